#include "device/hooks.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <torch/csrc/autograd/engine.h>

#include <array>
#include <atomic>
#include <mutex>
#include <thread>

#include "core/generator.h"
#include "core/graph.h"
#include "device/host_memory.h"
#include "device/streams.h"
#include "execute/batch.h"
#include "execute/callbacks.h"
#include "execute/executor.h"
#include "execute/serve.h"
#include "execute/worker.h"

namespace tarry {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

std::atomic<c10::DeviceIndex> number_of_devices{1};
thread_local c10::DeviceIndex this_device = 0;

c10::Device device(c10::DeviceIndex index) {
  return c10::Device(kType, index < 0 ? this_device : index);
}

c10::DeviceIndex index_of(c10::Device device) {
  TORCH_CHECK(device.type() == kType, "tarry: expected a tarry device, got ", device);
  return device.index();
}

// Streams and events: see streams.h.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device d) const override { return device(exchange_device(index_of(d))); }
  c10::Device getDevice() const override { return device(this_device); }
  void setDevice(c10::Device d) const override { set_device(index_of(d)); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) {
      this_device = d.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device d) const override { return current_stream(device(d.index())); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, device(d.index())); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return new_stream(device(d.index())); }
  c10::Stream getNewStream(c10::Device d, int) const override { return new_stream(device(d.index())); }
  c10::Stream exchangeStream(c10::Stream s) const override { return exchange_stream(s); }
  bool queryStream(const c10::Stream& s) const override { return Event::now(s.device_index()).is_complete(); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(checked_device(s.device_index())); }

  // PyTorch reads a null event as one that was never recorded.
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    Event recorded = Event::now(s.device_index(), /*timed=*/flag == c10::EventFlag::BACKEND_DEFAULT);
    if (*event) {
      *static_cast<Event*>(*event) = recorded;
    } else {
      *event = new Event(recorded);
    }
  }
  void block(void*, const c10::Stream&) const override {} // what is recorded later runs later, on every stream
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->is_complete(); }
  void synchronizeEvent(void* event) const override {
    if (event) {
      synchronize(static_cast<Event*>(event)->device);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return Event::milliseconds(*static_cast<Event*>(from), *static_cast<Event*>(to));
  }

  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize(checked_device(index)); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override { check_fork(); }

  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchange_device(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<TarryGenerator>(checked_device(index));
  }

  bool isPinnedPtr(const void* data) const override {
    return at::hasCUDA() ? at::detail::getCUDAHooks().isPinnedPtr(data) : is_counted_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory_allocator(); }
  at::Device getDeviceFromPtr(void*) const override {
    TORCH_CHECK(
        false,
        "tarry: no address belongs to a tarry device (its tensors have no data pointer until they are computed). "
        "Copy the tensor first: tensor.cpu(), or torch.from_blob / from_dlpack on the CPU and .to('tarry')");
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

} // namespace

c10::DeviceIndex device_count() noexcept {
  return number_of_devices.load(std::memory_order_relaxed);
}

void set_device_count(int64_t count) {
  TORCH_CHECK(1 <= count && count <= kMaxDevices, "tarry: the number of devices must be 1 to ", +kMaxDevices, ", got ", count);
  TORCH_CHECK(
      count == device_count() || detail::use.load() == detail::Use::None, "tarry: the number of devices cannot change from ",
      +device_count(), " to ", count, " after the device has been used; set it right after 'import tarry'");
  number_of_devices.store(static_cast<c10::DeviceIndex>(count), std::memory_order_relaxed);
}

c10::DeviceIndex current_device() noexcept {
  return this_device;
}

c10::DeviceIndex checked_device(c10::DeviceIndex index) {
  if (index == -1) {
    return this_device;
  }
  TORCH_CHECK(
      0 <= index && index < device_count(), "tarry: there is no device 'tarry:", +index,
      "'; the devices are 'tarry:0' to 'tarry:", device_count() - 1, "'");
  return index;
}

void set_device(c10::DeviceIndex index) {
  this_device = checked_device(index);
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  const c10::DeviceIndex previous = this_device;
  set_device(index);
  return previous;
}

void register_hooks() {
  static std::once_flag once;
  std::call_once(once, [] {
    TORCH_CHECK(
        !at::isPrivateUse1HooksRegistered(),
        "tarry: another extension has registered a custom device, and PyTorch has room for one in a process; "
        "import tarry without it");
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    register_allocators();
  });
}

namespace detail {

std::atomic<Use> use{Use::None};

void first_use() {
  check_fork();
  static std::once_flag once;
  std::call_once(once, [] {
    const auto before = [] {
      if (!in_bad_fork()) {
        wait_for_all_tasks();
      }
    };
    pthread_atfork(before, nullptr, [] {
      if (use.load(std::memory_order_relaxed) == Use::Used) {
        use.store(Use::BadFork, std::memory_order_relaxed);
      }
    });
  });
  Use expected = Use::None;
  if (use.compare_exchange_strong(expected, Use::Used)) {
    join_autograd_engine();
  }
}

void refuse_fork() {
  TORCH_CHECK(
      false,
      "tarry: this process was forked from one that had already used the device, and cannot use it. "
      "Start it with the 'spawn' method (torch.multiprocessing.set_start_method('spawn'), or "
      "multiprocessing_context='spawn' in a DataLoader), or keep tensors on the CPU in worker processes and "
      "move them to 'tarry' in the main one");
}

} // namespace detail

// ---- streams and events
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

// ---- threads of the autograd engine

// The autograd engine runs a device's part of backward on a thread of that device. It starts its threads at the first
// backward() of the process, one for each device known by then, and never again: a device that comes later has none, and
// its first backward() would fail an internal assertion. So the device makes sure of its thread when it is first used.
// Leans on a protected member of the engine (seen in torch 2.11 to 2.13).
namespace {

struct EngineAccess : torch::autograd::Engine {
  using Queues = std::vector<std::shared_ptr<torch::autograd::ReadyQueue>>;
  static Queues& queues(torch::autograd::Engine& engine) { return engine.*(&EngineAccess::device_ready_queues_); }
};

} // namespace

void join_autograd_engine() {
  auto& engine = torch::autograd::Engine::get_default_engine();
  try {
    engine.initialize_device_threads_pool();
  } catch (const c10::Error&) {
    return; // a forked process in which autograd's threads are gone; its own error will say so if backward() is called
  }
  auto& queues = EngineAccess::queues(engine);
  while (queues.size() < static_cast<size_t>(device_count())) {
    const int index = static_cast<int>(queues.size());
    queues.push_back(std::make_shared<torch::autograd::ReadyQueue>());
    std::thread(&torch::autograd::Engine::thread_init, &engine, index, queues.back(), /*should_increment=*/true).detach();
  }
}

} // namespace tarry
