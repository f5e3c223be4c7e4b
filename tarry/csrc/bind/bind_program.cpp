// Programs that run without Python, as backends make them, and what tarry uses of PyTorch's JIT. No other source includes the JIT's
// headers for Python: they take longer to compile than all of tarry's own.
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <unordered_set>

#include "bind/bind.h"
#include "execute/captured.h"
#include "execute/executor.h"

namespace py = pybind11;

namespace tarry {
namespace {

using OutputType = std::tuple<std::vector<int64_t>, std::vector<int64_t>, c10::ScalarType>; // sizes, strides, dtype

// A TorchScript graph, run by the interpreter as it is.
class ScriptProgram final : public Program {
 public:
  ScriptProgram(
      const std::shared_ptr<torch::jit::Graph>& graph, std::vector<size_t> numbers, std::vector<size_t> returned,
      std::vector<OutputType> types)
      : code_(graph->copy(), "tarry_step"),
        numbers_(std::move(numbers)),
        returned_(std::move(returned)),
        types_(std::move(types)) {}

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const override {
    torch::jit::Stack stack;
    stack.reserve(inputs.size() + numbers_.size());
    for (at::Tensor& input : inputs) {
      stack.emplace_back(std::move(input));
    }
    inputs.clear();
    for (const size_t index : numbers_) {
      stack.push_back(numbers.at(index));
    }
    torch::jit::InterpreterState(code_).run(stack);
    const auto tuple = stack.back().toTuple();
    const auto& results = tuple->elements();
    std::vector<at::Tensor> outputs(types_.size());
    for (size_t i = 0; i < returned_.size(); ++i) {
      at::Tensor& output = outputs[returned_[i]];
      output = results[i].toTensor();
      if (!output.defined()) { // kernels leave out some results that meta kernels promise; nothing can depend on them
        const auto& [sizes, strides, dtype] = types_[returned_[i]];
        output = at::empty_strided(sizes, strides, dtype);
      }
    }
    return outputs;
  }

