// Faults on purpose: tests make an operator, an allocation or an interrupt fail at any point of a step (tests/faults).
#pragma once

#include <atomic>
#include <cstdint>

namespace tarry {

enum class Fault : int { None, Kernel, Memory, Interrupt };

namespace fault {
extern std::atomic<int64_t> countdown; // points that still pass; negative: no fault is armed
[[gnu::cold]] void strike();           // at an armed point
} // namespace fault

// The point number `after` from now on fails, once.
void arm_fault(Fault fault, int64_t after);
// How many points were passed since a fault was armed. No fault is armed any more.
int64_t disarm_fault();

// A point where something may fail.
inline void fault_point() {
  if (__builtin_expect(fault::countdown.load(std::memory_order_relaxed) >= 0, 0)) {
    fault::strike();
  }
}

} // namespace tarry
