#include "execute/batch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <tuple>

#include "execute/executor.h"
#include "device/hooks.h"
#include "core/numbers.h"
#include "record/opaque.h"
#include "record/provenance.h"
#include "record/scan.h"

namespace tarry {
namespace {

bool before(const NodePtr& a, const NodePtr& b) {
  return a->epoch != b->epoch ? a->epoch < b->epoch : a->position < b->position;
}

// All nodes that the roots need, in program order. Called under the lock.
void gather(Batch& batch) {
  const DeviceState& state = *batch.state;
  std::vector<NodePtr> recorded(state.position); // in this epoch, by position; those of earlier ones are few
  ska::flat_hash_map<const Node*, bool> older;
  std::vector<Node*> stack;
  stack.reserve(state.position);
  auto visit = [&](const NodePtr& node) {
    const bool is_current = node->epoch == state.epoch;
    if (is_current ? static_cast<bool>(recorded[node->position]) : !older.emplace(node.get(), true).second) {
      return;
    }
    if (!is_input(*node)) {
      stack.push_back(node.get());
    }
    (is_current ? recorded[node->position] : batch.order.emplace_back()) = node;
  };
  for (const Root& root : batch.roots) {
    visit(root.node);
  }
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    for (const Edge& edge : node->edges) {
      visit(edge.node);
    }
  }
  // Recording order is program order.
  std::sort(batch.order.begin(), batch.order.end(), before);
  batch.order.reserve(batch.order.size() + recorded.size());
  for (NodePtr& node : recorded) {
    if (node) {
      batch.order.push_back(std::move(node));
    }
  }
  std::sort(batch.roots.begin(), batch.roots.end(), [](const Root& a, const Root& b) {
    return a.node == b.node ? a.output < b.output : before(a.node, b.node);
  });
  batch.number_values(state.epoch);
  batch.may_fail = std::any_of(batch.order.begin(), batch.order.end(), [](const NodePtr& node) { return node->may_fail; });
  for (const Root& root : batch.roots) {
    batch.key = mix(mix(batch.key, root.node->hash), root.output);
    const NodePtr& leaf = root.storage->leaf;
    const bool stands = leaf && leaf->epoch == root.storage->leaf_epoch && leaf->leaf_layout == root.storage->home;
    batch.replaces.push_back(stands ? batch.find_index(*leaf) : -1);
  }
}

NodePtr copy_node(const Node& node) {
  auto copy = c10::make_intrusive<Node>();
  copy->op = node.op;
  copy->signature = node.signature;
  copy->type_hash = node.type_hash;
  copy->hash = node.hash;
  copy->position = node.position; // of no epoch: the recorder does not use it again
  copy->site = node.site;
  copy->region = node.region;
  copy->constants = node.constants;
  copy->slots = node.slots;
  copy->mutations = node.mutations;
  copy->leaf_layout = node.leaf_layout;
  copy->may_fail = node.may_fail;
  return copy;
}

} // namespace

std::shared_ptr<Batch> collect(DeviceState& state) {
  check_fork();
  auto batch = std::make_shared<Batch>();
  batch->state = &state;
  Graveyard graveyard;
  std::vector<NodePtr> old_history;
  std::lock_guard<std::mutex> guard(state.mutex);
  TORCH_INTERNAL_ASSERT(!state.executor->is_busy());
  for (TarryStorage* storage = state.pending; storage; storage = storage->next) {
    batch->roots.push_back({storage, storage->value.node, storage->value.output});
  }
  const DirectCalls& direct = state.direct;
  batch->is_partial = direct.direct != 0;
  batch->stretch = direct.stretch;
  if (batch->roots.empty()) { // what was recorded is needed by no tensor any more
    state.next_epoch(graveyard);
    return nullptr;
  }
  gather(*batch);
  for (Root& root : batch->roots) {
    if (root.storage->claim) {
      *root.storage->claim = nullptr; // of an earlier batch that still exists: it must not touch the storage again
    }
    root.storage->claim = &root.storage;
  }
  batch->began = state.began;
  batch->epoch = state.next_epoch(graveyard);
  old_history.swap(state.history);
  return batch;
}

