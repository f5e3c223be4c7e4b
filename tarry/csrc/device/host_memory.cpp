#include "device/host_memory.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <utility>

#include "core/graph.h"
#include "device/hooks.h"
#include "execute/callbacks.h"
#include "record/memory.h"

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

// ---- allocators

// The allocators that PyTorch expects a device to have. Neither holds memory: a tarry storage owns a tensor of the real
// device, and pinned host memory belongs to the GPU if there is one (else to host_memory.cpp).
namespace {

// The memory is the real device's: the GPU's allocator counts it, or host_memory.h.
struct DeviceMemory final : c10::DeviceAllocator {
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  c10::DataPtr allocate(size_t) override {
    // The recorder makes all storages. A plain one with a pointer would be taken for one of its own later on.
    TORCH_CHECK(
        false,
        "tarry: memory cannot be allocated on the device directly; make a tensor there (torch.empty(..., "
        "device='tarry')) or move one from the CPU (.to('tarry'))");
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "tarry: memory on the device has no address to copy from or to");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override {
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      if (auto* gpu = gpu_of(i)) {
        return gpu->emptyCache(pool); // that of all GPUs
      }
    }
#ifdef __GLIBC__
    malloc_trim(0);
#endif
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {} // nothing is freed before what uses it has run
  Stats getDeviceStats(c10::DeviceIndex given) override {
    const c10::DeviceIndex index = checked_device(given);
    auto* gpu = gpu_of(index);
    Stats stats = gpu ? gpu->getDeviceStats(real_device(index).index()) : on_host(index);
    auto& allocated = stats.allocated_bytes[0];
    allocated.current += promised_bytes(device_state(index));
    allocated.peak = std::max(allocated.peak, allocated.current);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    auto* gpu = gpu_of(checked_device(index));
    gpu ? gpu->resetAccumulatedStats(real_device(index).index()) : reset_accumulated(checked_device(index));
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    auto* gpu = gpu_of(checked_device(index));
    gpu ? gpu->resetPeakStats(real_device(index).index()) : reset_peak(checked_device(index));
  }
  // Not marked as an override: torch 2.11 may lack it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) { return memory_info(checked_device(index)); }

 private:
  // The GPU's allocator, if the real device is a GPU that has been used.
  static c10::DeviceAllocator* gpu_of(c10::DeviceIndex index) {
    const c10::Device real = real_device(index);
    auto* found = real.is_cuda() ? dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(real.type())) : nullptr;
    return found && found->initialized() ? found : nullptr;
  }

  static Stats on_host(c10::DeviceIndex index) {
    const HostMemoryStats host = host_memory_stats(index);
    Stats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = stats.active_bytes[0] = stats.requested_bytes[0] = host.bytes;
    stats.allocation[0] = stats.segment[0] = stats.active[0] = host.blocks;
    stats.num_ooms = host.out_of_memory;
    return stats;
  }
};

struct HostMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override { return pinned_memory_allocator()->allocate(nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return pinned_memory_allocator()->raw_deleter(); }
  void copy_data(void* target, const void* source, size_t nbytes) const override { std::memcpy(target, source, nbytes); }
  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    return gpu() && gpu()->record_event(pointer, context, stream);
  }
  void empty_cache() override {
    if (gpu()) {
      gpu()->empty_cache();
    }
  }
  at::HostStats get_stats() override { return gpu() ? gpu()->get_stats() : at::HostStats(); }
  void reset_accumulated_stats() override {
    if (gpu()) {
      gpu()->reset_accumulated_stats();
    }
  }
  void reset_peak_stats() override {
    if (gpu()) {
      gpu()->reset_peak_stats();
    }
  }

 private:
  static at::HostAllocator* gpu() { return at::hasCUDA() ? at::getHostAllocator(c10::DeviceType::CUDA) : nullptr; }
};

} // namespace

c10::Allocator* pinned_memory_allocator() {
  return at::hasCUDA() ? at::detail::getCUDAHooks().getPinnedMemoryAllocator() : counted_pinned_allocator();
}

void keep_freed_memory(size_t bytes) {
#ifdef __GLIBC__
  // Setting either ends glibc's own adjustment of both. 32 MB is the most that it accepts for the first.
  constexpr size_t largest = 32 * 1024 * 1024;
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(std::min(bytes, largest)));
  mallopt(M_TRIM_THRESHOLD, static_cast<int>(std::min<size_t>(bytes, std::numeric_limits<int>::max())));
#endif
}

void register_allocators() {
  install_host_memory();
  // Leaked, as PyTorch keeps bare pointers to both.
  c10::SetAllocator(c10::DeviceType::PrivateUse1, new DeviceMemory());
  at::setHostAllocator(c10::DeviceType::PrivateUse1, new HostMemory());
}

} // namespace tarry
