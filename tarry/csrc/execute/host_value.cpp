#include "execute/host_value.h"

#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "core/arguments.h"
#include "core/numbers.h"

namespace tarry {
namespace {

constexpr size_t kMaxNodes = 32;
constexpr size_t kMaxBytes = 1 << 18; // of each result

// What a node is at this moment: another thread may end the step, and have the node used again for the next one.
struct Call {
  const Node* node;
  const Operator* op;
  std::vector<c10::IValue> constants;
  std::vector<int16_t> slots;
  std::vector<Edge> edges;
  std::vector<const Layout*> results;
  bool writes; // its result is the tensor that it writes
};

bool is_exact(const Layout* layout) {
  return c10::isIntegralType(layout->dtype, /*includeBool=*/true) && layout->nbytes <= kMaxBytes;
}

// A write of a whole tensor that the call reads by no other argument: how factories fill what they have allocated.
bool is_plain_write(const Node& node) {
  if (node.mutations.size() != 1 || !node.signature->fresh.empty() || !is_exact(node.mutations[0].home)) {
    return false;
  }
  const Edge& written = node.edges[node.mutations[0].edge];
  const auto reads = std::count_if(
      node.edges.begin(), node.edges.end(), [&](const Edge& edge) { return edge.node == written.node; });
  return !written.view && reads == 1;
}

bool is_plain_result(const Node& node) {
  const auto& items = node.signature->items;
  const auto& fresh = node.signature->fresh;
  return !fresh.empty() && (items.size() == fresh.size() || (items.empty() && fresh.size() == 1)) && // none: uninitialised
      std::all_of(items.begin(), items.end(), [](const auto& item) { return item.kind == Signature::Return::Fresh; }) &&
      std::all_of(fresh.begin(), fresh.end(), is_exact);
}

bool is_computable(const Node& node) {
  return !node.is_leaf() && !node.may_fail && !node.results && node.op->has(kListed) && !node.op->has(kRandom) &&
      (node.mutations.empty() ? is_plain_result(node) : is_plain_write(node));
}

size_t position(const std::vector<Call>& calls, const Node* node) {
  const auto found = std::find_if(calls.begin(), calls.end(), [node](const Call& call) { return call.node == node; });
  return found - calls.begin();
}

// Appends the node after all that flows into it. False if something in there cannot be computed. Under the lock.
bool collect(const NodePtr& node, std::vector<Call>& calls, size_t depth = 0) {
  if (position(calls, node.get()) < calls.size()) {
    return true;
  }
  if (depth > kMaxNodes || calls.size() >= kMaxNodes || !is_computable(*node)) {
    return false;
  }
  for (const Edge& edge : node->edges) {
    if (!collect(edge.node, calls, depth + 1)) {
      return false;
    }
  }
  Call call{node.get(), node->op, {}, {}, {}, node->signature->fresh, !node->mutations.empty()};
  call.constants.assign(node->constants.begin(), node->constants.end());
  call.slots.assign(node->slots.begin(), node->slots.end());
  call.edges.assign(node->edges.begin(), node->edges.end());
  if (call.writes) {
    call.results = {node->mutations[0].home};
  }
  calls.push_back(std::move(call));
  return true;
}

class Evaluation {
 public:
  explicit Evaluation(const std::vector<Call>& calls) : calls_(calls) {}

  std::vector<std::vector<at::Tensor>> run() {
    for (const Call& call : calls_) {
      push_arguments(call);
      call.op->handle.callBoxed(&stack_);
      std::vector<at::Tensor> results;
      for (size_t i = 0; i < call.results.size(); ++i) {
        results.push_back(laid_out(call.writes ? written_ : stack_.at(i).toTensor(), call.results[i]));
      }
      values_.push_back(std::move(results));
    }
    return std::move(values_);
  }

 private:
  static at::Tensor laid_out(const at::Tensor& value, const Layout* layout) {
    if (layout->describes(value.unsafeGetTensorImpl())) {
      return value;
    }
    return at::empty_strided(layout->sizes, layout->strides, value.options().dtype(layout->dtype)).copy_(value);
  }

  at::Tensor tensor(const Call& call, Operand operand) const {
    if (operand.slot == kAbsent) {
      return at::Tensor();
    }
    if (operand.slot == kWrappedNumber) {
      return wrapped_number(call.constants[operand.index].toScalar());
    }
    const Edge& edge = call.edges[operand.index];
    const at::Tensor& home = values_[position(calls_, edge.node.get())][edge.output];
    return edge.view ? view_as_layout(home, edge.view) : home;
  }

  void push_arguments(const Call& call) {
    stack_.clear();
    const auto& arguments = call.op->arguments;
    visit_arguments(
        *call.op, call.slots,
        [&](size_t i, Operand operand) {
          const bool none = operand.slot == kAbsent && arguments[i].is_optional;
          at::Tensor value = tensor(call, operand);
          if (arguments[i].is_mutable && value.defined()) {
            value = written_ = clone_exactly(value);
          }
          stack_.push_back(none ? c10::IValue() : c10::IValue(std::move(value)));
        },
        [&](size_t i, bool given, c10::ArrayRef<Operand> items) {
          c10::List<at::Tensor> list;
          for (const Operand& item : items) {
            list.push_back(tensor(call, item));
          }
          TORCH_CHECK(!given || !arguments[i].is_optional, "a list of optional tensors");
          stack_.push_back(given ? c10::IValue(std::move(list)) : c10::IValue());
        },
        [&](size_t, size_t constant) {
          const c10::IValue& value = call.constants[constant];
          const bool ours = value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1;
          stack_.push_back(ours ? c10::IValue(c10::Device(c10::kCPU)) : value);
        });
  }

  const std::vector<Call>& calls_;
  std::vector<std::vector<at::Tensor>> values_;
  at::Tensor written_; // by the call at hand
  torch::jit::Stack stack_;
};

} // namespace

at::Tensor host_value(TarryStorage* storage) {
  std::vector<Call> calls; // freed after the lock is released
  uint32_t output = 0;
  {
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    if (!storage->value.node || !collect(storage->value.node, calls)) {
      return at::Tensor();
    }
    output = storage->value.output;
  }
  const PlainDispatch plain;
  try {
    return Evaluation(calls).run().back()[output];
  } catch (const std::exception&) {
    return at::Tensor(); // the step says what is wrong
  }
}

} // namespace tarry
