#include "device/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>

#include "core/graph.h"
#include "device/hooks.h"
#include "execute/callbacks.h"
#include "execute/batch.h"
#include "execute/executor.h"
#include "execute/serve.h"

namespace tarry {
namespace {

thread_local std::array<c10::StreamId, kMaxDevices> current_streams{}; // 0 is the default stream

c10::Stream stream(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}

bool is_computed(DeviceState& state, uint64_t epoch) {
  std::lock_guard<std::mutex> guard(state.mutex);
  const Batch* in_flight = state.executor->batch_in_flight();
  return (state.epoch > epoch || !state.pending) && !(in_flight && in_flight->epoch <= epoch && !state.executor->is_step_done());
}

// Kernels that were launched may be running still.
bool is_idle(c10::Device real) {
  if (real.is_cpu()) {
    return true;
  }
  const c10::impl::VirtualGuardImpl guard(real.type());
  return guard.queryStream(guard.getStream(real));
}

} // namespace

c10::Stream new_stream(c10::Device device) {
  static std::atomic<c10::StreamId> next{1};
  return stream(device, next.fetch_add(1, std::memory_order_relaxed));
}

c10::Stream current_stream(c10::Device device) {
  return stream(device, current_streams[device.index()]);
}

c10::Stream exchange_stream(c10::Stream given) {
  const c10::DeviceIndex index = checked_device(given.device_index());
  return stream(given.device(), std::exchange(current_streams[index], given.id()));
}

Event Event::now(c10::DeviceIndex device, bool timed) {
  const c10::DeviceIndex index = checked_device(device);
  if (timed) {
    synchronize(index);
  }
  DeviceState& state = device_state(index);
  std::lock_guard<std::mutex> guard(state.mutex);
  return {index, state.pending && state.position != 0 ? state.epoch : state.epoch - 1, Clock::now()};
}

double Event::milliseconds(const Event& from, const Event& to) {
  return std::chrono::duration<double, std::milli>(to.time - from.time).count();
}

bool Event::is_complete() const {
  DeviceState& state = device_state(device);
  if (!is_computed(state, epoch)) {
    request_cut(device, "query of an event or a stream");
  }
  return is_computed(state, epoch) && is_idle(real_device(device));
}

} // namespace tarry
