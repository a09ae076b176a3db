// lora_apply: y[t] += (x[t] @ lora_a[slot, :rank].T) @ lora_b[slot, :rank], all projections at once.
//
// Tokens of one segment share an adapter and are taken in tiles. First every (tile, projection) is
// shrunk to its rank in float32, then every (tile, projection, range of outputs) is expanded. Slot -1
// and rank 0 make no task; rows past the rank are never touched.
#pragma once

#include "linear.h"

namespace lorafleet::LF_ISA {

constexpr i64 kTokenTile = 48;
constexpr i64 kExpandRows = 4;
constexpr i64 kExpandChunk = 512;
constexpr i64 kTilesAhead = 2;

struct LoRATile {
  i64 first_token;
  i64 num_tokens;
  i64 slot;
  i64 target;
  i64 rank;
  float* mid;  // [num_tokens, mid_stride]
  i64 mid_stride;
};

struct LoRAPlan {
  i64 num_tiles;
  i64 mid_size;
  i64 shrink_ns;
  i64 expand_ns;
  i64 max_chunks;  // ranges of outputs of the widest projection
};

// Calls visit(tile) for every tile of tokens and every projection its adapter targets.
template <class Visit>
LF_INLINE void for_each_tile(const LoRAArgs& args, const Visit& visit) {
  for (i64 s = 0; s < args.num_segments; ++s) {
    i64 slot = args.segment_slots[s];
    if (slot < 0) continue;
    i64 end = args.segment_starts[s + 1];
    for (i64 token = args.segment_starts[s]; token < end; token += kTokenTile) {
      for (i64 p = 0; p < args.num_targets; ++p) {
        i64 rank = args.ranks[p * args.ranks_stride + slot];
        if (rank <= 0) continue;
        visit(LoRATile{token, min(kTokenTile, end - token), slot, p, rank, nullptr,
                       round_up(rank, kTileOuts)});
      }
    }
  }
}

static LoRAPlan plan_lora(const LoRAArgs& args, i64 element_size) {
  LoRAPlan plan = {};
  for_each_tile(args, [&](const LoRATile& tile) {
    i64 out = args.targets[tile.target].out;
    plan.num_tiles += 1;
    plan.mid_size += tile.num_tokens * tile.mid_stride;
    plan.shrink_ns += tile.rank * args.in * (element_size * 5 + tile.num_tokens) / 50;
    plan.expand_ns += tile.rank * out * (element_size * 5 + tile.num_tokens) / 50;
    plan.max_chunks = max(plan.max_chunks, ceil_div(out, kExpandChunk));
  });
  return plan;
}

// Asks for rows of weights that will be read soon. They are short and lie anywhere, so the hardware's
// own prefetcher hardly gets going before a row ends.
template <class T>
LF_INLINE void prefetch_rows(const T* row, i64 stride, i64 num_rows, i64 width) {
  for (i64 i = 0; i < num_rows; ++i, row += stride) {
    const char* bytes = reinterpret_cast<const char*>(row);
    i64 num_bytes = width * static_cast<i64>(sizeof(T));
    for (i64 at = 0; at < num_bytes; at += 64) __builtin_prefetch(bytes + at, 0, 2);
  }
}

template <class T>
LF_INLINE const T* lora_a_of(const LoRAArgs& args, const LoRATile& tile) {
  return static_cast<const T*>(args.lora_a) + tile.target * args.a_target_stride +
         tile.slot * args.a_slot_stride;
}

template <class T>
LF_INLINE const T* lora_b_of(const LoRAArgs& args, const LoRATile& tile) {
  const LoRATarget& target = args.targets[tile.target];
  return static_cast<const T*>(target.lora_b) + tile.slot * target.slot_stride;
}

template <class T>
static void prefetch_tile(const LoRAArgs& args, const LoRATile& tile) {
  const LoRATarget& target = args.targets[tile.target];
  prefetch_rows(lora_a_of<T>(args, tile), args.a_rank_stride, tile.rank, args.in);
  prefetch_rows(lora_b_of<T>(args, tile), target.rank_stride, tile.rank, target.out);
}

template <class T>
static void shrink_tiles(const LoRAArgs& args, const LoRATile* tiles, const LoRAPlan& plan) {
  const T* x = static_cast<const T*>(args.x);
  i64 width = staged_width(args.in);
  run_tasks(plan.num_tiles, plan.shrink_ns, [&](auto next) {
    auto* staged = scratch_array<Staged<T>>(Scratch::rows, kTokenTile * width);
    i64 staged_token = -1;
    for (i64 task; next(task);) {
      const LoRATile& tile = tiles[task];
      if (task + kTilesAhead < plan.num_tiles) prefetch_tile<T>(args, tiles[task + kTilesAhead]);
      if (tile.first_token != staged_token) {
        auto row_at = [&](i64 r) { return x + (tile.first_token + r) * args.x_stride; };
        stage_panels(tile.num_tokens, args.in, row_at, staged);
        staged_token = tile.first_token;
      }
      multiply_rows(staged, tile.num_tokens, lora_a_of<T>(args, tile), args.a_rank_stride,
                    tile.rank, args.in, tile.mid, tile.mid_stride);
    }
  });
}

template <int R, int C, class T>
LF_INLINE void expand_tile(const float* mid, i64 mid_stride, const T* const* b_rows, i64 rank,
                           i64 column, T* y, i64 y_stride) {
  Pair acc[R][C] = {};
  axpy_tile<R, C>(mid, mid_stride, b_rows, rank, column, acc);
  LF_UNROLL for (int r = 0; r < R; ++r) {
    LF_UNROLL for (int c = 0; c < C; ++c) {
      T* out = y + r * y_stride + column + c * 2 * W;
      Pair old = load_pair(out);
      store_pair(out, {old.first + acc[r][c].first, old.second + acc[r][c].second});
    }
  }
}

template <int R, class T>
LF_INLINE void expand_tail(const float* mid, i64 mid_stride, const T* const* b_rows, i64 rank,
                           i64 column, i64 count, T* y, i64 y_stride) {
  Pair acc[R][1] = {};
  axpy_tail<R>(mid, mid_stride, b_rows, rank, column, count, acc);
  LF_UNROLL for (int r = 0; r < R; ++r) {
    T* out = y + r * y_stride + column;
    Pair old = load_pair_tail(out, count);
    store_pair_tail(out, {old.first + acc[r][0].first, old.second + acc[r][0].second}, count);
  }
}

// R tokens, outputs [column, end).
template <int R, int C, class T>
static void expand_rows(const float* mid, i64 mid_stride, const T* const* b_rows, i64 rank,
                        i64 column, i64 end, T* y, i64 y_stride) {
  for (; column + C * 2 * W <= end; column += C * 2 * W) {
    expand_tile<R, C>(mid, mid_stride, b_rows, rank, column, y, y_stride);
  }
  for (; column + 2 * W <= end; column += 2 * W) {
    expand_tile<R, 1>(mid, mid_stride, b_rows, rank, column, y, y_stride);
  }
  if (column < end) {
    expand_tail<R>(mid, mid_stride, b_rows, rank, column, end - column, y, y_stride);
  }
}

template <class T>
static void expand_tokens(const LoRATile& tile, const T* const* b_rows, i64 column, i64 end, T* y,
                          i64 y_stride) {
  i64 token = 0;
  for (; token + kExpandRows <= tile.num_tokens; token += kExpandRows) {
    expand_rows<kExpandRows, 2>(tile.mid + token * tile.mid_stride, tile.mid_stride, b_rows,
                                tile.rank, column, end, y + token * y_stride, y_stride);
  }
  for (; token < tile.num_tokens; ++token) {
    expand_rows<1, 4>(tile.mid + token * tile.mid_stride, tile.mid_stride, b_rows, tile.rank,
                      column, end, y + token * y_stride, y_stride);
  }
}

template <class T>
static void expand_tiles(const LoRAArgs& args, const LoRATile* tiles, const LoRAPlan& plan) {
  run_tasks(plan.num_tiles * plan.max_chunks, plan.expand_ns, [&](auto next) {
    for (i64 task; next(task);) {
      const LoRATile& tile = tiles[task / plan.max_chunks];
      const LoRATarget& target = args.targets[tile.target];
      i64 column = task % plan.max_chunks * kExpandChunk;
      if (column >= target.out) continue;
      const T* b = lora_b_of<T>(args, tile);
      const T** b_rows = scratch_array<const T*>(Scratch::scores, tile.rank);
      for (i64 i = 0; i < tile.rank; ++i) b_rows[i] = b + i * target.rank_stride;
      T* y = static_cast<T*>(target.y) + tile.first_token * target.y_stride;
      expand_tokens(tile, b_rows, column, min(column + kExpandChunk, target.out), y,
                    target.y_stride);
    }
  });
}

template <class T>
static void lora_apply(const LoRAArgs& args) {
  LoRAPlan plan = plan_lora(args, sizeof(T));
  if (plan.num_tiles == 0) return;
  LoRATile* tiles = scratch_array<LoRATile>(Scratch::tasks, plan.num_tiles);
  float* mid = scratch_array<float>(Scratch::mid, plan.mid_size);
  i64 count = 0;
  for_each_tile(args, [&](LoRATile tile) {
    tile.mid = mid;
    mid += tile.num_tokens * tile.mid_stride;
    tiles[count++] = tile;
  });
  shrink_tiles<T>(args, tiles, plan);
  expand_tiles<T>(args, tiles, plan);
}

}  // namespace lorafleet::LF_ISA
