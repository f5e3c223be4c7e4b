#pragma once

#include <torch/csrc/utils/pybind.h>

namespace tarry {

// Programs that backends make: LaunchList from instructions, ScriptProgram from a TorchScript graph.
void bind_program(pybind11::module& m);

} // namespace tarry