std::shared_ptr<Batch> peek(const std::vector<at::Tensor>& tensors) {
  check_fork();
  auto batch = std::make_shared<Batch>();
  batch->state = nullptr;
  batch->epoch = 0;
  std::vector<TarryStorage*> storages;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(is_tarry(tensor), "tarry.graph: expected tensors on device 'tarry', but got one on '", tensor.device(), "'");
    for (const at::Tensor& part : strided_parts(tensor)) {
      storages.push_back(storage_of(part.unsafeGetTensorImpl()));
      TORCH_CHECK(storages.back(), "tarry.graph: this tensor was made from a raw pointer");
      TORCH_CHECK(!batch->state || batch->state == storages.back()->state, "tarry.graph: the tensors are on different devices");
      batch->state = storages.back()->state;
    }
  }
  if (storages.empty()) {
    return nullptr;
  }
  batch->state->executor->wait();
  Graveyard graveyard;
  std::unique_lock<std::mutex> lock(batch->state->mutex);
  for (TarryStorage* storage : storages) {
    if (FailurePtr failure = storage->failure) {
      lock.unlock();
      batch->roots.clear();
      failure->raise();
    }
  }
  for (TarryStorage* storage : storages) {
    Value value = current_value(storage, graveyard);
    batch->roots.push_back({storage, std::move(value.node), value.output});
  }
  gather(*batch);
  for (Root& root : batch->roots) {
    root.storage = nullptr; // nothing will be committed
  }
  return batch;
}

std::shared_ptr<Batch> copy_batch(const Batch& batch) {
  auto copy = std::make_shared<Batch>();
  copy->state = batch.state;
  copy->epoch = 0;
  copy->key = batch.key;
  copy->replaces = batch.replaces;
  copy->may_fail = batch.may_fail;
  copy->replayed = true;
  std::vector<NodePtr> copies(batch.values + 1); // by the index of its first value
  for (const NodePtr& node : batch.order) {
    NodePtr made = copy_node(*node);
    // What an input was computed from, in an earlier batch, is not part of this one. A replay's own nodes are never inputs:
    // if they have results, these were kept for nodes that another thread has recorded meanwhile.
    if (batch.replayed || !is_input(*node)) {
      for (const Edge& edge : node->edges) {
        made->edges.push_back({copies[batch.index_of(*edge.node)], edge.output, edge.view});
      }
    }
    copies[batch.index_of(*node)] = made;
    copy->order.push_back(std::move(made));
  }
  for (const Root& root : batch.roots) {
    copy->roots.push_back({nullptr, copies[batch.index_of(*root.node)], root.output});
  }
  copy->number_values(/*epoch=*/0);
  return copy;
}

Batch::~Batch() {
  std::lock_guard<std::mutex> guard(state->mutex);
  for (const Root& root : roots) {
    if (root.storage) {
      root.storage->claim = nullptr;
    }
  }
}

void Batch::number_values(uint64_t epoch) {
  indexed_epoch_ = epoch;
  for (const NodePtr& node : order) {
    if (node->epoch != epoch) {
      older_indices_[node.get()] = values;
    } else {
      if (indices_by_position_.size() <= node->position) {
        indices_by_position_.resize(std::max<size_t>(node->position + 1, order.size()), UINT32_MAX); // -1 as find_index() gives it
      }
      indices_by_position_[node->position] = values;
    }
    values += static_cast<uint32_t>(node->outputs());
  }
}

int32_t Batch::find_index(const Node& node) const {
  if (node.epoch == indexed_epoch_) {
    return node.position < indices_by_position_.size() ? static_cast<int32_t>(indices_by_position_[node.position]) : -1;
  }
  const auto found = older_indices_.find(&node);
  return found == older_indices_.end() ? -1 : static_cast<int32_t>(found->second);
}

size_t Batch::operations() const {
  return static_cast<size_t>(std::count_if(order.begin(), order.end(), [](const NodePtr& node) { return !is_input(*node); }));
}

size_t Batch::leaves() const {
  return order.size() - operations();
}

Hash128 Batch::call_site() const {
  std::vector<std::pair<const Operator*, uint32_t>> found;
  for (const NodePtr& node : order) {
    if (!is_input(*node)) {
      found.emplace_back(node->op, site_without_module(node->site));
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  Hash128 hash;
  for (const auto& [op, site] : found) {
    hash = mix(mix(hash, reinterpret_cast<uint64_t>(op)), site);
  }
  return hash;
}

at::Tensor clone_exactly(const at::Tensor& tensor) {
  at::Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
  copy.copy_(tensor);
  return copy;
}

at::Tensor alias(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false));
}

