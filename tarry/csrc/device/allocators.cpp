// The allocators that PyTorch expects a device to have. Neither holds memory: a tarry storage owns a tensor of the real
// device, and pinned host memory belongs to the GPU if there is one.
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

#include "device/hooks.h"

namespace tarry {
namespace {

// Not "initialized", which makes torch.accelerator.memory_stats(), empty_cache() and the like do nothing.
struct NoDeviceMemory final : c10::DeviceAllocator {
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
  bool initialized() override { return false; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
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
  return at::hasCUDA() ? at::detail::getCUDAHooks().getPinnedMemoryAllocator() : c10::GetCPUAllocator();
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
  // Leaked, as PyTorch keeps bare pointers to both.
  c10::SetAllocator(c10::DeviceType::PrivateUse1, new NoDeviceMemory());
  at::setHostAllocator(c10::DeviceType::PrivateUse1, new HostMemory());
}

} // namespace tarry
