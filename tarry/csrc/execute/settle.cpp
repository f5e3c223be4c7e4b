// What a batch leaves on the reference path if a node fails, or if it is interrupted: see failure.h for the law.
#include "core/numbers.h"
#include "execute/executor.h"
#include "execute/interpret.h"
#include "record/provenance.h"

namespace tarry {

void Interpreter::keep_results() {
  for (const NodePtr& node : batch_.order) {
    if (node->is_leaf()) {
      if (values_[batch_.index_of(*node)].defined()) {
        node->data = values_[batch_.index_of(*node)];
      }
      continue;
    }
    for (uint32_t i = 0; i < node->outputs(); ++i) {
      at::Tensor& value = values_[batch_.index_of(*node) + i];
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
    if (first &&
        (!origin || !first->node || origin->lane != node.lane || batch_.index_of(*origin) < batch_.index_of(*first->node))) {
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
    note_failed_step(first.failure->lane, batch_.state->index, batch_.epoch);
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

} // namespace tarry
