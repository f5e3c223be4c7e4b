#include "replay/verify.h"

#include "core/generator.h"
#include "core/numbers.h"

namespace tarry {

struct Expectation::Storages {
  const Expectation& expectation;
  std::vector<uint64_t> fresh;

  uint64_t at(const Replay::StorageRef& ref) const {
    switch (ref.from) {
      case Replay::From::Argument:
        return expectation.argument_serials_.at(ref.index);
      case Replay::From::Gradient:
        return expectation.gradient_serials_.at(ref.index);
      case Replay::From::Kept:
        return expectation.kept_serials_.at(ref.index);
      case Replay::From::Fresh:
        return ref.index < fresh.size() ? fresh[ref.index] : 0;
      default:
        return 0;
    }
  }

  bool has(const Replay::Tensor& expected, const at::Tensor& tensor) const {
    return tensor.defined() && is_tarry(tensor) && !tensor.is_conj() && !tensor.is_neg() &&
        serial_of(tensor) == at(expected.storage) && expected.layout->describes(tensor.unsafeGetTensorImpl());
  }
};

Expectation::Expectation(std::shared_ptr<Replay> replay, std::vector<at::Tensor> arguments, const std::vector<double>& numbers)
    : replay_(std::move(replay)),
      expected_(replay_->with_numbers(numbers)),
      plan_(replay_->plan()),
      arguments_(std::move(arguments)),
      random_(default_generator(expected_.state->index).get<TarryGenerator>()->advance(0)) {
  for (const at::Tensor& argument : arguments_) {
    argument_serials_.push_back(argument.defined() ? serial_of(argument) : 0);
  }
  for (const at::Tensor& holder : plan_.holders) {
    gradient_serials_.push_back(holder.grad().defined() ? serial_of(holder.grad()) : 0);
  }
  for (const WeakStorage& kept : plan_.kept) {
    const StoragePtr storage = kept.lock();
    kept_serials_.push_back(storage ? storage->serial : 0);
  }
}

bool Expectation::same_leaf(const Trace::Leaf& leaf, const Replay::StorageRef& source, const Storages& storages) const {
  switch (source.from) {
    case Replay::From::Uploaded:
      return leaf.uploaded.is_same(arguments_.at(source.index));
    case Replay::From::UploadedHost:
      return leaf.uploaded.is_same(plan_.hosts.at(source.index));
    default:
      return !leaf.uploaded.defined() && leaf.serial == storages.at(source);
  }
}

bool Expectation::same_nodes(const Batch& batch, const Trace& trace, const Storages& storages) const {
  if (batch.order.size() != expected_.order.size()) {
    return false;
  }
  ska::flat_hash_map<const Node*, const Trace::Leaf*> leaves;
  for (const Trace::Leaf& leaf : trace.leaves) {
    leaves[leaf.node.get()] = &leaf;
  }
  size_t source = 0, draw = 0;
  for (size_t i = 0; i < batch.order.size(); ++i) {
    const Node &a = *expected_.order[i], &b = *batch.order[i];
    if (a.op != b.op || b.results || a.is_leaf() != b.is_leaf()) {
      return false;
    }
    if (a.is_leaf()) {
      const auto leaf = leaves.find(&b);
      if (leaf == leaves.end() || a.leaf_layout != b.leaf_layout || !same_leaf(*leaf->second, plan_.sources[source++], storages)) {
        return false;
      }
      continue;
    }
    size_t constants = a.constants.size();
    if (draw < plan_.seeds.size() && plan_.seeds[draw].first == i) {
      --constants; // the last one is the seed
      const uint64_t offset = random_.second + plan_.seeds[draw++].second;
      if (b.constants.empty() || b.constants.back().toInt() != derive_seed(random_.first, offset)) {
        return false;
      }
    }
    if (b.lane != trace.lane || a.signature != b.signature || a.region != b.region || a.slots != b.slots ||
        a.edges.size() != b.edges.size() || a.constants.size() != b.constants.size() ||
        !std::equal(a.constants.begin(), a.constants.begin() + constants, b.constants.begin(), same_value)) {
      return false;
    }
    for (size_t k = 0; k < a.edges.size(); ++k) {
      const Edge &x = a.edges[k], &y = b.edges[k];
      if (x.view != y.view || x.output != y.output || expected_.slot_of(*x.node) != batch.slot_of(*y.node)) {
        return false;
      }
    }
  }
  return true;
}

bool Expectation::same_roots(const Batch& batch, const Trace& trace, Storages& storages, std::vector<StoragePtr>& held) const {
  if (batch.roots.size() != expected_.roots.size()) {
    return false;
  }
  storages.fresh.resize(batch.roots.size());
  for (size_t i = 0; i < batch.roots.size(); ++i) {
    const Root &a = expected_.roots[i], &b = batch.roots[i];
    held.push_back(b.storage ? hold(b.storage) : StoragePtr());
    const uint64_t serial = held.back() ? held.back()->serial : 0;
    const Replay::StorageRef& target = plan_.targets[i];
    if (target.from == Replay::From::Fresh) {
      storages.fresh.at(target.index) = serial;
    }
    const bool is_right = target.from == Replay::From::Fresh ? serial >= trace.first_serial : serial == storages.at(target);
    if (!is_right || a.output != b.output || expected_.slot_of(*a.node) != batch.slot_of(*b.node)) {
      return false;
    }
  }
  return true;
}

bool Expectation::same_gradients(const Storages& storages) const {
  std::vector<const Replay::Gradient*> changes(plan_.holders.size());
  for (const Replay::Gradient& gradient : plan_.gradients) {
    if (gradient.holder.from == Replay::From::Argument) {
      return false;
    }
    changes.at(gradient.holder.index) = &gradient;
  }
  for (size_t i = 0; i < plan_.holders.size(); ++i) {
    const at::Tensor& now = plan_.holders[i].grad();
    if (!changes[i] || !changes[i]->tensor) {
      const uint64_t before = changes[i] ? 0 : gradient_serials_[i];
      if (before ? !now.defined() || serial_of(now) != before : now.defined()) {
        return false;
      }
    } else if (!now.defined() || now.requires_grad() || !storages.has(*changes[i]->tensor, now)) {
      return false;
    }
  }
  return true;
}

bool Expectation::met(const Batch& batch, const Trace& trace, const std::vector<at::Tensor>& results) const {
  if (batch.state != expected_.state || results.size() != plan_.results.size() || !trace.reads.empty() ||
      !trace.overwritten.empty()) {
    return false;
  }
  if (std::any_of(arguments_.begin(), arguments_.end(), [](const at::Tensor& t) { return t.defined() && t.requires_grad(); })) {
    return false; // they may have gradients of their own
  }
  const auto random = default_generator(batch.state->index).get<TarryGenerator>()->advance(0);
  if (random.first != random_.first || random.second != random_.second + plan_.draws) {
    return false;
  }
  Storages storages{*this, {}};
  bool is_same = false;
  {
    std::vector<StoragePtr> held;
    std::lock_guard<std::mutex> guard(batch.state->mutex);
    is_same = !trace.shared && same_nodes(batch, trace, storages) && same_roots(batch, trace, storages, held);
  }
  for (size_t i = 0; is_same && i < results.size(); ++i) {
    is_same = storages.has(plan_.results[i], results[i]);
  }
  return is_same && same_gradients(storages);
}

} // namespace tarry
