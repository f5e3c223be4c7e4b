// The allocators that PyTorch expects a device to have. Neither holds memory: a tarry storage owns a tensor of the real
// device, and pinned host memory belongs to the GPU if there is one (else to host_memory.cpp).
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstring>
#include <limits>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "core/graph.h"
#include "device/hooks.h"
#include "device/host_memory.h"
#include "execute/callbacks.h"
#include "record/memory.h"

namespace tarry {
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
