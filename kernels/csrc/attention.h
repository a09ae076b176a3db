// Causal attention over a paged KV cache, decode and prefill alike.
//
// The context is walked in chunks at fixed positions with an online softmax.
#pragma once

#include "attention_tasks.h"

namespace lorafleet::LF_ISA {

constexpr float kMinusInfinity = -__builtin_inff();

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
  i64 rows = head_rows(args, task);
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

// One head of a chunk. Few rows read keys and values where they lie.
template <class T>
static void attend_in_place(const AttentionArgs& args, const AttentionTask& task, i64 head,
                            const Staged<T>* query, const ChunkPlaces<T>& places, i64 begin,
                            const RowStates& states, ChunkFetch<T>& fetch) {
  i64 rows = head_rows(args, task), offset = head * args.head_stride;
  float* scores = scratch_array<float>(Scratch::scores, rows * kChunk);
  auto keys_at = [&](i64 j) {
    fetch.step();
    WeightRows<T> source = {{}, args.head_dim, nullptr};
    // Past the last key it is repeated, and those scores are not used.
    for (int i = 0; i < kTileOuts; ++i) source.rows[i] = places.keys[min(j + i, places.n - 1)] + offset;
    return source;
  };
  dot_rows(rows, query, tile_shape(args).width, places.n, keys_at, scores, kChunk);
  const T* values[kChunk];
  for (i64 j = 0; j < places.n; ++j) values[j] = places.values[j] + offset;
  mix_chunk(args, task, scores, values, args.head_dim, begin, places.n, states);
}

// Many rows share keys and values converted once.
template <class T>
static void attend_staged(const AttentionArgs& args, const AttentionTask& task, i64 head,
                          const float* query, const ChunkPlaces<T>& places, i64 begin,
                          const RowStates& states, ChunkFetch<T>&) {
  i64 rows = head_rows(args, task), width = tile_shape(args).width, offset = head * args.head_stride;
  float* scores = scratch_array<float>(Scratch::scores, rows * kChunk);
  float* keys = scratch_array<float>(Scratch::weights, 2 * kChunk * width);
  float* values = keys + kChunk * width;
  const float* value_rows[kChunk];
  for (i64 j = 0; j < places.n; ++j) {
    stage_in_panel(places.keys[j] + offset, args.head_dim, j % kTileOuts, kTileOuts,
                   keys + j / kTileOuts * kTileOuts * width);
    stage_row(places.values[j] + offset, args.head_dim, values + j * width);
    value_rows[j] = values + j * width;
  }
  auto keys_at = [&](i64 j) { return WeightPanel{keys + j * width, width}; };
  dot_rows(rows, query, width, places.n, keys_at, scores, kChunk);
  mix_chunk(args, task, scores, value_rows, width, begin, places.n, states);
}

LF_INLINE i64 first_row(const AttentionArgs& args, const AttentionTask& task) {
  return args.query_starts[task.sequence] - args.query_starts[args.first_sequence] +
         task.first_token;
}

// Stages the queries of one head, and starts its states.
template <class T, class S>
static void start_head(const AttentionArgs& args, const AttentionTask& task, i64 head, S* query,
                       const RowStates& states) {
  TileShape shape = tile_shape(args);
  i64 rows = head_rows(args, task), token = first_row(args, task);
  auto row_at = [&](i64 row) {
    return static_cast<const T*>(args.query) + (token + row / shape.group) * args.query_token_stride +
           ((task.kv_head + head) * shape.group + row % shape.group) * args.query_head_stride;
  };
  stage_panels(rows, args.head_dim, row_at, query);
  for (i64 row = 0; row < rows; ++row) {
    states.maxima[row] = kMinusInfinity;
    states.sums[row] = 0;
  }
  __builtin_memset(states.acc, 0, rows * shape.width * sizeof(float));
}

// Attends chunk by chunk and head by head. S is what queries are staged as; what `next` will read first
// is asked for during the last chunk, unless that is null.
template <class T, class S, class AttendChunk>
static void attend_with(const AttentionArgs& args, const AttentionTask& task,
                        const AttentionTask* next, float* memory, const AttendChunk& attend_chunk) {
  i64 head_size = head_rows(args, task) * tile_shape(args).width;
  S* query = scratch_array<S>(Scratch::rows, task.num_heads * head_size);
  for (i64 head = 0; head < task.num_heads; ++head) {
    start_head<T>(args, task, head, query + head * head_size, states_at(args, task, memory, head));
  }
  ChunkPlaces<T> chunks[2];
  if (task.begin < task.end) locate_chunk(args, task, task.begin, chunks[0]);
  for (i64 begin = task.begin, number = 0; begin < task.end; ++number) {
    const ChunkPlaces<T>& chunk = chunks[number % 2];
    ChunkPlaces<T>& ahead = chunks[(number + 1) % 2];
    i64 end = begin + chunk.n;
    ahead.n = 0;
    if (end < task.end) {
      locate_chunk(args, task, end, ahead);
    } else if (next != nullptr && next->begin < next->end) {
      locate_chunk(args, *next, next->begin, ahead);
    }
    ChunkFetch<T> fetch(args, task, ahead, task.num_heads * ceil_div(chunk.n, kTileOuts));
    for (i64 head = 0; head < task.num_heads; ++head) {
      attend_chunk(args, task, head, query + head * head_size, chunk, begin,
                   states_at(args, task, memory, head), fetch);
    }
    begin = end;
  }
}

template <class T>
static void attend(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next,
                   float* memory) {
  if (reads_in_place(args, task.num_tokens)) {
    attend_with<T, Staged<T>>(args, task, next, memory, attend_in_place<T>);
  } else {
    attend_with<T, float>(args, task, nullptr, memory, attend_staged<T>);
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
static void store_head(const AttentionArgs& args, const AttentionTask& task, i64 head,
                       const RowStates& states) {
  TileShape shape = tile_shape(args);
  i64 token = first_row(args, task), first_head = (task.kv_head + head) * shape.group;
  for (i64 row = 0; row < head_rows(args, task); ++row) {
    T* out = static_cast<T*>(args.out) +
             ((token + row / shape.group) * args.heads + first_head + row % shape.group) * args.head_dim;
    float factor = states.sums[row] == 0 ? 0.0f : 1.0f / states.sums[row];
    for_pairs(args.head_dim, [&](i64 offset, i64 count) {
      Pair value = load_pair(states.acc + row * shape.width + offset);
      store_pair(out + offset, {value.first * factor, value.second * factor}, count);
    });
  }
}

// Writes the outputs of a tile, whose ranges are `tasks`.
template <class T>
static void store_tile(const AttentionArgs& args, const AttentionTask* tasks, float* memory) {
  for (i64 head = 0; head < tasks->num_heads; ++head) {
    RowStates states = states_at(args, *tasks, memory, head);
    for (i64 split = 1; split < tasks->splits; ++split) {
      merge_states(states, states_at(args, tasks[split], tasks[split].partial, head),
                   head_rows(args, *tasks), tile_shape(args).width);
    }
    store_head<T>(args, *tasks, head, states);
  }
}

template <class T>
static void paged_attention(const AttentionArgs& args) {
  i64 num_tasks = 0, partial_size = 0, own_size = 0, row_positions = 0;
  for_each_attention_task(args, [&](const AttentionTask& task) {
    i64 size = states_size(args, task);
    ++num_tasks;
    own_size = max(own_size, size);
    if (task.splits > 1) partial_size += size;
    row_positions += (head_rows(args, task) + 8) * task.num_heads * (task.end - task.begin);
  });
  AttentionTask* tasks = scratch_array<AttentionTask>(Scratch::tasks, num_tasks);
  float* partial = scratch_array<float>(Scratch::partial, partial_size);
  i64 count = 0;
  for_each_attention_task(args, [&](AttentionTask task) {
    if (task.splits > 1) {
      task.partial = partial;
      partial += states_size(args, task);
    }
    tasks[count++] = task;
  });
  run_tasks(num_tasks, row_positions * args.head_dim / 16, [&](auto next) {
    float* own = scratch_array<float>(Scratch::out, own_size);
    for (i64 index; next(index);) {
      const AttentionTask& task = tasks[index];
      const AttentionTask* after = index + 1 < num_tasks ? &task + 1 : nullptr;
      attend<T>(args, task, after, task.splits > 1 ? task.partial : own);
      if (task.splits == 1) store_tile<T>(args, &task, own);
    }
  });
  for (i64 index = 0; index < num_tasks; index += tasks[index].splits) {
    if (tasks[index].splits > 1) store_tile<T>(args, tasks + index, tasks[index].partial);
  }
}

}  // namespace lorafleet::LF_ISA
