// What custom operators (tarry/custom_ops) need of the dispatcher that Python cannot give at no cost.
#pragma once

#include <pybind11/pybind11.h>

namespace tarry {

void bind_custom_op(pybind11::module& m);

} // namespace tarry
