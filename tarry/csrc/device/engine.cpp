// The autograd engine runs a device's part of backward on a thread of that device. It starts its threads at the first
// backward() of the process, one for each device known by then, and never again: a device that comes later has none, and
// its first backward() would fail an internal assertion. So the device makes sure of its thread when it is first used.
// Leans on a protected member of the engine (seen in torch 2.11 to 2.13).
#include <torch/csrc/autograd/engine.h>

#include <thread>

#include "device/hooks.h"

namespace tarry {
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
