// Batches as Python sees them: as objects, and as plain data, from which tarry/ir/build.py makes a graph; and who serves them.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <unordered_map>

#include "bind/bind.h"
#include "core/arguments.h"
#include "core/switches.h"
#include "device/hooks.h"
#include "execute/event_log.h"
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

// ---- steps that are served without Python, and their log

c10::IValue number_of(py::handle number) {
  PyObject* const object = number.ptr();
  return PyBool_Check(object) ? c10::IValue(number.cast<bool>())
      : PyLong_Check(object)  ? c10::IValue(number.cast<int64_t>())
      : PyFloat_Check(object) ? c10::IValue(number.cast<double>())
                              : c10::IValue(number.cast<c10::complex<double>>());
}

// Waits without the GIL, and lets signal handlers run meanwhile. False if that took longer than `timeout` seconds, if one is given.
bool acquire(StepLock& lock, double timeout) {
  constexpr std::chrono::milliseconds kPoll{50};
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
  while (!lock.mutex.try_lock()) {
    if (timeout >= 0 && std::chrono::steady_clock::now() >= until) {
      return false;
    }
    {
      py::gil_scoped_release release;
      if (lock.mutex.try_lock_for(kPoll)) {
        return true;
      }
    }
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
  return true;
}

void bind_serving(py::module& m) {
  py::class_<StepLock, std::unique_ptr<StepLock, py::nodelete>>(
      m, "StepLock", "Held by the thread that computes a step, which may take it again.")
      .def("acquire", &acquire, py::arg("timeout") = -1.0)
      .def("release", [](StepLock& lock) { lock.mutex.unlock(); })
      .def("__enter__", [](StepLock& lock) { acquire(lock, -1); })
      .def("__exit__", [](StepLock& lock, py::object, py::object, py::object) { lock.mutex.unlock(); })
      .def_readwrite("in_step", &StepLock::in_step, "The thread that holds it is in the middle of a step.");
  m.def("step_lock", &step_lock, py::return_value_policy::reference);
  m.def(
      "set_watched",
      [](const std::string& watcher, bool watches) {
        static const std::unordered_map<std::string, Watcher> watchers{
            {"subscriber", Watcher::Subscriber},
            {"observer", Watcher::Observer},
            {"closure", Watcher::Closure},
            {"fallback", Watcher::Fallback},
            {"writer", Watcher::Writer}};
        set_watched(watchers.at(watcher), watches);
      },
      "Whether a Watcher has to see each step as it happens: Python then serves all of them.");
  m.def("set_compiling", &set_compiling, "Whether a backend compiles on this thread.");
  m.def("is_compiling", &is_compiling);
  m.def("set_small_step", &set_small_step, py::arg("operations"), py::arg("bytes"));
  m.def(
      "serve",
      [](int device, const std::string& reason, bool awaited) {
        check_fork();
        return serve(state_of(device), reason.c_str(), awaited);
      },
      "Computes what is pending. False, and nothing is done, if the runtime has to see to it.");
  m.def("serve_replay", &serve_replay, "The same for the batch of a replay.");
  m.def(
      "remember_program",
      [](std::shared_ptr<Structure> structure, const py::dict& constants, std::shared_ptr<Program> program,
         std::vector<int64_t> update, py::object diagnose) {
        KnownProgram known{std::move(structure), {}, std::move(program), std::move(update), kept_object(std::move(diagnose))};
        for (const auto& [index, number] : constants) {
          known.constants.emplace_back(index.cast<size_t>(), number_of(number));
        }
        remember_program(std::move(known));
      },
      "Batches of this structure, with these numbers, are computed by this program, without Python. The step lock is held.");
  m.def(
      "remember_reference", [](std::shared_ptr<Structure> structure) { remember_reference(std::move(structure)); },
      "Batches of this structure are computed by the reference path, without Python, until withdraw_references().");
  m.def("withdraw_references", &withdraw_references, "Python is asked again about those. From any thread.");
  m.def("forget_program", &forget_program);
  m.def("forget_programs", &forget_programs);
  m.def("was_served", &was_served, "Whether the program of a structure was run without Python since that was last asked.");
}

py::dict fields_of(const LoggedEvent& event) {
  static const char* const paths[] = {"reference", "native", "replayed", "direct"};
  const PlaceText place = describe_place(event.place);
  py::dict fields;
  fields["file"] = place.file;
  fields["line"] = place.line;
  fields["library"] = place.library;
  fields["module"] = place.module;
  fields["seconds"] = event.seconds;
  fields["device"] = static_cast<int>(event.device);
  if (event.kind == LoggedEvent::Kind::Read) {
    fields["method"] = event.reason;
    return fields;
  }
  fields["reason"] = event.reason;
  fields["operations"] = event.operations;
  fields["path"] = paths[static_cast<int>(event.kind)];
  fields["start"] = perf_counter(event.began);
  fields["record_seconds"] = seconds_between(event.began, event.begin);
  fields["wait_seconds"] = event.wait_seconds;
  fields["execute_seconds"] = event.execute_seconds;
  return fields;
}

void bind_event_log(py::module& m) {
  m.def("set_logging", &set_logging, "Whether events that happen without Python are kept for take_events().");
  m.def(
      "take_events",
      []() -> py::tuple {
        const LoggedEvents taken = take_events();
        py::list found;
        for (const LoggedEvent& event : taken.events) {
          const double time = perf_counter(event.begin) + event.seconds;
          found.append(
              py::make_tuple(event.kind == LoggedEvent::Kind::Read ? "read" : "sync", fields_of(event), time, event.thread));
        }
        return py::make_tuple(found, taken.lost);
      },
      "What was logged since the last time: kind, fields, time and thread of each; and how many more were overwritten.");
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
  bind_serving(m);
  bind_event_log(m);
}

} // namespace tarry
