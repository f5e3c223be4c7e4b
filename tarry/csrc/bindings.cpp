// The native module, as Python sees it.
#include <ATen/ScalarOps.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_memoryformats.h>
#include <torch/library.h>

#include "ahead.h"
#include "batch.h"
#include "bind_device.h"
#include "bind_program.h"
#include "bind_replay.h"
#include "custom_op.h"
#include "hooks.h"
#include "provenance.h"
#include "record.h"

namespace py = pybind11;

namespace tarry {
namespace {

py::tuple to_tuple(c10::IntArrayRef values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    result[i] = values[i];
  }
  return result;
}

py::object to_python(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

py::object to_python(const Layout* layout) {
  if (!layout) {
    return py::none();
  }
  return py::make_tuple(to_python(layout->dtype), to_tuple(layout->sizes), to_tuple(layout->strides), layout->offset);
}

template <typename T>
py::object to_object(T* borrowed) { // pybind11's own casts of these enumerations differ between versions of torch
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(borrowed));
}

// Enumerations travel as integers; the schema tells which they are.
py::object to_python(const c10::IValue& value, const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type() ? argument.real_type() : argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  if (value.isInt()) {
    switch (type->kind()) {
      case c10::TypeKind::ScalarTypeType:
        return to_python(static_cast<at::ScalarType>(value.toInt()));
      case c10::TypeKind::LayoutType:
        return to_object(torch::getTHPLayout(static_cast<at::Layout>(value.toInt())));
      case c10::TypeKind::MemoryFormatType:
        return to_object(torch::utils::getTHPMemoryFormat(static_cast<at::MemoryFormat>(value.toInt())));
      default:
        break;
    }
  }
  return torch::jit::toPyObject(value);
}

// Writes one batch down as plain Python data: see tarry/ir/build.py.
class RawGraph {
 public:
  explicit RawGraph(const Batch& batch) : batch_(batch), ids_(batch.slots, -1) {}

  py::dict make() {
    py::list inputs, nodes, outputs, replaces;
    int64_t id = 0;
    for (const NodePtr& node : batch_.order) {
      if (is_input(*node)) {
        for (uint32_t i = 0; i < node->outputs(); ++i) {
          ids_[node->first_slot + i] = id++;
          inputs.append(to_python(node->output_layout(i)));
        }
      }
    }
    for (const NodePtr& node : batch_.order) {
      if (!is_input(*node)) {
        for (uint32_t i = 0; i < node->outputs(); ++i) {
          ids_[node->first_slot + i] = id++;
        }
      }
    }
    for (const NodePtr& node : batch_.order) {
      if (!is_input(*node)) {
        nodes.append(describe(*node));
      }
    }
    for (const Root& root : batch_.roots) {
      outputs.append(ids_[root.node->first_slot + root.output]);
    }
    for (const int32_t slot : batch_.replaces) {
      replaces.append(slot < 0 ? -1 : ids_[slot]);
    }
    py::dict graph;
    graph["inputs"] = inputs;
    graph["nodes"] = nodes;
    graph["numbers"] = numbers_;
    graph["outputs"] = outputs;
    graph["replaces"] = replaces;
    return graph;
  }

 private:
  static py::tuple absent() { return py::make_tuple("const", py::none()); }

  py::tuple number(const char* kind, const c10::IValue& value) {
    numbers_.append(torch::jit::toPyObject(value));
    return py::make_tuple(kind, numbers_.size() - 1, torch::jit::toPyObject(value));
  }

  py::tuple tensor(const Node& node, int16_t slot, size_t& edge, size_t& constant) {
    if (slot == kAbsent) {
      return py::make_tuple("none");
    }
    if (slot == kWrappedNumber) {
      const c10::IValue& value = node.constants[constant++];
      const auto dtype = value.isDouble() ? at::kDouble : value.isInt() ? at::kLong : value.isBool() ? at::kBool : at::kComplexDouble;
      const py::tuple base = number("wrapped", value);
      return py::make_tuple(base[0], base[1], base[2], to_python(dtype));
    }
    const Edge& source = node.edges[edge++];
    return py::make_tuple("edge", ids_[source.node->first_slot + source.output], to_python(source.view));
  }

