// Python binding, and what the kernels need from their process: threads, memory to work in.
#include <cstdlib>
#include <memory>
#include <new>

#include "crew.h"
#include "decoder.h"

namespace lorafleet {

void run_workers(void (*work)(void*), void* state) { Crew::get().run(work, state); }
int max_workers() { return Crew::get().num_threads(); }

namespace {

struct ScratchArea {
  std::unique_ptr<void, decltype(&std::free)> memory{nullptr, &std::free};
  std::size_t num_bytes = 0;
};

}  // namespace

void* scratch(Scratch purpose, std::size_t num_bytes) {
  thread_local ScratchArea areas[static_cast<int>(Scratch::count)];
  ScratchArea& area = areas[static_cast<int>(purpose)];
  if (area.num_bytes < num_bytes) {
    constexpr std::size_t kAlignment = 64;
    std::size_t rounded = (num_bytes + num_bytes / 2 + kAlignment - 1) / kAlignment * kAlignment;
    area.memory.reset();
    area.num_bytes = 0;
    area.memory.reset(std::aligned_alloc(kAlignment, rounded));
    if (area.memory == nullptr) throw std::bad_alloc();
    area.num_bytes = rounded;
  }
  return area.memory.get();
}

}  // namespace lorafleet

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("set_num_threads", [](int count) { lorafleet::Crew::get().set_num_threads(count); });
  m.def("supported_isas", &lorafleet::supported_isas);
  m.def("active_isa", &lorafleet::active_isa);
  m.def("select_isa", &lorafleet::select_isa);
  namespace py = pybind11;
  using namespace lorafleet;
  py::class_<Norm>(m, "Norm").def(py::init<Tensor, double>());
  py::class_<LinearGroup>(m, "LinearGroup")
      .def(py::init<std::vector<Tensor>, std::vector<std::optional<Tensor>>>());
  py::class_<AttentionBatch>(m, "AttentionBatch")
      .def(py::init<Tensor, Tensor, Tensor, Tensor, i64>());
  py::class_<LoRABatch>(m, "LoRABatch").def(py::init<Tensor, Tensor>());
  py::class_<DecoderLayer>(m, "DecoderLayer")
      .def(py::init<Norm, LinearGroup, std::optional<Norm>, std::optional<Norm>, LinearGroup, Norm,
                    LinearGroup, LinearGroup, i64, double, std::optional<i64>>(),
           py::kw_only(), py::arg("input_norm"), py::arg("qkv"), py::arg("query_norm"),
           py::arg("key_norm"), py::arg("o"), py::arg("mlp_norm"), py::arg("gate_up"),
           py::arg("down"), py::arg("head_dim"), py::arg("scale"), py::arg("window"));
  m.def("decoder_layers", &decoder_layers);
  m.def("linear", &lorafleet::linear);
  m.def("linear_multi", &lorafleet::linear_multi);
  m.def("lora_apply", &lorafleet::lora_apply);
  m.def("paged_attention", &lorafleet::paged_attention);
  m.def("store_kv", &lorafleet::store_kv);
  m.def("rms_norm", &lorafleet::rms_norm);
  m.def("add_rms_norm", &lorafleet::add_rms_norm);
  m.def("silu_and_mul", &lorafleet::silu_and_mul);
  m.def("apply_rope", &lorafleet::apply_rope);
}
