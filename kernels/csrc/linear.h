// linear: y = x @ weight.T + bias, weights read where they lie, in the model's own layout.
//
// A task is a block of rows times a range of outputs of one target. Weights become float32 in registers.
#pragma once

#include "tiles.h"

namespace lorafleet::LF_ISA {

constexpr i64 kRowBlock = 96;
// Tiles of rows share four rows of weights while those are in L1, as many as fit it beside them.
constexpr i64 kTileGroupBytes = 24 << 10;
constexpr i64 kMaxChunk = 256;
// How far ahead of the next four rows weights are fetched: what memory delivers in its own latency.
constexpr i64 kAheadBytes = 4096;

struct LinearPlan {
  i64 row_block;
  i64 row_blocks;
  i64 chunk;             // outputs of one task
  i64 chunks;            // of all targets together
  i64 estimated_ns;
};

template <class T>
static LinearPlan plan_linear(const LinearArgs& args) {
  LinearPlan plan;
  i64 outs = 0;
  for (i64 i = 0; i < args.num_targets; ++i) outs += args.targets[i].out;
  plan.row_blocks = ceil_div(args.rows, kRowBlock);
  plan.row_block = ceil_div(args.rows, plan.row_blocks);
  // Around 10 GB/s and 100 GFLOP/s of one core, four times as many where bfloat16 is multiplied as it is.
  i64 elements = outs * args.in, bytes = elements * static_cast<i64>(sizeof(T));
  plan.estimated_ns = bytes / 10 + elements * args.rows / (sizeof(Staged<T>) == 2 ? 200 : 50);
  // Tasks of some 10 us balance well and hide the cost of taking one.
  i64 ns_per_out = max(1, plan.estimated_ns / (plan.row_blocks * max(1, outs)));
  plan.chunk = min(kMaxChunk, max(16, round_up(10000 / ns_per_out, 16)));
  plan.chunks = 0;
  for (i64 i = 0; i < args.num_targets; ++i) {
    plan.chunks += ceil_div(args.targets[i].out, plan.chunk);
  }
  return plan;
}

// out[r, n] = x[r] . weight[n], x given as panels, weights read straight from memory. `out` has room for
// outs rounded up to kTileOuts.
//
// The first pass over the weights fetches what it will read soon. Where more follow, which find them in
// the second cache, these fetch what lies behind the weights in turn: that is the next task's.
template <class T>
static void multiply_rows(const Staged<T>* x, i64 rows, const T* weight, i64 stride, i64 outs, i64 in,
                          float* out, i64 out_stride) {
  i64 width = staged_width(in), row_bytes = in * static_cast<i64>(sizeof(Staged<T>));
  TileSplit split(rows, row_bytes);
  i64 group = max(1, kTileGroupBytes * split.tiles / (rows * row_bytes));
  i64 passes = ceil_div(split.tiles, group);
  i64 out_bytes = stride * static_cast<i64>(sizeof(T));
  for (i64 pass = 0; pass < passes; ++pass) {
    i64 first = pass * group, last = min(split.tiles, first + group);
    i64 ahead = pass == 0 ? kTileOuts * out_bytes + kAheadBytes : outs * out_bytes;
    for (i64 n = 0; n < outs; n += kTileOuts) {
      WeightRows<T> source = {{}, in, nullptr};
      // Past the last row it is repeated, and those sums are not used.
      for (int i = 0; i < kTileOuts; ++i) source.rows[i] = weight + min(n + i, outs - 1) * stride;
      bool fetches = pass == 0 || n / kTileOuts % (passes - 1) == pass - 1;
      for (i64 tile = first; tile < last; ++tile) {
        const char* start = reinterpret_cast<const char*>(source.rows[0]);
        source.ahead = fetches && tile == first ? start + ahead : nullptr;
        i64 row = split.begin(tile);
        dot_tile(split.begin(tile + 1) - row, x + row * width, source, out + row * out_stride + n,
                 out_stride);
      }
    }
  }
}

template <class T>
LF_INLINE void store_linear(const float* sums, const T* bias, i64 count, T* y) {
  for (i64 i = 0; i < count; i += W) {
    V value = load(sums + i);
    if (bias != nullptr) value += load_natural(bias + i, count - i);
    store_natural(y + i, value, count - i);
  }
}

template <class T>
static void linear(const LinearArgs& args) {
  LinearPlan plan = plan_linear<T>(args);
  const T* x = static_cast<const T*>(args.x);
  i64 width = staged_width(args.in);
  i64 out_stride = round_up(plan.chunk, W);
  run_tasks(plan.chunks * plan.row_blocks, plan.estimated_ns, [&](auto next) {
    auto* staged = scratch_array<Staged<T>>(Scratch::rows, plan.row_block * width);
    float* out = scratch_array<float>(Scratch::out, plan.row_block * out_stride);
    i64 staged_block = -1;
    for (i64 task; next(task);) {
      i64 block = task / plan.chunks, chunk = task % plan.chunks;
      i64 first_row = block * plan.row_block;
      i64 rows = min(plan.row_block, args.rows - first_row);
      if (block != staged_block) {
        auto row_at = [&](i64 r) { return x + (first_row + r) * args.x_stride; };
        stage_panels(rows, args.in, row_at, staged);
        staged_block = block;
      }
      const LinearTarget* target = args.targets;
      while (chunk >= ceil_div(target->out, plan.chunk)) {
        chunk -= ceil_div(target->out, plan.chunk);
        ++target;
      }
      i64 first_out = chunk * plan.chunk;
      i64 outs = min(plan.chunk, target->out - first_out);
      const T* weight = static_cast<const T*>(target->weight) + first_out * target->weight_stride;
      multiply_rows(staged, rows, weight, target->weight_stride, outs, args.in, out, out_stride);
      const T* bias = static_cast<const T*>(target->bias);
      for (i64 r = 0; r < rows; ++r) {
        store_linear(out + r * out_stride, bias == nullptr ? nullptr : bias + first_out, outs,
                     static_cast<T*>(target->y) + (first_row + r) * target->y_stride + first_out);
      }
    }
  });
}

}  // namespace lorafleet::LF_ISA