  py::dict describe(const Node& node) {
    py::list arguments, outputs, mutated;
    size_t edge = 0, constant = 0, slot = 0;
    const auto& schema = node.op->handle.schema();
    for (size_t i = 0; i < node.op->arguments.size(); ++i) {
      switch (node.op->arguments[i].kind) {
        case ArgKind::Tensor:
          arguments.append(tensor(node, node.slots[slot++], edge, constant));
          break;
        case ArgKind::TensorList: {
          const int n = node.slots[slot++];
          py::list items;
          for (int k = 0; k < n; ++k) {
            items.append(tensor(node, node.slots[slot++], edge, constant));
          }
          arguments.append(n < 0 ? py::tuple(py::make_tuple("none")) : py::tuple(py::make_tuple("list", items)));
          break;
        }
        case ArgKind::Number: {
          const c10::IValue& value = node.constants[constant++];
          arguments.append(value.isNone() ? absent() : number("number", value));
          break;
        }
        case ArgKind::NumberList: {
          const c10::IValue& value = node.constants[constant++];
          py::list items;
          if (!value.isNone()) {
            for (const c10::IValue& item : value.toListRef()) {
              items.append(number("number", item));
            }
          }
          arguments.append(value.isNone() ? absent() : py::tuple(py::make_tuple("list", items)));
          break;
        }
        case ArgKind::Generator:
          ++constant;
          arguments.append(number("seed", node.constants.back()));
          break;
        case ArgKind::Constant:
          arguments.append(py::make_tuple("const", to_python(node.constants[constant++], schema.arguments()[i])));
          break;
      }
    }
    for (uint32_t i = 0; i < node.outputs(); ++i) {
      outputs.append(to_python(node.output_layout(i)));
    }
    for (const Mutation& mutation : node.mutations) {
      const Edge& source = node.edges[mutation.edge];
      mutated.append(ids_[source.node->first_slot + source.output]);
    }
    py::dict result;
    const auto [file, line] = site_location(node.site);
    result["op"] = node.op->name;
    result["args"] = arguments;
    result["outputs"] = outputs;
    result["fresh"] = node.signature->fresh.size();
    result["mutated"] = mutated;
    result["site"] = node.site;
    result["file"] = file;
    result["line"] = line;
    result["region"] = node.region;
    if (node.op->has(kRandom) && node.op->generator_argument < 0) {
      result["seed"] = number("seed", node.constants.back()); // drawn by an operator that takes no generator
    }
    return result;
  }

