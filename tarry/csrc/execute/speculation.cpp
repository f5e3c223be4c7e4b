#include "execute/speculation.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "execute/batch.h"
#include "core/generator.h"
#include "core/numbers.h"
#include "device/host_memory.h"

namespace tarry {
namespace {

using Held = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;

// Another tensor over the same memory. On a CPU, one that does not count among the users of the buffer: a thread that asks
// whether it may write to it should not have to wait until the program that reads it is done. The sources keep the memory.
at::Tensor lend(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    return alias(tensor);
  }
  c10::Storage memory(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
      at::DataPtr(const_cast<void*>(tensor.storage().data()), tensor.device())); // NOLINT: nothing writes through it
  auto lent = at::detail::make_tensor<c10::TensorImpl>(std::move(memory), tensor.key_set(), tensor.dtype());
  lent.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return lent;
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

// Bytes that they still take up. A storage must not die under the lock: it goes into `held`.
size_t bytes_of(const std::vector<WeakStorageImpl>& results, Held& held) {
  size_t bytes = 0;
  for (const auto& weak : results) {
    if (auto storage = weak.lock()) {
      bytes += storage->nbytes();
      held.push_back(std::move(storage));
    }
  }
  return bytes;
}

} // namespace

void Speculation::run() noexcept {
  try {
    const MayBreakOff may_break_off(cancelled);
    const c10::OptionalDeviceGuard guard(inputs.empty() ? std::nullopt : std::make_optional(inputs[0].device()));
    PlainDispatch plain;
    const CountedMemory counted(device);
    results = program->parts().early->run(std::move(inputs), numbers);
  } catch (...) {
    error = std::current_exception();
  }
  inputs.clear();
}

void Speculation::cancel() {
  cancelled = true;
  wait();
  sources.clear();
}

// ---- what comes next

// What the early part takes, and when it can be known.
void Speculator::set_inputs(const Batch& batch) {
  const auto& parts = expected_.program->parts();
  const auto [inputs, numbers] = batch.positions();
  std::vector<NodePtr> leaves;
  for (const NodePtr& node : batch.order) {
    if (is_input(*node)) {
      leaves.insert(leaves.end(), node->is_leaf() ? 1 : node->results->size(), node);
    }
  }
  uint32_t last = 0;
  for (const uint32_t k : parts.early_takes) {
    last = std::max(last, inputs.at(k));
    expected_.inputs.push_back(leaves.at(k));
  }
  for (const uint32_t k : parts.seeds) {
    last = std::max(last, numbers.at(k));
  }
  expected_.complete_at = last + 1;
}

void Speculator::renew(const Batch& batch, const std::shared_ptr<const SplitProgram>& program, Replaced& old) {
  old.results = std::exchange(early_results_, early_results(batch, *program));
  if (expected_.program != program || expected_.order != batch.order) {
    std::swap(old.expected, expected_);
    expected_.order = batch.order;
    expected_.program = program;
    expected_.predicts = old.expected.program != program || old.expected.predicts;
    set_inputs(batch);
  }
  expected_.uploads.clear();
  bool known = expected_.predicts;
  for (const NodePtr& leaf : expected_.inputs) {
    const auto found = std::find_if(batch_uploads_.begin(), batch_uploads_.end(), [&](const WeakStorageImpl& upload) {
      return upload._unsafe_get_target() == leaf->source._unsafe_get_target();
    });
    expected_.uploads.push_back(found == batch_uploads_.end() ? -1 : static_cast<int32_t>(found - batch_uploads_.begin()));
    known = known && (leaf->steady || expected_.uploads.back() >= 0);
  }
  expected_.launch_at = known ? std::min(kFewNodes, expected_.complete_at) : expected_.complete_at;
}

void Speculator::expect(
    const Batch& batch, const std::shared_ptr<const SplitProgram>& program, bool overlaps, Replaced& old) noexcept {
  const bool tries = program && program->speculation.allows();
  if (tries) {
    try {
      renew(batch, program, old);
    } catch (...) { // the batch is computed in any case
      expected_.launch_at = kNever;
    }
  }
  if (overlaps) {
    std::swap(expected_, other_expected_);
  }
  launch_at_ = tries && expected_.program == program ? expected_.launch_at : kNever;
}

// ---- launching

void Speculator::note_upload(c10::StorageImpl* storage) {
  if (uploads_.size() < kMaxUploads) {
    uploads_.push_back(weak(storage));
  }
}

// The real tensor that an input of the early part will be, if that is known; undefined if not. Under the lock.
at::Tensor Speculator::predict(const Node& leaf, int32_t upload, Held& held) const {
  const WeakStorageImpl* source = leaf.steady ? &leaf.source : nullptr;
  if (!source && upload >= 0 && static_cast<size_t>(upload) < uploads_.size()) {
    source = &uploads_[upload];
  }
  if (!source) {
    return {};
  }
  held.push_back(source->lock());
  const auto* storage = static_cast<const TarryStorage*>(held.back().get());
  const bool known = storage && storage->state == &state_ && !storage->value.node && !storage->is_being_written() &&
      storage->home == leaf.leaf_layout;
  return known ? storage->data : at::Tensor();
}

// Whether the early part has room for new results. Tries again later if not.
bool Speculator::has_room(bool is_busy) {
  Held held;
  std::shared_ptr<const SplitProgram> program;
  size_t in_use = 0;
  {
    std::lock_guard<std::mutex> guard(state_.mutex);
    program = is_due() ? expected_.program : nullptr;
    in_use = program ? bytes_of(early_results_, held) : 0;
  }
  held.clear(); // or they would be in use
  if (!program) {
    return false;
  }
  // On a device, results may have to be moved, which are inputs of the part that is being launched.
  if (!is_busy || real_device(state_.index).is_cpu()) {
    c10::InferenceMode no_inference(false);
    PlainDispatch plain;
    if (program->parts().early->makes_room(in_use)) {
      return true;
    }
  }
  std::lock_guard<std::mutex> guard(state_.mutex);
  if (expected_.program == program && is_due()) {
    launch_at_ = state_.position + kFewNodes;
  }
  return false;
}

// Program, inputs and numbers; false if they are not known, or not what is expected. Under the lock.
bool Speculator::fill(Speculation& made, uint32_t until, Held& held) {
  for (const NodePtr& node : expected_.order) {
    if (node->position >= until && node->epoch != state_.epoch) {
      break; // not recorded yet; program order
    }
    if (node->epoch != state_.epoch) {
      return false; // another graph
    }
  }
  made.program = expected_.program;
  uint64_t to_come = 0; // operators that will draw
  for (const NodePtr& node : expected_.order) {
    if (node->results) {
      return false;
    }
    if (node->is_leaf()) {
      continue;
    }
    const size_t first = made.numbers.size();
    append_numbers(*node, made.numbers); // of nodes that are still to come: those of the last step, but for seeds
    const int64_t seed = node->epoch == state_.epoch ? -1 : seed_among_numbers(*node);
    if (seed >= 0 && made.numbers[first + seed].toInt() != kNoSeed) {
      made.numbers[first + seed] = next_seed(state_.index, to_come++);
    }
  }
  const bool predicts = until < expected_.complete_at;
  made.predicted = predicts;
  for (size_t i = 0; i < expected_.inputs.size(); ++i) {
    const Node& leaf = *expected_.inputs[i];
    at::Tensor data = leaf.epoch == state_.epoch ? leaf.data : at::Tensor();
    if (!data.defined() && predicts) {
      data = predict(leaf, expected_.uploads[i], held);
      if (!data.defined()) {
        launch_at_ = expected_.complete_at; // wait until it is recorded
      }
    }
    if (!data.defined() || data.layout() != c10::kStrided || data.is_meta()) {
      return false;
    }
    made.inputs.push_back(lend(data));
    made.sources.push_back(std::move(data));
  }
  return made.program->parts().early->accepts(made.inputs);
}

void Speculator::launch(bool is_busy) {
  if (!has_room(is_busy)) {
    return;
  }
  auto made = std::make_shared<Speculation>();
  made->device = state_.index;
  Held held; // until the lock is released: one may be the last to go
  std::lock_guard<std::mutex> guard(state_.mutex);
  if (is_due() && !launched_ && expected_.program && fill(*made, std::exchange(launch_at_, kNever), held)) {
    launched_ = made;
    submit(std::move(made));
  }
}

void Speculator::end_epoch(Graveyard& graveyard) {
  std::swap(for_batch_, launched_); // what an earlier batch has left, if it was never computed, is claimed by the next, in vain
  for (WeakStorageImpl& upload : std::exchange(batch_uploads_, std::exchange(uploads_, {}))) {
    graveyard.storages.push_back(std::move(upload));
  }
  launch_at_ = kNever;
}

// ---- the outcome

void Speculator::miss(const Speculation& speculation) {
  ++missed;
  speculation.program->speculation.failed();
}

std::shared_ptr<Speculation> Speculator::claim(
    const Batch& batch, const SplitProgram* program, const std::vector<c10::IValue>& numbers) {
  std::shared_ptr<Speculation> found;
  {
    std::lock_guard<std::mutex> guard(state_.mutex);
    found = std::move(for_batch_);
  }
  if (!found) {
    return nullptr;
  }
  bool same = found->program.get() == program;
  if (same) {
    std::vector<const Node*> inputs;
    for (const NodePtr& node : batch.order) {
      if (node->is_leaf()) {
        inputs.push_back(node.get());
      }
    }
    const auto& parts = program->parts();
    for (size_t i = 0; same && i < parts.early_takes.size(); ++i) {
      same = parts.early_takes[i] < inputs.size() && inputs[parts.early_takes[i]]->data.is_same(found->sources[i]);
    }
    for (size_t i = 0; same && i < parts.numbers.size(); ++i) {
      same = same_value(numbers.at(parts.numbers[i]), found->numbers.at(parts.numbers[i]));
    }
    if (!same && found->predicted) {
      std::lock_guard<std::mutex> guard(state_.mutex);
      expected_.predicts = false;
    }
  }
  if (!same) {
    found->cancel();
    miss(*found);
    return nullptr;
  }
  if (!real_device(state_.index).is_cpu()) {
    found->wait();
  }
  found->sources.clear(); // the batch has the same
  return found;
}

std::optional<std::vector<at::Tensor>> Speculator::results_of(Speculation& claimed) {
  claimed.wait();
  if (claimed.error) {
    miss(claimed);
    return std::nullopt;
  }
  ++used;
  claimed.program->speculation.succeeded();
  return std::move(claimed.results);
}

void Speculator::drop() {
  std::shared_ptr<Speculation> dropped;
  {
    std::lock_guard<std::mutex> guard(state_.mutex);
    dropped = std::move(for_batch_);
  }
  if (dropped) {
    dropped->cancel();
    miss(*dropped);
  }
}

void Speculator::cancel() {
  std::shared_ptr<Speculation> cancelled[2];
  {
    std::lock_guard<std::mutex> guard(state_.mutex);
    cancelled[0] = std::move(for_batch_);
    cancelled[1] = std::move(launched_);
    launch_at_ = kNever;
  }
  for (const auto& speculation : cancelled) {
    if (speculation) {
      speculation->cancel();
    }
  }
}

void Speculator::forget() {
  cancel();
  Expectation old, older;
  std::vector<WeakStorageImpl> results;
  std::lock_guard<std::mutex> guard(state_.mutex);
  std::swap(old, expected_);
  std::swap(older, other_expected_);
  std::swap(results, early_results_);
  launch_at_ = kNever;
}

} // namespace tarry
