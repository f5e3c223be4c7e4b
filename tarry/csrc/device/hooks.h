// What PyTorch asks of a device: how many there are, which is current, streams and events, and whether this process may
// use it at all.
#pragma once

#include <c10/core/Device.h>
#include <c10/macros/Macros.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace c10 {
struct Allocator;
struct StorageImpl;
} // namespace c10

namespace tarry {

constexpr c10::DeviceIndex kMaxDevices = 64;

c10::DeviceIndex device_count() noexcept;
// Only before the device is first used: the autograd engine and the device states are sized by then.
void set_device_count(int64_t count);

// The current device belongs to the thread, as everywhere in PyTorch.
c10::DeviceIndex current_device() noexcept;
void set_device(c10::DeviceIndex index);
c10::DeviceIndex exchange_device(c10::DeviceIndex index); // returns the previous one
// The index itself if there is such a device, the current one for -1, else an error.
c10::DeviceIndex checked_device(c10::DeviceIndex index);

// Called once when the module is loaded. An error if another extension has taken PyTorch's slot for custom devices.
void register_hooks();

// PyTorch asks the registered custom device, and no other, about pinned memory. Where the computer has a GPU the real work
// is likely to go there, so pinning does what it did before tarry was imported; elsewhere it is a plain copy.
c10::Allocator* pinned_memory_allocator();
void register_allocators(); // part of register_hooks()
// Lets the process keep this much of the memory that it has freed. A step frees nearly all that it has allocated; if that went
// back to the system, the next one would spend a good part of its time on page faults.
void keep_freed_memory(size_t bytes);

// Makes sure that the autograd engine has a thread for each of our devices (hooks.cpp).
void join_autograd_engine();

// Defined by the recorder: Tensor.resize_ and UntypedStorage.resize_ come here.
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

// A process that was forked from one that had used the device inherits locks, nodes and a backend whose threads (or GPU
// context) are not there. It must not use the device; a child of a process that had not is free to.
namespace detail {
enum class Use : uint8_t { None, Used, BadFork };
extern std::atomic<Use> use;
void first_use(); // None -> Used
[[noreturn]] void refuse_fork();
} // namespace detail

inline bool in_bad_fork() noexcept {
  return detail::use.load(std::memory_order_relaxed) == detail::Use::BadFork;
}

inline void check_fork() {
  if (C10_UNLIKELY(in_bad_fork())) {
    detail::refuse_fork();
  }
}

// To be called wherever the device starts to do something: notes the use and refuses a bad fork, in one load.
inline void mark_used() {
  if (C10_UNLIKELY(detail::use.load(std::memory_order_relaxed) != detail::Use::Used)) {
    detail::first_use();
  }
}

} // namespace tarry
