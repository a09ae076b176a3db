// The two register tiles everything else is made of.
//
//   dot_tile   out[r, n]  = sum_k x[r, k] * rows[n][k]       weights stored [out, in]
//   axpy_tile  acc[r, c] += sum_i coef[r, i] * rows[i][c]    weights stored [rank, out], values of KV
//
// Rows of weights are given by pointer, so blocks of a paged cache and slots of adapters need no copy.
#pragma once

#include "simd.h"

namespace lorafleet::LF_ISA {

// Rows of x in one tile: 4 * kTileRows accumulators plus operands have to fit the register file.
#if LF_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 3;
#endif
constexpr int kTileOuts = 4;

// How many floats one staged row of `width` takes: whole pairs, zeros behind the end.
LF_INLINE i64 staged_width(i64 width) { return round_up(width, 2 * W); }

// A panel holds R rows as float32 with their vectors interleaved: vector k of row r is the
// (k * R + r)th. One pointer serves a whole tile and memory is read in one stream.
template <class T>
LF_INLINE void stage_in_panel(const T* row, i64 width, i64 r, i64 num_rows, float* panel) {
  for_pairs(width, [&](i64 offset, i64 count) {
    Pair pair = load_pair(row + offset, count);
    float* to = panel + offset * num_rows + r * W;
    store(to, pair.first);
    store(to + num_rows * W, pair.second);
  });
}

template <class T>
LF_INLINE void stage_row(const T* row, i64 width, float* staged) {
  stage_in_panel(row, width, 0, 1, staged);
}

// How rows of x are shared between tiles: as evenly as can be.
struct TileSplit {
  i64 rows;
  i64 tiles;
  explicit TileSplit(i64 num_rows) : rows(num_rows), tiles(ceil_div(num_rows, kTileRows)) {}
  i64 begin(i64 tile) const { return rows * tile / tiles; }
};

// Stages row_at(0) .. row_at(num_rows - 1) as one panel per tile, one panel after the other.
template <class RowAt>
LF_INLINE void stage_panels(i64 num_rows, i64 width, const RowAt& row_at, float* staged) {
  TileSplit split(num_rows);
  for (i64 tile = 0; tile < split.tiles; ++tile) {
    i64 begin = split.begin(tile), count = split.begin(tile + 1) - begin;
    for (i64 r = 0; r < count; ++r) {
      stage_in_panel(row_at(begin + r), width, r, count, staged + begin * staged_width(width));
    }
  }
}

// Four rows of weights where they lie. Fetches `prefetch_bytes` ahead of what it reads.
template <class T>
struct WeightRows {
  const T* rows[kTileOuts];
  i64 width;
  i64 prefetch_bytes;

  LF_INLINE_MEMBER V first(int n, i64 offset) const { return load_first(rows[n] + offset); }
  LF_INLINE_MEMBER V second(int n, i64 offset) const {
    const T* row = rows[n];
    LF_RELOAD(row);
    return load_second(row + offset);
  }
  LF_INLINE_MEMBER void prefetch(int n, i64 offset) const {
    if (prefetch_bytes > 0) {
      __builtin_prefetch(reinterpret_cast<const char*>(rows[n] + offset) + prefetch_bytes);
    }
  }
  LF_INLINE_MEMBER Pair tail(int n, i64 offset) const {
    return load_pair_tail(rows[n] + offset, width - offset);
  }
};

// Four rows of weights staged as a panel; `width` is a staged width, so there is no tail.
struct WeightPanel {
  const float* panel;
  i64 width;

