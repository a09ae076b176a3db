// The ops on torch's tensors: checks them, fills the argument records, chooses the instruction set.
//
// Everything with a pointer in it is checked here, so that the kernels need not: a wrong block or slot
// number raises instead of reading foreign memory.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"

namespace lorafleet {
namespace {

using at::Tensor;

std::vector<const KernelTable*> supported_tables() {
  std::vector<const KernelTable*> tables{&kPortableKernels};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    tables.push_back(&kAvx2Kernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tables.push_back(&kAvx512Kernels);
      if (__builtin_cpu_supports("avx512bf16")) tables.push_back(&kAvx512Bf16Kernels);
    }
  }
#endif
  return tables;
}

const KernelTable* active = supported_tables().back();

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : supported_tables()) names.emplace_back(table->name);
  return names;
}

std::string active_isa() { return active->name; }

void select_isa(const std::string& name) {
  for (const KernelTable* table : supported_tables()) {
    if (name == table->name) {
      active = table;
      return;
    }
  }
  TORCH_CHECK(false, "instruction set ", name, " is not supported here");
}

DType dtype_of(const Tensor& tensor) {
  at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "expected float32 or bfloat16, got ", type);
  return type == at::kFloat ? DType::f32 : DType::bf16;
}

Tensor empty(at::IntArrayRef shape, const Tensor& like) {
  return at::detail::empty_cpu(shape, like.scalar_type());
}

// The tensor itself when its last axis is dense, else a dense copy.
Tensor dense_rows(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

void check_like(const char* name, const Tensor& tensor, const Tensor& like) {
  TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), name, ": expected ", like.scalar_type(),
              ", got ", tensor.scalar_type());
  TORCH_CHECK(tensor.device().is_cpu(), name, ": expected a CPU tensor");
}

// Checks a tensor that is changed in place or read by stride: a copy would be wrong or waste.
void check_dense(const char* name, const Tensor& tensor, const Tensor& like, i64 dims) {
  check_like(name, tensor, like);
  TORCH_CHECK(tensor.dim() == dims && (tensor.stride(-1) == 1 || tensor.size(-1) <= 1), name,
              ": expected ", dims, " axes with a dense last one");
}

const std::int32_t* int32_data(const char* name, const Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kInt && tensor.device().is_cpu() &&
                  (tensor.numel() == 0 || tensor.stride(-1) == 1),
              name, ": expected a dense int32 CPU tensor");
  return tensor.const_data_ptr<std::int32_t>();
}

