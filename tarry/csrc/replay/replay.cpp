#include "replay/replay.h"

#include <algorithm>
#include <cstring>

#include "core/generator.h"
#include "core/numbers.h"
#include "core/switches.h"
#include "device/hooks.h"
#include "execute/executor.h"
#include "record/provenance.h"

namespace tarry {

// ---- watching a call

Trace::Trace(DeviceState& state) : state(state), first_serial(next_serial()) {
  {
    Graveyard graveyard;
    std::lock_guard<std::mutex> guard(state.mutex);
    TORCH_CHECK(!state.trace, "tarry: a step function is being watched already");
    if (state.position != 0) { // recorded, and dead by now
      state.next_epoch(graveyard);
    }
    state.trace = this;
  }
  state.executor->speculator.drop();
}

Trace::~Trace() {
  std::lock_guard<std::mutex> guard(state.mutex);
  state.trace = nullptr;
}

void Trace::leaf(const NodePtr& node, TarryStorage& storage) {
  shared = shared || std::this_thread::get_id() != thread;
  const auto found = uploads.find(storage.serial);
  leaves.push_back(
      {node, WeakStorage(StoragePtr::reclaim_copy(&storage)), storage.serial,
       found == uploads.end() ? at::Tensor() : found->second});
}

void note_read(DeviceState& state) {
  const uint32_t site = current_site();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (Trace* trace = state.trace; trace && trace->thread == std::this_thread::get_id()) {
    trace->reads.push_back(site);
  }
}

void note_upload(const TarryStorage& storage, const at::Tensor& source) {
  const uint32_t site = current_site();
  at::Tensor replaced;
  std::lock_guard<std::mutex> guard(storage.state->mutex);
  if (Trace* trace = storage.state->trace; trace && trace->thread == std::this_thread::get_id()) {
    if (storage.serial < trace->first_serial) {
      trace->overwritten.push_back(site);
    }
    replaced = std::exchange(trace->uploads[storage.serial], source);
  }
}

// ---- a call that was watched

uint64_t serial_of(const at::Tensor& tensor) {
  const TarryStorage* storage = is_tarry(tensor) ? storage_of(tensor.unsafeGetTensorImpl()) : nullptr;
  return storage ? storage->serial : 0;
}

Snapshot::Snapshot(const Batch& original, Trace& trace) : batch(copy_batch(original)) {
  std::vector<StoragePtr> held;
  std::lock_guard<std::mutex> guard(original.state->mutex);
  ska::flat_hash_map<const Node*, const Trace::Leaf*> traced;
  for (const Trace::Leaf& leaf : trace.leaves) {
    traced[leaf.node.get()] = &leaf;
  }
  for (size_t i = 0; i < original.order.size(); ++i) {
    const Node& node = *original.order[i];
    trace.shared = trace.shared || (!node.is_leaf() && !original.replayed && node.lane != trace.lane);
    if (node.results) {
      whole = false;
    } else if (node.is_leaf()) {
      const auto found = traced.find(&node);
      whole = whole && found != traced.end();
      if (whole) {
        leaves.push_back(*found->second);
        leaves.back().node = batch->order[i];
      }
    }
  }
  for (const Root& root : original.roots) {
    StoragePtr storage; // unless another thread is just dropping the last reference: the lock keeps it from going further
    if (root.storage) {
      c10::raw::weak_intrusive_ptr::incref(root.storage);
      storage = WeakStorage::reclaim(root.storage).lock();
    }
    held.push_back(std::move(storage)); // given up after the lock
    storages.emplace_back(held.back());
    serials.push_back(held.back() ? held.back()->serial : 0); // 0: died since it was collected
  }
}

// ---- numbers that each run is given

namespace {

// Of all numbers of a batch, by their positions in Batch::numbers(): a node, and which of its numbers.
std::vector<std::pair<uint32_t, uint32_t>> number_positions(const Batch& batch, const std::vector<uint32_t>& chosen) {
  std::vector<std::pair<uint32_t, uint32_t>> all, found;
  for (uint32_t i = 0; i < batch.order.size(); ++i) {
    const Node& node = *batch.order[i];
    const size_t count = node.is_leaf() ? 0 : count_numbers(node);
    for (uint32_t k = 0; k < count; ++k) {
      all.emplace_back(i, k);
    }
  }
  for (const uint32_t number : chosen) {
    found.push_back(all.at(number));
  }
  return found;
}

} // namespace

void Snapshot::set_numbers(const std::vector<uint32_t>& positions, const std::vector<double>& numbers) {
  const auto found = number_positions(*batch, positions);
  for (size_t i = 0; i < found.size(); ++i) {
    set_number(*batch->order[found[i].first], found[i].second, numbers.at(i));
  }
}

// ---- arming

Replay::Replay(const Snapshot& snapshot, Plan plan) : batch_(copy_batch(*snapshot.batch)), plan_(std::move(plan)) {
  TORCH_CHECK(
      plan_.sources.size() == snapshot.leaves.size() && plan_.targets.size() == batch_->roots.size(),
      "tarry: a replay needs a source for each leaf and a target for each root");
  renew_nodes();
  number_positions_ = number_positions(*batch_, plan_.numbers);
}

void Replay::renew_nodes() {
  leaves_.clear();
  for (const NodePtr& node : batch_->order) {
    if (node->is_leaf()) {
      leaves_.push_back(node.get());
    }
  }
}

struct Replay::Storages {
  const Plan& plan;
  std::vector<StoragePtr> arguments, gradients, kept, fresh;

