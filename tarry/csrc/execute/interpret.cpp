// The reference path: a batch executed node by node with ATen on the real device.
//
// Buffers follow copy-on-write: an operator writes into its argument's buffer if nothing else can see it (no later node, no
// storage, no other tensor), and into a copy otherwise. So a step that updates parameters in place updates them in place here.
#include "execute/interpret.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <chrono>

#include "execute/batch.h"
#include "core/arguments.h"
#include "execute/executor.h"
#include "core/fault.h"
#include "core/gil.h"
#include "core/numbers.h"
#include "record/provenance.h"
#include "record/record.h"
#include "core/switches.h"

namespace tarry {

SeededCall::SeededCall(const Operator& op, int64_t seed, torch::jit::Stack& stack, c10::Device device) {
  if (op.generator_argument >= 0) {
    at::Generator generator;
    if (device.is_cpu()) {
      generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
    } else {
      generator = at::globalContext().defaultGenerator(device).clone();
      generator.set_current_seed(static_cast<uint64_t>(seed));
    }
    stack[stack.size() - op.arguments.size() + op.generator_argument] = c10::IValue(std::move(generator));
  } else {
    borrowed_ = at::globalContext().defaultGenerator(device);
    saved_ = borrowed_.clone();
    borrowed_.set_current_seed(static_cast<uint64_t>(seed));
  }
}

SeededCall::~SeededCall() {
  if (borrowed_.defined()) {
    borrowed_.set_state(saved_.get_state());
  }
}

namespace {

struct FailedSteps {
  std::mutex mutex;
  ska::flat_hash_map<uint32_t, std::vector<std::pair<int, uint64_t>>> by_lane;
};

FailedSteps& all_failed_steps() {
  static auto* instance = new FailedSteps();
  return *instance;
}

void note_failed_step(uint32_t lane, const Batch& batch) {
  FailedSteps& shared = all_failed_steps();
  std::lock_guard<std::mutex> guard(shared.mutex);
  shared.by_lane[lane].emplace_back(batch.state->index, batch.epoch);
}

using Clock = std::chrono::steady_clock;

class Interpreter {
 public:
  Interpreter(Batch& batch, bool interruptible)
      : batch_(batch),
        device_(real_device(batch.state->index)),
        interruptible_(interruptible),
        values_(batch.slots),
        uses_(batch.slots, 0) {}

  bool run(); // whether all could be computed

 private:
  void load(Node& node);
  void execute(Node& node);
  void try_execute(Node& node); // if it fails, the error is kept
  void fail(const Node& node, FailurePtr failure);
  at::Tensor take_for_write(uint32_t slot, uint32_t own_uses);
  uint32_t slot_of(const Edge& edge, const Node& reader) const {
    if (C10_LIKELY(failed_.empty())) {
      return batch_.slot_of(*edge.node) + edge.output;
    }
    const Remains source = source_of(edge, lane_of(reader));
    return batch_.slot_of(*source.node) + source.output; // a node without it does not run: inherited_failure()
  }
  void take_written(const Node& node);
  at::Tensor tensor_argument(const Node& node, Operand operand, bool is_mutable);
  c10::IValue list_argument(const Node& node, const Argument& argument, c10::ArrayRef<Operand> items);
  void push_arguments(const Node& node);
  void call(const Node& node);
  void store_results(Node& node);
  void store(Node& node, uint32_t output, at::Tensor value);
  void check_signals();
  // Keeps what is computed so far with its nodes, for nodes that still need it: the batch can be taken up again later.
  void keep_results(); // under the lock
  void settle_failures();
  // What a storage is left with. `failure`: why, if that is not what was recorded.
  struct Remains {
    NodePtr node; // the last value that could be computed; null if there is none to go back to
    uint32_t output = 0;
    FailurePtr failure;
    bool uninitialised = false; // it goes back to before anything was written
  };
  Remains remains_of(NodePtr node, uint32_t output) const; // back along the writes
  at::Tensor value_of(const Remains& remains) const {
    return remains.node ? values_[batch_.slot_of(*remains.node) + remains.output] : at::Tensor();
  }
  void settle(TarryStorage* storage, const Remains& remains, Graveyard& graveyard);
  void fail_later_nodes(const std::vector<at::Tensor>& lost, Graveyard& graveyard);
  FailurePtr failure_of(const Node& node) const {
    const auto found = failed_.find(&node);
    return found == failed_.end() ? nullptr : found->second;
  }
  // What an edge reads: the very value or, if another thread's write to it failed, the value from before that write.
  Remains source_of(const Edge& edge, uint32_t lane) const;
  // Why a node must not run after a failure, if so: it reads what has failed, or its thread has failed before and it would write
  // to something older than that. In eager the program would have stopped there, so later writes must not show.
  FailurePtr inherited_failure(const Node& node) const;
  static const Node* origin_of(const Edge& edge);
  uint32_t lane_of(const Node& node) const { return batch_.replayed ? batch_.lane : node.lane; }
  void raise_failures(); // those of this thread; settle_failures() keeps the others for theirs

