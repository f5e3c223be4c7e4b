#include "record/record.h"

#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "execute/executor.h"
#include "execute/serve.h"
#include "core/generator.h"
#include "device/hooks.h"
#include "device/lend.h"
#include "record/direct.h"
#include "record/memory.h"
#include "record/host_mode.h"
#include "record/provenance.h"
#include "replay/replay.h"
#include "record/scan.h"

namespace tarry {
namespace {

std::atomic<uint32_t> max_pending{100000};
std::array<std::atomic<uint32_t>, kMaxDevices> chunks{}; // nodes of a chunk, per device; 0: steps are recorded whole
thread_local int32_t current_region = 0;
// Per device, the last epoch in which this thread has recorded something that may fail.
thread_local std::array<uint64_t, kMaxDevices> epochs_with_failures{};

// The node at the next place in the program: the one that the last step had there, if `fits(node)`, or else a new one, for the
// caller to fill in.
struct NextNode {
  NodePtr node;
  bool is_new;
};
template <typename Fits>
NextNode next_node(DeviceState& state, Graveyard& graveyard, const Fits& fits) {
  const uint32_t position = state.position++;
  NextNode next{position < state.history.size() ? std::move(state.history[position]) : NodePtr(), false};
  if (next.node && fits(*next.node)) {
    ++state.reused;
  } else {
    graveyard.nodes.push_back(std::exchange(next.node, c10::make_intrusive<Node>()));
    next.is_new = true;
  }
  next.node->epoch = state.epoch;
  next.node->position = position;
  return next;
}

// A node that stands for the arbitrary contents of a fresh storage.
NodePtr empty_node(DeviceState& state, const Layout* home, Graveyard& graveyard) {
  static const Operator* op = find_operator("aten::empty_strided", "");
  const Hash128 hash = mix(op->hash, home->hash);
  auto [node, is_new] = next_node(state, graveyard, [&](const Node& last) {
    return last.op == op && last.hash == hash && last.signature->fresh[0] == home && last.region == current_region;
  });
  node->site = 0;
  node->lane = current_lane();
  if (!is_new) {
    return std::move(node);
  }
  node->op = op;
  node->region = current_region;
  node->type_hash = node->hash = hash;
  auto& signature = state.signatures[node->type_hash];
  if (!signature) {
    signature = std::make_unique<Signature>();
    signature->fresh.push_back(home);
  }
  node->signature = signature.get();
  node->constants = {
      c10::IValue(c10::IntArrayRef(home->sizes)),
      c10::IValue(c10::IntArrayRef(home->strides)),
      c10::IValue(static_cast<int64_t>(home->dtype)),
      c10::IValue(),
      c10::IValue(c10::Device(c10::DeviceType::PrivateUse1, state.index)),
      c10::IValue()};
  return std::move(node);
}

} // namespace

Value current_value(TarryStorage* storage, Graveyard& graveyard) {
  if (storage->value.node) {
    return storage->value;
  }
  DeviceState& state = *storage->state;
  if (!storage->data.defined()) {
    storage->value = {empty_node(state, storage->home, graveyard), 0};
    state.link(storage);
    return storage->value;
  }
  if (storage->leaf && storage->leaf_epoch == state.epoch) {
    return {storage->leaf, 0};
  }
  auto [node, is_new] = next_node(
      state, graveyard, [&](const Node& last) { return last.is_leaf() && last.leaf_layout == storage->home; });
  if (is_new) {
    node->leaf_layout = storage->home;
    node->hash = mix(Hash128(), storage->home->hash);
  }
  graveyard.tensors.push_back(std::move(node->data));
  node->data = storage->data;
  node->steady = node->source._unsafe_get_target() == storage;
  if (!node->steady) {
    graveyard.storages.push_back(std::exchange(node->source, weak(storage)));
  }
  graveyard.nodes.push_back(std::move(storage->leaf));
  storage->leaf = node;
  storage->leaf_epoch = state.epoch;
  if (Trace* trace = state.trace.load(std::memory_order_relaxed); C10_UNLIKELY(trace)) {
    trace->leaf(node, *storage);
  }
  return {std::move(node), 0};
}

namespace {

bool may_fail_on(c10::Device device, const Operator& op) {
  return !op.has(kNeverFails) && !(op.has(kFailsOnIndex) && device.is_cuda()) && !(op.has(kFailsOnNumbers) && device.is_cpu());
}

// Whether the call itself may fail on data.
bool may_fail(const Scan& scan, const Signature& signature) {
  const Operator& op = scan.op;
  if (C10_LIKELY(op.has(kNeverFails))) {
    return false;
  }
  if (op.has(kFailsOnIntegers)) {
    const auto is_integer = [](c10::ScalarType dtype) { return c10::isIntegralType(dtype, /*includeBool=*/false); };
    return std::any_of(
               signature.fresh.begin(), signature.fresh.end(), [&](const Layout* made) { return is_integer(made->dtype); }) ||
        std::any_of(scan.tensors.begin(), scan.tensors.end(), [&](const TensorArgument& argument) {
             return argument.is_mutable && is_integer(argument.storage->home->dtype);
           });
  }
  return may_fail_on(real_device(scan.state->index), op);
}

// Whether a write may fail, or have to be taken back because something before it fails. Then the contents from before must be there:
// those of this epoch if that something was recorded in it, and of an earlier one, which is still pending, in any case.
bool keeps_old_contents(const Scan& scan, const Value& old) {
  const DeviceState& state = *scan.state;
  if (old.node->epoch != state.epoch && (!state.executor->computes(old) || state.executor->batch_in_flight()->may_fail)) {
    return true;
  }
  return epochs_with_failures[state.index] == state.epoch || may_fail_on(real_device(state.index), scan.op) ||
      std::any_of(scan.tensors.begin(), scan.tensors.end(), [](const TensorArgument& argument) {
           return argument.storage->value.node && argument.storage->value.node->may_fail;
         });
}

// Whether the old contents of an argument need not be computed: all of it is overwritten, and no failure brings them back.
bool is_discarded(const Scan& scan, const TensorArgument& argument) {
  if (C10_LIKELY(!argument.is_mutable || !scan.op.has(kOverwrites) || argument.view)) {
    return false;
  }
  const Value& old = argument.storage->value;
  return old.node ? !keeps_old_contents(scan, old) : argument.storage->failure != nullptr;
}

// The failure of an argument that would be read, if there is one. Under the lock.
FailurePtr failed_argument(const Scan& scan) {
  for (const TensorArgument& argument : scan.tensors) {
    if (C10_UNLIKELY(argument.storage->failure != nullptr) && !is_discarded(scan, argument)) {
      return argument.storage->failure;
    }
  }
  return nullptr;
}

// Why enough is pending before this call, if it is.
const char* why_cut(const Scan& scan) {
  DeviceState& state = *scan.state;
  if (C10_UNLIKELY(state.position >= max_pending.load(std::memory_order_relaxed))) {
    return "node cap";
  }
  // A call that may be replayed is recorded whole.
  const uint32_t chunk = chunks[state.index].load(std::memory_order_relaxed);
  if (C10_UNLIKELY(chunk != 0 && state.position >= chunk) && !has_watcher(Watcher::Observer)) {
    return "chunk";
  }
  const bool reads_pending = std::any_of(scan.tensors.begin(), scan.tensors.end(), [&](const TensorArgument& argument) {
    return argument.storage->value.node && !is_discarded(scan, argument);
  });
  return over_budget(state, reads_pending) ? "memory cap" : nullptr;
}

// Whether an argument is a result of the step in flight. Under the lock.
bool reads_in_flight(const Scan& scan) {
  const Executor& executor = *scan.state->executor;
  return C10_UNLIKELY(executor.is_busy()) &&
      std::any_of(scan.tensors.begin(), scan.tensors.end(), [&](const TensorArgument& argument) {
           return executor.computes(argument.storage->value) && !is_discarded(scan, argument);
         });
}

// Whether a kernel is writing to an argument, for another thread. Under the lock.
bool is_being_written(const Scan& scan) {
  return std::any_of(scan.tensors.begin(), scan.tensors.end(), [](const TensorArgument& argument) {
    return argument.storage->is_being_written();
  });
}

// Whether others may write an argument's memory, or look at it, at any time. Under the lock.
bool reads_lent(const Scan& scan) {
  return std::any_of(
      scan.tensors.begin(), scan.tensors.end(), [](const TensorArgument& argument) { return argument.storage->is_lent(); });
}

// An operator may write to an argument that it reads only if it works element by element, and looks at both in the same way.
bool shares_memory_with_out(const Scan& scan) {
  for (const TensorArgument& written : scan.tensors) {
    for (const TensorArgument& other : scan.tensors) {
      const bool harmless = scan.op.has(kPointwise) && !other.is_mutable && other.view == written.view;
      if (written.is_mutable && &other != &written && other.storage == written.storage && !harmless) {
        return true;
      }
    }
  }
  return false;
}

// Whether each argument that is resized has an empty storage for itself, which simply becomes one of the right layout.
bool resizes_only_empty(const Scan& scan, const Signature& signature) {
  size_t k = 0;
  for (const TensorArgument& argument : scan.tensors) {
    if (!argument.is_mutable || !signature.resized[k++]) {
      continue;
    }
    const auto users = std::count_if(
        scan.tensors.begin(), scan.tensors.end(), [&](const TensorArgument& other) { return other.storage == argument.storage; });
    if (argument.storage->nbytes() != 0 || argument.view || argument.tensor->storage_offset() != 0 || users > 1) {
      return false;
    }
  }
  return true;
}

void resize_empty(const Scan& scan, const Signature& signature) {
  size_t k = 0;
  for (const TensorArgument& argument : scan.tensors) {
    const Layout* layout = argument.is_mutable ? signature.resized[k++] : nullptr;
    if (layout) {
      argument.tensor->unsafeGetTensorImpl()->set_sizes_and_strides(layout->sizes, layout->strides, layout->offset);
      argument.storage->become(layout);
    }
  }
}

// What a node reads of an argument's storage, or has as the contents from before its write.
Value value_for(const Scan& scan, const TensorArgument& argument, Graveyard& graveyard) {
  const TarryStorage& storage = *argument.storage;
  if (C10_LIKELY(!is_discarded(scan, argument))) {
    return current_value(argument.storage, graveyard);
  }
  if (storage.leaf && storage.leaf_epoch == scan.state->epoch && storage.leaf->leaf_layout == storage.home) {
    return {storage.leaf, 0}; // whose buffer can be overwritten; they are not the contents from before (Mutation::discards)
  }
  return {empty_node(*scan.state, storage.home, graveyard), 0};
}

// Each storage that the call writes, by the first argument through which it does.
c10::SmallVector<Mutation, 1> mutations_of(const Scan& scan) {
  c10::SmallVector<Mutation, 1> found;
  for (uint32_t i = 0; i < scan.tensors.size(); ++i) {
    const TensorArgument& argument = scan.tensors[i];
    const auto writes_same = [&argument](const TensorArgument& other) {
      return other.is_mutable && other.storage == argument.storage;
    };
    if (argument.is_mutable && std::none_of(scan.tensors.begin(), scan.tensors.begin() + i, writes_same)) {
      found.push_back({i, argument.storage->home});
    }
  }
  return found;
}

// Under the lock: finds or makes the node, and gives the mutated storages their new values.
NodePtr make_node(Scan& scan, const Signature* signature, uint32_t site, Graveyard& graveyard) {
  DeviceState& state = *scan.state;
  c10::SmallVector<Edge, 3> edges;
  Hash128 hash = scan.hash;
  bool may_fail = tarry::may_fail(scan, *signature);
  c10::SmallVector<bool, 3> discards;
  for (const TensorArgument& argument : scan.tensors) {
    discards.push_back(is_discarded(scan, argument));
    Value value = value_for(scan, argument, graveyard);
    may_fail = may_fail || value.node->may_fail;
    if (!value.node->site) {
      value.node->site = site; // an uninitialised storage is allocated where it is first used
    }
    hash = mix(mix(hash, value.node->hash.lo + value.output), value.node->hash.hi + (argument.view ? argument.view->hash.hi : 0));
    edges.push_back({std::move(value.node), value.output, argument.view});
  }
  ++state.recorded;
  state.direct.add(scan.op);
  auto [node, is_new] = next_node(state, graveyard, [&](const Node& last) {
    return last.op == &scan.op && last.type_hash == scan.hash && last.edges.size() == edges.size() &&
        last.region == current_region && last.signature == signature &&
        std::equal(
               edges.begin(), edges.end(), last.edges.begin(),
               [](const Edge& a, const Edge& b) { return a.node == b.node && a.output == b.output && a.view == b.view; }) &&
        same_call(last, scan.slots, scan.constants);
  });
  node->constants = std::move(scan.constants);
  if (is_new) {
    node->op = &scan.op;
    node->signature = signature;
    node->type_hash = scan.hash;
    node->hash = hash;
    node->region = current_region;
    node->edges = std::move(edges);
    node->slots = std::move(scan.slots);
    if (scan.op.mutates) {
      node->mutations = mutations_of(scan);
    }
  }
  node->site = site;
  node->lane = current_lane();
  node->may_fail = may_fail;
  if (may_fail) {
    epochs_with_failures[state.index] = state.epoch;
  }
  uint32_t output = static_cast<uint32_t>(signature->fresh.size());
  for (Mutation& mutation : node->mutations) {
    mutation.discards = discards[mutation.edge];
    set_pending(scan.tensors[mutation.edge].storage, node, output++, graveyard);
  }
  return std::move(node);
}

c10::IValue make_result(const Scan& scan, const Signature& signature, size_t& item, c10::ArrayRef<StoragePtr> storages) {
  const Signature::Item& spec = signature.items[item++];
  switch (spec.kind) {
    case Signature::Return::Fresh:
      return make_tensor(*scan.state, signature.fresh[spec.index], storages[spec.index]);
    case Signature::Return::Argument:
      return *scan.tensors[spec.index].tensor;
    case Signature::Return::View: {
      const TensorArgument& base = scan.tensors[spec.index];
      const Layout* layout = intern_layout(
          spec.view->dtype, spec.view->sizes, spec.view->strides, spec.view->offset + base.tensor->storage_offset());
      return make_tensor(*scan.state, layout, StoragePtr::reclaim_copy(base.storage));
    }
    case Signature::Return::Undefined:
      return at::Tensor();
    case Signature::Return::Constant:
      return spec.constant;
    case Signature::Return::List: {
      c10::List<at::Tensor> list;
      list.reserve(spec.index);
      for (uint32_t i = 0; i < spec.index; ++i) {
        list.push_back(make_result(scan, signature, item, storages).toTensor());
      }
      return list;
    }
  }
  return {};
}

// Writes through a conjugated or negated view: the operator works on a plain copy, which is then copied back.
void record_on_copies(const Operator& op, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.arguments.size());
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  auto plain = [&](const c10::IValue& value) -> c10::IValue {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().key_set().has_any(kLazyBits)) {
      return value;
    }
    copies.emplace_back(value.toTensor(), without_lazy_bits(value.toTensor()));
    return copies.back().second;
  };
  torch::jit::Stack call;
  for (size_t i = 0; i < arguments.size(); ++i) {
    TORCH_CHECK(
        op.arguments[i].kind != ArgKind::TensorList || !op.arguments[i].is_mutable, "tarry: ", op.name,
        " cannot write to a list with conjugated or negated views; call .resolve_conj() on them first");
    call.push_back(op.arguments[i].kind == ArgKind::Tensor && op.arguments[i].is_mutable ? plain(arguments[i]) : arguments[i]);
  }
  record(op, &call);
  for (auto& [original, copy] : copies) {
    original.copy_(copy);
    for (c10::IValue& result : call) {
      if (result.isTensor() && result.toTensor().is_same(copy)) {
        result = original;
      }
    }
  }
  torch::jit::drop(*stack, op.arguments.size());
  for (c10::IValue& result : call) {
    stack->push_back(std::move(result));
  }
}