  TarryStorage* at(const StorageRef& ref) const {
    switch (ref.from) {
      case From::Argument:
        return arguments.at(ref.index).get();
      case From::Gradient:
        return gradients.at(ref.index).get();
      case From::Kept:
        return kept.at(ref.index).get();
      case From::Fresh:
        return fresh.at(ref.index).get();
      default:
        return nullptr;
    }
  }
};

namespace {

StoragePtr strong_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_tarry(tensor)) {
    return {};
  }
  TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
  return storage ? StoragePtr::reclaim_copy(storage) : StoragePtr();
}

} // namespace

std::optional<std::string> Replay::find_storages(const std::vector<at::Tensor>& arguments, Storages& found) const {
  for (const WeakStorage& weak : plan_.kept) {
    found.kept.push_back(weak.lock());
    if (!found.kept.back()) {
      return "a tensor that the step used is gone";
    }
  }
  for (const at::Tensor& holder : plan_.holders) {
    found.gradients.push_back(strong_storage(holder.grad()));
  }
  for (const at::Tensor& argument : arguments) {
    found.arguments.push_back(strong_storage(argument));
    TarryStorage* storage = found.arguments.back().get();
    if (!storage) {
      continue;
    }
    const auto is_it = [storage](const StoragePtr& other) { return other.get() == storage; };
    if (std::any_of(found.kept.begin(), found.kept.end(), is_it) ||
        std::any_of(found.gradients.begin(), found.gradients.end(), is_it)) {
      return "an argument shares memory with a tensor that the step uses";
    }
  }
  return std::nullopt;
}

// Under the lock.
std::optional<std::string> Replay::check_contents(const Storages& found) const {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const StorageRef& source = plan_.sources[i];
    if (source.from == From::Uploaded || source.from == From::UploadedHost) {
      continue;
    }
    const TarryStorage* storage = found.at(source);
    if (!storage || storage->home != leaves_[i]->leaf_layout || storage->state != batch_->state) {
      return "a tensor that the step reads was resized or replaced";
    }
    if (storage->value.node || !storage->data.defined()) {
      return "a tensor that the step reads has no contents yet";
    }
    if (storage->is_lent()) {
      return "others look at the memory of a tensor that the step reads (DLPack or __cuda_array_interface__)";
    }
  }
  for (size_t i = 0; i < plan_.targets.size(); ++i) {
    if (plan_.targets[i].from == From::Dropped || plan_.targets[i].from == From::Fresh) {
      continue;
    }
    const TarryStorage* storage = found.at(plan_.targets[i]);
    const Root& root = batch_->roots[i];
    if (!storage || storage->home != root.node->output_layout(root.output) || storage->value.node) {
      return "a tensor that the step writes was resized or replaced";
    }
    if (storage->is_lent()) {
      return "others look at the memory of a tensor that the step writes (DLPack or __cuda_array_interface__)";
    }
  }
  return std::nullopt;
}

std::optional<std::string> Replay::refusal(const std::vector<at::Tensor>& arguments) const {
  Storages storages{plan_, {}, {}, {}, {}};
  if (auto reason = find_storages(arguments, storages)) {
    return reason;
  }
  std::lock_guard<std::mutex> guard(batch_->state->mutex);
  return check_contents(storages);
}

void Replay::draw_seeds() {
  if (plan_.draws == 0) {
    return;
  }
  const auto [seed, offset] = default_generator(batch_->state->index).get<TarryGenerator>()->advance(plan_.draws);
  for (const auto& [node, before] : plan_.seeds) {
    batch_->order.at(node)->constants.back() = derive_seed(seed, offset + before);
  }
}

void Replay::set_numbers(const std::vector<double>& numbers) {
  TORCH_CHECK(
      numbers.size() == number_positions_.size(), "tarry: a replay takes ", number_positions_.size(), " numbers, not ",
      numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto [node, which] = number_positions_[i];
    set_number(*batch_->order[node], which, numbers[i]);
  }
}

void Replay::make_fresh(Storages& storages) const {
  storages.fresh.resize(plan_.targets.size());
  for (size_t i = 0; i < plan_.targets.size(); ++i) {
    if (plan_.targets[i].from == From::Fresh) {
      const Layout* home = batch_->roots[i].node->output_layout(batch_->roots[i].output);
      storages.fresh.at(plan_.targets[i].index) = c10::make_intrusive<TarryStorage>(batch_->state, home, home->nbytes);
    }
  }
}

