#include "execute/executor.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "device/hooks.h"
#include "device/host_memory.h"
#include "execute/async_step.h"
#include "execute/serve.h"

namespace tarry {
namespace {

std::atomic<bool> enabled{true};

// Submitting a step costs two changes of thread: a step that takes less than this does not pay.
constexpr std::chrono::microseconds kBrief{200};

// The leaf whose buffer each root's storage is given beforehand: the one that the result replaces, if nothing else can see it.
// The program updates the buffer in place, or its result is copied there when the step is done: for the next step, both are
// the same. Null where there is no such leaf.
std::vector<Node*> leaves_replaced(const AsyncStep& step) {
  const Batch& batch = *step.batch;
  std::vector<Node*> inputs, by_index(batch.values);
  for (const NodePtr& node : batch.order) {
    if (node->is_leaf()) { // may_overlap() has seen to it that there are no other inputs
      inputs.push_back(node.get());
      const bool own = node->data.use_count() == 1 && node->data.storage().use_count() == 2; // itself and the program's input
      by_index[batch.index_of(*node)] = own ? node.get() : nullptr;
    }
  }
  for (const int64_t position : step.update) { // made its own by Batch::inputs()
    by_index[batch.index_of(*inputs.at(position))] = inputs[position];
  }
  std::vector<Node*> found;
  for (size_t i = 0; i < batch.roots.size(); ++i) {
    const Root& root = batch.roots[i];
    Node* leaf = batch.replaces[i] < 0 ? nullptr : by_index[batch.replaces[i]];
    const bool fits = leaf && root.node->output_layout(root.output)->describes(leaf->data.unsafeGetTensorImpl());
    found.push_back(fits ? leaf : nullptr);
  }
  return found;
}

// Values that another step has left are inputs of this batch only: nothing like it will come again.
bool comes_again(const Batch& batch) {
  return !batch.replayed &&
      std::none_of(batch.order.begin(), batch.order.end(), [](const NodePtr& node) { return node->results != nullptr; });
}

} // namespace

// ---- running a batch

bool Executor::may_use_worker() {
  const bool free = can_run_ahead(real_device(state_.index));
  if (!free && enabled.load(std::memory_order_relaxed)) {
    std::lock_guard<std::mutex> guard(state_.mutex);
    ++counts.no_cores;
  }
  return free;
}

bool Executor::may_overlap(const Batch& batch) {
  const c10::Device device = real_device(state_.index);
  return batch.mode == Batch::Mode::MayOverlap && !at::hasCallbacks() && // a profiler wants to see this thread's work
      std::all_of(
             batch.order.begin(), batch.order.end(),
             [device](const NodePtr& node) { return !node->results && (!node->is_leaf() || node->data.device() == device); }) &&
      overlap_.allows();
}

bool Executor::run(
    const std::shared_ptr<Batch>& batch, const std::shared_ptr<const Program>& program, const std::vector<int64_t>& update,
    const std::vector<int64_t>& symbols, bool preserve, std::shared_ptr<void> diagnose) {
  c10::InferenceMode no_inference(
      false);          // what is made in inference mode cannot be written outside it, and results outlive the block
  PlainDispatch plain; // the second: the first switches autograd on
  auto numbers = batch->numbers();
  numbers.insert(numbers.end(), symbols.begin(), symbols.end());
  const auto step = std::make_shared<AsyncStep>(batch, program, update, std::move(numbers), std::move(diagnose));
  WriteLog log;
  try {
    // First: what was launched with other inputs holds on to buffers that are to be updated.
    step->early = speculator.claim(*batch, step->split.get(), step->numbers);
    step->inputs = batch->inputs(update, preserve);
    if (!step->accepts_inputs()) {
      return false;
    }
    const bool worker = may_use_worker();
    const auto expected = worker && comes_again(*batch) ? step->split : nullptr;
    if (worker && !preserve && step->accepts_everything() && may_overlap(*batch) && submit_step(step, expected)) {
      return true;
    }
    if (!step->compute(/*asynchronously=*/false)) {
      return false;
    }
    Speculator::Replaced old;
    std::lock_guard<std::mutex> guard(state_.mutex);
    if (expected && state_.position == 0) { // or the next step has begun already
      speculator.expect(*batch, expected, /*overlaps=*/false, old);
    }
    return true;
  } catch (...) {
    if (step->early) {
      step->early->wait(); // it reads the inputs
    }
    batch->recover(update, log, step->lane);
    throw;
  }
}

// False, and nothing is done, if something was recorded since the batch was collected: it may refer to the batch's nodes.
bool Executor::submit_step(const std::shared_ptr<AsyncStep>& step, const std::shared_ptr<const SplitProgram>& expected) {
  Batch& batch = *step->batch;
  const auto leaves = leaves_replaced(*step);
  Graveyard graveyard;
  Speculator::Replaced old;
  std::lock_guard<std::mutex> guard(state_.mutex);
  if (state_.position != 0) {
    return false;
  }
  batch.mode = Batch::Mode::InFlight;
  batch.in_place.assign(leaves.size(), at::Tensor());
  for (size_t i = 0; i < leaves.size(); ++i) {
    Root& root = batch.roots[i];
    if (!leaves[i]) {
      continue;
    }
    batch.in_place[i] = leaves[i]->data;
    if (root.storage && root.storage->value.node == root.node && root.storage->value.output == root.output) {
      set_data(root.storage, leaves[i]->data, graveyard);
    }
  }
  if (!batch.replayed) {
    // The step's nodes are not free before it is done, so steps take turns with two sets of nodes.
    speculator.expect(batch, expected, /*overlaps=*/true, old);
    state_.history.swap(other_history_);
  }
  ++counts.submitted;
  step->submitted = std::chrono::steady_clock::now();
  step_ = step;
  submit(step);
  return true;
}

void Executor::note_done(const AsyncStep& step, bool was_read) {
  std::lock_guard<std::mutex> guard(state_.mutex);
  counts.overlapped += state_.position != 0;
  if (state_.position != 0 || was_read) {
    overlap_.succeeded();
  } else if (std::chrono::steady_clock::now() - step.submitted < kBrief) {
    overlap_.failed();
  }
}

// ---- the step in flight

// All later nodes have a later epoch.
bool Executor::computes(const Value& value) const {
  return step_ && value.node && value.node->epoch <= step_->batch->epoch;
}

const Batch* Executor::batch_in_flight() const {
  return step_ ? step_->batch.get() : nullptr;
}

bool Executor::is_step_done() const {
  return !step_ || step_->is_done();
}

// `for_value`: a value is needed, which another thread may ask for without holding up the one that records.
std::shared_ptr<AsyncStep> Executor::finish(bool for_value) {
  std::shared_ptr<AsyncStep> step;
  {
    std::lock_guard<std::mutex> guard(state_.mutex);
    step = step_;
  }
  if (!step) {
    return nullptr;
  }
  step->wait();
  Graveyard left; // freed after the lock is released, as is the step
  {
    std::lock_guard<std::mutex> guard(state_.mutex);
    if (step_ != step) {
      return nullptr; // another thread was first
    }
    std::swap(left, step->batch->left);
    step->batch->mode = Batch::Mode::Awaited;
    if (!step->error) {
      if (for_value && step->owner == std::this_thread::get_id() && state_.position == 0) {
        overlap_.failed();
      }
      step_.reset(); // not the last reference
      return nullptr;
    }
  }
  speculator.cancel(); // what was launched reads buffers whose contents are not there
  return step;
}

void Executor::close(const AsyncStep& step) {
  std::shared_ptr<AsyncStep> closed;
  std::lock_guard<std::mutex> guard(state_.mutex);
  if (step_.get() == &step) {
    closed = std::move(step_);
  }
}

at::Tensor Executor::read_early(const TarryStorage* storage) {
  std::shared_ptr<AsyncStep> step;
  size_t index = 0;
  {
    std::lock_guard<std::mutex> guard(state_.mutex);
    if (!computes(storage->value) || !step_->split) {
      return {};
    }
    const auto& roots = step_->batch->roots;
    const auto found = std::find_if(roots.begin(), roots.end(), [storage](const Root& root) { return root.storage == storage; });
    index = static_cast<size_t>(found - roots.begin());
    if (found == roots.end() || found->node != storage->value.node || found->output != storage->value.output ||
        step_->split->parts().outputs.at(index) >= 0) {
      return {};
    }
    step = step_;
  }
  return step->read_early(index);
}

void Executor::wait() {
  while (finish(/*for_value=*/true)) {
    request_sync(state_.index, "a step that failed"); // raises its error, unless another thread is the first to do so
  }
}

// ---- speculation

void Executor::speculate() {
  bool is_busy = false;
  {
    std::lock_guard<std::mutex> guard(state_.mutex);
    is_busy = step_ && !step_->is_done();
  }
  speculator.launch(is_busy);
}

void Executor::forget() {
  speculator.forget();
  overlap_.reset();
}

bool can_run_ahead(c10::Device device) {
  return enabled.load(std::memory_order_relaxed) && may_use_second_thread(at::get_num_threads(), available_cores(), device);
}

void set_run_ahead(bool on) {
  enabled = on;
  if (!on) {
    forget_speculations();
  }
}

void forget_speculations() {
  for (c10::DeviceIndex i = 0; i < kMaxDevices; ++i) {
    device_state(i).executor->forget();
  }
}

void stop_executors() {
  if (!in_bad_fork()) { // where locks of other threads are held for ever
    set_run_ahead(false);
    wait_for_all_tasks();
  }
}

// ---- steps

// Numbers that are published at most: on a device, each is copied on its own.
constexpr int kMaxEarlyValues = 4;

AsyncStep::AsyncStep(
    std::shared_ptr<Batch> batch, std::shared_ptr<const Program> program, std::vector<int64_t> update,
    std::vector<c10::IValue> numbers, std::shared_ptr<void> diagnose)
    : batch(std::move(batch)),
      program(std::move(program)),
      split(std::dynamic_pointer_cast<const SplitProgram>(this->program)),
      update(std::move(update)),
      numbers(std::move(numbers)),
      diagnose(std::move(diagnose)),
      lane(this->batch->replayed ? this->batch->lane : current_lane()) {}

bool AsyncStep::accepts_inputs() const {
  return split ? early || split->early_accepts(inputs) : program->accepts(inputs);
}

bool AsyncStep::accepts_everything() const {
  const bool early_done = early && early->is_done() && !early->error;
  return program->accepts_all() || (early_done && split->late_accepts(inputs, early->results));
}

bool AsyncStep::compute(bool asynchronously) {
  auto first = early ? batch->state->executor->speculator.results_of(*early) : std::nullopt;
  if (!asynchronously) {
    batch->left = {}; // of a run that failed; not before the early part is done, which may read it
  }
  if (!split) {
    batch->commit_results(program->run(std::move(inputs), numbers));
    return true;
  }
  if (!first) {
    first = split->run_early(inputs, numbers);
  }
  if (!split->late_accepts(inputs, *first)) {
    return false;
  }
  if (asynchronously) {
    publish_early(*first);
  }
  auto outputs = split->run_late(inputs, std::move(*first), numbers);
  inputs.clear();
  batch->commit_results(std::move(outputs));
  return true;
}

void AsyncStep::run() noexcept {
  WriteLog log;
  try {
    const c10::OptionalDeviceGuard device(inputs.empty() ? std::nullopt : std::make_optional(inputs[0].device()));
    PlainDispatch plain;
    const CountedMemory counted(batch->state->index);
    TORCH_CHECK(compute(/*asynchronously=*/true), "tarry: the late part of a step does not accept its inputs");
    batch->state->executor->note_done(*this, was_read_);
  } catch (...) {
    error = std::current_exception();
    inputs.clear();
    batch->recover(update, log, lane);
  }
}

void AsyncStep::publish_early(const std::vector<at::Tensor>& early_results) {
  const auto& outputs = split->parts().outputs;
  std::vector<at::Tensor> values(outputs.size());
  std::optional<c10::Device> from;
  int count = 0;
  for (size_t i = 0; i < outputs.size() && count < kMaxEarlyValues; ++i) {
    const at::Tensor* value = outputs[i] < 0 ? &early_results.at(-1 - outputs[i]) : nullptr;
    const Root& root = batch->roots[i];
    if (!value || value->numel() != 1 || !root.node->output_layout(root.output)->describes(value->unsafeGetTensorImpl())) {
      continue;
    }
    const auto options = value->options().device(c10::kCPU).pinned_memory(!value->is_cpu());
    values[i] = at::empty_strided(value->sizes(), value->strides(), options).copy_(*value, /*non_blocking=*/true);
    from = value->device();
    ++count;
  }
  if (from && !from->is_cpu()) {
    arrival_.emplace(from->type());
    arrival_->record(c10::impl::VirtualGuardImpl(from->type()).getStream(*from));
  }
  early_values_ = std::move(values);
  publish();
}

at::Tensor AsyncStep::read_early(size_t root) {
  wait(Progress::EarlyDone);
  if (root >= early_values_.size() || !early_values_[root].defined()) {
    return {};
  }
  if (arrival_) {
    arrival_->synchronize();
  }
  was_read_ = true;
  return early_values_[root];
}

} // namespace tarry