// Lets other Python threads run during long calls only: taking the lock back can cost more than a
// short call, of which a decode step makes hundreds. Does nothing within a call that let them run.
class LongCall {
 public:
  explicit LongCall(double estimated_ns) {
    if (estimated_ns > 5e5 && PyGILState_Check()) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

std::vector<Tensor> linear_multi(const Tensor& x_in, const std::vector<Tensor>& weights,
                                 const std::vector<std::optional<Tensor>>& biases) {
  Tensor x = dense_rows(x_in);
  check_dense("x", x, x, 2);
  TORCH_CHECK(biases.size() == weights.size(), "expected one bias or None per weight");
  std::vector<Tensor> ys;
  std::vector<LinearTarget> targets;
  ys.reserve(weights.size());
  targets.reserve(weights.size());
  double elements = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    check_dense("weight", weight, x, 2);
    TORCH_CHECK(weight.size(1) == x.size(1), "weight: expected ", x.size(1), " columns, got ",
                weight.size(1));
    const void* bias = nullptr;
    if (biases[i].has_value()) {
      check_dense("bias", *biases[i], x, 1);
      TORCH_CHECK(biases[i]->size(0) == weight.size(0), "bias: wrong size");
      bias = biases[i]->const_data_ptr();
    }
    Tensor y = empty({x.size(0), weight.size(0)}, x);
    targets.push_back({weight.const_data_ptr(), weight.stride(0), bias, y.mutable_data_ptr(),
                       weight.size(0), weight.size(0)});
    elements += static_cast<double>(weight.numel());
    ys.push_back(std::move(y));
  }
  LinearArgs args{dtype_of(x), x.const_data_ptr(), x.stride(0), x.size(0), x.size(1), targets.data(),
                  static_cast<i64>(targets.size())};
  if (args.rows > 0) {
    LongCall call(elements * (0.1 + 0.01 * static_cast<double>(args.rows)));
    active->linear(args);
  }
  return ys;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return linear_multi(x, {weight}, {bias})[0];
}

void check_segments(const LoRAArgs& args, i64 tokens, i64 slots, i64 max_rank) {
  for (i64 s = 0; s < args.num_segments; ++s) {
    i64 slot = args.segment_slots[s];
    TORCH_CHECK(slot < slots, "segment ", s, " has slot ", slot, " of ", slots);
    TORCH_CHECK(0 <= args.segment_starts[s] && args.segment_starts[s] <= args.segment_starts[s + 1] &&
                    args.segment_starts[s + 1] <= tokens,
                "segment ", s, " is not within ", tokens, " tokens");
    for (i64 p = 0; slot >= 0 && p < args.num_targets; ++p) {
      i64 rank = args.ranks[p * args.ranks_stride + slot];
      TORCH_CHECK(0 <= rank && rank <= max_rank, "slot ", slot, " has rank ", rank, " of ", max_rank);
    }
  }
}

void lora_apply(const Tensor& x_in, const Tensor& lora_a, const std::vector<Tensor>& lora_b,
                const Tensor& ranks, const Tensor& segment_starts, const Tensor& segment_slots,
                const std::vector<Tensor>& ys) {
  Tensor x = dense_rows(x_in);
  check_dense("x", x, x, 2);
  check_dense("lora_a", lora_a, x, 4);
  i64 num_targets = lora_a.size(0), slots = lora_a.size(1), max_rank = lora_a.size(2);
  TORCH_CHECK(lora_a.size(3) == x.size(1), "lora_a: expected ", x.size(1), " columns");
  TORCH_CHECK(static_cast<i64>(lora_b.size()) == num_targets &&
                  static_cast<i64>(ys.size()) == num_targets,
              "one lora_b and one y per projection");
  TORCH_CHECK(ranks.dim() == 2 && ranks.size(0) == num_targets && ranks.size(1) == slots,
              "ranks: wrong shape");
  TORCH_CHECK(segment_starts.numel() == segment_slots.numel() + 1, "segments: wrong sizes");
  std::vector<LoRATarget> targets;
  targets.reserve(lora_b.size());
  for (std::size_t p = 0; p < lora_b.size(); ++p) {
    const Tensor &b = lora_b[p], &y = ys[p];
    check_dense("lora_b", b, x, 3);
    check_dense("y", y, x, 2);
    TORCH_CHECK(b.size(0) == slots && b.size(1) == max_rank && b.size(2) == y.size(1) &&
                    y.size(0) == x.size(0),
                "lora_b or y: wrong shape");
    targets.push_back({b.const_data_ptr(), b.stride(0), b.stride(1), y.mutable_data_ptr(),
                       y.stride(0), y.size(1)});
  }
  LoRAArgs args{dtype_of(x),
                x.const_data_ptr(),
                x.stride(0),
                x.size(1),
                lora_a.const_data_ptr(),
                lora_a.stride(0),
                lora_a.stride(1),
                lora_a.stride(2),
                int32_data("ranks", ranks),
                ranks.stride(0),
                int32_data("segment_starts", segment_starts),
                int32_data("segment_slots", segment_slots),
                segment_slots.numel(),
                targets.data(),
                num_targets};
  check_segments(args, x.size(0), slots, max_rank);
  LongCall call(0.01 * static_cast<double>(x.numel() * max_rank * num_targets));
  active->lora_apply(args);
}

// Checks every block that will be read and returns the number of (token, position) pairs.
double check_context(const AttentionArgs& args, i64 num_blocks, i64 query_tokens) {
  double pairs = 0;
  i64 end = args.first_sequence + args.num_sequences;
  TORCH_CHECK(args.num_sequences == 0 ||
                  args.query_starts[end] - args.query_starts[args.first_sequence] == query_tokens,
              "query: expected the tokens of ", args.num_sequences, " sequences");
  for (i64 s = args.first_sequence; s < end; ++s) {
    i64 tokens = args.query_starts[s + 1] - args.query_starts[s], context = args.context_lens[s];
    TORCH_CHECK(0 <= tokens && (tokens <= context || context == 0), "sequence ", s, " has ", tokens,
                " tokens in a context of ", context);
    i64 blocks = (context + args.block_size - 1) / args.block_size;
    TORCH_CHECK(blocks <= args.block_tables_stride, "sequence ", s, " needs ", blocks, " blocks");
    const std::int32_t* table = args.block_tables + s * args.block_tables_stride;
    std::uint32_t largest = 0;
    for (i64 i = 0; i < blocks; ++i) {
      largest = std::max(largest, static_cast<std::uint32_t>(table[i]));
    }
    TORCH_CHECK(blocks == 0 || largest < num_blocks, "sequence ", s, " has a block outside the cache");
    pairs += static_cast<double>(tokens) * static_cast<double>(context);
  }
  return pairs;
}

Tensor paged_attention(const Tensor& query_in, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_starts, const Tensor& context_lens,
                       const Tensor& block_tables, i64 first_sequence, i64 num_sequences,
                       double scale, std::optional<i64> window, std::optional<double> soft_cap) {
  Tensor query = dense_rows(query_in);
  check_dense("query", query, query, 3);
  check_dense("key_cache", key_cache, query, 4);
  check_dense("value_cache", value_cache, query, 4);
  TORCH_CHECK(key_cache.strides() == value_cache.strides() && key_cache.sizes() == value_cache.sizes(),
              "key_cache and value_cache: expected the same layout");
  TORCH_CHECK(query.size(2) == key_cache.size(3) && query.size(1) % key_cache.size(2) == 0,
              "query: heads do not fit the cache");
  TORCH_CHECK(first_sequence >= 0 && num_sequences >= 0 &&
                  query_starts.numel() > first_sequence + num_sequences &&
                  context_lens.numel() >= first_sequence + num_sequences &&
                  block_tables.dim() == 2 && block_tables.is_contiguous() &&
                  block_tables.size(0) >= first_sequence + num_sequences,
              "batch: fewer sequences than asked for");
  Tensor out = empty(query.sizes(), query);
  AttentionArgs args{dtype_of(query),
                     query.const_data_ptr(),
                     query.stride(0),
                     query.stride(1),
                     out.mutable_data_ptr(),
                     key_cache.const_data_ptr(),
                     value_cache.const_data_ptr(),
                     key_cache.stride(0),
                     key_cache.stride(1),
                     key_cache.stride(2),
                     key_cache.size(1),
                     int32_data("block_tables", block_tables),
                     block_tables.size(1),
                     int32_data("context_lens", context_lens),
                     int32_data("query_starts", query_starts),
                     first_sequence,
                     num_sequences,
                     query.size(1),
                     key_cache.size(2),
                     query.size(2),
                     window.value_or(std::numeric_limits<std::int32_t>::max()),
                     static_cast<float>(scale),
                     static_cast<float>(soft_cap.value_or(0.0))};
  double pairs = check_context(args, key_cache.size(0), query.size(0));
  LongCall call(0.05 * pairs * static_cast<double>(args.heads * args.head_dim));
  active->paged_attention(args);
  return out;
}

void store_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache,
              const Tensor& value_cache, const Tensor& slot_mapping) {
  i64 tokens = key.size(0), num_slots = key_cache.size(0) * key_cache.size(1);
  TORCH_CHECK(slot_mapping.scalar_type() == at::kLong && slot_mapping.numel() == tokens &&
                  slot_mapping.is_contiguous(),
              "slot_mapping: expected one int64 per token");
  const i64* slots = slot_mapping.const_data_ptr<i64>();
  for (i64 t = 0; t < tokens; ++t) {
    TORCH_CHECK(slots[t] < num_slots, "token ", t, " has slot ", slots[t], " of ", num_slots);
  }
  for (auto [from, to] : {std::pair{&key, &key_cache}, std::pair{&value, &value_cache}}) {
    check_like("key or value", *from, *to);
    TORCH_CHECK(to->is_contiguous() && from->dim() == 3 && to->dim() == 4 && from->size(0) == tokens &&
                    from->size(1) == to->size(2) && from->size(2) == to->size(3),
                "key, value or cache: wrong shape");
    Tensor source = from->stride(2) == 1 && from->stride(1) == from->size(2) ? *from : from->contiguous();
    i64 row_bytes = source.size(1) * source.size(2) * static_cast<i64>(source.element_size());
    i64 stride_bytes = source.stride(0) * static_cast<i64>(source.element_size());
    const char* read = static_cast<const char*>(source.const_data_ptr());
    char* write = static_cast<char*>(to->mutable_data_ptr());
    for (i64 t = 0; t < tokens; ++t) {
      if (slots[t] >= 0) std::memcpy(write + slots[t] * row_bytes, read + t * stride_bytes, row_bytes);
    }
  }
}

