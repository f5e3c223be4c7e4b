// What tarry uses of PyTorch's JIT: graphs as programs, and the conversion of values from and to Python. No other source includes
// the JIT's headers for Python: they take longer to compile than all of tarry's own.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "execute/program.h"

namespace tarry {

using OutputType = std::tuple<std::vector<int64_t>, std::vector<int64_t>, c10::ScalarType>; // sizes, strides, dtype

// A program that has the interpreter run a torch._C.Graph of tensors, then of numbers, that returns a tuple.
std::shared_ptr<Program> script_program(
    const pybind11::object& graph, std::vector<size_t> numbers, std::vector<size_t> returned, std::vector<OutputType> types);

pybind11::object to_python(const c10::IValue& value);
c10::IValue from_python(pybind11::handle object, const c10::TypePtr& type);

} // namespace tarry
