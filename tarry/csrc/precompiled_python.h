// As precompiled.h, for the sources that include pybind11: one that does is slower to compile, whether it uses it or not.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "core/graph.h"
