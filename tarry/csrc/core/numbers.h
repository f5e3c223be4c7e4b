// Equal numbers, and the numbers of a node: inputs of its graph, and no part of its identity. In the order of the raw graph
// (bind/bind_batch.cpp).
#pragma once

#include <vector>

#include "core/graph.h"

namespace tarry {

// Exactly the same: 1 is not 1.0, nor True; -0.0 is not 0.0, and NaN is NaN. Also for lists.
bool same_value(const c10::IValue& a, const c10::IValue& b);
bool same_double(double a, double b);

// A number where an operator takes a tensor, as the dispatcher sees it: a tensor that does not decide the result's dtype.
at::Tensor wrapped_number(const at::Scalar& value);

void append_numbers(const Node& node, std::vector<c10::IValue>& found);
int64_t seed_among_numbers(const Node& node); // which of them it is; -1 if there is none
size_t count_numbers(const Node& node);
void set_number(Node& node, size_t which, double number);

} // namespace tarry
