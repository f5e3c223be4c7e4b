#include "core/switches.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "device/hooks.h"
#include "execute/batch.h"
#include "execute/serve.h"

namespace tarry {
namespace {

enum Switch : uint64_t { kDeterministic = 1, kWarnOnly = 2, kFillMemory = 4 };
constexpr int kDefaultDtype = 8; // 8 bits from here on: what integers become where an operator computes in floating point
constexpr int kPrecision = 16;   // the bits from here on: the index of a name below, and one
constexpr std::array<const char*, 3> kPrecisions{"highest", "high", "medium"}; // by at::Float32MatmulPrecision
constexpr uint64_t kInitial = kFillMemory | static_cast<uint64_t>(c10::ScalarType::Float) << kDefaultDtype |
    1ULL << kPrecision; // as PyTorch starts

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
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(switches >> kDefaultDtype & 0xff)));
  if (const uint64_t precision = switches >> kPrecision; precision != matmul_precision() >> kPrecision && precision != 0) {
    at::globalContext().setFloat32MatmulPrecision(kPrecisions.at(precision - 1));
  }
}

} // namespace

uint64_t current_switches() {
  const at::Context& context = at::globalContext();
  return (context.deterministicAlgorithms() ? kDeterministic : 0) | (context.deterministicAlgorithmsWarnOnly() ? kWarnOnly : 0) |
      (context.deterministicFillUninitializedMemory() ? kFillMemory : 0) |
      static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) << kDefaultDtype;
}

uint64_t matmul_precision() {
  try {
    return (static_cast<uint64_t>(at::globalContext().float32MatmulPrecision()) + 1) << kPrecision;
  } catch (const c10::Error&) {
    return 0; // it was set for single backends as well
  }
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
  const uint64_t last = known.load(std::memory_order_relaxed);
  if (switches >> kPrecision == 0) {
    switches |= last >> kPrecision << kPrecision;
  }
  if (C10_LIKELY(last == switches)) {
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

bool are_recorded_switches(const Batch& batch) {
  const uint64_t changed = (current_switches() | matmul_precision()) ^ recorded()[batch.state->index];
  const auto is_product = [](const NodePtr& node) { return node->op && node->op->has(kProduct); };
  return C10_LIKELY(changed == 0) ||
      (changed >> kPrecision << kPrecision == changed && std::none_of(batch.order.begin(), batch.order.end(), is_product));
}

RecordedSwitches::RecordedSwitches(const DeviceState& state) : current_(current_switches() | matmul_precision()) {
  const uint64_t wanted = recorded()[state.index];
  if (wanted != current_) {
    set_switches(wanted);
  }
}

RecordedSwitches::~RecordedSwitches() {
  if ((current_switches() | matmul_precision()) != current_) {
    set_switches(current_);
  }
}

} // namespace tarry
