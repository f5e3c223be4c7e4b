#include "ahead.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <thread>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "batch.h"
#include "hooks.h"

namespace tarry {
namespace {

std::atomic<bool> enabled{true};

// Whether denormal numbers are flushed to zero (torch.set_flush_denormal) belongs to a thread.
unsigned float_mode() {
#ifdef __SSE__
  return _mm_getcsr();
#else
  return 0;
#endif
}

void set_float_mode([[maybe_unused]] unsigned mode) {
#ifdef __SSE__
  _mm_setcsr(mode);
#endif
}

// One thread for all flights, started by the first. Never destroyed: it may wait when the process ends.
class Pilot {
 public:
  static Pilot& get() {
    static auto* pilot = new Pilot();
    return *pilot;
  }

  void take(std::shared_ptr<Flight> flight) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (!started_) {
        std::thread([this] { work(); }).detach();
        started_ = true;
      }
      waiting_.push_back(std::move(flight));
    }
    wake_.notify_one();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return waiting_.empty() && !busy_; });
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return !waiting_.empty(); });
      std::shared_ptr<Flight> flight = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      fly(*flight);
      flight.reset();
      lock.lock();
      busy_ = false;
      if (waiting_.empty()) {
        idle_.notify_all();
      }
    }
  }

  static void fly(Flight& flight) {
    std::vector<at::Tensor> results;
    std::exception_ptr error;
    try {
      if (at::get_num_threads() != flight.threads) {
        at::set_num_threads(flight.threads);
      }
      set_float_mode(flight.float_mode);
      PlainDispatch plain;
      results = flight.program->parts().early->run(std::move(flight.inputs), flight.numbers);
    } catch (...) {
      error = std::current_exception();
    }
    flight.inputs.clear(); // before anybody is told: the buffers must be nobody else's when they are updated
    std::lock_guard<std::mutex> guard(flight.mutex);
    flight.results = std::move(results);
    flight.error = error;
    flight.done = true;
    flight.landed.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<std::shared_ptr<Flight>> waiting_;
  bool started_ = false;
  bool busy_ = false;
};

bool same_number(const c10::IValue& a, const c10::IValue& b) {
  if (a.isDouble() && b.isDouble()) {
    const double x = a.toDouble(), y = b.toDouble();
    return std::memcmp(&x, &y, sizeof(double)) == 0;
  }
  if (a.isComplexDouble() && b.isComplexDouble()) {
    const auto x = a.toComplexDouble(), y = b.toComplexDouble();
    return std::memcmp(&x, &y, sizeof(x)) == 0;
  }
  if (a.isInt() && b.isInt()) {
    return a.toInt() == b.toInt();
  }
  return a.isBool() && b.isBool() && a.toBool() == b.toBool();
}

// The storages that have what the early part of the program has computed for a batch.
std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> early_results(const Batch& batch, const SplitProgram& program) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> found;
  const auto& outputs = program.parts().outputs;
  for (size_t i = 0; i < outputs.size() && i < batch.roots.size(); ++i) {
    if (c10::StorageImpl* storage = batch.roots[i].storage; storage && outputs[i] < 0) {
      // Its last tensor may be going at this moment: it must not be called back to life.
      c10::raw::weak_intrusive_ptr::incref(storage);
      found.push_back(c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(storage));
    }
  }
  return found;
}

// Bytes that they still take up. Storages that are looked at must not die under the lock: they go into `seen`.
size_t bytes_of(const Expectation& expected, std::vector<c10::intrusive_ptr<c10::StorageImpl>>& seen) {
  size_t bytes = 0;
  for (const auto& weak : expected.old) {
    if (auto storage = weak.lock()) {
      bytes += storage->nbytes();
      seen.push_back(std::move(storage));
    }
  }
  return bytes;
}

} // namespace

std::pair<std::vector<uint32_t>, std::vector<uint32_t>> positions_of(const Batch& batch) {
  std::vector<uint32_t> inputs, numbers;
  std::vector<c10::IValue> found;
  for (const NodePtr& node : batch.order) {
    if (is_input(*node)) {
      inputs.insert(inputs.end(), node->is_leaf() ? 1 : node->results->size(), node->position);
    } else {
      append_numbers(*node, found);
      numbers.resize(found.size(), node->position);
    }
  }
  return {std::move(inputs), std::move(numbers)};
}

std::vector<at::Tensor> SplitProgram::run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const {
  std::vector<at::Tensor> taken;
  for (const uint32_t k : parts_.early_takes) {
    taken.push_back(inputs[k]);
  }
  return run_late(inputs, parts_.early->run(std::move(taken), numbers), numbers);
}

std::vector<at::Tensor> SplitProgram::run_late(
    const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> early, const std::vector<c10::IValue>& numbers) const {
  std::vector<at::Tensor> taken;
  for (const int32_t k : parts_.late_takes) {
    taken.push_back(k >= 0 ? inputs[k] : early[-1 - k]);
  }
  std::vector<bool> returned(early.size());
  for (const int32_t k : parts_.outputs) {
    if (k < 0) {
      returned[-1 - k] = true;
    }
  }
  for (size_t k = 0; k < early.size(); ++k) {
    if (!returned[k]) {
      early[k].reset();
    }
  }
  const auto late = parts_.late->run(std::move(taken), numbers);
  std::vector<at::Tensor> outputs;
  for (const int32_t k : parts_.outputs) {
    outputs.push_back(k >= 0 ? late[k] : early[-1 - k]);
  }
  return outputs;
}

