// The seam between the Python binding and the kernels.
//
// Knows raw pointers, strides and sizes. Knows nothing of torch, so that the kernels can be compiled
// several times with different instruction sets. Strides count elements, not bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lorafleet {

using i64 = std::int64_t;

enum class DType { f32, bf16 };

// One output of `linear`: y[t, o] = x[t] . weight[o] + bias[o].
struct LinearTarget {
  const void* weight;
  i64 weight_stride;
  const void* bias;  // null for none
  void* y;
  i64 y_stride;
  i64 out;
};

struct LinearArgs {
  DType dtype;
  const void* x;
  i64 x_stride;
  i64 rows;
  i64 in;
  const LinearTarget* targets;
  i64 num_targets;
};

// One projection's expand: y[t] += mid[t] @ lora_b[slot].
struct LoRATarget {
  const void* lora_b;
  i64 slot_stride;
  i64 rank_stride;
  void* y;
  i64 y_stride;
  i64 out;
};

struct LoRAArgs {
  DType dtype;
  const void* x;
  i64 x_stride;
  i64 in;
  const void* lora_a;
  i64 a_target_stride;
  i64 a_slot_stride;
  i64 a_rank_stride;
  const std::int32_t* ranks;  // [num_targets, slots]
  i64 ranks_stride;
  const std::int32_t* segment_starts;
  const std::int32_t* segment_slots;
  i64 num_segments;
  const LoRATarget* targets;
  i64 num_targets;
};

struct AttentionArgs {
  DType dtype;
  const void* query;
  i64 query_token_stride;
  i64 query_head_stride;
  void* out;  // [tokens, heads, head_dim], contiguous
  const void* key_cache;
  const void* value_cache;
  i64 block_stride;
  i64 token_stride;
  i64 head_stride;
  i64 block_size;
  const std::int32_t* block_tables;
  i64 block_tables_stride;
  const std::int32_t* context_lens;
  const std::int32_t* query_starts;
  i64 first_sequence;
  i64 num_sequences;
  i64 heads;
  i64 kv_heads;
  i64 head_dim;
  i64 window;  // positions a token sees, itself included
  float scale;
  float soft_cap;  // 0 for none
};

struct RmsNormArgs {
  DType dtype;
  const void* x;
  i64 x_stride;
  // Unless null, what is added first, and where the sums go; both as dense as y.
  const void* update;
  void* sums;
  const void* weight;
  void* y;
  i64 rows;
  i64 hidden;
  float eps;
};

struct SiluAndMulArgs {
  DType dtype;
  const void* gate;
  i64 gate_stride;
  const void* up;
  i64 up_stride;
  void* y;
  i64 rows;
  i64 width;
};

struct RopeTarget {
  void* x;
  i64 token_stride;
  i64 head_stride;
  i64 heads;
};

struct RopeArgs {
  DType dtype;
  const RopeTarget* targets;
  i64 num_targets;
  const void* cos;
  i64 cos_stride;
  const void* sin;
  i64 sin_stride;
  i64 tokens;
  i64 head_dim;
};

// The kernels of one instruction set.
struct KernelTable {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*lora_apply)(const LoRAArgs&);
  void (*paged_attention)(const AttentionArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*silu_and_mul)(const SiluAndMulArgs&);
  void (*apply_rope)(const RopeArgs&);
};

extern const KernelTable kPortableKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;
#endif

// Runs work(state) on this thread and on others that are free, and waits for those that took part.
void run_workers(void (*work)(void*), void* state);
// How many these are at most.
int max_workers();

// Memory that one thread keeps between calls, 64-byte aligned, one area per purpose. A pointer stays
// valid until the same thread asks the same purpose for more.
enum class Scratch { tasks, mid, partial, rows, weights, out, scores, count };
void* scratch(Scratch purpose, std::size_t num_bytes);

}  // namespace lorafleet
