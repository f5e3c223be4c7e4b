// A batch as plain Python data, from which tarry/ir/build.py makes a graph.
#pragma once

#include <pybind11/pybind11.h>

#include "execute/batch.h"

namespace tarry {

// With `integers`, the graph that it would be with those in place of its own (see Outline).
pybind11::dict raw_graph(const Batch& batch, const std::vector<int64_t>* integers);

} // namespace tarry