// Why a call cannot be recorded, as far as that is known before its signature is; null if it can.
const char* why_eager(const Scan& scan) {
  const Operator& op = scan.op;
  if (C10_UNLIKELY(op.has(kDynamic) || op.has(kForcedEager) || !op.recordable || scan.eager_reason)) {
    return op.has(kForcedEager) ? "the configuration forces it"
        : scan.eager_reason     ? scan.eager_reason
                                : "its result depends on data";
  }
  if (C10_UNLIKELY(op.has_out && (scan.writes_through_lazy_bits || shares_memory_with_out(scan)))) {
    return "it writes to memory that it reads, or through a conjugated or negated view";
  }
  return nullptr;
}

// Under the lock: waits for a step in flight that computes an argument, and raises the failure of an argument. A thread whose
// operator has failed in another's hands writes nothing more before it has raised the error.
void settle_arguments(const Scan& scan, std::unique_lock<std::mutex>& lock) {
  DeviceState& state = *scan.state;
  while (reads_in_flight(scan)) {
    lock.unlock();
    state.executor->wait();
    lock.lock();
  }
  while (is_being_written(scan)) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  if (FailurePtr failure = failed_argument(scan)) {
    lock.unlock();
    failure->raise();
  }
  if (scan.op.mutates && is_owed(current_lane())) {
    lock.unlock();
    raise_owed();
    lock.lock();
  }
}

