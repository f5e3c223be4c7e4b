#include "ahead.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "batch.h"
#include "hooks.h"
#include "numbers.h"
#include "voyage.h"

namespace tarry {
namespace {

std::atomic<bool> enabled{true};

// Another tensor over the same memory. On a CPU, one that does not count among the users of the buffer: whoever asks whether he
// may write to it should not have to wait until the program that reads it is done. The flight's sources keep the memory.
at::Tensor lend(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    return alias(tensor);
  }
  c10::Storage memory(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
      at::DataPtr(const_cast<void*>(tensor.storage().data()), tensor.device())); // NOLINT: nobody writes through it
  auto lent = at::detail::make_tensor<c10::TensorImpl>(std::move(memory), tensor.key_set(), tensor.dtype());
  lent.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return lent;
}

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
std::vector<WeakStorageImpl> early_results(const Batch& batch, const SplitProgram& program) {
  std::vector<WeakStorageImpl> found;
  const auto& outputs = program.parts().outputs;
  for (size_t i = 0; i < outputs.size() && i < batch.roots.size(); ++i) {
    if (c10::StorageImpl* storage = batch.roots[i].storage; storage && outputs[i] < 0) {
      // Its last tensor may be going at this moment: it must not be called back to life.
      c10::raw::weak_intrusive_ptr::incref(storage);
      found.push_back(WeakStorageImpl::reclaim(storage));
    }
  }
  return found;
}

// Bytes that they still take up. Storages that are looked at must not die under the lock: they go into `seen`.
size_t bytes_of(const std::vector<WeakStorageImpl>& results, std::vector<c10::intrusive_ptr<c10::StorageImpl>>& seen) {
  size_t bytes = 0;
  for (const auto& weak : results) {
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

namespace {

std::vector<at::Tensor> pick(const std::vector<at::Tensor>& inputs, const std::vector<uint32_t>& positions) {
  std::vector<at::Tensor> picked;
  picked.reserve(positions.size());
  for (const uint32_t k : positions) {
    picked.push_back(inputs[k]);
  }
  return picked;
}

} // namespace

std::vector<at::Tensor> SplitProgram::run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const {
  return run_late(inputs, run_early(inputs, numbers), numbers);
}

bool SplitProgram::early_accepts(const std::vector<at::Tensor>& inputs) const {
  return parts_.early->accepts(pick(inputs, parts_.early_takes));
}

std::vector<at::Tensor> SplitProgram::run_early(const std::vector<at::Tensor>& inputs, const std::vector<c10::IValue>& numbers) const {
  return parts_.early->run(pick(inputs, parts_.early_takes), numbers);
}

std::vector<at::Tensor> SplitProgram::late_inputs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& early) const {
  std::vector<at::Tensor> taken;
  taken.reserve(parts_.late_takes.size());
  for (const int32_t k : parts_.late_takes) {
    taken.push_back(k >= 0 ? inputs[k] : early[-1 - k]);
  }
  return taken;
}

bool SplitProgram::late_accepts(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& early) const {
  return parts_.late->accepts(late_inputs(inputs, early));
}

std::vector<at::Tensor> SplitProgram::run_late(
    const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> early, const std::vector<c10::IValue>& numbers) const {
  auto taken = late_inputs(inputs, early);
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

void Flight::fly() noexcept {
  try {
    const MayBreakOff may_break_off(cancelled);
    const c10::OptionalDeviceGuard device(inputs.empty() ? std::nullopt : std::make_optional(inputs[0].device()));
    PlainDispatch plain;
    results = program->parts().early->run(std::move(inputs), numbers);
  } catch (...) {
    error = std::current_exception();
  }
  inputs.clear();
}

namespace {

// A step's first operators must be the expected ones before anything is launched on the strength of foresight.
constexpr uint32_t kEnoughSeen = 4;

// What the early part takes, and when it can be known. Under the lock.
void look_at_inputs(const Batch& batch, Expectation& expected) {
  const auto& parts = expected.program->parts();
  const auto [inputs, numbers] = positions_of(batch);
  std::vector<NodePtr> leaves;
  for (const NodePtr& node : batch.order) {
    if (is_input(*node)) {
      leaves.insert(leaves.end(), node->is_leaf() ? 1 : node->results->size(), node);
    }
  }
  uint32_t last = 0;
  for (const uint32_t k : parts.early_takes) {
    last = std::max(last, inputs.at(k));
    expected.inputs.push_back(leaves.at(k));
  }
  for (const uint32_t k : parts.seeds) {
    last = std::max(last, numbers.at(k));
    expected.foresees = false; // a seed is drawn when its operator is recorded
  }
  expected.complete_at = last + 1;
}

// The real tensor that an input of the early part will be, if that can be told; undefined if not. Under the lock.
at::Tensor foreseen(const DeviceState& state, const Node& leaf, int32_t upload, std::vector<c10::intrusive_ptr<c10::StorageImpl>>& held) {
  const WeakStorageImpl* place = leaf.steady ? &leaf.source : nullptr;
  if (!place && upload >= 0 && static_cast<size_t>(upload) < state.uploads.size()) {
    place = &state.uploads[upload];
  }
  if (!place) {
    return {};
  }
  held.push_back(place->lock());
  const auto* storage = static_cast<const TarryStorage*>(held.back().get());
  const bool known = storage && storage->state == &state && !storage->value.node && storage->home == leaf.leaf_layout;
  return known ? storage->data : at::Tensor();
}

} // namespace

void renew_expectation(const Batch& batch, const std::shared_ptr<const SplitProgram>& program, Replaced& old) noexcept try {
  DeviceState& state = *batch.state;
  Expectation& expected = *state.expected;
  if (!runs_ahead() || program->misses.load() >= SplitProgram::kMaxMisses) {
    expected.launch_at = kNever;
    return;
  }
  old.results = std::exchange(state.early_results, early_results(batch, *program));
  if (expected.program != program || expected.order != batch.order) {
    std::swap(old.expected, expected);
    expected.order = batch.order;
    expected.program = program;
    expected.foresees = old.expected.program != program || old.expected.foresees;
    look_at_inputs(batch, expected);
  }
  expected.uploads.clear();
  bool known = expected.foresees;
  for (const NodePtr& leaf : expected.inputs) {
    const auto found = std::find_if(batch.uploads.begin(), batch.uploads.end(), [&](const WeakStorageImpl& upload) {
      return upload._unsafe_get_target() == leaf->source._unsafe_get_target();
    });
    expected.uploads.push_back(found == batch.uploads.end() ? -1 : static_cast<int32_t>(found - batch.uploads.begin()));
    known = known && (leaf->steady || expected.uploads.back() >= 0);
  }
  expected.launch_at = known ? std::min(kEnoughSeen, expected.complete_at) : expected.complete_at;
} catch (...) {
  batch.state->expected->launch_at = kNever;
}

void expect_again(const Batch& batch, std::shared_ptr<const SplitProgram> program) noexcept {
  DeviceState& state = *batch.state;
  Replaced old;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.position != 0) {
    return; // recorded meanwhile: the next step has begun without us
  }
  renew_expectation(batch, program, old);
  state.launch_at = state.expected->program == program ? state.expected->launch_at : kNever;
}

namespace {

// Whether the early part of what is expected has room for new results. Looks again later if not.
bool has_room(DeviceState& state) {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> seen;
  std::shared_ptr<const SplitProgram> program;
  size_t in_use = 0;
  bool busy = false;
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    program = state.position < state.launch_at ? nullptr : state.expected->program;
    in_use = program ? bytes_of(state.early_results, seen) : 0;
    // Results may have to be moved, which are inputs of the part that is being launched.
    busy = state.voyage && !state.voyage->is_done() && !real_device(state.index).is_cpu();
  }
  seen.clear(); // or they would be in use
  if (!program) {
    return false;
  }
  if (!busy) {
    c10::InferenceMode no_inference(false);
    PlainDispatch plain;
    if (program->parts().early->makes_room(in_use)) {
      return true;
    }
  }
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.expected->program == program && state.launch_at <= state.position) {
    state.launch_at = state.position + Expectation::kLookAgain;
  }
  return false;
}

} // namespace

