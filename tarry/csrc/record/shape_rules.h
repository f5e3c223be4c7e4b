// Fast shape rules for the commonest operators: too much for a program in which every call has new shapes, such as generation with
// a growing cache, are both the 8 to 20 us of a call on stand-ins (shapes.cpp) and the 10 to 700 us of PyTorch's meta kernels in
// Python, which stand in front of the C++ ones in the dispatcher.
#pragma once

#include "core/operator.h"

namespace tarry {

// The rule that knows the results of an operator's common calls from a look at the arguments: tensors of one dtype that lie as they
// mostly do, and nothing that could be wrong. It gives null for any other call. Null if the operator has no rule.
ShapeRule find_shape_rule(const std::string& name);

// PyTorch's meta kernel in C++, where the dispatcher has a slow one in Python; null for all other operators.
const c10::KernelFunction* find_meta_kernel(const std::string& name);

} // namespace tarry
