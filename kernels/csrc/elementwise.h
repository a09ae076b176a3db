// rms_norm (with and without a residual), silu_and_mul and apply_rope: one pass over memory each.
#pragma once

#include "simd.h"

namespace lorafleet::LF_ISA {

// Rows are shared in groups of about this many elements.
constexpr i64 kRowGroupElements = 8192;

// Calls body(row) for all rows.
template <class Body>
LF_INLINE void for_rows(i64 rows, i64 width, i64 estimated_ns, const Body& body) {
  i64 group = max(1, kRowGroupElements / max(1, width));
  run_tasks(ceil_div(rows, group), estimated_ns, [&](auto next) {
    for (i64 task; next(task);) {
      for (i64 row = task * group; row < min(rows, (task + 1) * group); ++row) body(row);
    }
  });
}

// Writes x + update to the sums, rounded, and returns them.
template <class T>
LF_INLINE const T* add_row(const RmsNormArgs& args, i64 row, const T* x) {
  const T* update = static_cast<const T*>(args.update) + row * args.hidden;
  T* sums = static_cast<T*>(args.sums) + row * args.hidden;
  for_pairs(args.hidden, [&](i64 offset, i64 count) {
    Pair value = load_pair(x + offset, count), more = load_pair(update + offset, count);
    store_pair(sums + offset, {value.first + more.first, value.second + more.second}, count);
  });
  return sums;
}

template <class T>
static void rms_norm(const RmsNormArgs& args) {
  for_rows(args.rows, args.hidden, args.rows * args.hidden / 8, [&](i64 row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* weight = static_cast<const T*>(args.weight);
    T* y = static_cast<T*>(args.y) + row * args.hidden;
    if (args.update != nullptr) x = add_row(args, row, x);
    Pair squares = {};
    for_pairs(args.hidden, [&](i64 offset, i64 count) {
      Pair value = load_pair(x + offset, count);
      squares.first += value.first * value.first;
      squares.second += value.second * value.second;
    });
    float mean = sum_lanes(squares.first + squares.second) / args.hidden;
    float factor = 1.0f / __builtin_sqrtf(mean + args.eps);
    for_pairs(args.hidden, [&](i64 offset, i64 count) {
      Pair value = load_pair(x + offset, count), scale = load_pair(weight + offset, count);
      Pair out = {round_through(value.first * factor, x) * scale.first,
                  round_through(value.second * factor, x) * scale.second};
      store_pair(y + offset, out, count);
    });
  });
}

LF_INLINE V silu(V x) { return x / (1.0f + exp(-x)); }

template <class T>
static void silu_and_mul(const SiluAndMulArgs& args) {
  for_rows(args.rows, args.width, args.rows * args.width / 4, [&](i64 row) {
    const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride;
    const T* up = static_cast<const T*>(args.up) + row * args.up_stride;
    T* y = static_cast<T*>(args.y) + row * args.width;
    for_pairs(args.width, [&](i64 offset, i64 count) {
      Pair g = load_pair(gate + offset, count), u = load_pair(up + offset, count);
      store_pair(y + offset, {silu(g.first) * u.first, silu(g.second) * u.second}, count);
    });
  });
}

template <class T>
LF_INLINE void rotate_head(T* x, const T* cos, const T* sin, i64 half) {
  for_pairs(half, [&](i64 offset, i64 count) {
    Pair low = load_pair(x + offset, count), high = load_pair(x + half + offset, count);
    Pair cos_low = load_pair(cos + offset, count), cos_high = load_pair(cos + half + offset, count);
    Pair sin_low = load_pair(sin + offset, count), sin_high = load_pair(sin + half + offset, count);
    store_pair(x + offset,
               Pair{low.first * cos_low.first - high.first * sin_low.first,
                    low.second * cos_low.second - high.second * sin_low.second},
               count);
    store_pair(x + half + offset,
               Pair{high.first * cos_high.first + low.first * sin_high.first,
                    high.second * cos_high.second + low.second * sin_high.second},
               count);
  });
}

template <class T>
static void apply_rope(const RopeArgs& args) {
  i64 heads = 0;
  for (i64 i = 0; i < args.num_targets; ++i) heads += args.targets[i].heads;
  i64 width = heads * args.head_dim;
  for_rows(args.tokens, width, args.tokens * width / 8, [&](i64 token) {
    const T* cos = static_cast<const T*>(args.cos) + token * args.cos_stride;
    const T* sin = static_cast<const T*>(args.sin) + token * args.sin_stride;
    for (i64 i = 0; i < args.num_targets; ++i) {
      const RopeTarget& target = args.targets[i];
      T* x = static_cast<T*>(target.x) + token * target.token_stride;
      for (i64 head = 0; head < target.heads; ++head) {
        rotate_head(x + head * target.head_stride, cos, sin, args.head_dim / 2);
      }
    }
  });
}

}  // namespace lorafleet::LF_ISA
