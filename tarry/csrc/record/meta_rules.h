// Shape rules in C++ for the commonest operators.
//
// PyTorch's Python meta kernels stand in front of its C++ ones in the dispatcher, and take some 100 us where those take two:
// too much for a program in which every call has new shapes, such as generation with a growing cache. These are the C++ kernels,
// called by name, and a few rules of our own. A rule that cannot tell, or that fails, is no answer: the dispatcher is asked then.
#pragma once

#include "core/operator.h"

namespace tarry {

// The rule of an operator, to be called with tensors on the meta device; null if there is none. A result that is undefined means
// that the rule cannot tell.
const c10::KernelFunction* find_rule(const std::string& name);

} // namespace tarry