Tensor rms_norm(const Tensor& x_in, const Tensor& weight, double eps) {
  Tensor x = dense_rows(x_in);
  check_dense("x", x, x, 2);
  check_dense("weight", weight, x, 1);
  TORCH_CHECK(weight.size(0) == x.size(1), "weight: wrong size");
  Tensor y = empty(x.sizes(), x);
  active->rms_norm({dtype_of(x), x.const_data_ptr(), x.stride(0), nullptr, nullptr,
                    weight.const_data_ptr(), y.mutable_data_ptr(), x.size(0), x.size(1),
                    static_cast<float>(eps)});
  return y;
}

Tensor add_rms_norm(const Tensor& stream, const Tensor& update_in, const Tensor& weight, double eps) {
  Tensor update = update_in.contiguous();
  check_dense("update", update, stream, 2);
  check_dense("weight", weight, stream, 1);
  TORCH_CHECK(stream.is_contiguous() && stream.sizes() == update.sizes(),
              "stream and update: expected the same shape, the stream contiguous");
  TORCH_CHECK(weight.size(0) == stream.size(1), "weight: wrong size");
  Tensor y = empty(stream.sizes(), stream);
  active->rms_norm({dtype_of(stream), stream.const_data_ptr(), stream.stride(0),
                    update.const_data_ptr(), stream.mutable_data_ptr(), weight.const_data_ptr(),
                    y.mutable_data_ptr(), stream.size(0), stream.size(1), static_cast<float>(eps)});
  return y;
}