  LF_INLINE_MEMBER V first(int n, i64 offset) const {
    return load(panel + offset * kTileOuts + n * W);
  }
  LF_INLINE_MEMBER V second(int n, i64 offset) const {
    return load(panel + offset * kTileOuts + (kTileOuts + n) * W);
  }
  LF_INLINE_MEMBER void prefetch(int, i64) const {}
  LF_INLINE_MEMBER Pair tail(int, i64) const { return Pair(); }
};

template <int R>
LF_INLINE void accumulate(V (&acc)[R][kTileOuts], const float* x, const V (&weights)[kTileOuts]) {
  LF_UNROLL for (int r = 0; r < R; ++r) {
    V value = load(x + r * W);
    LF_KEEP(value);
    LF_UNROLL for (int n = 0; n < kTileOuts; ++n) acc[r][n] += value * weights[n];
  }
}

template <int R, class Weights>
LF_INLINE void dot_tile_rows(const float* x, const Weights& source, float* out, i64 out_stride) {
  V acc[R][kTileOuts] = {};
  V weights[kTileOuts];
  i64 offset = 0;
  for (; offset + 2 * W <= source.width; offset += 2 * W) {
    LF_UNROLL for (int n = 0; n < kTileOuts; ++n) {
      weights[n] = source.first(n, offset);
      LF_KEEP(weights[n]);
      source.prefetch(n, offset);
    }
    accumulate<R>(acc, x + offset * R, weights);
    LF_UNROLL for (int n = 0; n < kTileOuts; ++n) {
      weights[n] = source.second(n, offset);
      LF_KEEP(weights[n]);
    }
    accumulate<R>(acc, x + (offset + W) * R, weights);
  }
  if (offset < source.width) {
    V second[kTileOuts];
    LF_UNROLL for (int n = 0; n < kTileOuts; ++n) {
      Pair pair = source.tail(n, offset);
      weights[n] = pair.first;
      second[n] = pair.second;
    }
    accumulate<R>(acc, x + offset * R, weights);
    accumulate<R>(acc, x + (offset + W) * R, second);
  }
  LF_UNROLL for (int r = 0; r < R; ++r) {
    V4 sums = sum_lanes(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    __builtin_memcpy(out + r * out_stride, &sums, sizeof(sums));
  }
}

// out[r, 0..3] for the rows of one panel of x. A row's sums depend neither on the panel's size nor on
// whether the weights were staged.
template <class Weights>
static void dot_tile(i64 num_rows, const float* x, const Weights& source, float* out,
                     i64 out_stride) {
#define LF_CASE(R) \
  case R:          \
    return dot_tile_rows<R>(x, source, out, out_stride)
  switch (num_rows) {
    LF_CASE(1);
    LF_CASE(2);
    LF_CASE(3);
#if LF_VECTOR_BYTES == 64 || defined(__aarch64__)
    LF_CASE(4);
    LF_CASE(5);
    LF_CASE(6);
#endif
  }
#undef LF_CASE
}

// out[r, n] for all panels of x; weights_at(n) gives the weights of outs n .. n + 3. `out` has room for
// outs rounded up to kTileOuts.
template <class WeightsAt>
LF_INLINE void dot_rows(i64 num_rows, const float* x, i64 x_width, i64 outs,
                        const WeightsAt& weights_at, float* out, i64 out_stride) {
  TileSplit split(num_rows);
  for (i64 tile = 0; tile < split.tiles; ++tile) {
    i64 begin = split.begin(tile), count = split.begin(tile + 1) - begin;
    for (i64 n = 0; n < outs; n += kTileOuts) {
      dot_tile(count, x + begin * x_width, weights_at(n), out + begin * out_stride + n, out_stride);
    }
  }
}

template <int R, int C, class T>
LF_INLINE void axpy_tile(const float* coef, i64 coef_stride, const T* const* row_ptrs, i64 num_rows,
                         i64 column, Pair (&acc)[R][C]) {
  for (i64 i = 0; i < num_rows; ++i) {
    const T* row = row_ptrs[i] + column;
    V scale[R];
    LF_UNROLL for (int r = 0; r < R; ++r) scale[r] = splat(coef[r * coef_stride + i]);
    LF_UNROLL for (int c = 0; c < C; ++c) {
      V first = load_first(row + c * 2 * W);
      LF_UNROLL for (int r = 0; r < R; ++r) acc[r][c].first += scale[r] * first;
      V second = load_second(row + c * 2 * W);
      LF_UNROLL for (int r = 0; r < R; ++r) acc[r][c].second += scale[r] * second;
    }
  }
}

template <int R, class T>
LF_INLINE void axpy_tail(const float* coef, i64 coef_stride, const T* const* row_ptrs, i64 num_rows,
                         i64 column, i64 count, Pair (&acc)[R][1]) {
  for (i64 i = 0; i < num_rows; ++i) {
    Pair values = load_pair_tail(row_ptrs[i] + column, count);
    LF_UNROLL for (int r = 0; r < R; ++r) {
      V scale = splat(coef[r * coef_stride + i]);
      acc[r][0].first += scale * values.first;
      acc[r][0].second += scale * values.second;
    }
  }
}

}  // namespace lorafleet::LF_ISA
