// Global switches of PyTorch's that change what operators compute or refuse. A call counts with those that are set when it is
// recorded: they are part of its hash, and what is pending is computed under them. Where they change, the device's pending work is
// computed first.
#pragma once

#include <cstdint>

#include "core/graph.h"

namespace tarry {

uint64_t current_switches();
// The precision of float32 products, for operators that are made of them.
uint64_t product_precision();
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