// Per leaf: a copy of the host tensor that it stands for, if it does.
std::vector<at::Tensor> Replay::upload(const std::vector<at::Tensor>& arguments) const {
  PlainDispatch plain;
  std::vector<at::Tensor> uploaded(leaves_.size());
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const StorageRef& source = plan_.sources[i];
    if (source.from == From::Uploaded || source.from == From::UploadedHost) {
      const at::Tensor& host = source.from == From::Uploaded ? arguments.at(source.index) : plan_.hosts.at(source.index);
      uploaded[i] = empty_real(leaves_[i]->leaf_layout, *batch_->state).copy_(host);
    }
  }
  return uploaded;
}

// The storages that the step gives new contents. Under the lock.
void Replay::make_pending(const Storages& storages, Graveyard& graveyard) {
  for (size_t i = 0; i < plan_.targets.size(); ++i) {
    Root& root = batch_->roots[i];
    if (root.storage) {
      root.storage->claim = nullptr; // of the last run
    }
    root.storage = storages.at(plan_.targets[i]);
    if (root.storage) {
      set_pending(root.storage, root.node, root.output, graveyard);
      if (root.storage->claim) {
        *root.storage->claim = nullptr;
      }
      root.storage->claim = &root.storage;
    }
  }
}

// What the program sees of the step: gradients, versions of the tensors that are written, and the results.
std::vector<at::Tensor> Replay::publish(const std::vector<at::Tensor>& arguments, const Storages& storages) const {
  const auto make = [&](const Tensor& spec) {
    return make_tensor(*batch_->state, spec.layout, StoragePtr::reclaim_copy(storages.at(spec.storage)));
  };
  for (const Gradient& gradient : plan_.gradients) {
    const at::Tensor& holder = gradient.holder.from == From::Argument ? arguments.at(gradient.holder.index)
                                                                      : plan_.holders.at(gradient.holder.index);
    holder.mutable_grad() = gradient.tensor ? make(*gradient.tensor) : at::Tensor();
  }
  for (const at::Tensor& tensor : plan_.written) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
  for (const StorageRef& target : plan_.targets) {
    if (target.from == From::Argument) {
      arguments[target.index].unsafeGetTensorImpl()->bump_version();
    }
  }
  std::vector<at::Tensor> results;
  for (const Tensor& spec : plan_.results) {
    results.push_back(make(spec));
  }
  return results;
}

std::variant<std::vector<at::Tensor>, std::string> Replay::arm(
    const std::vector<at::Tensor>& arguments, const std::vector<double>& numbers) {
  check_fork();
  DeviceState& state = *batch_->state;
  record_under(state, current_switches() | matmul_precision()); // guards have found them to be those of the recording
  Storages storages{plan_, {}, {}, {}, {}};
  if (auto reason = find_storages(arguments, storages)) {
    return *reason;
  }
  if (std::any_of(batch_->roots.begin(), batch_->roots.end(), [](const Root& root) { return root.node->results != nullptr; })) {
    batch_ = copy_batch(*batch_); // another thread has recorded nodes that read these, and keeps them
    renew_nodes();
  }
  make_fresh(storages);
  std::vector<at::Tensor> uploaded = upload(arguments);
  {
    Graveyard graveyard;
    std::lock_guard<std::mutex> guard(state.mutex);
    TORCH_INTERNAL_ASSERT(!state.executor->is_busy());
    if (auto reason = check_contents(storages)) {
      return *reason;
    }
    draw_seeds();
    set_numbers(numbers);
    for (size_t i = 0; i < leaves_.size(); ++i) {
      leaves_[i]->data = uploaded[i].defined() ? std::move(uploaded[i]) : storages.at(plan_.sources[i])->data;
    }
    make_pending(storages, graveyard);
    batch_->epoch = state.next_epoch(graveyard);
    batch_->lane = current_lane();
  }
  state.executor->speculator.drop(); // what was launched for another step
  return publish(arguments, storages);
}

// ---- reads of host tensors
namespace {

thread_local HostReads* watcher = nullptr;

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& call) {
  if (watcher && std::strcmp(call.name(), "aten::_local_scalar_dense") == 0 && !call.inputs().empty() &&
      call.inputs()[0].isTensor()) {
    const at::Tensor& tensor = call.inputs()[0].toTensor();
    // A wrapped number is a number of the program that some operator takes as a tensor.
    if (tensor.defined() && tensor.is_cpu() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      watcher->found.emplace_back(tensor, current_site());
    }
  }
  return nullptr;
}

} // namespace

HostReads::HostReads() {
  TORCH_CHECK(!watcher, "tarry: this thread's reads are being watched already");
  watcher = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&look).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void HostReads::stop() {
  if (watcher == this) {
    watcher = nullptr;
    at::removeCallback(handle_);
  }
}

} // namespace tarry
