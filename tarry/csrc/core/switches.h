// Global switches of PyTorch's that change what operators compute or refuse. A call counts with those that are set when it is
// recorded: they are part of its hash, and what is pending is computed under them. Where they change, the device's pending work is
// computed first.
#pragma once

#include <cstdint>

#include "core/graph.h"

namespace tarry {

struct Batch; // execute/batch.h

uint64_t current_switches();
// What torch.set_float32_matmul_precision() has set, to be added for operators that are made of products; 0: it does not matter.
uint64_t matmul_precision();
// The precision of float32 products on each real device, for the hash of such operators.
uint64_t product_precision();
// Whether those are set that a batch was recorded under.
bool are_recorded_switches(const Batch& batch);
// To be called before something is recorded on the device; no lock may be held. Computes what is pending under other switches.
void record_under(DeviceState& state, uint64_t switches);

// While it lives, the switches are those that the device's pending work was recorded under.
class RecordedSwitches {
 public:
  explicit RecordedSwitches(const DeviceState& state);
  ~RecordedSwitches();
  RecordedSwitches(const RecordedSwitches&) = delete;
  RecordedSwitches& operator=(const RecordedSwitches&) = delete;

 private:
  uint64_t current_;
};

} // namespace tarry