std::vector<at::Tensor> Batch::inputs(const std::vector<int64_t>& update, bool preserve) {
  PlainDispatch plain;
  std::vector<at::Tensor> tensors;
  std::vector<bool> updated(values);
  for (const int64_t position : update) {
    updated.at(position) = true;
  }
  for (const NodePtr& node : order) {
    if (node->is_leaf()) {
      node->data = on_real_device(node->data, *state); // which stays as it is if that fails
      const bool is_own = node->data.use_count() == 1 && node->data.storage().use_count() == 1;
      if (updated[tensors.size()] && (preserve || !is_own)) {
        at::Tensor copy = clone_exactly(node->data);
        originals.push_back({node.get(), is_own ? std::move(copy) : std::exchange(node->data, std::move(copy)), is_own});
      }
      tensors.push_back(alias(node->data));
    } else if (node->results) {
      for (const at::Tensor& result : *node->results) {
        tensors.push_back(result.defined() ? alias(on_real_device(result, *state)) : result);
      }
    }
  }
  return tensors;
}

void Batch::recover(const std::vector<int64_t>& update, const WriteLog& log, uint32_t lane) {
  std::vector<const Node*> written; // by position
  for (const NodePtr& node : order) {
    if (is_input(*node)) {
      written.insert(written.end(), node->is_leaf() ? 1 : node->results->size(), node->is_leaf() ? node.get() : nullptr);
    }
  }
  PlainDispatch plain;
  ska::flat_hash_map<const Node*, bool> restored;
  for (Original& original : originals) {
    if (original.is_backup) {
      original.leaf->data.copy_(original.before);
      left.tensors.push_back(std::move(original.before));
    } else {
      left.tensors.push_back(std::exchange(original.leaf->data, std::move(original.before)));
    }
    restored[original.leaf] = true;
  }
  originals.clear();
  for (const int64_t position : update) {
    const Node* leaf = written.at(position);
    if (leaf && !restored.count(leaf) && leaf->data.defined() && !leaf->data.is_meta() && log.has(leaf->data)) {
      lost.push_back(leaf);
    }
  }
  if (!lost.empty()) {
    loss = caught_failure(lane, "while a program was updating tensors in place: what they held before is lost");
  }
}

std::vector<at::Tensor> Batch::own_inputs() const {
  std::vector<at::Tensor> tensors;
  for (const NodePtr& node : order) {
    if (node->is_leaf()) {
      tensors.push_back(node->data);
    } else if (node->results) {
      tensors.insert(tensors.end(), node->results->begin(), node->results->end());
    }
  }
  return tensors;
}

std::vector<c10::IValue> Batch::numbers() const {
  std::vector<c10::IValue> found;
  for (const NodePtr& node : order) {
    if (!is_input(*node)) {
      append_numbers(*node, found);
    }
  }
  return found;
}

std::pair<std::vector<uint32_t>, std::vector<uint32_t>> Batch::positions() const {
  std::vector<uint32_t> inputs, numbers;
  std::vector<c10::IValue> found;
  for (const NodePtr& node : order) {
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

// Strides of dimensions that are never stepped along (of size 1, or of an empty tensor) may be anything.
bool differs_in_idle_strides(const at::Tensor& tensor, const Layout& layout) {
  if (!tensor.defined() || tensor.scalar_type() != layout.dtype || tensor.sizes() != c10::IntArrayRef(layout.sizes) ||
      tensor.storage_offset() != 0 || tensor.strides() == c10::IntArrayRef(layout.strides)) {
    return false;
  }
  for (size_t d = 0; layout.numel != 0 && d < layout.sizes.size(); ++d) {
    if (layout.sizes[d] != 1 && tensor.strides()[d] != layout.strides[d]) {
      return false;
    }
  }
  return true;
}

// The memory that a tensor's elements lie in.
std::pair<const char*, const char*> memory_of(const at::Tensor& tensor) {
  const auto* start = static_cast<const char*>(tensor.const_data_ptr());
  return {start, start + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize())};
}

} // namespace

