#include "bind/jit.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/interpreter.h>

namespace py = pybind11;

namespace tarry {
namespace {

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

} // namespace

std::shared_ptr<Program> script_program(
    const py::object& graph, std::vector<size_t> numbers, std::vector<size_t> returned, std::vector<OutputType> types) {
  return std::make_shared<ScriptProgram>(
      graph.cast<std::shared_ptr<torch::jit::Graph>>(), std::move(numbers), std::move(returned), std::move(types));
}

py::object to_python(const c10::IValue& value) {
  return torch::jit::toPyObject(value);
}

c10::IValue from_python(py::handle object, const c10::TypePtr& type) {
  return torch::jit::toIValue(object, type);
}

} // namespace tarry