void add_seed(Scan& scan, c10::ArrayRef<c10::IValue> arguments) {
  const Operator& op = scan.op;
  const bool given = op.generator_argument >= 0 && !arguments[op.generator_argument].isNone();
  auto generator = given ? std::make_optional(arguments[op.generator_argument].toGenerator()) : std::nullopt;
  scan.constants.emplace_back(op.draws(arguments) ? draw_seed(generator, scan.state->index) : kNoSeed);
}

struct RecordedCall {
  const Signature* signature = nullptr;
  c10::SmallVector<StoragePtr, 2> storages; // of the fresh results
  bool is_due = false;                      // the executor may launch something
};

// Makes the node, or says why the call has to run eagerly.
const char* record_node(Scan& scan, c10::ArrayRef<c10::IValue> arguments, RecordedCall& made) {
  const Operator& op = scan.op;
  DeviceState& state = *scan.state;
  const bool needs_check = tarry::needs_check(scan);
  const uint32_t site = current_site();
  Graveyard graveyard;
  std::unique_lock<std::mutex> lock(state.mutex);
  if (C10_UNLIKELY(state.position == 0)) {
    state.began = std::chrono::steady_clock::now();
  }
  const Signature* signature = made.signature = find_signature(scan, arguments, lock);
  if (C10_UNLIKELY(signature->runs_eagerly)) {
    return op.has_out ? "what becomes of its out= arguments is unknown" : "its output shape depends on data";
  }
  if (C10_UNLIKELY(needs_check)) {
    check_once(scan, arguments, lock);
  }
  if (C10_UNLIKELY(!signature->resized.empty() && !resizes_only_empty(scan, *signature))) {
    return "it resizes an out= argument that shares memory";
  }
  if (const char* reason = why_cut(scan); C10_UNLIKELY(reason)) {
    const int64_t holes = allowed_holes(state);
    lock.unlock();
    request_cut(state.index, reason);
    give_back_holes(holes);
    lock.lock();
  }
  NodePtr node;
  if (!signature->only_views) {
    settle_arguments(scan, lock);
    if (C10_UNLIKELY(any_loans()) && reads_lent(scan)) {
      return "others look at its memory (DLPack or __cuda_array_interface__)";
    }
    if (op.has(kRandom)) {
      add_seed(scan, arguments);
    }
    node = make_node(scan, signature, site, graveyard);
  }
  if (op.mutates && !signature->resized.empty()) {
    resize_empty(scan, *signature);
    for (Mutation& mutation : node->mutations) {
      mutation.home = scan.tensors[mutation.edge].storage->home;
    }
  }
  for (uint32_t i = 0; i < signature->fresh.size(); ++i) {
    const Layout* layout = signature->fresh[i];
    auto storage = c10::make_intrusive<TarryStorage>(&state, layout, layout->nbytes);
    storage->value = {node, i};
    state.link(storage.get());
    made.storages.push_back(std::move(storage));
  }
  made.is_due = state.executor->speculator.is_due();
  return nullptr;
}

} // namespace

