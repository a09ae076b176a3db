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

template <class T>
LF_INLINE void stage_row(const T* row, i64 width, float* staged) {
  for_pairs(width, [&](i64 offset, i64 count) {
    store_pair(staged + offset, load_pair(row + offset, count));
  });
}

template <class T>
LF_INLINE void dot_step(const T* const* rows, i64 offset, V (&weights)[kTileOuts], bool first) {
  LF_UNROLL for (int n = 0; n < kTileOuts; ++n) {
    weights[n] = first ? load_first(rows[n] + offset) : load_second(rows[n] + offset);
  }
}

template <int R>
LF_INLINE void accumulate(V (&acc)[R][kTileOuts], const float* x, i64 x_stride,
                          const V (&weights)[kTileOuts]) {
  LF_UNROLL for (int r = 0; r < R; ++r) {
    V value = load(x + r * x_stride);
    LF_UNROLL for (int n = 0; n < kTileOuts; ++n) acc[r][n] += value * weights[n];
  }
}

template <int R, class T>
LF_INLINE void dot_tile_rows(const float* x, i64 x_stride, const T* const* row_ptrs, i64 width,
                             i64 prefetch_bytes, float* out, i64 out_stride) {
  const T* rows[kTileOuts];
  LF_UNROLL for (int n = 0; n < kTileOuts; ++n) rows[n] = row_ptrs[n];
  V acc[R][kTileOuts] = {};
  V weights[kTileOuts];
  i64 offset = 0;
  for (; offset + 2 * W <= width; offset += 2 * W) {
    if (R <= 2) {
      LF_UNROLL for (int n = 0; n < kTileOuts; ++n) {
        __builtin_prefetch(reinterpret_cast<const char*>(rows[n] + offset) + prefetch_bytes);
      }
    }
    dot_step(rows, offset, weights, true);
    accumulate<R>(acc, x + offset, x_stride, weights);
    dot_step(rows, offset, weights, false);
    accumulate<R>(acc, x + offset + W, x_stride, weights);
  }
  if (offset < width) {
    V second[kTileOuts];
    LF_UNROLL for (int n = 0; n < kTileOuts; ++n) {
      Pair pair = load_pair_tail(rows[n] + offset, width - offset);
      weights[n] = pair.first;
      second[n] = pair.second;
    }
    accumulate<R>(acc, x + offset, x_stride, weights);
    accumulate<R>(acc, x + offset + W, x_stride, second);
  }
  LF_UNROLL for (int r = 0; r < R; ++r) {
    V4 sums = sum_lanes(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    __builtin_memcpy(out + r * out_stride, &sums, sizeof(sums));
  }
}

// out[r, 0..3] for r < num_rows <= kTileRows. x is staged in T's pair order; a row's sums do not
// depend on num_rows, nor on whether the weights were staged as float32 before.
template <class T>
static void dot_tile(i64 num_rows, const float* x, i64 x_stride, const T* const* row_ptrs,
                     i64 width, i64 prefetch_bytes, float* out, i64 out_stride) {
#define LF_CASE(R)                                                                             \
  case R:                                                                                      \
    return dot_tile_rows<R>(x, x_stride, row_ptrs, width, prefetch_bytes, out, out_stride)
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

// out[r, n] for any number of rows and outs; `out` has room for outs rounded up to kTileOuts.
template <class T>
static void dot_rows(i64 num_rows, const float* x, i64 x_stride, const T* const* row_ptrs, i64 outs,
                     i64 width, float* out, i64 out_stride) {
  i64 tiles = ceil_div(num_rows, kTileRows);
  for (i64 tile = 0; tile < tiles; ++tile) {
    i64 begin = num_rows * tile / tiles, end = num_rows * (tile + 1) / tiles;
    for (i64 n = 0; n < outs; n += kTileOuts) {
      dot_tile(end - begin, x + begin * x_stride, x_stride, row_ptrs + n, width, 0,
               out + begin * out_stride + n, out_stride);
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
