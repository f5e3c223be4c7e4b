// What the sources of this folder include besides what all others do: see ../precompiled.h.
#include "../precompiled.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
