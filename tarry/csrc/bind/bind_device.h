// The device functions of the native module, for tarry/device/.
#pragma once

#include <pybind11/pybind11.h>

namespace tarry {

void bind_device(pybind11::module& m);

} // namespace tarry
