#include "core/switches.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include <array>
#include <atomic>

#include "device/hooks.h"
#include "record/record.h"

namespace tarry {
namespace {

enum Switch : uint64_t { kDeterministic = 1, kWarnOnly = 2, kFillMemory = 4 };
constexpr int kDefaultDtype = 8; // the bits from here on: what integers become where an operator computes in floating point
constexpr uint64_t kInitial = kFillMemory | static_cast<uint64_t>(c10::ScalarType::Float) << kDefaultDtype; // as PyTorch starts

std::array<std::atomic<uint64_t>, kMaxDevices>& recorded() {
  static auto* switches = [] {
    auto* made = new std::array<std::atomic<uint64_t>, kMaxDevices>();
    for (auto& value : *made) {
      value = kInitial;
    }
    return made;
  }();
  return *switches;
}

void set_switches(uint64_t switches) {
  at::globalContext().setDeterministicAlgorithms(switches & kDeterministic, switches & kWarnOnly);
  at::globalContext().setDeterministicFillUninitializedMemory(switches & kFillMemory);
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(switches >> kDefaultDtype)));
}

} // namespace

uint64_t current_switches() {
  const at::Context& context = at::globalContext();
  return (context.deterministicAlgorithms() ? kDeterministic : 0) | (context.deterministicAlgorithmsWarnOnly() ? kWarnOnly : 0) |
      (context.deterministicFillUninitializedMemory() ? kFillMemory : 0) |
      static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << kDefaultDtype;
}

uint64_t product_precision() {
  const at::Context& context = at::globalContext();
  uint64_t word = 0;
  for (const auto backend : {at::Float32Backend::CUDA, at::Float32Backend::MKLDNN}) {
    for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV}) {
      word = word << 4 | static_cast<uint64_t>(context.float32Precision(backend, op));
    }
  }
  return word;
}

void record_under(DeviceState& state, uint64_t switches) {
  auto& known = recorded()[state.index];
  if (C10_LIKELY(known.load(std::memory_order_relaxed) == switches)) {
    return;
  }
  bool pending = false;
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    pending = state.pending != nullptr;
  }
  if (pending) {
    const RecordedSwitches as_recorded(state);
    request_sync(state.index, "a global switch of PyTorch's changed");
  }
  known = switches;
}

RecordedSwitches::RecordedSwitches(const DeviceState& state) : current_(current_switches()) {
  const uint64_t wanted = recorded()[state.index];
  if (wanted != current_) {
    set_switches(wanted);
  }
}

RecordedSwitches::~RecordedSwitches() {
  if (current_switches() != current_) {
    set_switches(current_);
  }
}

} // namespace tarry
