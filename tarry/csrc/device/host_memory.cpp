#include "device/host_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <mutex>
#include <utility>

#include "device/hooks.h"

namespace tarry {
namespace {

struct Counts {
  std::mutex mutex;
  HostMemoryStats stats;
  std::atomic<int64_t> limit{-1};
};

struct History {
  std::mutex mutex;
  std::atomic<size_t> entries{0};
  std::deque<MemoryEvent> events;
  std::map<uint64_t, MemoryEvent> live;
};

std::array<Counts, kMaxDevices>& all_counts() {
  static auto* counts = new std::array<Counts, kMaxDevices>();
  return *counts;
}

History& history() {
  static auto* kept = new History();
  return *kept;
}

thread_local c10::DeviceIndex counted_device = -1;
thread_local uint32_t memory_site = 0;

void note(bool is_alloc, c10::DeviceIndex device, const void* pointer, int64_t bytes) {
  History& kept = history();
  if (kept.entries.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const MemoryEvent event{
      is_alloc,
      device,
      reinterpret_cast<uint64_t>(pointer),
      bytes,
      std::chrono::duration_cast<std::chrono::microseconds>(now).count(),
      is_alloc ? memory_site : 0};
  std::lock_guard<std::mutex> guard(kept.mutex);
  if (!is_alloc && kept.live.erase(event.address) == 0) {
    return; // from before the history: its beginning is not there either
  }
  if (is_alloc) {
    kept.live[event.address] = event;
  }
  kept.events.push_back(event);
  while (kept.events.size() > kept.entries) {
    kept.events.pop_front();
  }
}

void count(c10::DeviceIndex device, const void* pointer) {
  const size_t bytes = malloc_usable_size(const_cast<void*>(pointer));
  {
    Counts& counts = all_counts()[device];
    std::lock_guard<std::mutex> guard(counts.mutex);
    counts.stats.bytes.increase(bytes);
    counts.stats.blocks.increase(1);
  }
  note(/*is_alloc=*/true, device, pointer, static_cast<int64_t>(bytes));
}

c10::Allocator* below = nullptr; // PyTorch's allocator
c10::DeleterFnPtr delete_below = nullptr;

template <int device>
void free_counted(void* pointer) {
  const size_t bytes = malloc_usable_size(pointer);
  {
    Counts& counts = all_counts()[device];
    std::lock_guard<std::mutex> guard(counts.mutex);
    counts.stats.bytes.decrease(bytes);
    counts.stats.blocks.decrease(1);
  }
  note(/*is_alloc=*/false, device, pointer, static_cast<int64_t>(bytes));
  delete_below(pointer);
}

template <int... devices>
constexpr std::array<c10::DeleterFnPtr, sizeof...(devices)> make_deleters(std::integer_sequence<int, devices...>) {
  return {&free_counted<devices>...};
}
constexpr auto kDeleters = make_deleters(std::make_integer_sequence<int, kMaxDevices>());

[[noreturn]] void out_of_memory(c10::DeviceIndex device, size_t nbytes, const char* why) {
  int64_t used = 0;
  {
    Counts& counts = all_counts()[device];
    std::lock_guard<std::mutex> guard(counts.mutex);
    ++counts.stats.out_of_memory;
    used = counts.stats.bytes.current;
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "tarry: out of memory on 'tarry:", +device, "': tried to allocate ", nbytes, " bytes with ", used,
      " bytes in use. ", why, " Free tensors, use smaller batches, or activation checkpointing (torch.utils.checkpoint)");
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::DeviceIndex device = counted_device;
    if (C10_LIKELY(device < 0) || nbytes == 0) {
      return below->allocate(nbytes);
    }
    const int64_t limit = all_counts()[device].limit.load(std::memory_order_relaxed);
    if (C10_UNLIKELY(limit >= 0 && host_memory_stats(device).bytes.current + static_cast<int64_t>(nbytes) > limit)) {
      out_of_memory(device, nbytes, "The limit is the one of torch.tarry.set_per_process_memory_fraction.");
    }
    c10::DataPtr made;
    try {
      made = below->allocate(nbytes);
    } catch (const c10::Error&) {
      out_of_memory(device, nbytes, "The system has no more.");
    }
    if (C10_LIKELY(made.compare_exchange_deleter(delete_below, kDeleters[device]))) {
      count(device, made.get());
    }
    return made;
  }
  c10::DeleterFnPtr raw_deleter() const override { return below->raw_deleter(); }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override { below->copy_data(target, source, nbytes); }
};

// ---- pinned memory

struct Pinned {
  std::mutex mutex;
  std::map<uint64_t, size_t> blocks; // by address
};

Pinned& pinned() {
  static auto* known = new Pinned();
  return *known;
}

void free_pinned(void* pointer) {
  {
    std::lock_guard<std::mutex> guard(pinned().mutex);
    pinned().blocks.erase(reinterpret_cast<uint64_t>(pointer));
  }
  delete_below(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::DataPtr made = below->allocate(nbytes);
    if (made.get() && made.compare_exchange_deleter(delete_below, &free_pinned)) {
      std::lock_guard<std::mutex> guard(pinned().mutex);
      pinned().blocks[reinterpret_cast<uint64_t>(made.get())] = nbytes;
    }
    return made;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, std::size_t nbytes) const override { below->copy_data(target, source, nbytes); }
};

} // namespace

CountedMemory::CountedMemory(c10::DeviceIndex device) : previous_(exchange_counted_device(device)) {}

CountedMemory::~CountedMemory() {
  exchange_counted_device(previous_);
}

c10::DeviceIndex exchange_counted_device(c10::DeviceIndex device) {
  return std::exchange(counted_device, device);
}

void set_memory_site(uint32_t site) {
  memory_site = site;
}

HostMemoryStats host_memory_stats(c10::DeviceIndex device) {
  Counts& counts = all_counts()[device];
  std::lock_guard<std::mutex> guard(counts.mutex);
  return counts.stats;
}

void reset_peak(c10::DeviceIndex device) {
  Counts& counts = all_counts()[device];
  std::lock_guard<std::mutex> guard(counts.mutex);
  counts.stats.bytes.reset_peak();
  counts.stats.blocks.reset_peak();
}

void reset_accumulated(c10::DeviceIndex device) {
  Counts& counts = all_counts()[device];
  std::lock_guard<std::mutex> guard(counts.mutex);
  counts.stats.bytes.reset_accumulated();
  counts.stats.blocks.reset_accumulated();
  counts.stats.out_of_memory = 0;
}

void set_memory_limit(c10::DeviceIndex device, int64_t bytes) {
  all_counts()[checked_device(device)].limit = bytes;
}

void keep_memory_history(size_t entries) {
  History& kept = history();
  std::lock_guard<std::mutex> guard(kept.mutex);
  if (entries == 0 || kept.entries == 0) {
    kept.events.clear();
    kept.live.clear();
  }
  kept.entries = entries;
}

MemoryHistory memory_history() {
  History& kept = history();
  std::lock_guard<std::mutex> guard(kept.mutex);
  return {{kept.events.begin(), kept.events.end()}, kept.live};
}

c10::Allocator* counted_pinned_allocator() {
  static auto* allocator = new PinnedAllocator();
  return allocator;
}

bool is_counted_pinned(const void* pointer) {
  Pinned& known = pinned();
  const auto address = reinterpret_cast<uint64_t>(pointer);
  std::lock_guard<std::mutex> guard(known.mutex);
  const auto after = known.blocks.upper_bound(address);
  return after != known.blocks.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

void install_host_memory() {
  below = c10::GetCPUAllocator();
  delete_below = below->raw_deleter();
  if (delete_below) { // or blocks cannot be told apart
    c10::SetCPUAllocator(new CountingAllocator(), /*priority=*/1);
  }
}

} // namespace tarry
