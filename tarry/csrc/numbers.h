// The numbers of a node: inputs of its graph, and no part of its identity. In the order of the raw graph (raw_graph.h).
#pragma once

#include <vector>

#include "graph.h"

namespace tarry {

void append_numbers(const Node& node, std::vector<c10::IValue>& found);
size_t count_numbers(const Node& node);
void set_number(Node& node, size_t which, double number);

} // namespace tarry