  const Batch& batch_;
  std::vector<int64_t> ids_;
  py::list numbers_;
};

py::tuple key_of(const Hash128& hash) {
  return py::make_tuple(hash.hi, hash.lo);
}

// A number where an operator takes a tensor, as the dispatcher sees it: a tensor that does not decide the result's dtype. An
// operator, so that compiled programs can make one from a number that is their input.
at::Tensor wrapped_number(const at::Scalar& value) {
  at::Tensor number = at::detail::scalar_tensor_static(value, value.type(), at::kCPU);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

TORCH_LIBRARY_FRAGMENT(tarry, m) {
  m.def("wrapped_number(Scalar value) -> Tensor", &wrapped_number);
}

} // namespace
} // namespace tarry

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace tarry;
  register_hooks();
  bind_device(m);
  bind_program(m);
  bind_custom_op(m);
  bind_replay(m);

  m.def("register_operator", &register_operator);
  m.def("set_callbacks", [](py::object sync, py::object fallback, py::object read) {
    set_callbacks(sync.ptr(), fallback.ptr(), read.ptr());
  });
  m.def("set_real_device", [](int index, const std::string& device) {
    set_real_device(static_cast<c10::DeviceIndex>(index), c10::Device(device));
  });
  m.def("real_device", [](int index) { return real_device(static_cast<c10::DeviceIndex>(index)).str(); }, py::arg("index") = -1);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("set_max_pending", &set_max_pending);
  m.def("set_forced_eager", &set_forced_eager);
  m.def("set_region", &set_region);
  m.def("add_internal_path", &add_internal_path);
  m.def("current_site", [] { return site_location(current_site()); });
  m.def("counters", [](int device) {
    auto& state = device_state(static_cast<c10::DeviceIndex>(device));
    std::lock_guard<std::mutex> guard(state.mutex);
    py::dict result;
    result["record"] = state.recorded;
    result["node_reuse"] = state.reused;
    if (state.ahead_used || state.ahead_missed) {
      result["run_ahead"] = state.ahead_used;
      result["run_ahead_miss"] = state.ahead_missed;
    }
    return result;
  });
  m.def("reset_counters", [](int device) {
    auto& state = device_state(static_cast<c10::DeviceIndex>(device));
    std::lock_guard<std::mutex> guard(state.mutex);
    state.recorded = state.reused = state.ahead_used = state.ahead_missed = 0;
  });
  m.def("pending", [](int device) {
    auto& state = device_state(static_cast<c10::DeviceIndex>(device));
    std::lock_guard<std::mutex> guard(state.mutex);
    return state.position;
  }, "Nodes recorded since the last cut.");
  m.def("materialise", [](const at::Tensor& tensor) {
    py::gil_scoped_release release;
    return materialise(tensor, "sync").detach(); // see Batch::inputs
  });
  m.def("is_pending", [](const at::Tensor& tensor) {
    TORCH_CHECK(is_tarry(tensor), "tarry: expected a tensor on device 'tarry', but got one on '", tensor.device(), "'");
    TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
    TORCH_CHECK(storage, "tarry: this tensor has no storage on device 'tarry' (it is sparse, say)");
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    return static_cast<bool>(storage->value.node);
  });
  m.def("collect", [](int device) { return collect(device_state(static_cast<c10::DeviceIndex>(device))); });
  m.def("peek", &peek);

  py::class_<PlainDispatch>(m, "PlainDispatch", "While it lives, operators of this thread are kernels and nothing else.")
      .def(py::init<>());
  py::class_<Structure>(m, "Structure").def_property_readonly("key", [](const Structure& s) { return key_of(s.key); });
  py::class_<Batch>(m, "Batch")
      .def_property_readonly("key", [](const Batch& batch) { return key_of(batch.key); })
      .def_property_readonly("num_operations", &Batch::operations)
      .def_property_readonly("num_outputs", [](const Batch& batch) { return batch.roots.size(); })
      .def_property_readonly("device", [](const Batch& batch) { return static_cast<int>(batch.state->index); })
      .def(
          "inputs",
          [](Batch& batch, const std::vector<int64_t>& update) {
            abandon(batch);
            return batch.inputs(update);
          },
          py::arg("update") = std::vector<int64_t>())
      .def("own_inputs", &Batch::own_inputs)
      .def("numbers", [](const Batch& batch) {
        const auto numbers = batch.numbers();
        py::list result(numbers.size());
        for (size_t i = 0; i < numbers.size(); ++i) {
          result[i] = torch::jit::toPyObject(numbers[i]);
        }
        return result;
      })
      .def("raw", [](const Batch& batch) { return RawGraph(batch).make(); })
      .def("positions", &positions_of)
      .def("structure", [](const Batch& batch) { return std::make_unique<Structure>(batch); })
      .def("matches", &Batch::matches)
      .def("run", [](Batch& batch, const std::shared_ptr<Program>& program, const std::vector<int64_t>& update) {
        py::gil_scoped_release release;
        return batch.run(program, update);
      })
      .def("interpret", &Batch::interpret, py::arg("interruptible"), py::call_guard<py::gil_scoped_release>())
      .def("commit", [](Batch& batch, std::vector<std::optional<at::Tensor>> results) {
        std::vector<at::Tensor> outputs;
        for (auto& result : results) {
          outputs.push_back(result ? std::move(*result) : at::Tensor());
        }
        py::gil_scoped_release release;
        batch.commit_results(std::move(outputs));
      });
}