void Flight::wait() {
  for (int i = 0; i < 2000; ++i) { // it is often about to land, and sleeping takes longer
    std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
    if (lock && done) {
      return;
    }
  }
  std::unique_lock<std::mutex> lock(mutex);
  landed.wait(lock, [this] { return done; });
}

void expect_again(const Batch& batch, std::shared_ptr<const SplitProgram> program) noexcept try {
  if (!enabled.load(std::memory_order_relaxed) || program->misses.load() >= SplitProgram::kMaxMisses) {
    return;
  }
  DeviceState& state = *batch.state;
  Expectation old;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.position != 0) {
    return; // recorded meanwhile: the next step has begun without us
  }
  Expectation& expected = *state.expected;
  expected.old.swap(old.old);
  expected.old = early_results(batch, *program);
  if (expected.program != program || expected.order != batch.order) {
    std::swap(old.program, expected.program);
    std::swap(old.order, expected.order);
    const auto& parts = program->parts();
    const auto [inputs, numbers] = positions_of(batch);
    uint32_t last = 0;
    for (const uint32_t k : parts.early_takes) {
      last = std::max(last, inputs.at(k));
    }
    for (const uint32_t k : parts.seeds) {
      last = std::max(last, numbers.at(k));
    }
    state.expected_at = last + 1;
    expected.order = batch.order;
    expected.program = std::move(program);
  }
  state.launch_at = state.expected_at;
} catch (...) {
}

void launch(DeviceState& state) {
  auto flight = std::make_shared<Flight>();
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> seen;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.position < state.launch_at || !state.expected->program) {
    return;
  }
  if (bytes_of(*state.expected, seen) > Expectation::kMaxOld) {
    state.launch_at = state.position + Expectation::kLookAgain;
    return;
  }
  const uint32_t until = std::exchange(state.launch_at, kNever);
  const Expectation& expected = *state.expected;
  for (const NodePtr& node : expected.order) {
    if (node->position >= until && node->epoch != state.epoch) {
      break; // not recorded yet; program order
    }
    if (node->epoch != state.epoch || node->error) {
      return; // another graph
    }
  }
  flight->program = expected.program;
  flight->epoch = state.epoch;
  flight->threads = at::get_num_threads();
  flight->float_mode = float_mode();
  std::vector<const Node*> inputs;
  for (const NodePtr& node : expected.order) {
    if (node->is_leaf()) {
      inputs.push_back(node.get());
    } else if (node->results) {
      return;
    } else {
      append_numbers(*node, flight->numbers); // of nodes that are still to come: those of the last step
    }
  }
  for (const uint32_t k : flight->program->parts().early_takes) {
    const at::Tensor& data = inputs.at(k)->data;
    if (inputs[k]->epoch != state.epoch || !data.defined() || !data.device().is_cpu() || data.layout() != c10::kStrided) {
      return;
    }
    flight->sources.push_back(data);
    flight->inputs.push_back(alias(data));
  }
  state.flight = flight;
  Pilot::get().take(std::move(flight));
}

std::optional<std::vector<at::Tensor>> land(Batch& batch, const SplitProgram& program, const std::vector<c10::IValue>& numbers) {
  if (!batch.flight) {
    return std::nullopt;
  }
  const std::shared_ptr<Flight> flight = std::move(batch.flight);
  flight->wait();
  std::vector<const Node*> inputs;
  for (const NodePtr& node : batch.order) {
    if (node->is_leaf()) {
      inputs.push_back(node.get());
    }
  }
  const auto& parts = program.parts();
  bool same = flight->program.get() == &program && !flight->error;
  for (size_t i = 0; same && i < parts.early_takes.size(); ++i) {
    same = parts.early_takes[i] < inputs.size() && inputs[parts.early_takes[i]]->data.is_same(flight->sources[i]);
  }
  for (size_t i = 0; same && i < parts.numbers.size(); ++i) {
    same = same_number(numbers.at(parts.numbers[i]), flight->numbers.at(parts.numbers[i]));
  }
  flight->sources.clear();
  {
    std::lock_guard<std::mutex> guard(batch.state->mutex);
    ++(same ? batch.state->ahead_used : batch.state->ahead_missed);
  }
  if (!same) {
    ++flight->program->misses;
    return std::nullopt;
  }
  program.misses = 0;
  return std::move(flight->results);
}

void set_run_ahead(bool on) {
  enabled = on;
  if (!on) {
    forget_expectations();
  }
}

void forget_expectations() {
  for (c10::DeviceIndex i = 0; i < kMaxDevices; ++i) {
    DeviceState& state = device_state(i);
    Expectation old;
    std::shared_ptr<Flight> flight;
    std::lock_guard<std::mutex> guard(state.mutex);
    std::swap(old, *state.expected);
    std::swap(flight, state.flight);
    state.launch_at = kNever;
  }
}

void land_all() {
  Pilot::get().wait();
}

void wait_for_flights() {
  if (!in_bad_fork()) { // where another thread's locks are held for ever
    set_run_ahead(false);
    land_all();
  }
}

} // namespace tarry
