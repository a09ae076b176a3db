// All decoder layers of Llama's shape as one call: the ops of torch_ops.h in the order of the model.
//
// A decode step of a small model spends a fifth of its time between ops when Python calls each of them.
#pragma once

#include <array>
#include <tuple>

#include "torch_ops.h"

namespace lorafleet {
namespace {

// Linears that share their input.
struct LinearGroup {
  std::vector<Tensor> weights;
  std::vector<std::optional<Tensor>> biases;
};

struct Norm {
  Tensor weight;
  double eps;
};

struct DecoderLayer {
  Norm input_norm;
  LinearGroup qkv;
  std::optional<Norm> query_norm;  // of each head, both or none
  std::optional<Norm> key_norm;
  LinearGroup o;
  Norm mlp_norm;
  LinearGroup gate_up;
  LinearGroup down;
  i64 head_dim;
  double scale;
  std::optional<i64> window;
};

struct AttentionBatch {
  Tensor query_starts, context_lens, block_tables, slot_mapping;
  i64 num_decodes;
};

struct LoRABatch {
  Tensor segment_starts, segment_slots;
};

// lora_a, lora_b and ranks of one group, none while no adapter has targeted it.
using GroupSlots = std::optional<std::tuple<Tensor, std::vector<Tensor>, Tensor>>;
// Of qkv, o, gate_up and down.
using LayerSlots = std::array<GroupSlots, 4>;
// Keys and values.
using LayerCache = std::pair<Tensor, Tensor>;

class DecoderRun {
 public:
  DecoderRun(const Tensor& cos, const Tensor& sin, const AttentionBatch& attention,
             const std::optional<LoRABatch>& lora)
      : cos_(cos), sin_(sin), attention_(attention), lora_(lora) {}

  // Brings the stream up to the layer's MLP and returns what that adds.
  Tensor layer(const DecoderLayer& layer, const LayerCache& cache, const LayerSlots& slots,
               const Tensor& stream, const std::optional<Tensor>& update) const {
    const Norm& norm = layer.input_norm;
    Tensor rows = update.has_value() ? add_rms_norm(stream, *update, norm.weight, norm.eps)
                                     : rms_norm(stream, norm.weight, norm.eps);
    std::vector<Tensor> qkv = project(layer.qkv, slots[0], rows);
    Tensor mixed = attend(layer, cache, qkv);
    Tensor attended = project(layer.o, slots[1], mixed.view({rows.size(0), -1}))[0];
    rows = add_rms_norm(stream, attended, layer.mlp_norm.weight, layer.mlp_norm.eps);
    std::vector<Tensor> gate_up = project(layer.gate_up, slots[2], rows);
    return project(layer.down, slots[3], silu_and_mul(gate_up[0], gate_up[1]))[0];
  }

 private:
  std::vector<Tensor> project(const LinearGroup& group, const GroupSlots& slots,
                              const Tensor& rows) const {
    std::vector<Tensor> outs = linear_multi(rows, group.weights, group.biases);
    if (lora_.has_value() && slots.has_value()) {
      const auto& [lora_a, lora_b, ranks] = *slots;
      lora_apply(rows, lora_a, lora_b, ranks, lora_->segment_starts, lora_->segment_slots, outs);
    }
    return outs;
  }

  Tensor attend(const DecoderLayer& layer, const LayerCache& cache, std::vector<Tensor>& qkv) const {
    for (Tensor& heads : qkv) heads = heads.view({heads.size(0), -1, layer.head_dim});
    Tensor &query = qkv[0], &key = qkv[1], &value = qkv[2];
    if (layer.query_norm.has_value()) query = norm_heads(query, *layer.query_norm);
    if (layer.key_norm.has_value()) key = norm_heads(key, *layer.key_norm);
    apply_rope(query, key, cos_, sin_);
    store_kv(key, value, cache.first, cache.second, attention_.slot_mapping);
    i64 split = attention_.num_decodes, sequences = attention_.context_lens.size(0);
    auto attend_to = [&](const Tensor& rows, i64 first, i64 count) {
      return paged_attention(rows, cache.first, cache.second, attention_.query_starts,
                             attention_.context_lens, attention_.block_tables, first, count,
                             layer.scale, layer.window, std::nullopt);
    };
    i64 tokens = query.size(0);
    if (split == tokens) return attend_to(query, 0, split);
    if (split == 0) return attend_to(query, 0, sequences);
    return at::cat({attend_to(query.narrow(0, 0, split), 0, split),
                    attend_to(query.narrow(0, split, tokens - split), split, sequences - split)});
  }

  static Tensor norm_heads(const Tensor& heads, const Norm& norm) {
    return rms_norm(heads.view({-1, heads.size(2)}), norm.weight, norm.eps).view(heads.sizes());
  }

  const Tensor& cos_;
  const Tensor& sin_;
  const AttentionBatch& attention_;
  const std::optional<LoRABatch>& lora_;
};

// Runs all layers over the stream, in place, and returns what the last one's MLP adds to it.
Tensor decoder_layers(const std::vector<const DecoderLayer*>& layers, const Tensor& stream,
                      const Tensor& cos, const Tensor& sin, const std::vector<LayerCache>& caches,
                      const AttentionBatch& attention, const std::optional<LoRABatch>& lora,
                      const std::vector<LayerSlots>& slots) {
  TORCH_CHECK(!layers.empty() && caches.size() == layers.size() && slots.size() == layers.size(),
              "expected caches and slots for each of ", layers.size(), " layers");
  pybind11::gil_scoped_release release;
  DecoderRun run(cos, sin, attention, lora);
  std::optional<Tensor> update;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    update = run.layer(*layers[i], caches[i], slots[i], stream, update);
  }
  return *update;
}

}  // namespace
}  // namespace lorafleet