void Batch::check_count(const std::vector<at::Tensor>& outputs) const {
  TORCH_CHECK(
      outputs.size() == roots.size(), "tarry: the program gave ", outputs.size(), " results for ", roots.size(), " outputs");
}

// Results that lie in the memory of an input or of another result become copies; `given`: those that are as the program gave them.
void Batch::separate(std::vector<at::Tensor>& outputs, const std::vector<bool>& given) const {
  struct Piece {
    const char* start;
    const char* end;
    int64_t output; // -1: an input's
  };
  std::vector<Piece> pieces;
  auto add = [&](const at::Tensor& tensor, int64_t output) {
    if (tensor.defined() && tensor.numel() != 0 && !tensor.is_meta()) {
      const auto [start, end] = memory_of(tensor);
      pieces.push_back({start, end, output});
    }
  };
  for (const at::Tensor& input : own_inputs()) {
    add(input, -1);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (given[i]) {
      add(outputs[i], static_cast<int64_t>(i));
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::tie(a.start, a.output) < std::tie(b.start, b.output);
  });
  const char* reached = nullptr;
  int64_t owner = -1;
  for (const Piece& piece : pieces) {
    if (reached && piece.start < reached) {
      const int64_t copied = piece.output >= 0 ? piece.output : owner;
      if (copied >= 0) {
        outputs[copied] = clone_exactly(outputs[copied]);
      }
    }
    if (!reached || piece.end > reached) {
      reached = piece.end;
      owner = piece.output;
    }
  }
}

void Batch::commit_results(std::vector<at::Tensor> outputs) {
  PlainDispatch plain;
  check_count(outputs);
  std::vector<Node*> leaves(values); // the leaf that each value is of, if it is one
  for (const NodePtr& node : order) {
    if (node->is_leaf()) {
      leaves[index_of(*node)] = node.get();
    }
  }
  std::vector<bool> given(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Layout* layout = roots[i].node->output_layout(roots[i].output);
    if (!outputs[i].defined()) {
      if (replaces[i] >= 0 && leaves[replaces[i]]) {
        outputs[i] = leaves[replaces[i]]->data;
      }
      TORCH_CHECK(outputs[i].defined(), "tarry: there is no result ", i, ", and it replaces no input");
      continue;
    }
    if (outputs[i].is_meta()) {
      continue; // data of the backend's own, which keep the very tensor that they hang on
    }
    TORCH_CHECK(
        outputs[i].scalar_type() == layout->dtype && outputs[i].sizes() == c10::IntArrayRef(layout->sizes), "tarry: result ", i,
        " of the program (", roots[i].node->op ? roots[i].node->op->name : "input", ") is ", outputs[i].scalar_type(),
        outputs[i].sizes(), ", but ", layout->dtype, layout->sizes, " was recorded");
    const bool lazy = outputs[i].is_conj() || outputs[i].is_neg();
    if (lazy || (!layout->describes(outputs[i].unsafeGetTensorImpl()) && !differs_in_idle_strides(outputs[i], *layout))) {
      at::Tensor exact = at::empty_strided(layout->sizes, layout->strides, outputs[i].options());
      exact.copy_(outputs[i]);
      outputs[i] = std::move(exact);
    } else {
      outputs[i] = alias(outputs[i]); // see inputs()
      given[i] = true;
    }
  }
  separate(outputs, given);
  commit(std::move(outputs));
}

// Nothing that is recorded later reads the leaves: a new epoch has its own. `quiet`: no later node refers to the others, either,
// and the recorder may use them again.
void Batch::release_nodes(bool quiet, std::vector<NodePtr>& history, Graveyard& graveyard) {
  for (NodePtr& node : order) {
    if (node->is_leaf() && node->data.defined()) {
      graveyard.tensors.push_back(std::move(node->data));
    }
    if (quiet && node->results) {
      for (at::Tensor& result : *node->results) {
        graveyard.tensors.push_back(std::move(result));
      }
      node->results.reset();
      continue; // of an earlier, interrupted epoch: not to be used again
    }
    if (quiet && node->epoch == epoch) {
      if (history.size() <= node->position) {
        history.resize(node->position + 1);
      }
      history[node->position] = node;
    }
  }
}

