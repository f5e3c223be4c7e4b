#include "execute/host_value.h"

#include <algorithm>

#include "execute/interpret.h"

namespace tarry {
namespace {

constexpr size_t kMaxNodes = 32;
constexpr size_t kMaxBytes = 1 << 18; // of each result

bool is_computable(const Node& node, uint64_t epoch) {
  if (node.is_leaf() || node.may_fail || node.results || node.epoch != epoch || !node.op->has(kListed) || node.op->has(kRandom)) {
    return false;
  }
  for (uint32_t i = 0; i < node.outputs(); ++i) {
    const Layout* layout = node.output_layout(i);
    if (!c10::isIntegralType(layout->dtype, /*includeBool=*/true) || layout->nbytes > kMaxBytes) {
      return false;
    }
  }
  return true;
}

// Appends the node after all that flows into it. False if something in there cannot be computed. Under the lock.
bool gather(const NodePtr& node, std::vector<NodePtr>& order, uint64_t epoch, size_t depth = 0) {
  if (std::find(order.begin(), order.end(), node) != order.end()) {
    return true;
  }
  if (depth > kMaxNodes || order.size() >= kMaxNodes || !is_computable(*node, epoch)) {
    return false;
  }
  for (const Edge& edge : node->edges) {
    if (!gather(edge.node, order, epoch, depth + 1)) {
      return false;
    }
  }
  order.push_back(node);
  return true;
}

} // namespace

at::Tensor host_value(TarryStorage* storage) {
  DeviceState& state = *storage->state;
  Batch recorded; // both are freed after the lock is released
  std::shared_ptr<Batch> batch;
  recorded.state = &state;
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    const Value& value = storage->value;
    if (!value.node || !gather(value.node, recorded.order, state.epoch)) {
      return at::Tensor();
    }
    recorded.roots.push_back({nullptr, value.node, value.output});
    recorded.number_values(state.epoch);
    batch = copy_batch(recorded); // another thread may end the step, and have its nodes used again for the next one
  }
  try {
    return Interpreter(*batch, /*interruptible=*/false, c10::kCPU).evaluate().at(0);
  } catch (const std::exception&) {
    return at::Tensor(); // the step says what is wrong
  }
}

} // namespace tarry
