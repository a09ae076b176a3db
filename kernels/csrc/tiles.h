// The two register tiles everything else is made of.
//
//   dot_tile   out[r, n]  = sum_k x[r, k] * rows[n][k]       weights stored [out, in]
//   axpy_tile  acc[r, c] += sum_i coef[r, i] * rows[i][c]    weights stored [rank, out], values of KV
//
// Rows of weights are given by pointer, so blocks of a paged cache and slots of adapters need no copy.
#pragma once

#include "simd.h"

namespace lorafleet::LF_ISA {

// Rows of x in one tile. Accumulators of kWideRows rows and all four outs fit the register file beside
// their operands; more rows take two outs at a time. Up to kThinRows all the time goes into waiting for
// weights, which come fastest in one stream: one out after the other.
#if LF_VECTOR_BYTES == 64 || defined(__aarch64__)
constexpr int kTileRows = 8;
constexpr int kWideRows = 6;
constexpr int kThinRows = 2;
#else
constexpr int kTileRows = 3;
constexpr int kWideRows = 3;
constexpr int kThinRows = 1;
#endif
constexpr int kTileOuts = 4;
constexpr i64 kLineBytes = 64;
// Bytes of a row up to which a panel of kTileRows leaves room for weights in a first cache of 48 KB.
constexpr i64 kNarrowBytes = 4096;

// What rows are staged as: float32, or as they are where bfloat16 is multiplied as it is.
#if LF_BF16_DOT
template <class T>
using Staged = T;
#else
template <class T>
using Staged = float;
#endif

// How many elements one staged row of `width` takes: whole pairs, zeros behind the end.
LF_INLINE i64 staged_width(i64 width) { return round_up(width, 2 * W); }

// A panel holds R staged rows with their vectors interleaved: vector k of row r is the
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

#if LF_BF16_DOT
LF_INLINE void stage_in_panel(const bf16* row, i64 width, i64 r, i64 num_rows, bf16* panel) {
  for_pairs(width, [&](i64 offset, i64 count) {
    bool is_whole = count == 2 * W;
    VU lanes = is_whole ? load_raw(row + offset) : load_raw_tail(row + offset, count);
    store_raw(panel + offset * num_rows + r * 2 * W, lanes);
  });
}
#endif

template <class T>
LF_INLINE void stage_row(const T* row, i64 width, float* staged) {
  stage_in_panel(row, width, 0, 1, staged);
}

// How rows of x are shared between tiles: as evenly as can be. A few rows gain by being one or two
// tiles, which read the weights from memory while they compute; panels that outgrow the first cache lose.
struct TileSplit {
  i64 rows;
  i64 tiles;
  TileSplit(i64 num_rows, i64 row_bytes) : rows(num_rows) {
    bool is_small = num_rows <= 2 * kTileRows && row_bytes <= kNarrowBytes;
    tiles = ceil_div(num_rows, is_small ? kTileRows : kWideRows);
  }
  i64 begin(i64 tile) const { return rows * tile / tiles; }
};

// Stages row_at(0) .. row_at(num_rows - 1) as one panel per tile, one panel after the other.
template <class S, class RowAt>
LF_INLINE void stage_panels(i64 num_rows, i64 width, const RowAt& row_at, S* staged) {
  TileSplit split(num_rows, width * static_cast<i64>(sizeof(S)));
  for (i64 tile = 0; tile < split.tiles; ++tile) {
    i64 begin = split.begin(tile), count = split.begin(tile + 1) - begin;
    for (i64 r = 0; r < count; ++r) {
      stage_in_panel(row_at(begin + r), width, r, count, staged + begin * staged_width(width));
    }
  }
}

// Four rows of weights where they lie. While they are read, as many bytes are fetched from `ahead` on,
// unless that is null.
//
// In the order of their addresses and into the second cache: what a core can await in its first one is
// a third of what memory delivers, and the hardware's prefetcher, which runs further ahead, follows
// one long stream but not four short ones.
template <class T>
struct WeightRows {
  const T* rows[kTileOuts];
  i64 width;
  const char* ahead;

