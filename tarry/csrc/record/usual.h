// What the results of the commonest calls are like, where a look at the arguments tells.
//
// A call is usual if its tensors have the same dtype and lie as they mostly do, and nothing about it could be wrong. Then no
// kernel needs to be asked, which takes 8 to 20 us (shapes.cpp): too much for a program in which every call has new shapes, such as
// generation with a growing cache.
#pragma once

#include "core/operator.h"

namespace tarry {

// What tells how the results of an operator's calls are laid out, and gives null where a call is not usual; null if there is
// no such thing for the operator.
Usual find_usual(const std::string& name);

} // namespace tarry
