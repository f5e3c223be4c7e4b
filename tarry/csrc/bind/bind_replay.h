#pragma once

#include <torch/csrc/utils/pybind.h>

namespace tarry {

// What tarry/replay is made of: Trace, Snapshot, Replay, and the guards.
void bind_replay(pybind11::module& m);

} // namespace tarry