  Batch& batch_;
  const c10::Device device_;
  const bool interruptible_;
  std::vector<at::Tensor> values_;
  std::vector<uint32_t> uses_; // edges and roots that still need the value
  torch::jit::Stack stack_;
  std::vector<std::pair<uint32_t, at::Tensor>> written_; // of the node in execution: slot and buffer written
  ska::flat_hash_map<const Node*, FailurePtr> failed_;
  struct FirstFailure {
    const Node* node; // null: a program, before any node
    FailurePtr failure;
  };
  std::vector<FirstFailure> first_failures_; // of each lane that has failed
  const FirstFailure* first_failure(uint32_t lane) const {
    const auto found = std::find_if(
        first_failures_.begin(), first_failures_.end(), [lane](const FirstFailure& first) { return first.failure->lane == lane; });
    return found == first_failures_.end() ? nullptr : &*found;
  }
  Clock::time_point next_check_ = Clock::now() + std::chrono::milliseconds(50);
};

void Interpreter::load(Node& node) {
  if (node.is_leaf()) {
    values_[batch_.slot_of(node)] = on_real_device(std::move(node.data), *batch_.state);
  } else {
    for (size_t i = 0; i < node.results->size(); ++i) {
      at::Tensor& result = (*node.results)[i];
      values_[batch_.slot_of(node) + i] = result.defined() ? on_real_device(std::move(result), *batch_.state) : at::Tensor();
    }
  }
}

at::Tensor Interpreter::take_for_write(uint32_t slot, uint32_t own_uses) {
  at::Tensor& value = values_[slot];
  const bool last = uses_[slot] == own_uses;
  if (last && value.use_count() == 1 && value.storage().use_count() == 1) {
    return std::move(value);
  }
  return clone_exactly(value);
}

at::Tensor Interpreter::tensor_argument(const Node& node, Operand operand, bool is_mutable) {
  if (operand.slot == kAbsent) {
    return at::Tensor();
  }
  if (operand.slot == kWrappedNumber) {
    return wrapped_number(node.constants[operand.index].toScalar());
  }
  const Edge& source = node.edges[operand.index];
  const uint32_t from = slot_of(source, node);
  const at::Tensor* home = nullptr;
  for (auto& [written, buffer] : written_) {
    if (written == from) {
      home = &buffer;
    }
  }
  if (!home && !is_mutable) {
    // A value that this node also writes is seen through the written buffer, as in eager.
    home = &values_[from];
  }
  TORCH_INTERNAL_ASSERT(home && home->defined());
  return source.view ? view_as_layout(*home, source.view) : *home;
}

void Interpreter::store(Node& node, uint32_t output, at::Tensor value) {
  const Layout* layout = node.output_layout(output);
  if (!layout->describes(value.unsafeGetTensorImpl())) {
    TORCH_CHECK(
        value.sizes() == c10::IntArrayRef(layout->sizes), "tarry: ", node.op->name, " gave a result of shape ", value.sizes(),
        " where its meta kernel promised ", layout->sizes);
    at::Tensor copy = at::empty_strided(layout->sizes, layout->strides, value.options().dtype(layout->dtype));
    copy.copy_(value);
    value = std::move(copy);
  } else if (value.is_conj() || value.is_neg() || value._is_zerotensor()) {
    value = clone_exactly(value);
  }
  if (uses_[batch_.slot_of(node) + output] != 0) {
    values_[batch_.slot_of(node) + output] = std::move(value);
  }
}

// The buffers that the node writes.
void Interpreter::take_written(const Node& node) {
  written_.clear();
  for (const Mutation& mutation : node.mutations) {
    const Edge& edge = node.edges[mutation.edge];
    const uint32_t from = slot_of(edge, node);
    uint32_t own_uses = 0;
    for (const Edge& other : node.edges) {
      own_uses += other.node == edge.node && other.output == edge.output;
    }
    written_.emplace_back(from, take_for_write(from, own_uses));
  }
}

c10::IValue Interpreter::list_argument(const Node& node, const Argument& argument, c10::ArrayRef<Operand> items) {
  c10::List<at::Tensor> list;
  c10::List<std::optional<at::Tensor>> optional_list;
  for (const Operand& item : items) {
    at::Tensor tensor = tensor_argument(node, item, argument.is_mutable);
    if (argument.is_optional) {
      optional_list.push_back(tensor.defined() ? std::make_optional(std::move(tensor)) : std::nullopt);
    } else {
      list.push_back(std::move(tensor));
    }
  }
  return argument.is_optional ? c10::IValue(std::move(optional_list)) : c10::IValue(std::move(list));
}

void Interpreter::push_arguments(const Node& node) {
  stack_.clear();
  const auto& arguments = node.op->arguments;
  visit_arguments(
      *node.op, node.slots,
      [&](size_t i, Operand operand) {
        const bool none = operand.slot == kAbsent && arguments[i].is_optional;
        stack_.push_back(none ? c10::IValue() : tensor_argument(node, operand, arguments[i].is_mutable));
      },
      [&](size_t i, bool given, c10::ArrayRef<Operand> items) {
        stack_.push_back(given ? list_argument(node, arguments[i], items) : c10::IValue());
      },
      [&](size_t, size_t constant) {
        const c10::IValue& value = node.constants[constant];
        const bool ours = value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1;
        stack_.push_back(ours ? c10::IValue(device_) : value);
      });
}

void Interpreter::call(const Node& node) {
  std::optional<SeededCall> seeded;
  if (node.op->draws(torch::jit::last(stack_, node.op->arguments.size()))) {
    seeded.emplace(*node.op, node.constants.back().toInt(), stack_, device_);
  }
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  } silence;
  std::optional<c10::WarningUtils::WarningHandlerGuard> given; // its warnings came when it was recorded
  if (C10_UNLIKELY(!node.signature->warnings.empty())) {
    given.emplace(&silence);
  }
  node.op->handle.callBoxed(&stack_);
}

// Results that are fresh, in order; those that are the written arguments are found in their buffers.
void Interpreter::store_results(Node& node) {
  uint32_t output = 0;
  size_t item = 0;
  auto take = [&](c10::IValue value) {
    const Signature::Item& spec = node.signature->items[item++];
    if (spec.kind == Signature::Return::Fresh) {
      at::Tensor result = std::move(value).toTensor();
      if (!result.defined()) {
        // The kernel left out a result that the meta kernel promises; nothing can depend on its contents.
        const Layout* layout = node.output_layout(output);
        result = at::empty_strided(layout->sizes, layout->strides, at::TensorOptions().dtype(layout->dtype).device(device_));
      }
      store(node, output++, std::move(result));
    }
  };
  if (node.signature->items.empty() && !node.signature->fresh.empty()) {
    store(node, 0, std::move(stack_[0]).toTensor()); // the node of an uninitialised storage
  } else if (!node.signature->items.empty()) {
    for (c10::IValue& value : stack_) {
      if (value.isTensorList()) {
        ++item;
        for (const c10::IValue& element : value.toListRef()) {
          take(element);
        }
      } else {
        take(std::move(value));
      }
    }
  }
  stack_.clear();
  output = static_cast<uint32_t>(node.signature->fresh.size());
  for (auto& [slot_written, buffer] : written_) {
    store(node, output++, std::move(buffer));
  }
  written_.clear();
}

void Interpreter::execute(Node& node) {
  take_written(node);
  push_arguments(node);
  call(node);
  for (const Edge& used : node.edges) {
    const uint32_t from = batch_.slot_of(*used.node) + used.output;
    if (--uses_[from] == 0) {
      values_[from].reset();
    }
  }
  store_results(node);
}

void Interpreter::try_execute(Node& node) {
  try {
    fault_point();
    execute(node);
  } catch (...) {
    // The arguments taken for writing have what eager would have left there.
    for (auto& [slot, buffer] : written_) {
      if (!values_[slot].defined()) {
        values_[slot] = std::move(buffer);
      }
    }
    written_.clear();
    stack_.clear();
    if (interruptible_ && failed_.empty() && node.mutations.empty() && caught_interrupt()) {
      throw; // the node has changed nothing, and is computed later
    }
    const uint32_t lane = lane_of(node);
    fail(node, caught_failure(lane, "while executing " + node.op->name + ", recorded at " + describe_site(node.site)));
  }
}

// A thread that reads what another's operator failed to compute fails with the same error.
void Interpreter::fail(const Node& node, FailurePtr failure) {
  const uint32_t lane = lane_of(node);
  if (failure->lane != lane) {
    failure = std::make_shared<Failure>(failure->error, lane);
  }
  failed_[&node] = failure;
  if (!first_failure(lane)) {
    first_failures_.push_back({&node, std::move(failure)});
  }
}

void Interpreter::check_signals() {
  if (Clock::now() < next_check_) {
    return;
  }
  const Gil gil;
  if (PyErr_CheckSignals() != 0) {
    throw_python_error();
  }
  next_check_ = Clock::now() + std::chrono::milliseconds(50);
}

void Interpreter::keep_results() {
  for (const NodePtr& node : batch_.order) {
    if (node->is_leaf()) {
      if (values_[batch_.slot_of(*node)].defined()) {
        node->data = values_[batch_.slot_of(*node)];
      }
      continue;
    }
    for (uint32_t i = 0; i < node->outputs(); ++i) {
      at::Tensor& value = values_[batch_.slot_of(*node) + i];
      if (value.defined()) {
        if (!node->results) {
          node->results = std::make_unique<std::vector<at::Tensor>>(node->outputs());
        }
        (*node->results)[i] = value;
      }
    }
  }
}

Interpreter::Remains Interpreter::remains_of(NodePtr node, uint32_t output) const {
  FailurePtr failure;
  while (FailurePtr found = failure_of(*node)) {
    failure = std::move(found);
    if (node->is_leaf() || output < node->signature->fresh.size()) {
      return {nullptr, 0, std::move(failure)};
    }
    const Mutation& write = node->mutations[output - node->signature->fresh.size()];
    if (write.discards) {
      return {nullptr, 0, std::move(failure)};
    }
    const Edge& before = node->edges[write.edge];
    output = before.output;
    node = before.node;
  }
  const bool empty = node->op && node->signature->items.empty() && node->mutations.empty();
  if (failure && empty) {
    return {nullptr, 0, std::move(failure), /*uninitialised=*/true};
  }
  return {std::move(node), output, std::move(failure)};
}

Interpreter::Remains Interpreter::source_of(const Edge& edge, uint32_t lane) const {
  FailurePtr failure = failure_of(*edge.node);
  if (!failure) {
    return {edge.node, edge.output, nullptr};
  }
  return failure->lane == lane ? Remains{nullptr, 0, std::move(failure)} : remains_of(edge.node, edge.output);
}

FailurePtr Interpreter::inherited_failure(const Node& node) const {
  const uint32_t lane = lane_of(node);
  for (const Edge& edge : node.edges) {
    const Remains source = source_of(edge, lane);
    if (source.failure && !value_of(source).defined()) {
      return source.failure;
    }
  }
  const FirstFailure* first = first_failure(lane);
  for (const Mutation& mutation : node.mutations) {
    const Node* origin = first ? origin_of(node.edges[mutation.edge]) : nullptr;
    if (first && (!origin || !first->node || origin->lane != node.lane || batch_.slot_of(*origin) < batch_.slot_of(*first->node))) {
      return first->failure;
    }
  }
  return nullptr;
}

// The node that made the storage which an edge reads, in this batch; null if it is older.
const Node* Interpreter::origin_of(const Edge& edge) {
  const Node* node = edge.node.get();
  uint32_t output = edge.output;
  while (!is_input(*node) && output >= node->signature->fresh.size()) {
    const Mutation& write = node->mutations[output - node->signature->fresh.size()];
    if (write.discards) {
      return nullptr;
    }
    const Edge& before = node->edges[write.edge];
    node = before.node.get();
    output = before.output;
  }
  return is_input(*node) ? nullptr : node;
}

void Interpreter::settle(TarryStorage* storage, const Remains& remains, Graveyard& graveyard) {
  const at::Tensor value = value_of(remains);
  if (value.defined() && storage->home->describes(value.unsafeGetTensorImpl())) {
    set_data(storage, value, graveyard);
  } else {
    set_failed(storage, remains.uninitialised ? nullptr : remains.failure, graveyard);
  }
}

// The nodes of this epoch that something pending needs, in program order. Under the lock.
static std::vector<NodePtr> needed_nodes(const DeviceState& state) {
  std::vector<NodePtr> found;
  ska::flat_hash_map<const Node*, bool> seen;
  const auto visit = [&](const NodePtr& node) {
    if (node->epoch == state.epoch && !seen[node.get()]) {
      seen[node.get()] = true;
      found.push_back(node);
    }
  };
  for (const TarryStorage* storage = state.pending; storage; storage = storage->next) {
    visit(storage->value.node);
  }
  for (size_t i = 0; i < found.size(); ++i) {
    const NodePtr node = found[i];
    for (const Edge& edge : node->edges) {
      visit(edge.node);
    }
  }
  std::sort(found.begin(), found.end(), [](const NodePtr& a, const NodePtr& b) { return a->position < b->position; });
  return found;
}

// Nodes that other threads have recorded meanwhile may refer to nodes that failed, or to buffers (`lost`) that a step in flight
// was to fill. Under the lock.
void Interpreter::fail_later_nodes(const std::vector<at::Tensor>& lost, Graveyard& graveyard) {
  DeviceState& state = *batch_.state;
  for (const NodePtr& node : needed_nodes(state)) {
    if (node->is_leaf()) {
      for (const at::Tensor& buffer : lost) {
        if (node->data.defined() && node->data.storage().is_alias_of(buffer.storage())) {
          failed_[node.get()] = first_failures_.front().failure;
        }
      }
      continue;
    }
    // Before a thread learns of its failure, it may have recorded more: its writes to what is older do not happen, either.
    const FirstFailure* first = first_failure(node->lane);
    for (const Mutation& mutation : node->mutations) {
      const Node* origin = first ? origin_of(node->edges[mutation.edge]) : nullptr;
      if (first && (!origin || origin->epoch != state.epoch || origin->lane != node->lane)) {
        failed_[node.get()] = first->failure;
      }
    }
    for (Edge& edge : node->edges) {
      Remains source = source_of(edge, node->lane);
      if (!source.node) {
        failed_[node.get()] = source.failure;
        break;
      }
      if (source.node != edge.node) {
        graveyard.nodes.push_back(std::exchange(edge.node, std::move(source.node)));
        edge.output = source.output;
      }
    }
  }
  std::vector<TarryStorage*> affected;
  for (TarryStorage* storage = state.pending; storage; storage = storage->next) {
    if (failure_of(*storage->value.node)) {
      affected.push_back(storage);
    }
  }
  for (TarryStorage* storage : affected) {
    Remains remains = remains_of(storage->value.node, storage->value.output);
    if (remains.node && remains.node->is_leaf() && remains.node->data.defined()) {
      set_data(storage, remains.node->data, graveyard);
    } else if (remains.node) {
      graveyard.nodes.push_back(std::exchange(storage->value.node, std::move(remains.node)));
      storage->value.output = remains.output;
    } else {
      set_failed(storage, remains.uninitialised ? nullptr : remains.failure, graveyard);
    }
  }
}

void Interpreter::settle_failures() {
  Graveyard graveyard;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  {
    std::lock_guard<std::mutex> guard(batch_.state->mutex);
    if (batch_.state->position != 0) {
      keep_results(); // nodes recorded meanwhile may refer to these
    }
    std::vector<at::Tensor> lost;
    for (size_t i = 0; i < batch_.roots.size(); ++i) {
      const Root& root = batch_.roots[i];
      const Remains remains = remains_of(root.node, root.output);
      if (i < batch_.in_place.size() && batch_.in_place[i].defined()) { // the next step may have this buffer already
        const at::Tensor& buffer = batch_.in_place[i];
        if (const at::Tensor value = value_of(remains); value.defined()) {
          copies.emplace_back(buffer, value);
        } else {
          lost.push_back(buffer);
          if (root.storage && root.storage->data.is_same(buffer)) {
            set_failed(root.storage, remains.failure, graveyard);
          }
        }
      } else if (root.storage && root.storage->value.node == root.node && root.storage->value.output == root.output) {
        settle(root.storage, remains, graveyard);
      }
    }
    if (batch_.state->position != 0) {
      fail_later_nodes(lost, graveyard);
    }
    for (const FirstFailure& first : first_failures_) { // under the lock: the next write of these threads finds it
      if (first.failure->lane != current_lane()) {
        owe(first.failure);
      }
    }
  }
  for (auto& [buffer, value] : copies) {
    if (!value.is_same(buffer)) {
      buffer.copy_(value);
    }
  }
  batch_.in_place.clear();
}

void Interpreter::raise_failures() {
  FailurePtr mine;
  for (const FirstFailure& first : first_failures_) {
    note_failed_step(first.failure->lane, batch_);
    if (first.failure->lane == current_lane()) {
      mine = first.failure;
    }
  }
  values_.clear();
  failed_.clear();
  first_failures_.clear();
  if (mine) {
    mine->raise();
  }
}

bool Interpreter::run() {
  for (const NodePtr& node : batch_.order) {
    if (!is_input(*node)) {
      for (const Edge& edge : node->edges) {
        ++uses_[batch_.slot_of(*edge.node) + edge.output];
      }
    }
  }
  for (const Root& root : batch_.roots) {
    ++uses_[batch_.slot_of(*root.node) + root.output];
  }
  PlainDispatch plain;
  const RecordedSwitches switches(*batch_.state);
  if (!batch_.lost.empty()) {
    for (const Node* leaf : batch_.lost) {
      failed_[leaf] = batch_.loss;
    }
    first_failures_.push_back({nullptr, batch_.loss});
  }
  try {
    size_t count = 0;
    for (const NodePtr& node : batch_.order) {
      if (is_input(*node)) {
        load(*node);
        continue;
      }
      // After a failure, the rest is computed without a break: what has failed must be settled.
      if (interruptible_ && failed_.empty() && (++count & 63) == 0) {
        check_signals();
      }
      if (C10_UNLIKELY(!failed_.empty())) {
        if (FailurePtr failure = inherited_failure(*node)) {
          fail(*node, std::move(failure));
          continue;
        }
      }
      try_execute(*node);
    }
  } catch (...) {
    // Interrupted: everything is still pending, and nothing is lost.
    std::lock_guard<std::mutex> guard(batch_.state->mutex);
    keep_results();
    throw;
  }
  if (!failed_.empty()) {
    settle_failures();
    raise_failures();
    return false;
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(batch_.roots.size());
  for (const Root& root : batch_.roots) {
    outputs.push_back(values_[batch_.slot_of(*root.node) + root.output]);
  }
  values_.clear();
  batch_.commit(std::move(outputs));
  return true;
}

} // namespace

std::vector<std::pair<int, uint64_t>> failed_steps(uint32_t lane) {
  FailedSteps& shared = all_failed_steps();
  std::lock_guard<std::mutex> guard(shared.mutex);
  const auto found = shared.by_lane.find(lane);
  return found == shared.by_lane.end() ? std::vector<std::pair<int, uint64_t>>() : found->second;
}

bool Batch::interpret(bool interruptible) {
  state->executor->speculator.drop();
  return Interpreter(*this, interruptible).run();
}

} // namespace tarry
