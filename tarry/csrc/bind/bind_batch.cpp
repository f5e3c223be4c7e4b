// Batches as Python sees them: as objects, and as plain data, from which tarry/ir/build.py makes a graph.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "bind/bind.h"
#include "core/arguments.h"
#include "core/switches.h"
#include "execute/executor.h"
#include "execute/outline.h"
#include "execute/serve.h"
#include "record/provenance.h"

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

template <typename T>
py::object to_object(T* borrowed) { // pybind11's own casts of these enumerations differ between versions of torch
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(borrowed));
}

// An IValue holds an enumeration as an integer; the schema says which it is.
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
  return tarry::to_python(value);
}

// Writes one batch down as plain Python data: see tarry/ir/build.py.
class RawGraph {
 public:
  explicit RawGraph(const Batch& batch) : batch_(batch), ids_(batch.values, -1) {}

  py::dict make() {
    py::list inputs, nodes, outputs, replaces;
    int64_t id = 0;
    for (const NodePtr& node : batch_.order) {
      if (is_input(*node)) {
        for (uint32_t i = 0; i < node->outputs(); ++i) {
          ids_[batch_.index_of(*node) + i] = id++;
          inputs.append(layout(node->output_layout(i)));
        }
      }
    }
    for (const NodePtr& node : batch_.order) {
      if (!is_input(*node)) {
        for (uint32_t i = 0; i < node->outputs(); ++i) {
          ids_[batch_.index_of(*node) + i] = id++;
        }
      }
    }
    for (const NodePtr& node : batch_.order) {
      if (!is_input(*node)) {
        nodes.append(describe(*node));
      }
    }
    for (const Root& root : batch_.roots) {
      outputs.append(id_of(root));
    }
    for (const int32_t index : batch_.replaces) {
      replaces.append(index < 0 ? -1 : ids_[index]);
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
  static py::object layout(const Layout* layout) {
    if (!layout) {
      return py::none();
    }
    return py::make_tuple(to_python(layout->dtype), to_tuple(layout->sizes), to_tuple(layout->strides), layout->offset);
  }

  py::tuple number(const char* kind, const c10::IValue& value) {
    numbers_.append(tarry::to_python(value));
    return py::make_tuple(kind, numbers_.size() - 1, tarry::to_python(value));
  }

  template <typename Source> // a Root or an Edge
  int64_t id_of(const Source& source) const {
    return ids_[batch_.index_of(*source.node) + source.output];
  }

  py::tuple tensor(const Node& node, Operand operand) {
    if (operand.slot == kAbsent) {
      return py::make_tuple("none");
    }
    if (operand.slot == kWrappedNumber) {
      const c10::IValue& value = node.constants[operand.index];
      const py::tuple base = number("wrapped", value);
      return py::make_tuple(base[0], base[1], base[2], to_python(value.toScalar().type()));
    }
    const Edge& source = node.edges[operand.index];
    return py::make_tuple("edge", id_of(source), layout(source.view));
  }

  py::tuple plain(const Node& node, size_t i, const c10::IValue& value) {
    const ArgKind kind = node.op->arguments[i].kind;
    if (kind == ArgKind::Generator) {
      return number("seed", node.constants.back());
    }
    if (kind == ArgKind::Constant || value.isNone()) {
      return py::make_tuple("const", to_python(value, node.op->handle.schema().arguments()[i]));
    }
    if (kind == ArgKind::Number) {
      return number("number", value);
    }
    py::list items;
    for (const c10::IValue& item : value.toListRef()) {
      items.append(number("number", item));
    }
    return py::make_tuple("list", items);
  }

  py::list arguments_of(const Node& node) {
    py::list arguments;
    visit_arguments(
        *node.op, node.slots, [&](size_t, Operand operand) { arguments.append(tensor(node, operand)); },
        [&](size_t, bool given, c10::ArrayRef<Operand> operands) {
          py::list items;
          for (const Operand& operand : operands) {
            items.append(tensor(node, operand));
          }
          arguments.append(given ? py::tuple(py::make_tuple("list", items)) : py::tuple(py::make_tuple("none")));
        },
        [&](size_t i, size_t index) { arguments.append(plain(node, i, node.constants[index])); });
    return arguments;
  }

  // For each result that may be a new tensor: whether there is one.
  static py::tuple returned(const Signature& signature) {
    py::list found;
    for (const Signature::Item& item : signature.items) {
      if (item.kind == Signature::Return::Fresh || item.kind == Signature::Return::Undefined) {
        found.append(item.kind == Signature::Return::Fresh);
      }
    }
    return py::tuple(found);
  }

  py::dict describe(const Node& node) {
    py::list outputs, mutated;
    for (uint32_t i = 0; i < node.outputs(); ++i) {
      outputs.append(layout(node.output_layout(i)));
    }
    for (const Mutation& mutation : node.mutations) {
      const Edge& source = node.edges[mutation.edge];
      mutated.append(id_of(source));
    }
    py::dict result;
    const auto [file, line] = site_location(node.site);
    result["op"] = node.op->name;
    result["args"] = arguments_of(node);
    result["outputs"] = outputs;
    result["fresh"] = node.signature->fresh.size();
    result["returned"] = returned(*node.signature);
    result["mutated"] = mutated;
    result["site"] = node.site;
    result["file"] = file;
    result["line"] = line;
    result["module"] = site_module(node.site);
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

void recover_from(Batch& batch, py::object error, const std::vector<int64_t>& update, bool lost) {
  WriteLog log;
  if (lost) {
    for (const at::Tensor& input : batch.own_inputs()) {
      if (input.defined() && !input.is_meta()) {
        log.add(input);
      }
    }
  }
  try {
    PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
    throw python_error();
  } catch (...) {
    batch.recover(update, log, current_lane());
    PyErr_Clear();
  }
}

void bind_structures(py::module& m) {
  py::class_<Outline>(m, "Outline")
      .def_property_readonly("key", [](const Outline& outline) { return key_of(outline.key); })
      .def_property_readonly("integers", [](const Outline& outline) { return outline.integers; })
      .def_property_readonly("ranks", [](const Outline& outline) { return outline.ranks; })
      .def_property_readonly("comes_again", [](const Outline& outline) { return outline.comes_again; })
      .def("same", &Outline::same, "Whether they differ in integers only.");
  py::class_<SizeTemplate>(m, "SizeTemplate")
      .def(py::init([](std::vector<uint32_t> symbols, const RawPolynomials& polynomials, std::vector<uint32_t> indices) {
        return SizeTemplate{std::move(symbols), to_polynomials(polynomials), std::move(indices)};
      }))
      .def("match", [](const SizeTemplate& self, const Outline& outline) { return self.match(outline.integers); });
  py::class_<Structure, std::shared_ptr<Structure>>(m, "Structure")
      .def_property(
          "key", [](const Structure& s) { return key_of(s.key); },
          [](Structure& s, std::pair<uint64_t, uint64_t> key) { std::tie(s.key.hi, s.key.lo) = key; }, "Tests make keys collide.");
}

py::list numbers_of(const Batch& batch) {
  py::list result;
  for (const c10::IValue& number : batch.numbers()) {
    result.append(tarry::to_python(number));
  }
  return result;
}

void commit(Batch& batch, std::vector<std::optional<at::Tensor>> results) {
  std::vector<at::Tensor> outputs;
  for (auto& result : results) {
    outputs.push_back(result ? std::move(*result) : at::Tensor());
  }
  py::gil_scoped_release release;
  batch.commit_results(std::move(outputs));
}

} // namespace

void bind_batch(py::module& m) {
  bind_structures(m);
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch")
      .def_property_readonly("key", [](const Batch& batch) { return key_of(batch.key); })
      .def_property_readonly("num_operations", &Batch::operations)
      .def_property_readonly("num_inputs", &Batch::leaves)
      .def_property_readonly(
          "is_small", [](const Batch& batch) { return is_small(batch); }, "No program pays for it: see set_small_step.")
      .def("call_site", [](const Batch& batch) { return key_of(batch.call_site()); })
      .def_property_readonly("device", [](const Batch& batch) { return static_cast<int>(batch.state->index); })
      .def_property_readonly(
          "began", [](const Batch& batch) { return perf_counter(batch.began); }, "time.perf_counter() then.")
      .def_property_readonly(
          "asked", [](const Batch& batch) { return perf_counter(batch.asked); }, "The same; 0: not natively.")
      .def_property_readonly("waited", [](const Batch& batch) { return batch.waited; })
      .def_readonly("is_partial", &Batch::is_partial)
      .def_readwrite("by_reference", &Batch::by_reference)
      .def_property_readonly("replayed", [](const Batch& batch) { return batch.replayed; })
      .def("switches_are_set", [](const Batch& batch) { return are_recorded_switches(batch); })
      .def(
          "inputs",
          [](Batch& batch, const std::vector<int64_t>& update, bool preserve) {
            batch.state->executor->speculator.drop();
            return batch.inputs(update, preserve);
          },
          py::arg("update") = std::vector<int64_t>(), py::arg("preserve") = false)
      .def(
          "recover", &recover_from, py::arg("error"), py::arg("update"), py::arg("lost"),
          "A program in Python has failed. `lost`: inputs that it updates where they are may be half-written.")
      .def("own_inputs", &Batch::own_inputs)
      .def("numbers", &numbers_of)
      .def(
          "raw", [](const Batch& batch) { return RawGraph(batch).make(); }, "The graph as plain data.")
      .def("outline", [](const Batch& batch) { return std::make_unique<Outline>(batch); })
      .def("positions", &Batch::positions)
      .def("structure", [](const Batch& batch) { return std::make_shared<Structure>(batch); })
      .def("matches", &Batch::matches)
      .def_property(
          "unawaited", [](const Batch& batch) { return batch.mode == Batch::Mode::MayOverlap; },
          [](Batch& batch, bool unawaited) { batch.mode = unawaited ? Batch::Mode::MayOverlap : Batch::Mode::Awaited; },
          "No thread needs a value of it now.")
      .def(
          "run",
          [](const std::shared_ptr<Batch>& batch, const std::shared_ptr<Program>& program, const std::vector<int64_t>& update,
             const std::vector<int64_t>& symbols, bool preserve, py::object diagnose) {
            std::shared_ptr<void> kept = batch->mode == Batch::Mode::MayOverlap ? kept_object(std::move(diagnose)) : nullptr;
            py::gil_scoped_release release;
            return batch->state->executor->run(batch, program, update, symbols, preserve, std::move(kept));
          },
          py::arg("program"), py::arg("update"), py::arg("symbols"), py::arg("preserve"), py::arg("diagnose"))
      .def("interpret", &Batch::interpret, py::arg("interruptible"), py::call_guard<py::gil_scoped_release>())
      .def("commit", &commit);
  m.def("collect", [](int device) { return collect(state_of(device)); });
  m.def("peek", &peek);
  py::class_<PlainDispatch>(m, "PlainDispatch", "While it lives, operators of this thread are kernels and nothing else.")
      .def(py::init<>());
}

} // namespace tarry