void launch(DeviceState& state) {
  if (!has_room(state)) {
    return;
  }
  auto flight = std::make_shared<Flight>();
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> held; // until the lock is released: one may be the last to go
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.position < state.launch_at || !state.expected->program) {
    return;
  }
  if (state.expected->program->misses.load() >= SplitProgram::kMaxMisses) {
    state.launch_at = kNever;
    return;
  }
  const uint32_t until = std::exchange(state.launch_at, kNever);
  const Expectation& expected = *state.expected;
  for (const NodePtr& node : expected.order) {
    if (node->position >= until && node->epoch != state.epoch) {
      break; // not recorded yet; program order
    }
    if (node->epoch != state.epoch) {
      return; // another graph
    }
  }
  flight->program = expected.program;
  flight->epoch = state.epoch;
  for (const NodePtr& node : expected.order) {
    if (node->is_leaf()) {
      continue;
    }
    if (node->results) {
      return;
    }
    append_numbers(*node, flight->numbers); // of nodes that are still to come: those of the last step
  }
  for (size_t i = 0; i < expected.inputs.size(); ++i) {
    const Node& leaf = *expected.inputs[i];
    at::Tensor data = leaf.epoch == state.epoch ? leaf.data : at::Tensor();
    if (!data.defined()) {
      flight->foreseen = true;
      data = until < expected.complete_at ? foreseen(state, leaf, expected.uploads[i], held) : at::Tensor();
    }
    if (!data.defined() && until < expected.complete_at) {
      state.launch_at = expected.complete_at; // wait until it is recorded
      return;
    }
    if (!data.defined() || data.layout() != c10::kStrided || data.is_meta()) {
      return;
    }
    flight->inputs.push_back(lend(data));
    flight->sources.push_back(std::move(data));
  }
  const Program& early = *flight->program->parts().early;
  if (!early.accepts(flight->inputs)) {
    return;
  }
  state.flight = flight;
  hand_over(std::move(flight));
}

