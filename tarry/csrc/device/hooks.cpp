#include "device/hooks.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <mutex>

#include "core/generator.h"
#include "device/host_memory.h"
#include "device/streams.h"
#include "execute/callbacks.h"
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
} // namespace tarry
