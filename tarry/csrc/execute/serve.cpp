#include "execute/serve.h"

#include <ATen/record_function.h>
#include <Python.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>

#include "core/switches.h"
#include "device/hooks.h"
#include "device/host_memory.h"
#include "execute/callbacks.h"
#include "execute/event_log.h"
#include "execute/executor.h"
#include "record/direct.h"

namespace tarry {
namespace {

constexpr int64_t kNoBackend = -1;

std::atomic<uint32_t> watchers{0};
std::atomic<int64_t> small_operations{kNoBackend};
std::atomic<int64_t> small_bytes{0};
std::atomic<uint64_t> withdrawals{0};
thread_local bool compiling = false;

// Kernels run without Python's global lock, whether or not the caller holds it.
struct WithoutGil {
  WithoutGil() : saved(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (saved) {
      PyEval_RestoreThread(saved);
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const saved;
};

struct InStep {
  InStep() { step_lock().in_step = true; }
  ~InStep() { step_lock().in_step = false; }
  InStep(const InStep&) = delete;
  InStep& operator=(const InStep&) = delete;
};

// By key; several if keys collide. Guarded by the step lock.
using Programs = ska::flat_hash_map<Hash128, std::vector<KnownProgram>, HashOfHash>;

Programs& programs() {
  static auto* known = new Programs();
  return *known;
}

// As NumberGuard (runtime/variants.py) compares them, but for the kinds of NaN: those are left to it.
bool same_number(const c10::IValue& a, const c10::IValue& b) {
  const auto same_bits = [](const auto& x, const auto& y) { return std::memcmp(&x, &y, sizeof(x)) == 0; };
  return a.isDouble()       ? b.isDouble() && same_bits(a.toDouble(), b.toDouble())
      : a.isComplexDouble() ? b.isComplexDouble() && same_bits(a.toComplexDouble(), b.toComplexDouble())
      : a.isInt()           ? b.isInt() && a.toInt() == b.toInt()
                            : a.isBool() && b.isBool() && a.toBool() == b.toBool();
}

bool is_withdrawn(const KnownProgram& known) {
  return !known.program && known.references != withdrawals.load();
}

const KnownProgram* find_program(const Batch& batch) {
  const auto bucket = programs().find(batch.key);
  if (bucket == programs().end()) {
    return nullptr;
  }
  const auto numbers = batch.numbers();
  const auto found = std::find_if(bucket->second.begin(), bucket->second.end(), [&](const KnownProgram& known) {
    return !is_withdrawn(known) &&
        std::all_of(
            known.constants.begin(), known.constants.end(),
            [&](const auto& each) { return each.first < numbers.size() && same_number(each.second, numbers[each.first]); }) &&
        batch.matches(*known.structure);
  });
  return found == bucket->second.end() ? nullptr : &*found;
}

// What has no backend's program must not fail unnoticed by the runtime: optimizers take back what they have counted.
void interpret(Batch& batch) {
  try {
    const InStep in_step;
    batch.interpret(/*interruptible=*/false);
  } catch (const std::exception& error) {
    report_failure(error.what());
    throw;
  }
}

// False if the program does not accept the inputs.
bool run_program(const KnownProgram& known, const std::shared_ptr<Batch>& batch) {
  known.served = true;
  std::exception_ptr error;
  try {
    const InStep in_step;
    return batch->state->executor->run(batch, known.program, known.update, /*symbols=*/{}, /*preserve=*/false, known.diagnose);
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  diagnose(batch, known.diagnose.get(), std::move(error));
  return true;
}

// A kernel in Python may have the garbage collector run a finaliser that asks for a value: Runtime._serve keeps it off.
bool has_native_kernels(const Batch& batch) {
  return std::all_of(
      batch.order.begin(), batch.order.end(), [](const NodePtr& node) { return is_input(*node) || node->op->has(kListed); });
}

// False if it is not known how to compute the batch.
bool compute(const std::shared_ptr<Batch>& batch, LoggedEvent& event) {
  const CountedMemory counted(batch->state->index);
  const bool small = batch->is_partial ? has_native_kernels(*batch) : is_small(*batch);
  // A program would compute under the switches that are set now, not under those that were set when it was recorded.
  const KnownProgram* known = small || !are_recorded_switches(*batch) ? nullptr : find_program(*batch);
  const bool interpreted = small || (known && !known->program);
  const auto executing = Clock::now();
  if (interpreted) {
    if (known) {
      known->served = true;
    }
    batch->by_reference = true;
    interpret(*batch);
  } else if (!known || !run_program(*known, batch)) {
    return false;
  }
  const auto end = Clock::now();
  event.kind = interpreted ? LoggedEvent::Kind::Reference : LoggedEvent::Kind::Native;
  event.execute_seconds = seconds_between(executing, end);
  event.seconds = seconds_between(event.begin, end);
  std::lock_guard<std::mutex> guard(batch->state->mutex);
  ServedCounts& served = batch->state->executor->served;
  ++(interpreted ? served.interpreted : served.run);
  served.execute_seconds += event.execute_seconds;
  served.sync_seconds += event.seconds;
  return true;
}

// A profiler wants to see ranges.
bool may_serve() {
  return !is_watched() && !compiling && small_operations.load(std::memory_order_relaxed) != kNoBackend && !at::hasCallbacks();
}

// Whether nothing was recorded since the step that is in flight.
bool is_all_in_flight(DeviceState& state) {
  std::lock_guard<std::mutex> guard(state.mutex);
  return state.executor->is_busy() && state.position == 0;
}

} // namespace

StepLock& step_lock() {
  static auto* lock = new StepLock();
  return *lock;
}

void set_watched(Watcher who, bool watches) {
  const auto bit = static_cast<uint32_t>(who);
  watches ? watchers.fetch_or(bit) : watchers.fetch_and(~bit);
}

bool is_watched() {
  return watchers.load(std::memory_order_relaxed) != 0;
}

bool has_watcher(Watcher who) {
  return watchers.load(std::memory_order_relaxed) & static_cast<uint32_t>(who);
}

void set_compiling(bool on) {
  compiling = on;
}

bool is_compiling() {
  return compiling;
}

void set_small_step(int64_t operations, int64_t bytes) {
  small_operations = operations;
  small_bytes = bytes;
}

bool is_small(const Batch& batch) {
  int64_t operations = small_operations.load(std::memory_order_relaxed);
  int64_t bytes = small_bytes.load(std::memory_order_relaxed);
  if (operations <= 0 || batch.replayed) { // who replays a step has asked for its program
    return false;
  }
  for (const NodePtr& node : batch.order) {
    if (is_input(*node)) {
      continue;
    }
    if (--operations < 0) {
      return false;
    }
    for (uint32_t i = 0; i < node->outputs(); ++i) {
      bytes -= static_cast<int64_t>(node->output_layout(i)->nbytes);
    }
  }
  return bytes >= 0 && has_native_kernels(batch);
}

void remember_program(KnownProgram known) {
  auto& bucket = programs()[known.structure->key];
  bucket.erase(
      std::remove_if(
          bucket.begin(), bucket.end(),
          [&](const KnownProgram& each) { return !each.program && each.structure == known.structure; }),
      bucket.end());
  bucket.push_back(std::move(known));
}

void remember_reference(std::shared_ptr<const Structure> structure) {
  const bool has_kernels = std::all_of( // in C++: see is_small()
      structure->calls.begin(), structure->calls.end(), [](const Structure::Call& call) { return !call.op || call.op->has(kListed); });
  if (has_kernels) {
    KnownProgram known;
    known.structure = std::move(structure);
    known.references = withdrawals.load();
    remember_program(std::move(known));
  }
}

void withdraw_references() {
  ++withdrawals;
}

uint64_t withdrawals_of_references() {
  return withdrawals.load();
}

void forget_program(const Structure& structure) {
  const auto bucket = programs().find(structure.key);
  if (bucket != programs().end()) {
    auto& known = bucket->second;
    known.erase(
        std::remove_if(known.begin(), known.end(), [&](const KnownProgram& each) { return each.structure.get() == &structure; }),
        known.end());
  }
}

void forget_programs() {
  withdraw_references();
  programs().clear();
}

bool was_served(const Structure& structure) {
  const auto bucket = programs().find(structure.key);
  return bucket != programs().end() && std::any_of(bucket->second.begin(), bucket->second.end(), [&](const KnownProgram& known) {
           return known.structure.get() == &structure && std::exchange(known.served, false);
         });
}

bool serve(DeviceState& state, const char* reason, bool awaited) {
  if (!may_serve()) {
    return false;
  }
  {
    const WithoutGil without_gil;
    std::unique_lock<std::recursive_timed_mutex> lock(step_lock().mutex, std::try_to_lock);
    if (!lock || step_lock().in_step) {
      return false;
    }
    if (!awaited && is_all_in_flight(state)) {
      return true;
    }
    LoggedEvent event{LoggedEvent::Kind::Native, static_cast<int8_t>(state.index)};
    event.begin = Clock::now();
    if (state.executor->finish()) {
      return false; // it has failed, which is for the runtime to find
    }
    event.wait_seconds = seconds_between(event.begin, Clock::now());
    judge_stretch(state, reason);
    const std::shared_ptr<Batch> batch = collect(state);
    if (batch) {
      batch->mode = awaited ? Batch::Mode::Awaited : Batch::Mode::MayOverlap;
      batch->asked = event.begin;
      batch->waited = event.wait_seconds;
      event.began = batch->began;
      const bool logs = is_logging();
      const uint64_t stretch = batch->stretch;
      const bool is_partial = batch->is_partial;
      event.operations = logs ? static_cast<uint32_t>(batch->operations()) : 0; // its nodes are not ours once it is submitted
      const bool computed = compute(batch, event);
      if (!computed) {
        hand_over(batch, reason);
      }
      if (!is_partial) {
        note_computed(state, stretch, batch->by_reference);
      }
      if (computed && logs) {
        lock.unlock(); // Python may be called
        log_event(event, reason);
      }
    }
  }
  raise_owed();
  return true;
}

bool serve_replay(const std::shared_ptr<Batch>& batch, double waited) {
  if (!may_serve()) {
    return false;
  }
  LoggedEvent event{LoggedEvent::Kind::Native, static_cast<int8_t>(batch->state->index)};
  {
    const WithoutGil without_gil;
    event.began = event.begin = Clock::now();
    event.wait_seconds = waited;
    event.operations = is_logging() ? static_cast<uint32_t>(batch->operations()) : 0; // as in serve()
    batch->mode = Batch::Mode::MayOverlap;
    if (!compute(batch, event)) {
      return false;
    }
  }
  if (is_logging()) {
    event.kind = LoggedEvent::Kind::Replayed;
    log_event(event, "replay");
  }
  return true;
}

void request_sync(c10::DeviceIndex device, const char* reason) {
  check_fork(); // before any lock that the parent may have held
  if (!serve(device_state(device), reason, /*awaited=*/true)) {
    call_sync(device, reason, /*awaited=*/true);
  }
}

void request_cut(c10::DeviceIndex device, const char* reason) {
  check_fork();
  if (!serve(device_state(device), reason, /*awaited=*/false)) {
    call_sync(device, reason, /*awaited=*/false);
  }
}

// ---- the log of what was served
namespace {

constexpr size_t kCapacity = 1 << 13;
constexpr size_t kMany = kCapacity / 2;

struct Log {
  std::mutex mutex;
  std::vector<LoggedEvent> ring;
  uint64_t written = 0;
  uint64_t taken = 0;
};

Log& event_log() {
  static auto* instance = new Log();
  return *instance;
}

std::atomic<bool> logging{false};

} // namespace

void set_logging(bool on) {
  Log& log = event_log();
  std::lock_guard<std::mutex> guard(log.mutex);
  log.ring.resize(on ? kCapacity : 0);
  log.ring.shrink_to_fit();
  log.taken = log.written;
  logging = on;
}

bool is_logging() {
  return logging.load(std::memory_order_relaxed);
}

void log_event(LoggedEvent event, const char* reason) {
  event.place = current_place();
  event.thread = static_cast<uint64_t>(pthread_self());
  bool many = false;
  {
    Log& log = event_log();
    std::lock_guard<std::mutex> guard(log.mutex);
    if (log.ring.empty()) {
      return;
    }
    event.reason = reason;
    log.ring[log.written++ % kCapacity] = std::move(event);
    many = (log.written - log.taken) % kMany == 0;
  }
  if (many) {
    request_flush();
  }
}

LoggedEvents take_events() {
  Log& log = event_log();
  LoggedEvents found;
  std::lock_guard<std::mutex> guard(log.mutex);
  if (log.ring.empty()) {
    return found;
  }
  if (log.written - log.taken > kCapacity) {
    found.lost = log.written - log.taken - kCapacity;
    log.taken += found.lost;
  }
  for (; log.taken < log.written; ++log.taken) {
    found.events.push_back(log.ring[log.taken % kCapacity]);
  }
  return found;
}

ReadTimer::ReadTimer() : is_on_(is_logging() || has_watcher(Watcher::Subscriber)) {
  if (is_on_) {
    begin_ = Clock::now();
  }
}

void ReadTimer::report(const char* method, int8_t device) {
  const double seconds = seconds_between(begin_, Clock::now());
  if (has_watcher(Watcher::Subscriber)) {
    report_read(method, device, current_place(), seconds);
  } else if (is_logging()) {
    LoggedEvent event{LoggedEvent::Kind::Read, device};
    event.began = event.begin = begin_;
    event.seconds = seconds;
    log_event(event, method);
  }
}

} // namespace tarry