void Batch::commit(std::vector<at::Tensor> outputs) {
  check_count(outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Layout* layout = roots[i].node->output_layout(roots[i].output);
    if (differs_in_idle_strides(outputs[i], *layout)) {
      outputs[i] = view_as_layout(outputs[i], layout);
    }
    TORCH_CHECK(
        layout->describes(outputs[i].unsafeGetTensorImpl()), "tarry: result ", i, " of the program (",
        roots[i].node->op ? roots[i].node->op->name : "input", ") is ", outputs[i].scalar_type(), outputs[i].sizes(),
        " with strides ", outputs[i].strides(), ", but ", layout->dtype, layout->sizes, " with strides ", layout->strides,
        " was recorded");
  }
  for (size_t i = 0; i < in_place.size(); ++i) {
    if (in_place[i].defined() && !outputs[i].is_same(in_place[i])) {
      in_place[i].copy_(outputs[i]); // the next step has this buffer already
    }
  }
  Graveyard here;
  const bool in_flight = mode == Mode::InFlight;
  Graveyard& graveyard = in_flight ? left : here;
  std::lock_guard<std::mutex> guard(state->mutex);
  // Nothing was recorded since collect(); or a thread that needed one of the nodes would have waited.
  const bool quiet = in_flight || state->position == 0;
  auto& history = in_flight ? state->executor->other_history() : state->history;
  for (size_t i = 0; i < roots.size(); ++i) {
    Root& root = roots[i];
    if (!quiet) {
      // A node recorded meanwhile may refer to this one.
      if (!root.node->results) {
        root.node->results = std::make_unique<std::vector<at::Tensor>>(root.node->outputs());
      }
      (*root.node->results)[root.output] = outputs[i];
    }
    if (root.storage && root.storage->value.node == root.node && root.storage->value.output == root.output) {
      set_data(root.storage, std::move(outputs[i]), graveyard);
    }
  }
  for (at::Tensor& buffer : in_place) {
    graveyard.tensors.push_back(std::move(buffer));
  }
  in_place.clear();
  for (Original& original : originals) {
    graveyard.tensors.push_back(std::move(original.before));
  }
  originals.clear();
  release_nodes(quiet, history, graveyard);
}

// ---- comparing programs

Structure::Structure(const Batch& batch) : state(batch.state), key(batch.key), replaces(batch.replaces) {
  for (const NodePtr& node : batch.order) {
    Call call{node->op, node->signature, node->leaf_layout, node->region, {}, {}, {}};
    if (is_input(*node)) {
      call.op = nullptr;
      call.leaf_layout = node->is_leaf() ? node->leaf_layout : nullptr; // null: a kept result, which matches nothing
    } else {
      call.slots = node->slots;
      call.constants = node->constants;
      for (const Edge& edge : node->edges) {
        call.views.push_back(edge.view);
        wiring.push_back(batch.index_of(*edge.node) + edge.output);
      }
    }
    calls.push_back(std::move(call));
  }
  for (const Root& root : batch.roots) {
    wiring.push_back(batch.index_of(*root.node) + root.output);
  }
}

bool Batch::matches(const Structure& structure) const {
  if (state != structure.state || order.size() != structure.calls.size() || replaces != structure.replaces) {
    return false;
  }
  size_t wire = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const Node& a = *order[i];
    const Structure::Call& b = structure.calls[i];
    if (is_input(a)) {
      if (!a.is_leaf() || b.op || a.leaf_layout != b.leaf_layout) {
        return false;
      }
      continue;
    }
    if (a.op != b.op || a.signature != b.signature || a.edges.size() != b.views.size() || a.region != b.region ||
        !same_call(a, b.slots, b.constants)) {
      return false;
    }
    for (size_t e = 0; e < a.edges.size(); ++e) {
      if (a.edges[e].view != b.views[e]) {
        return false;
      }
    }
    if (wire + a.edges.size() > structure.wiring.size()) {
      return false;
    }
    for (const Edge& edge : a.edges) {
      if (structure.wiring[wire++] != index_of(*edge.node) + edge.output) {
        return false;
      }
    }
  }
  if (wire + roots.size() != structure.wiring.size()) {
    return false;
  }
  for (const Root& root : roots) {
    if (structure.wiring[wire++] != index_of(*root.node) + root.output) {
      return false;
    }
  }
  return true;
}

} // namespace tarry
