// Host memory: what a device whose real device is the CPU has allocated, and memory that counts as pinned.
//
// PyTorch counts what it allocates on a GPU, and nothing on the CPU. So tarry puts an allocator before PyTorch's that counts what is
// allocated while a thread computes for one of tarry's devices (CountedMemory); all other tensors of the CPU pass by. A counted
// block knows its device by its deleter, and its size is asked of the C library: there is no table of blocks, unless a history is kept.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tarry {

void install_host_memory(); // once, when the module is loaded

// While it lives, what this thread allocates on the CPU is the device's.
class CountedMemory {
 public:
  explicit CountedMemory(c10::DeviceIndex device);
  ~CountedMemory();
  CountedMemory(const CountedMemory&) = delete;
  CountedMemory& operator=(const CountedMemory&) = delete;

 private:
  const c10::DeviceIndex previous_;
};
c10::DeviceIndex exchange_counted_device(c10::DeviceIndex device); // the same for Python; -1: none

struct HostMemoryStats {
  c10::CachingAllocator::Stat bytes, blocks;
  int64_t out_of_memory = 0; // allocations that failed
};
HostMemoryStats host_memory_stats(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void reset_accumulated(c10::DeviceIndex device);
void set_memory_limit(c10::DeviceIndex device, int64_t bytes); // more is torch.OutOfMemoryError; negative: no limit

// A history of what was allocated and freed, for torch.tarry.memory_snapshot(). `entries`: how many are kept; 0 ends it.
struct MemoryEvent {
  bool is_alloc;
  c10::DeviceIndex device;
  uint64_t address;
  int64_t bytes;
  int64_t microseconds; // since 1970
  uint32_t site;        // of the operator whose result it is, if that is known
};
void keep_memory_history(size_t entries);
struct MemoryHistory {
  std::vector<MemoryEvent> events;
  std::map<uint64_t, MemoryEvent> live; // by address
};
MemoryHistory memory_history();
void set_memory_site(uint32_t site); // of what this thread allocates next

// Where there is no GPU, pinned memory is ordinary memory that is known to have been asked for as pinned.
c10::Allocator* counted_pinned_allocator();
bool is_counted_pinned(const void* pointer);

} // namespace tarry