void record(const Operator& op, torch::jit::Stack* stack) {
  check_fork();
  if (op.mutates) {
    raise_owed();
  }
  // Backward of what is recorded here runs on the thread that calls backward(): recording is too short to be handed to another
  // thread and waited for. (PyTorch gives each device but the CPU a thread of its own otherwise.)
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  const size_t count = op.arguments.size();
  const auto arguments = torch::jit::last(*stack, count);
  if (C10_UNLIKELY(op.has(kRandom) && draws_on_host(op, arguments))) {
    return draw_on_host(op, stack) ? void() : run_eagerly(op, stack, "its random numbers are those of the CPU");
  }
  if (call_directly(op, stack)) {
    return;
  }
  Scan scan(op);
  if (C10_UNLIKELY(op.has(kShapeFromDevice) || op.has_out)) {
    scan.hash = mix(scan.hash, static_cast<uint64_t>(real_device().type()));
  }
  for (size_t i = 0; i < count; ++i) {
    scan.argument(arguments[i], op.arguments[i]);
  }
  if (C10_UNLIKELY(scan.on_several_devices)) { // as on any accelerator: PyTorch's kernel for one tensor after the other
    op.handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  if (C10_UNLIKELY(scan.writes_through_lazy_bits && !op.has_out)) {
    return record_on_copies(op, stack);
  }
  if (C10_UNLIKELY(!scan.state)) {
    scan.state = &device_state(-1);
  }
  const char* reason = why_eager(scan);
  RecordedCall made;
  if (!reason) {
    record_under(*scan.state, scan.switches);
    reason = record_node(scan, arguments, made);
  }
  if (C10_UNLIKELY(reason != nullptr)) {
    return run_eagerly(op, stack, reason);
  }
  size_t item = 0;
  const size_t returns = op.handle.schema().returns().size();
  c10::SmallVector<c10::IValue, 2> results;
  for (size_t i = 0; i < returns; ++i) {
    results.push_back(make_result(scan, *made.signature, item, made.storages));
  }
  torch::jit::drop(*stack, count);
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
  for (const c10::Warning& warning : made.signature->warnings) {
    c10::warn(warning);
  }
  if (C10_UNLIKELY(made.is_due)) {
    scan.state->executor->speculate();
  }
}

void set_max_pending(uint32_t nodes) {
  max_pending = nodes;
}

void set_chunks(c10::DeviceIndex device, uint32_t nodes) {
  chunks.at(device) = nodes;
}

bool may_be_taken_back(const DeviceState& state) {
  const Batch* in_flight = state.executor->batch_in_flight();
  return epochs_with_failures[state.index] == state.epoch || (in_flight && in_flight->may_fail);
}

int32_t set_region(int32_t region) {
  std::swap(region, current_region);
  return region;
}

} // namespace tarry