  LF_INLINE_MEMBER V first(int n, i64 offset) const { return load_first(rows[n] + offset); }
  LF_INLINE_MEMBER V second(int n, i64 offset) const {
    const T* row = rows[n];
    LF_RELOAD(row);
    return load_second(row + offset);
  }
  // The share of the step that reads outs First .. First + N - 1 at `offset`; a single out has none.
  template <int First, int N>
  LF_INLINE_MEMBER void prefetch(i64 offset) const {
    if (N == 1 || ahead == nullptr) return;
    constexpr i64 kStep = N * 2 * W * sizeof(T);
    const char* share = ahead + (First * width + N * offset) * static_cast<i64>(sizeof(T));
    LF_UNROLL for (i64 at = 0; at < kStep; at += kLineBytes) __builtin_prefetch(share + at, 0, 2);
  }
  LF_INLINE_MEMBER Pair tail(int n, i64 offset) const {
    return load_pair_tail(rows[n] + offset, width - offset);
  }
  LF_INLINE_MEMBER VU raw(int n, i64 offset) const { return load_raw(rows[n] + offset); }
  LF_INLINE_MEMBER VU raw_tail(int n, i64 offset) const {
    return load_raw_tail(rows[n] + offset, width - offset);
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
  template <int First, int N>
  LF_INLINE_MEMBER void prefetch(i64) const {}
  LF_INLINE_MEMBER Pair tail(int, i64) const { return Pair(); }
};

// Adds a step's products: column First of acc is the first of Count outs.
template <int First, int Count, int R, int N>
LF_INLINE void accumulate(V (&acc)[R][N], const float* x, const V (&weights)[Count]) {
  LF_UNROLL for (int r = 0; r < R; ++r) {
    V value = load(x + r * W);
    LF_KEEP(value);
    LF_UNROLL for (int n = 0; n < Count; ++n) acc[r][First % N + n] += value * weights[n];
  }
}

// Adds the products of outs First .. First + Count - 1 of a tile's four to their columns of acc.
template <int First, int Count, int R, int N, class Weights>
LF_INLINE void add_products(V (&acc)[R][N], const float* x, const Weights& source) {
  V weights[Count];
  i64 offset = 0;
  for (; offset + 2 * W <= source.width; offset += 2 * W) {
    source.template prefetch<First, Count>(offset);
    LF_UNROLL for (int n = 0; n < Count; ++n) {
      weights[n] = source.first(First + n, offset);
      LF_KEEP(weights[n]);
    }
    accumulate<First>(acc, x + offset * R, weights);
    LF_UNROLL for (int n = 0; n < Count; ++n) {
      weights[n] = source.second(First + n, offset);
      LF_KEEP(weights[n]);
    }
    accumulate<First>(acc, x + (offset + W) * R, weights);
  }
  if (offset < source.width) {
    V second[Count];
    LF_UNROLL for (int n = 0; n < Count; ++n) {
      Pair pair = source.tail(First + n, offset);
      weights[n] = pair.first;
      second[n] = pair.second;
    }
    accumulate<First>(acc, x + offset * R, weights);
    accumulate<First>(acc, x + (offset + W) * R, second);
  }
}

#if LF_BF16_DOT
template <int First, int Count, int R, int N>
LF_INLINE void accumulate(V (&acc)[R][N], const bf16* x, const VU (&weights)[Count]) {
  LF_UNROLL for (int r = 0; r < R; ++r) {
    VU value = load_raw(x + r * 2 * W);
    LF_KEEP(value);
    LF_UNROLL for (int n = 0; n < Count; ++n) {
      V& sum = acc[r][First % N + n];
      sum = add_dots(sum, value, weights[n]);
    }
  }
}

template <int First, int Count, int R, int N>
LF_INLINE void add_products(V (&acc)[R][N], const bf16* x, const WeightRows<bf16>& source) {
  VU weights[Count];
  i64 offset = 0;
  for (; offset + 2 * W <= source.width; offset += 2 * W) {
    source.template prefetch<First, Count>(offset);
    LF_UNROLL for (int n = 0; n < Count; ++n) {
      weights[n] = source.raw(First + n, offset);
      LF_KEEP(weights[n]);
    }
    accumulate<First>(acc, x + offset * R, weights);
  }
  if (offset < source.width) {
    LF_UNROLL for (int n = 0; n < Count; ++n) weights[n] = source.raw_tail(First + n, offset);
    accumulate<First>(acc, x + offset * R, weights);
  }
}
#endif

// Sums the lanes of four accumulators at a time: one row's four outs, or two outs of two rows.
template <int First, int R, int N>
LF_INLINE void store_sums(const V (&acc)[R][N], float* out, i64 out_stride) {
  static_assert(N == 2 || N == 4, "outs of a tile");
  constexpr int kRows = 4 / N;
  LF_UNROLL for (int r = 0; r < R; r += kRows) {
    V places[4] = {};
    LF_UNROLL for (int i = 0; i < 4; ++i) {
      if (r + i / N < R) places[i] = acc[r + i / N][i % N];
    }
    V4 sums = sum_lanes(places[0], places[1], places[2], places[3]);
    LF_UNROLL for (int i = 0; i < 4; ++i) {
      if (r + i / N < R) out[(r + i / N) * out_stride + First + i % N] = sums[i];
    }
  }
}

// Outs First .. First + N - 1 of a tile's four.
template <int R, int First, int N, class S, class Weights>
LF_INLINE void dot_outs(const S* x, const Weights& source, float* out, i64 out_stride) {
  V acc[R][N] = {};
  add_products<First, N>(acc, x, source);
  store_sums<First>(acc, out, out_stride);
}

// All four outs one after the other, so that the weights are read in one stream.
template <int R, class S, class Weights>
LF_INLINE void dot_outs_in_turn(const S* x, const Weights& source, float* out, i64 out_stride) {
  V acc[R][kTileOuts] = {};
  add_products<0, 1>(acc, x, source);
  add_products<1, 1>(acc, x, source);
  add_products<2, 1>(acc, x, source);
  add_products<3, 1>(acc, x, source);
  store_sums<0>(acc, out, out_stride);
}

template <int R, class S, class Weights>
LF_INLINE void dot_tile_rows(const S* x, const Weights& source, float* out, i64 out_stride) {
  if constexpr (R <= kThinRows) {
    dot_outs_in_turn<R>(x, source, out, out_stride);
  } else if constexpr (R <= kWideRows) {
    dot_outs<R, 0, kTileOuts>(x, source, out, out_stride);
  } else {
    dot_outs<R, 0, 2>(x, source, out, out_stride);
    dot_outs<R, 2, 2>(x, source, out, out_stride);
  }
}

// out[r, 0..3] for the rows of one panel of x. A row's sums depend neither on the panel's size nor on
// whether the weights were staged.
template <class S, class Weights>
static void dot_tile(i64 num_rows, const S* x, const Weights& source, float* out,
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
    LF_CASE(7);
    LF_CASE(8);
#endif
  }
#undef LF_CASE
}

// out[r, n] for all panels of x; weights_at(n) gives the weights of outs n .. n + 3. `out` has room for
// outs rounded up to kTileOuts.
template <class S, class WeightsAt>
LF_INLINE void dot_rows(i64 num_rows, const S* x, i64 x_width, i64 outs,
                        const WeightsAt& weights_at, float* out, i64 out_stride) {
  TileSplit split(num_rows, x_width * static_cast<i64>(sizeof(S)));
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
