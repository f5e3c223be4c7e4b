#include "core/failure.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "core/fault.h"
#include "core/gil.h"

namespace tarry {
namespace {

struct Owed {
  std::mutex mutex;
  std::vector<FailurePtr> failures;
  std::atomic<size_t> count{0}; // so that a thread that is owed nothing takes no lock
};

struct FailedSteps {
  std::mutex mutex;
  std::unordered_map<uint32_t, StepList> by_lane;
};

FailedSteps& all_failed_steps() {
  static auto* steps = new FailedSteps();
  return *steps;
}

Owed& owed() {
  static auto* instance = new Owed();
  return *instance;
}

} // namespace

uint32_t current_lane() {
  static std::atomic<uint32_t> lanes{0};
  static thread_local const uint32_t lane = ++lanes;
  return lane;
}

void owe(FailurePtr failure) {
  Owed& shared = owed();
  std::lock_guard<std::mutex> guard(shared.mutex);
  shared.failures.push_back(std::move(failure));
  shared.count = shared.failures.size();
}

bool is_owed(uint32_t lane) {
  Owed& shared = owed();
  if (shared.count.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  std::lock_guard<std::mutex> guard(shared.mutex);
  return std::any_of(shared.failures.begin(), shared.failures.end(), [lane](const FailurePtr& failure) {
    return failure->lane == lane && !failure->raised;
  });
}

std::vector<FailurePtr> take_all_owed() {
  Owed& shared = owed();
  std::vector<FailurePtr> found;
  std::lock_guard<std::mutex> guard(shared.mutex);
  for (FailurePtr& failure : shared.failures) {
    if (!failure->raised) {
      found.push_back(failure);
    }
  }
  shared.failures.clear();
  shared.count = 0;
  return found;
}

void raise_owed() {
  Owed& shared = owed();
  if (shared.count.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const uint32_t lane = current_lane();
  FailurePtr mine;
  std::vector<FailurePtr> others, gone; // freed after the lock: a Python error takes the GIL
  {
    std::lock_guard<std::mutex> guard(shared.mutex);
    for (FailurePtr& failure : shared.failures) {
      if (failure->raised) {
        gone.push_back(std::move(failure));
      } else if (!mine && failure->lane == lane) {
        mine = std::move(failure);
      } else {
        others.push_back(std::move(failure));
      }
    }
    shared.failures = std::move(others);
    shared.count = shared.failures.size();
  }
  if (mine) {
    mine->raise();
  }
}

void note_failed_step(uint32_t lane, int device, uint64_t epoch) {
  FailedSteps& shared = all_failed_steps();
  std::lock_guard<std::mutex> guard(shared.mutex);
  shared.by_lane[lane].emplace_back(device, epoch);
}

StepList failed_steps(uint32_t lane) {
  FailedSteps& shared = all_failed_steps();
  std::lock_guard<std::mutex> guard(shared.mutex);
  const auto found = shared.by_lane.find(lane);
  return found == shared.by_lane.end() ? StepList() : found->second;
}

// ---- faults on purpose
namespace fault {
std::atomic<int64_t> countdown{-1};
} // namespace fault

namespace {
std::atomic<Fault> armed{Fault::None};
std::atomic<int64_t> passed{0};

[[noreturn]] void interrupt() {
  const Gil gil;
  PyErr_SetNone(PyExc_KeyboardInterrupt);
  throw_python_error();
}

} // namespace

void fault::strike() {
  ++passed;
  if (countdown.fetch_sub(1) != 0) {
    return;
  }
  switch (armed.exchange(Fault::None)) {
    case Fault::Kernel:
      TORCH_CHECK_VALUE(false, "injected: a kernel fails");
    case Fault::Memory:
      TORCH_CHECK(false, "injected: can't allocate memory");
    case Fault::Interrupt:
      interrupt();
    case Fault::None:
      break;
  }
}

void arm_fault(Fault fault, int64_t after) {
  armed = fault;
  passed = 0;
  fault::countdown = after;
}

int64_t disarm_fault() {
  fault::countdown = -1;
  armed = Fault::None;
  return passed;
}

} // namespace tarry