 private:
  torch::jit::Code code_;
  std::vector<size_t> numbers_;
  std::vector<size_t> returned_;
  std::vector<OutputType> types_; // of the outputs
};

std::shared_ptr<Program> script_program(
    const py::object& graph, std::vector<size_t> numbers, std::vector<size_t> returned, std::vector<OutputType> types) {
  return std::make_shared<ScriptProgram>(
      graph.cast<std::shared_ptr<torch::jit::Graph>>(), std::move(numbers), std::move(returned), std::move(types));
}

// A register among the arguments of an operator: ("register", number).
std::optional<uint32_t> register_in(py::handle argument) {
  if (!py::isinstance<py::tuple>(argument)) {
    return std::nullopt;
  }
  const auto tuple = py::reinterpret_borrow<py::tuple>(argument);
  if (tuple.size() != 2 || !py::isinstance<py::str>(tuple[0]) || tuple[0].cast<std::string>() != "register") {
    return std::nullopt;
  }
  return tuple[1].cast<uint32_t>();
}

void set_argument(LaunchList::Instruction& call, uint32_t index, py::handle argument, const c10::TypePtr& type) {
  if (const auto found = register_in(argument)) {
    call.operands.push_back({index, -1, *found});
    call.arguments.emplace_back();
    return;
  }
  if (!py::isinstance<py::list>(argument)) {
    call.arguments.push_back(from_python(argument, type));
    return;
  }
  // A list of tensors: filled in at each run.
  const auto list = py::reinterpret_borrow<py::list>(argument);
  bool registers = false;
  for (const py::handle item : list) {
    registers = registers || register_in(item);
  }
  if (!registers) {
    call.arguments.push_back(from_python(argument, type));
    return;
  }
  c10::List<at::Tensor> tensors;
  for (size_t k = 0; k < list.size(); ++k) {
    const auto found = register_in(list[k]);
    TORCH_CHECK(found, "tarry: a list with tensors and other things");
    call.operands.push_back({index, static_cast<int32_t>(k), *found});
    tensors.push_back(at::Tensor());
  }
  call.arguments.emplace_back(std::move(tensors));
}

LaunchList::Instruction instruction_from(const py::dict& given) {
  using Kind = LaunchList::Instruction::Kind;
  LaunchList::Instruction made;
  const auto kind = given["kind"].cast<std::string>();
  made.targets = given["targets"].cast<std::vector<uint32_t>>();
  made.sources = given["sources"].cast<std::vector<uint32_t>>();
  made.drops = given["drops"].cast<std::vector<uint32_t>>();
  made.overwrites = given["overwrites"].cast<std::vector<uint32_t>>();
  if (kind == "allocate" || kind == "view") {
    made.kind = kind == "view" ? Kind::View : Kind::Allocate;
    made.sizes = given["sizes"].cast<std::vector<int64_t>>();
    made.strides = given["strides"].cast<std::vector<int64_t>>();
    made.varies = given["varies"].cast<bool>();
    if (kind == "view") {
      made.offset = given["offset"].cast<int64_t>();
    } else {
      made.dtype = given["dtype"].cast<c10::ScalarType>();
    }
  } else if (kind == "kernel") {
    made.kind = Kind::Kernel;
    made.kernel = reinterpret_cast<void*>(given["address"].cast<uintptr_t>()); // NOLINT: from dlsym
    made.name = "tarry::kernel " + (given.contains("name") ? given["name"].cast<std::string>() : "of an older program");
    made.integers = given["integers"].cast<std::vector<uint32_t>>();
    const size_t taken = made.sources.size() + made.integers.size();
    TORCH_CHECK(taken <= LaunchList::kMaxPointers, "tarry: a kernel of ", taken, " pointers");
  } else if (kind == "call") {
    made.kind = Kind::Call;
    static std::deque<c10::OperatorHandle> handles; // instructions point into it
    handles.push_back(
        c10::Dispatcher::singleton().findSchemaOrThrow(
            given["op"].cast<std::string>().c_str(), given["overload"].cast<std::string>().c_str()));
    made.op = &handles.back();
    const auto arguments = given["arguments"].cast<py::list>();
    for (size_t i = 0; i < arguments.size(); ++i) {
      set_argument(made, static_cast<uint32_t>(i), arguments[i], made.op->schema().arguments().at(i).real_type());
    }
    if (given.contains("generator")) {
      made.generator = given["generator"].cast<int32_t>();
      made.seed = made.sources.at(0);
    }
  } else {
    TORCH_CHECK(kind == "move", "tarry: unknown instruction '", kind, "'");
    made.kind = Kind::Move;
  }
  return made;
}

std::shared_ptr<Program> split_program(
    std::shared_ptr<Program> early, std::shared_ptr<Program> late, std::vector<uint32_t> early_takes,
    std::vector<int32_t> late_takes, std::vector<int32_t> outputs, std::vector<uint32_t> numbers, std::vector<uint32_t> seeds) {
  return std::make_shared<SplitProgram>(SplitProgram::Parts{
      std::move(early), std::move(late), std::move(early_takes), std::move(late_takes), std::move(outputs), std::move(numbers),
      std::move(seeds)});
}

using RawCall = std::tuple<
    std::shared_ptr<Program>, std::vector<uint32_t>, std::vector<int32_t>, std::vector<uint32_t>, std::vector<uint32_t>,
    std::vector<int32_t>>;

std::shared_ptr<Program> sequence(size_t registers, const std::vector<RawCall>& calls, std::vector<int32_t> outputs) {
  std::vector<Sequence::Call> made;
  for (const auto& [program, takes, gives, numbers, drops, updates] : calls) {
    made.push_back({program, takes, gives, numbers, drops, updates});
  }
  return std::make_shared<Sequence>(registers, std::move(made), std::move(outputs));
}

void set_graph(
    CapturedProgram& program, uintptr_t launch, uintptr_t graph, py::object owner, std::vector<int64_t> addresses,
    const std::vector<std::optional<at::Tensor>>& placeholders, std::vector<uint32_t> written,
    const std::vector<std::pair<c10::ScalarType, std::vector<uint32_t>>>& vectors, std::vector<at::Tensor> vector_tensors,
    uintptr_t replay, uintptr_t captured, std::vector<at::Generator> generators, std::vector<uint32_t> seeds,
    const std::vector<std::optional<at::Tensor>>& results, const std::vector<at::Tensor>& given) {
  CapturedProgram::Parts parts;
  parts.launch = reinterpret_cast<CapturedProgram::Launch>(launch); // NOLINT: from dlsym
  parts.graph = reinterpret_cast<void*>(graph);                     // NOLINT
  parts.replay = reinterpret_cast<CapturedProgram::Replay>(replay); // NOLINT
  parts.captured = reinterpret_cast<void*>(captured);               // NOLINT
  parts.generators = std::move(generators);
  parts.seeds = std::move(seeds);
  parts.owner = kept_object(std::move(owner));
  parts.addresses = std::move(addresses);
  parts.written = std::move(written);
  for (const auto& [dtype, indices] : vectors) {
    parts.vectors.push_back({dtype, indices});
  }
  parts.vector_tensors = std::move(vector_tensors);
  for (const auto& placeholder : placeholders) {
    parts.placeholders.push_back(placeholder.value_or(at::Tensor()));
  }
  // Python must not look at storages: one that it has seen has a second owner from then on, and is not updated in place.
  std::unordered_set<const c10::StorageImpl*> theirs;
  for (const at::Tensor& tensor : given) {
    theirs.insert(tensor.storage().unsafeGetStorageImpl());
  }
  for (const auto& result : results) {
    TORCH_CHECK(!result || !theirs.count(result->storage().unsafeGetStorageImpl()), "a result lies in the memory of an input");
    parts.results.push_back(result ? tarry::alias(*result) : at::Tensor()); // one that Python has not seen
  }
  program.set(std::move(parts));
}

std::vector<std::optional<at::Tensor>> run_program(
    const Program& program, std::vector<at::Tensor> inputs, const py::list& numbers) {
  std::vector<c10::IValue> given;
  for (const py::handle number : numbers) {
    given.push_back(from_python(number, c10::NumberType::get()));
  }
  std::vector<at::Tensor> results;
  {
    const py::gil_scoped_release released;
    results = program.run(std::move(inputs), given);
  }
  std::vector<std::optional<at::Tensor>> outputs;
  for (at::Tensor& output : results) {
    outputs.push_back(output.defined() ? std::make_optional(tarry::alias(output)) : std::nullopt);
  }
  return outputs;
}

} // namespace

py::object to_python(const c10::IValue& value) {
  return torch::jit::toPyObject(value);
}

c10::IValue from_python(py::handle object, const c10::TypePtr& type) {
  return torch::jit::toIValue(object, type);
}

void bind_program(py::module& m) {
  py::class_<Program, std::shared_ptr<Program>>(m, "Program", "A compiled program that runs without Python.")
      .def("run", &run_program, "Under PlainDispatch. None for what was written into an input's buffer.");
  m.def("script_program", &script_program, "A TorchScript graph of tensors, then of numbers, that returns a tuple.");
  py::class_<CapturedProgram, Program, std::shared_ptr<CapturedProgram>>(
      m, "CapturedProgram", "A CUDA graph: see tarry/backends/inductor/capture.py.")
      .def(py::init<>())
      .def("set_graph", &set_graph)
      .def("clear", &CapturedProgram::clear)
      .def("accepts", &CapturedProgram::accepts);
  m.def(
      "address_of",
      [](const py::object& object) {
        void* address = reinterpret_cast<py::detail::instance*>(object.ptr())->get_value_and_holder().value_ptr(); // NOLINT
        return reinterpret_cast<uintptr_t>(address);                                                               // NOLINT
      },
      "Where the C++ object of an instance of a class that pybind11 has made lies.");
  m.def("split_program", &split_program, "A program in two parts, of which the first may run while the step is still recorded.");
  m.def("sequence", &sequence, "Programs that run one after the other: (program, takes, gives, numbers, drops, updates) each.");
  m.def("set_run_ahead", &set_run_ahead);
  m.def("can_run_ahead", [](const std::string& device) { return can_run_ahead(c10::Device(device)); });
  m.def("may_use_second_thread", [](int threads, int cores, const std::string& device) {
    return may_use_second_thread(threads, cores, c10::Device(device));
  });
  m.def("forget_speculations", &forget_speculations);
  m.def("stop_executors", &stop_executors, py::call_guard<py::gil_scoped_release>());
  m.def(
      "launch_list",
      [](uint32_t registers, const std::vector<std::pair<c10::ScalarType, std::vector<uint32_t>>>& vectors,
         const py::list& instructions, std::vector<at::Tensor> constants, std::vector<uint32_t> results,
         std::vector<uint32_t> returned, size_t outputs, const RawPolynomials& integers,
         size_t numbers) -> std::shared_ptr<Program> {
        std::vector<LaunchList::NumberVector> specs;
        for (const auto& [dtype, indices] : vectors) {
          specs.push_back({dtype, indices});
        }
        std::vector<LaunchList::Instruction> steps;
        for (const py::handle instruction : instructions) {
          steps.push_back(instruction_from(py::reinterpret_borrow<py::dict>(instruction)));
        }
        return std::make_shared<LaunchList>(
            registers, std::move(specs), std::move(steps), std::move(constants), std::move(results), std::move(returned), outputs,
            to_polynomials(integers), numbers);
      },
      "A list of instructions: see tarry/backends/inductor/launch.py.");
}

} // namespace tarry
