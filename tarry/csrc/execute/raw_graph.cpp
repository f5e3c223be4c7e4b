#include "execute/raw_graph.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "core/arguments.h"
#include "bind/jit.h"
#include "execute/outline.h"
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
  return tarry::to_python(value);
}

// Writes one batch down as plain Python data: see tarry/ir/build.py.
class RawGraph {
 public:
  RawGraph(const Batch& batch, const std::vector<int64_t>* integers) : batch_(batch), integers_(integers), ids_(batch.slots, -1) {}

  py::dict make() {
    py::list inputs, nodes, outputs, replaces;
    int64_t id = 0;
    for (const NodePtr& node : batch_.order) {
      if (is_input(*node)) {
        for (uint32_t i = 0; i < node->outputs(); ++i) {
          ids_[batch_.slot_of(*node) + i] = id++;
          inputs.append(layout(node->output_layout(i)));
        }
      }
    }
    for (const NodePtr& node : batch_.order) {
      if (!is_input(*node)) {
        for (uint32_t i = 0; i < node->outputs(); ++i) {
          ids_[batch_.slot_of(*node) + i] = id++;
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
  // The next of the given integers, in the order of an Outline; or the batch's own.
  int64_t next(int64_t own) { return integers_ ? integers_->at(position_++) : own; }

  py::tuple next(c10::IntArrayRef own) {
    std::vector<int64_t> given;
    for (const int64_t value : own) {
      given.push_back(next(value));
    }
    return to_tuple(given);
  }

  py::object layout(const Layout* layout) {
    if (!layout) {
      return py::none();
    }
    const py::tuple sizes = next(layout->sizes);
    const py::tuple strides = next(layout->strides);
    return py::make_tuple(to_python(layout->dtype), sizes, strides, next(layout->offset));
  }

  // A constant with the integers in it that may be others.
  c10::IValue with_integers(const c10::IValue& value) {
    if (value.isInt()) {
      return next(value.toInt());
    }
    if (value.isIntList()) {
      c10::List<int64_t> given;
      for (const int64_t item : value.toIntVector()) {
        given.push_back(next(item));
      }
      return given;
    }
    if (value.isList() && !value.toListRef().empty()) {
      auto given = value.toList().copy();
      for (size_t i = 0; i < given.size(); ++i) {
        given.set(i, with_integers(given.get(i)));
      }
      return given;
    }
    return value;
  }

  py::object constant(const c10::IValue& value, const c10::Argument& argument) {
    const bool fixed = !integers_ || (value.isInt() && is_enumeration(argument));
    return to_python(fixed ? value : with_integers(value), argument);
  }

  py::tuple plain_number(const Node& node, const c10::IValue& value) {
    const bool varies = integers_ && node.op->has(kShapeFromNumbers);
    return number("number", varies ? with_integers(value) : value);
  }

  py::tuple number(const char* kind, const c10::IValue& value) {
    numbers_.append(tarry::to_python(value));
    return py::make_tuple(kind, numbers_.size() - 1, tarry::to_python(value));
  }

  template <typename Source> // a Root or an Edge
  int64_t id_of(const Source& source) const {
    return ids_[batch_.slot_of(*source.node) + source.output];
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
      return py::make_tuple("const", constant(value, node.op->handle.schema().arguments()[i]));
    }
    if (kind == ArgKind::Number) {
      return plain_number(node, value);
    }
    py::list items;
    for (const c10::IValue& item : value.toListRef()) {
      items.append(plain_number(node, item));
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
    const py::list arguments = arguments_of(node); // first: integers are given in this order
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
    result["args"] = arguments;
    result["outputs"] = outputs;
    result["fresh"] = node.signature->fresh.size();
    result["returned"] = returned(*node.signature);
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
  const std::vector<int64_t>* integers_;
  size_t position_ = 0;
  std::vector<int64_t> ids_;
  py::list numbers_;
};

} // namespace

py::dict raw_graph(const Batch& batch, const std::vector<int64_t>* integers) {
  return RawGraph(batch, integers).make();
}

} // namespace tarry
