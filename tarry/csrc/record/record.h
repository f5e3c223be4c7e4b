// Recording one operator call: the hot path.
#pragma once

#include <ATen/core/stack.h>

#include "core/graph.h"
#include "record/provenance.h"

namespace tarry {

void record(const Operator& op, torch::jit::Stack* stack);
// The same as a kernel of any operator.
inline void record_boxed(const c10::OperatorHandle& handle, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  record(*find_operator(handle), stack);
}
// Runs the operator now, on the real device, after computing all that is pending.
void run_eagerly(const Operator& op, torch::jit::Stack* stack, const char* reason);

void set_max_pending(uint32_t nodes);
// While it is not 0, steps are computed in chunks of so many nodes, as they are recorded: the reference path computes them anyway,
// and the device would be idle until a step is complete (Engine in runtime/engine.py).
void set_chunks(c10::DeviceIndex device, uint32_t nodes);
void set_forced_eager(const std::vector<std::string>& names);
// Whether something of this thread's may still fail that was recorded before: a write must then be one that can be taken back.
// Under the lock.
bool may_be_taken_back(const DeviceState& state);
int32_t set_region(int32_t region); // returns the previous one of this thread

} // namespace tarry
