// The reference path: a batch executed node by node with ATen on the real device.
//
// Buffers follow copy-on-write: an operator writes into its argument's buffer if nothing else can see it (no later node, no
// storage, no other tensor), and into a copy otherwise. So a step that updates parameters in place updates them in place here.
#include "execute/interpret.h"

#include <ATen/ops/empty_strided.h>

#include "core/arguments.h"
#include "core/fault.h"
#include "core/generator.h"
#include "core/gil.h"
#include "core/numbers.h"
#include "core/switches.h"
#include "device/host_memory.h"
#include "device/profiler.h"
#include "execute/executor.h"
#include "record/provenance.h"
#include "record/record.h"

namespace tarry {

void Interpreter::load(Node& node) {
  const auto take = [&](size_t i, at::Tensor& tensor) {
    const uint32_t index = batch_.index_of(node) + static_cast<uint32_t>(i);
    if (tensor.defined() && uses_[index] != 0) {
      values_[index] = on_real_device(tensor, *batch_.state);
      tensor.reset(); // now, and not if it cannot be read: it may be written to if nothing else knows it
    }
  };
  try {
    if (node.is_leaf()) {
      take(0, node.data);
    } else {
      for (size_t i = 0; i < node.results->size(); ++i) {
        take(i, (*node.results)[i]);
      }
    }
  } catch (...) {
    // Data that only the backend can read, and cannot: what has computed them has failed, perhaps on another device.
    if (failed_.empty() && caught_interrupt()) {
      throw;
    }
    failed_[&node] = caught_failure(current_lane(), "while reading an input of the step");
  }
}

at::Tensor Interpreter::take_for_write(uint32_t index, uint32_t own_uses) {
  at::Tensor& value = values_[index];
  const bool last = uses_[index] == own_uses;
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
  const uint32_t from = index_of(source, node);
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
  if (uses_[batch_.index_of(node) + output] != 0) {
    values_[batch_.index_of(node) + output] = std::move(value);
  }
}

// The buffers that the node writes.
void Interpreter::take_written(const Node& node) {
  written_.clear();
  for (const Mutation& mutation : node.mutations) {
    const Edge& edge = node.edges[mutation.edge];
    const uint32_t from = index_of(edge, node);
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
  set_memory_site(node.site);
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
    const uint32_t from = batch_.index_of(*used.node) + used.output;
    if (--uses_[from] == 0) {
      values_[from].reset();
    }
  }
  store_results(node);
}

void Interpreter::try_execute(Node& node) {
  try {
    fault_point();
    if (C10_UNLIKELY(profiled_)) {
      RECORD_FUNCTION(kernel_row(node.op->name, node.site), c10::ArrayRef<const c10::IValue>());
      execute(node);
    } else {
      execute(node);
    }
  } catch (...) {
    // The arguments taken for writing have what eager would have left there.
    for (auto& [index, buffer] : written_) {
      if (!values_[index].defined()) {
        values_[index] = std::move(buffer);
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
  for (const double ticket : started_) {
    outstanding_.push_back({ticket, &node});
  }
  started_.clear();
}

static void wait_for_ticket(double ticket) {
  static const auto wait = c10::Dispatcher::singleton().findSchemaOrThrow("tarry_c10d::wait", "").typed<void(double)>();
  wait.call(ticket);
}

void Interpreter::wait_for(const Outstanding& collective) {
  Node& node = *collective.node;
  try {
    wait_for_ticket(collective.ticket);
  } catch (...) {
    FailurePtr failure = caught_failure(
        lane_of(node), "while executing " + node.op->name + ", recorded at " + describe_site(node.site));
    if (!failure_of(node)) {
      take_back(node);
      fail(node, std::move(failure));
    }
  }
}

// What a node has written goes back to where it was taken from.
void Interpreter::take_back(const Node& node) {
  const auto fresh = static_cast<uint32_t>(node.signature->fresh.size());
  for (uint32_t i = 0; i < node.outputs(); ++i) {
    at::Tensor value = std::move(values_[batch_.index_of(node) + i]);
    if (i >= fresh) {
      const Edge& before = node.edges[node.mutations[i - fresh].edge];
      at::Tensor& home = values_[batch_.index_of(*before.node) + before.output];
      if (!home.defined()) {
        home = std::move(value);
      }
    }
  }
}

// After a failure, what an edge reads is not simply the node's result: nothing stays outstanding then.
void Interpreter::wait_for_inputs(const Node& node) {
  const auto is_read = [&](const Outstanding& collective) {
    return !failed_.empty() || std::any_of(node.edges.begin(), node.edges.end(), [&](const Edge& edge) {
      return edge.node.get() == collective.node && edge.output + 1 != collective.node->outputs(); // the last one is the order
    });
  };
  for (size_t i = 0; i < outstanding_.size();) {
    if (is_read(outstanding_[i])) {
      const Outstanding collective = outstanding_[i];
      outstanding_.erase(outstanding_.begin() + static_cast<std::ptrdiff_t>(i));
      wait_for(collective);
    } else {
      ++i;
    }
  }
}

void Interpreter::give_up_waiting() {
  for (const Outstanding& collective : std::exchange(outstanding_, {})) {
    try {
      wait_for_ticket(collective.ticket);
    } catch (...) {
      take_back(*collective.node);
    }
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
  if (std::chrono::steady_clock::now() < next_check_) {
    return;
  }
  const Gil gil;
  if (PyErr_CheckSignals() != 0) {
    throw_python_error();
  }
  next_check_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
}

void Interpreter::count_uses() {
  for (const NodePtr& node : batch_.order) {
    if (!is_input(*node)) {
      for (const Edge& edge : node->edges) {
        ++uses_[batch_.index_of(*edge.node) + edge.output];
      }
    }
  }
  for (const Root& root : batch_.roots) {
    ++uses_[batch_.index_of(*root.node) + root.output];
  }
}

std::vector<at::Tensor> Interpreter::take_outputs() {
  std::vector<at::Tensor> outputs;
  outputs.reserve(batch_.roots.size());
  for (const Root& root : batch_.roots) {
    outputs.push_back(values_[batch_.index_of(*root.node) + root.output]);
  }
  values_.clear();
  return outputs;
}

std::vector<at::Tensor> Interpreter::evaluate() {
  count_uses();
  const PlainDispatch plain;
  const CollectTickets none(nullptr);
  for (const NodePtr& node : batch_.order) {
    execute(*node);
  }
  return take_outputs();
}

bool Interpreter::run() {
  count_uses();
  PlainDispatch plain;
  const RecordedSwitches switches(*batch_.state);
  const CollectTickets collecting(&started_);
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
      if (C10_UNLIKELY(!outstanding_.empty())) {
        wait_for_inputs(*node);
      }
      if (C10_UNLIKELY(!failed_.empty())) {
        if (FailurePtr failure = inherited_failure(*node)) {
          fail(*node, std::move(failure));
          continue;
        }
      }
      try_execute(*node);
    }
    for (const Outstanding& collective : std::exchange(outstanding_, {})) {
      wait_for(collective);
    }
  } catch (...) {
    // Interrupted: everything is still pending, and nothing is lost.
    give_up_waiting();
    std::lock_guard<std::mutex> guard(batch_.state->mutex);
    keep_results();
    throw;
  }
  if (!failed_.empty()) {
    settle_failures();
    raise_failures();
    return false;
  }
  batch_.commit(take_outputs());
  return true;
}

bool Batch::interpret(bool interruptible) {
  state->executor->speculator.drop();
  return Interpreter(*this, interruptible, real_device(state->index)).run();
}

} // namespace tarry
