// Causal attention over a paged KV cache, decode and prefill alike.
//
// A task is one KV head, a tile of query tokens with all query heads that share it, and a range of
// the context. The context is walked in chunks at fixed positions with an online softmax. A sequence
// whose tokens fit one tile has its context cut into ranges of fixed size, so one long context uses
// all threads and its result still depends on neither the batch nor the number of threads.
#pragma once

#include "tiles.h"

namespace lorafleet::LF_ISA {

constexpr i64 kChunk = 64;
constexpr i64 kSplit = 1024;
constexpr i64 kQueryRows = 48;
constexpr float kMinusInfinity = -__builtin_inff();

struct AttentionTask {
  i64 sequence;
  i64 kv_head;
  i64 first_token;  // in the sequence's new tokens
  i64 num_tokens;
  i64 begin;  // range of the context
  i64 end;
  i64 splits;      // ranges of this tile, tasks next to each other
  float* partial;  // null when this task is the tile's only one
};

// Softmax state of the rows of one tile: unnormalised outputs, their maxima and sums.
struct RowStates {
  float* acc;  // [rows, width]
  float* maxima;
  float* sums;
};

struct TileShape {
  i64 group;  // query heads per KV head
  i64 width;  // staged head_dim
  i64 tile_tokens;
};

LF_INLINE TileShape tile_shape(const AttentionArgs& args) {
  i64 group = args.heads / args.kv_heads;
  return {group, staged_width(args.head_dim), max(1, kQueryRows / group)};
}

LF_INLINE i64 state_size(i64 rows, i64 width) { return rows * (width + 2); }

LF_INLINE RowStates states_at(float* memory, i64 rows, i64 width) {
  return {memory, memory + rows * width, memory + rows * (width + 1)};
}

LF_INLINE i64 sequence_tokens(const AttentionArgs& args, i64 sequence) {
  return args.query_starts[sequence + 1] - args.query_starts[sequence];
}

// Context position of a sequence's first new token.
LF_INLINE i64 first_position(const AttentionArgs& args, i64 sequence) {
  return args.context_lens[sequence] - sequence_tokens(args, sequence);
}

// Calls visit(task) for every task; the ranges of one tile come one after the other.
template <class Visit>
LF_INLINE void for_each_attention_task(const AttentionArgs& args, const Visit& visit) {
  TileShape shape = tile_shape(args);
  for (i64 i = 0; i < args.num_sequences; ++i) {
    i64 sequence = args.first_sequence + i;
    i64 tokens = sequence_tokens(args, sequence);
    for (i64 token = 0; token < tokens; token += shape.tile_tokens) {
      i64 count = min(shape.tile_tokens, tokens - token);
      i64 position = first_position(args, sequence) + token;
      i64 begin = max(0, position + 1 - args.window), end = max(begin, position + count);
      i64 step = tokens <= shape.tile_tokens ? kSplit : end + kSplit;
      // An empty context is one empty range, whose outputs are zeros.
      i64 first = begin / step, splits = max(1, ceil_div(end, step) - first);
      for (i64 head = 0; head < args.kv_heads; ++head) {
        for (i64 split = first; split < first + splits; ++split) {
          visit(AttentionTask{sequence, head, token, count, max(begin, split * step),
                              min(end, (split + 1) * step), splits, nullptr});
        }
      }
    }
  }
}

// Turns a row of scores into weights exp(score - maximum) and rescales what was summed before.
// Only columns [low, high) are visible; n is the number of columns in use.
LF_INLINE void update_softmax(const AttentionArgs& args, float* scores, i64 n, i64 low, i64 high,
                              float* acc, i64 width, float& maximum, float& sum) {
  V largest = splat(kMinusInfinity);
  for (i64 j = 0; j < n; j += W) {
    V value = load(scores + j) * args.scale;
    if (args.soft_cap > 0) {
      // tanh(z) = 1 - 2 / (exp(2 z) + 1)
      V doubled = value * (2.0f / args.soft_cap);
      value = args.soft_cap * (1.0f - 2.0f / (exp(doubled) + 1.0f));
    }
    store(scores + j, value);
  }
  for (i64 j = 0; j < low; ++j) scores[j] = kMinusInfinity;
  for (i64 j = max(0, high); j < round_up(n, W); ++j) scores[j] = kMinusInfinity;
  for (i64 j = 0; j < n; j += W) {
    V value = load(scores + j);
    largest = select(value > largest, value, largest);
  }
  float new_maximum = max_lanes(largest);
  if (maximum > new_maximum) new_maximum = maximum;
  // A row that saw nothing yet keeps its zeros: its weights are exp(-inf - 0) = 0.
  float reference = new_maximum == kMinusInfinity ? 0.0f : new_maximum;
  float rescale = exp_scalar(maximum - reference);
  V total = {};
  for (i64 j = 0; j < n; j += W) {
    V weight = exp(load(scores + j) - reference);
    store(scores + j, weight);
    total += weight;
  }
  sum = sum * rescale + sum_lanes(total);
  maximum = new_maximum;
  if (rescale != 1.0f) {
    for (i64 d = 0; d < width; d += W) store(acc + d, load(acc + d) * rescale);
  }
}

template <int R, int C, class T>
LF_INLINE void mix_tile(const float* weights, const T* const* values, i64 n, i64 column, i64 count,
                        float* acc, i64 width) {
  Pair sums[R][C];
  LF_UNROLL for (int r = 0; r < R; ++r) {
    LF_UNROLL for (int c = 0; c < C; ++c) {
      sums[r][c] = load_pair(acc + r * width + column + c * 2 * W);
    }
  }
  if constexpr (C == 1) {
    if (count < 2 * W) {
      axpy_tail<R>(weights, kChunk, values, n, column, count, sums);
    } else {
      axpy_tile<R, C>(weights, kChunk, values, n, column, sums);
    }
  } else {
    axpy_tile<R, C>(weights, kChunk, values, n, column, sums);
  }
  LF_UNROLL for (int r = 0; r < R; ++r) {
    LF_UNROLL for (int c = 0; c < C; ++c) {
      store_pair(acc + r * width + column + c * 2 * W, sums[r][c]);
    }
  }
}

template <int R, class T>
static void mix_rows(const float* weights, const T* const* values, i64 n, i64 head_dim, float* acc,
                     i64 width) {
  i64 column = 0;
  for (; column + 4 * W <= head_dim; column += 4 * W) {
    mix_tile<R, 2>(weights, values, n, column, 4 * W, acc, width);
  }
  for (; column < head_dim; column += 2 * W) {
    mix_tile<R, 1>(weights, values, n, column, min(2 * W, head_dim - column), acc, width);
  }
}

// acc[r] += sum_j weights[r, j] * values[j]
template <class T>
static void mix_values(i64 rows, const float* weights, const T* const* values, i64 n, i64 head_dim,
                       float* acc, i64 width) {
  for (; rows >= 4; rows -= 4, weights += 4 * kChunk, acc += 4 * width) {
    mix_rows<4>(weights, values, n, head_dim, acc, width);
  }
  if (rows == 3) mix_rows<3>(weights, values, n, head_dim, acc, width);
  if (rows == 2) mix_rows<2>(weights, values, n, head_dim, acc, width);
  if (rows == 1) mix_rows<1>(weights, values, n, head_dim, acc, width);
}

// Softmax over one chunk's scores for all rows of a tile, and its values added to the outputs.
template <class T>
static void mix_chunk(const AttentionArgs& args, const AttentionTask& task, float* scores,
                      const T* const* values, i64 head_dim, i64 begin, i64 n,
                      const RowStates& states) {
  TileShape shape = tile_shape(args);
  i64 rows = task.num_tokens * shape.group;
  i64 position = first_position(args, task.sequence) + task.first_token;
  for (i64 row = 0; row < rows; ++row) {
    i64 high = position + row / shape.group + 1;
    i64 low = max(0, high - args.window);
    update_softmax(args, scores + row * kChunk, n, min(n, low - begin), min(n, high - begin),
                   states.acc + row * shape.width, shape.width, states.maxima[row],
                   states.sums[row]);
  }
  mix_values(rows, scores, values, n, head_dim, states.acc, shape.width);
}

template <class T>
struct ChunkPointers {
  const T* keys[kChunk];
  const T* values[kChunk];
};

// Pointers to the keys and values of context positions [begin, begin + n), keys padded to whole tiles.
template <class T>
LF_INLINE void locate_chunk(const AttentionArgs& args, const AttentionTask& task, i64 begin, i64 n,
                            ChunkPointers<T>& pointers) {
  const std::int32_t* table = args.block_tables + task.sequence * args.block_tables_stride;
  for (i64 j = 0; j < n; ++j) {
    i64 position = begin + j;
    i64 offset = table[position / args.block_size] * args.block_stride +
                 position % args.block_size * args.token_stride + task.kv_head * args.head_stride;
    pointers.keys[j] = static_cast<const T*>(args.key_cache) + offset;
    pointers.values[j] = static_cast<const T*>(args.value_cache) + offset;
  }
  for (i64 j = n; j < round_up(n, kTileOuts); ++j) pointers.keys[j] = pointers.keys[0];
}

// Few rows read keys and values where they lie.
template <class T>
static void attend_direct(const AttentionArgs& args, const AttentionTask& task, const float* query,
                          const ChunkPointers<T>& pointers, i64 begin, i64 n,
                          const RowStates& states) {
  TileShape shape = tile_shape(args);
  i64 rows = task.num_tokens * shape.group;
  float* scores = scratch_array<float>(Scratch::scores, rows * kChunk);
  auto keys_at = [&](i64 j) {
    WeightRows<T> source = {{}, args.head_dim, nullptr};
    for (int i = 0; i < kTileOuts; ++i) source.rows[i] = pointers.keys[j + i];
    return source;
  };
  dot_rows(rows, query, shape.width, n, keys_at, scores, kChunk);
  mix_chunk(args, task, scores, pointers.values, args.head_dim, begin, n, states);
}

// Many rows share keys and values converted once.
template <class T>
static void attend_staged(const AttentionArgs& args, const AttentionTask& task, const float* query,
                          const ChunkPointers<T>& pointers, i64 begin, i64 n,
                          const RowStates& states) {
  TileShape shape = tile_shape(args);
  i64 rows = task.num_tokens * shape.group, width = shape.width;
  float* scores = scratch_array<float>(Scratch::scores, rows * kChunk);
  float* keys = scratch_array<float>(Scratch::weights, 2 * kChunk * width);
  float* values = keys + kChunk * width;
  const float* value_rows[kChunk];
  for (i64 j = 0; j < n; ++j) {
    stage_in_panel(pointers.keys[j], args.head_dim, j % kTileOuts, kTileOuts,
                   keys + j / kTileOuts * kTileOuts * width);
    stage_row(pointers.values[j], args.head_dim, values + j * width);
    value_rows[j] = values + j * width;
  }
  auto keys_at = [&](i64 j) { return WeightPanel{keys + j * width, width}; };
  dot_rows(rows, query, width, n, keys_at, scores, kChunk);
  mix_chunk(args, task, scores, value_rows, width, begin, n, states);
}

template <class T>
static void attend(const AttentionArgs& args, const AttentionTask& task, const RowStates& states) {
  TileShape shape = tile_shape(args);
  i64 rows = task.num_tokens * shape.group;
  float* query = scratch_array<float>(Scratch::rows, rows * shape.width);
  i64 token = args.query_starts[task.sequence] - args.query_starts[args.first_sequence] +
              task.first_token;
  auto row_at = [&](i64 row) {
    return static_cast<const T*>(args.query) + (token + row / shape.group) * args.query_token_stride +
           (task.kv_head * shape.group + row % shape.group) * args.query_head_stride;
  };
  stage_panels(rows, args.head_dim, row_at, query);
  for (i64 row = 0; row < rows; ++row) {
    states.maxima[row] = kMinusInfinity;
    states.sums[row] = 0;
  }
  __builtin_memset(states.acc, 0, rows * shape.width * sizeof(float));
  auto attend_chunk = rows <= kTileRows ? attend_direct<T> : attend_staged<T>;
  ChunkPointers<T> pointers;
  for (i64 begin = task.begin; begin < task.end;) {
    i64 n = min(task.end, (begin / kChunk + 1) * kChunk) - begin;
    locate_chunk(args, task, begin, n, pointers);
    attend_chunk(args, task, query, pointers, begin, n, states);
    begin += n;
  }
}

// Adds the states of further ranges to those of the first.
static void merge_states(const RowStates& into, const RowStates& from, i64 rows, i64 width) {
  for (i64 row = 0; row < rows; ++row) {
    float maximum = into.maxima[row] > from.maxima[row] ? into.maxima[row] : from.maxima[row];
    if (maximum == kMinusInfinity) continue;
    float keep = exp_scalar(into.maxima[row] - maximum);
    float add = exp_scalar(from.maxima[row] - maximum);
    into.maxima[row] = maximum;
    into.sums[row] = into.sums[row] * keep + from.sums[row] * add;
    float* acc = into.acc + row * width;
    const float* other = from.acc + row * width;
    for (i64 d = 0; d < width; d += W) store(acc + d, load(acc + d) * keep + load(other + d) * add);
  }
}

template <class T>
static void store_rows(const AttentionArgs& args, const AttentionTask& task,
                       const RowStates& states) {
  TileShape shape = tile_shape(args);
  i64 token = args.query_starts[task.sequence] - args.query_starts[args.first_sequence] +
              task.first_token;
  for (i64 row = 0; row < task.num_tokens * shape.group; ++row) {
    i64 head = task.kv_head * shape.group + row % shape.group;
    T* out = static_cast<T*>(args.out) +
             ((token + row / shape.group) * args.heads + head) * args.head_dim;
    float factor = states.sums[row] == 0 ? 0.0f : 1.0f / states.sums[row];
    for_pairs(args.head_dim, [&](i64 offset, i64 count) {
      Pair value = load_pair(states.acc + row * shape.width + offset);
      store_pair(out + offset, {value.first * factor, value.second * factor}, count);
    });
  }
}

template <class T>
static void paged_attention(const AttentionArgs& args) {
  TileShape shape = tile_shape(args);
  i64 num_tasks = 0, partial_size = 0, row_positions = 0;
  for_each_attention_task(args, [&](const AttentionTask& task) {
    i64 rows = task.num_tokens * shape.group;
    ++num_tasks;
    if (task.splits > 1) partial_size += state_size(rows, shape.width);
    row_positions += (rows + 8) * (task.end - task.begin);
  });
  AttentionTask* tasks = scratch_array<AttentionTask>(Scratch::tasks, num_tasks);
  float* partial = scratch_array<float>(Scratch::partial, partial_size);
  i64 count = 0;
  for_each_attention_task(args, [&](AttentionTask task) {
    if (task.splits > 1) {
      task.partial = partial;
      partial += state_size(task.num_tokens * shape.group, shape.width);
    }
    tasks[count++] = task;
  });
  run_tasks(num_tasks, row_positions * args.head_dim / 16, [&](auto next) {
    float* own = scratch_array<float>(Scratch::out, state_size(max(kQueryRows, shape.group), shape.width));
    for (i64 index; next(index);) {
      const AttentionTask& task = tasks[index];
      i64 rows = task.num_tokens * shape.group;
      float* memory = task.partial != nullptr ? task.partial : own;
      RowStates states = states_at(memory, rows, shape.width);
      attend<T>(args, task, states);
      if (task.partial == nullptr) store_rows<T>(args, task, states);
    }
  });
  for (i64 index = 0; index < num_tasks; index += tasks[index].splits) {
    const AttentionTask& task = tasks[index];
    if (task.splits == 1) continue;
    i64 rows = task.num_tokens * shape.group;
    RowStates states = states_at(task.partial, rows, shape.width);
    for (i64 split = 1; split < task.splits; ++split) {
      merge_states(states, states_at(tasks[index + split].partial, rows, shape.width), rows,
                   shape.width);
    }
    store_rows<T>(args, task, states);
  }
}

}  // namespace lorafleet::LF_ISA