Tensor silu_and_mul(const Tensor& gate_in, const Tensor& up_in) {
  Tensor gate = dense_rows(gate_in), up = dense_rows(up_in);
  check_dense("gate", gate, gate, 2);
  check_dense("up", up, gate, 2);
  TORCH_CHECK(gate.sizes() == up.sizes(), "gate and up: expected the same shape");
  Tensor y = empty(gate.sizes(), gate);
  active->silu_and_mul({dtype_of(gate), gate.const_data_ptr(), gate.stride(0), up.const_data_ptr(),
                        up.stride(0), y.mutable_data_ptr(), gate.size(0), gate.size(1)});
  return y;
}

void apply_rope(const Tensor& query, const Tensor& key, const Tensor& cos_in, const Tensor& sin_in) {
  Tensor cos = dense_rows(cos_in), sin = dense_rows(sin_in);
  std::vector<RopeTarget> targets;
  for (const Tensor* x : {&query, &key}) {
    check_dense("query or key", *x, query, 3);
    TORCH_CHECK(x->size(0) == query.size(0) && x->size(2) == query.size(2) && x->size(2) % 2 == 0,
                "query or key: wrong shape");
    targets.push_back({x->mutable_data_ptr(), x->stride(0), x->stride(1), x->size(1)});
  }
  for (const Tensor* table : {&cos, &sin}) {
    check_dense("cos or sin", *table, query, 2);
    TORCH_CHECK(table->size(0) == query.size(0) && table->size(1) == query.size(2),
                "cos or sin: wrong shape");
  }
  active->apply_rope({dtype_of(query), targets.data(), 2, cos.const_data_ptr(), cos.stride(0),
                      sin.const_data_ptr(), sin.stride(0), query.size(0), query.size(2)});
}

}  // namespace
}  // namespace lorafleet