std::shared_ptr<Flight> claim_flight(Batch& batch, const SplitProgram& program, const std::vector<c10::IValue>& numbers) {
  std::shared_ptr<Flight> flight = std::move(batch.flight);
  if (!flight) {
    return nullptr;
  }
  std::vector<const Node*> inputs;
  for (const NodePtr& node : batch.order) {
    if (node->is_leaf()) {
      inputs.push_back(node.get());
    }
  }
  const auto& parts = program.parts();
  bool same = flight->program.get() == &program;
  for (size_t i = 0; same && i < parts.early_takes.size(); ++i) {
    same = parts.early_takes[i] < inputs.size() && inputs[parts.early_takes[i]]->data.is_same(flight->sources[i]);
  }
  for (size_t i = 0; same && i < parts.numbers.size(); ++i) {
    same = same_number(numbers.at(parts.numbers[i]), flight->numbers.at(parts.numbers[i]));
  }
  flight->cancelled = !same;
  if (!same || !real_device(batch.state->index).is_cpu()) {
    flight->wait();
  }
  flight->sources.clear(); // the batch has the same, if it is still in the air
  if (same) {
    return flight;
  }
  ++batch.state->ahead_missed;
  ++flight->program->misses;
  if (flight->foreseen && flight->program.get() == &program) {
    std::lock_guard<std::mutex> guard(batch.state->mutex);
    batch.state->expected->foresees = false;
  }
  return nullptr;
}

std::optional<std::vector<at::Tensor>> land(DeviceState& state, Flight& flight) {
  flight.wait();
  const bool failed = flight.error != nullptr;
  ++(failed ? state.ahead_missed : state.ahead_used);
  flight.program->misses = failed ? flight.program->misses + 1 : 0;
  return failed ? std::nullopt : std::make_optional(std::move(flight.results));
}

void abandon(Batch& batch) {
  const std::shared_ptr<Flight> flight = std::move(batch.flight);
  if (!flight) {
    return;
  }
  flight->cancelled = true;
  flight->wait();
  flight->sources.clear();
  ++flight->program->misses;
  ++batch.state->ahead_missed;
}

bool runs_ahead() {
  return enabled.load(std::memory_order_relaxed);
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
    Expectation old, older;
    std::vector<WeakStorageImpl> results;
    std::shared_ptr<Flight> flight;
    {
      std::lock_guard<std::mutex> guard(state.mutex);
      std::swap(old, *state.expected);
      std::swap(older, *state.other_expected);
      std::swap(results, state.early_results);
      std::swap(flight, state.flight);
      state.launch_at = kNever;
      state.pointless = state.grounded = 0;
    }
    if (flight) {
      flight->cancelled = true;
      flight->wait(); // see pilot.h
    }
  }
}

void wait_for_flights() {
  if (!in_bad_fork()) { // where another thread's locks are held for ever
    set_run_ahead(false);
    land_all();
  }
}

} // namespace tarry
