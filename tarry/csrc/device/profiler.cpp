#include "device/profiler.h"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <mutex>

#include "core/graph.h"
#include "device/hooks.h"
#include "record/provenance.h"

namespace tarry {
namespace {

// Steps run one at a time, so one clock serves all threads. It goes on while `depth` is not zero.
struct Clock {
  std::mutex mutex;
  int depth = 0;
  int64_t total = 0, since = 0; // nanoseconds

  int64_t read() {
    std::lock_guard<std::mutex> guard(mutex);
    return total + (depth ? c10::getTime() - since : 0);
  }
  void start() {
    std::lock_guard<std::mutex> guard(mutex);
    if (depth++ == 0) {
      since = c10::getTime();
    }
  }
  void stop() {
    std::lock_guard<std::mutex> guard(mutex);
    if (--depth == 0) {
      total += c10::getTime() - since;
    }
  }
};

Clock& clock() {
  static auto* instance = new Clock();
  return *instance;
}

// What the profiler calls at the begin and the end of each range. An event is what the clock showed.
struct Stubs final : torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;

  void record(c10::DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    if (device) {
      *device = current_device();
    }
    *event = std::make_shared<int64_t>(clock().read());
    if (cpu_ns) {
      *cpu_ns = c10::getTime();
    }
  }
  float elapsed(const Event* begin, const Event* end) const override { // microseconds
    return static_cast<float>(*static_cast<const int64_t*>(end->get()) - *static_cast<const int64_t*>(begin->get())) / 1000;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override {
    const c10::DeviceIndex before = current_device();
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      set_device(index);
      op(index);
    }
    set_device(before);
  }
  void synchronize() const override {} // events are times of the host, and complete
};

} // namespace

DeviceTime::DeviceTime() {
  clock().start();
}

DeviceTime::~DeviceTime() {
  if (at::hasCallbacks() && at::hasCUDA() && real_device().is_cuda()) {
    at::detail::getCUDAHooks().deviceSynchronize(real_device().index()); // kernels have only been launched yet
  }
  clock().stop();
}

void register_profiler() {
  static Stubs stubs;
  torch::profiler::impl::registerPrivateUse1Methods(&stubs);
}

std::string kernel_row(const std::string& name, uint32_t site) {
  const auto [file, line] = site_location(site);
  return "tarry::kernel " + name + " (" + file.substr(file.rfind('/') + 1) + ":" + std::to_string(line) + ")";
}

} // namespace tarry
