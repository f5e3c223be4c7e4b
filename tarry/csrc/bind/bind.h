// The native module, in parts, and the conversion of values from and to Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "execute/batch.h"
#include "execute/event_log.h"

namespace tarry {

void bind_device(pybind11::module& m);  // for tarry/device
void bind_program(pybind11::module& m); // programs that backends make
void bind_replay(pybind11::module& m);  // what tarry/replay is made of: Trace, Snapshot, Replay, and the guards

void bind_optimizer(pybind11::module& m); // for tarry/device/fast_step.py
void bind_batch(pybind11::module& m); // batches and their structures, as Python sees them

pybind11::object to_python(const c10::IValue& value);
c10::IValue from_python(pybind11::handle object, const c10::TypePtr& type);

// The object; any thread may drop the last reference.
std::shared_ptr<void> kept_object(pybind11::object object);

inline pybind11::tuple key_of(const Hash128& hash) {
  return pybind11::make_tuple(hash.hi, hash.lo);
}

inline double perf_counter(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

inline DeviceState& state_of(int device) {
  return device_state(static_cast<c10::DeviceIndex>(device));
}

} // namespace tarry
