// What attention over a paged KV cache is cut into, and where its keys and values lie.
//
// A task is some KV heads, a tile of query tokens with all query heads that share them, and a range of
// the context. A sequence whose tokens fit one tile has its context cut into ranges of fixed size, so
// one long context uses all threads and its result still depends on neither the batch nor the number
// of threads.
#pragma once

#include "tiles.h"

namespace lorafleet::LF_ISA {

// Positions of the context that are taken at once.
constexpr i64 kChunk = 64;
constexpr i64 kSplit = 1024;
constexpr i64 kQueryRows = 48;

struct AttentionTask {
  i64 sequence;
  i64 kv_head;  // the first of num_heads
  i64 num_heads;
  i64 first_token;  // in the sequence's new tokens
  i64 num_tokens;
  i64 begin;  // range of the context
  i64 end;
  i64 splits;      // ranges of this tile, tasks next to each other
  float* partial;  // null when this task is the tile's only one
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

// Softmax state of the rows of one tile and KV head: unnormalised outputs, their maxima and sums.
struct RowStates {
  float* acc;  // [rows, width]
  float* maxima;
  float* sums;
};

// Rows of one KV head.
LF_INLINE i64 head_rows(const AttentionArgs& args, const AttentionTask& task) {
  return task.num_tokens * tile_shape(args).group;
}

// How many floats the states of all heads of a task take.
LF_INLINE i64 states_size(const AttentionArgs& args, const AttentionTask& task) {
  return task.num_heads * head_rows(args, task) * (tile_shape(args).width + 2);
}

LF_INLINE RowStates states_at(const AttentionArgs& args, const AttentionTask& task, float* memory,
                              i64 head) {
  i64 rows = head_rows(args, task), width = tile_shape(args).width;
  memory += head * rows * (width + 2);
  return {memory, memory + rows * width, memory + rows * (width + 1)};
}

LF_INLINE i64 sequence_tokens(const AttentionArgs& args, i64 sequence) {
  return args.query_starts[sequence + 1] - args.query_starts[sequence];
}

// Context position of a sequence's first new token.
LF_INLINE i64 first_position(const AttentionArgs& args, i64 sequence) {
  return args.context_lens[sequence] - sequence_tokens(args, sequence);
}

// Few rows read keys and values where they lie; many share what is converted once.
LF_INLINE bool reads_in_place(const AttentionArgs& args, i64 num_tokens) {
  return num_tokens * tile_shape(args).group <= kTileRows;
}

// All heads of a position lie together. Where one task takes them all, memory is read in one stream,
// which is three times as fast; that needs sequences enough to share.
LF_INLINE i64 heads_of_a_task(const AttentionArgs& args, i64 num_tokens) {
  bool takes_all = reads_in_place(args, num_tokens) && args.num_sequences >= 2 * max_workers();
  return takes_all ? args.kv_heads : 1;
}

// Calls visit(task) for every task; the ranges of one tile come one after the other.
template <class Visit>
LF_INLINE void for_each_attention_task(const AttentionArgs& args, const Visit& visit) {
  TileShape shape = tile_shape(args);
  for (i64 i = 0; i < args.num_sequences; ++i) {
    i64 sequence = args.first_sequence + i;
    i64 tokens = sequence_tokens(args, sequence), heads = heads_of_a_task(args, tokens);
    for (i64 token = 0; token < tokens; token += shape.tile_tokens) {
      i64 count = min(shape.tile_tokens, tokens - token);
      i64 position = first_position(args, sequence) + token;
      i64 begin = max(0, position + 1 - args.window), end = max(begin, position + count);
      i64 step = tokens <= shape.tile_tokens ? kSplit : end + kSplit;
      // An empty context is one empty range, whose outputs are zeros.
      i64 first = begin / step, splits = max(1, ceil_div(end, step) - first);
      for (i64 head = 0; head < args.kv_heads; head += heads) {
        for (i64 split = first; split < first + splits; ++split) {
          visit(AttentionTask{sequence, head, heads, token, count, max(begin, split * step),
                              min(end, (split + 1) * step), splits, nullptr});
        }
      }
    }
  }
}

// Where the keys and values of some positions lie, those of the task's first head.
template <class T>
struct ChunkPlaces {
  i64 n = 0;
  const T* keys[kChunk];
  const T* values[kChunk];
};

// Places of the chunk that starts at `begin`.
template <class T>
LF_INLINE void locate_chunk(const AttentionArgs& args, const AttentionTask& task, i64 begin,
                            ChunkPlaces<T>& places) {
  const std::int32_t* table = args.block_tables + task.sequence * args.block_tables_stride;
  i64 end = min(task.end, (begin / kChunk + 1) * kChunk);
  places.n = max(0, end - begin);
  for (i64 j = 0; begin < end;) {
    i64 block = begin / args.block_size, in_block = begin - block * args.block_size;
    i64 offset = table[block] * args.block_stride + in_block * args.token_stride +
                 task.kv_head * args.head_stride;
    i64 block_end = min(end, begin + args.block_size - in_block);
    for (; begin < block_end; ++begin, ++j, offset += args.token_stride) {
      places.keys[j] = static_cast<const T*>(args.key_cache) + offset;
      places.values[j] = static_cast<const T*>(args.value_cache) + offset;
    }
  }
}

// Asks for all heads of a chunk's positions, a few at each step of the work on the chunk before it.
template <class T>
class ChunkFetch {
 public:
  ChunkFetch(const AttentionArgs& args, const AttentionTask& task, const ChunkPlaces<T>& places,
             i64 steps)
      : places_(places),
        row_bytes_(task.num_heads * args.head_stride * static_cast<i64>(sizeof(T))),
        per_step_(ceil_div(places.n, max(1, steps))) {}

  LF_INLINE_MEMBER void step() {
    for (i64 end = min(places_.n, done_ + per_step_); done_ < end; ++done_) {
      fetch(places_.keys[done_]);
      fetch(places_.values[done_]);
    }
  }

 private:
  LF_INLINE_MEMBER void fetch(const T* row) const {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (i64 at = 0; at < row_bytes_; at += kLineBytes) __builtin_prefetch(bytes + at, 0, 2);
  }

  const ChunkPlaces<T>& places_;
  i64 row_bytes_;
  i64 per_step_;
  i64 done_ = 0;
};

}  // namespace lorafleet::LF_ISA
