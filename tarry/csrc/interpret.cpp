// The reference path: a batch executed node by node with ATen on the real device.
//
// Buffers follow copy-on-write: an operator writes into its argument's buffer if nothing else can see it (no later node, no
// storage, no other tensor), and into a copy otherwise. So a step that updates parameters in place updates them in place here.
#include "interpret.h"

#include <Python.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Exceptions.h>

#include <chrono>

#include "ahead.h"
#include "batch.h"
#include "provenance.h"
#include "record.h"
#include "switches.h"

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

using Clock = std::chrono::steady_clock;

class Interpreter {
 public:
  Interpreter(Batch& batch, bool interruptible) : batch_(batch), device_(real_device(batch.state->index)), interruptible_(interruptible), values_(batch.slots), uses_(batch.slots, 0) {}

  void run();

 private:
  void load(Node& node);
  void execute(Node& node);
  bool try_execute(Node& node); // false: it failed, and the error is kept
  at::Tensor take_for_write(uint32_t slot, uint32_t own_uses);
  c10::IValue tensor_argument(const Node& node, int16_t slot, bool is_mutable, size_t& edge, size_t& constant);
  void store(Node& node, uint32_t output, at::Tensor value);
  void check_signals();
  // Keeps what is computed so far with its nodes, for nodes that still need it: the batch can be taken up again later.
  void keep_results(); // under the lock
  void settle_failures();
  // Back along the writes to the last value that could be computed; undefined if there is none to go back to, and reading the
  // storage raises the error again.
  at::Tensor last_good_value(const Root& root) const;
  // Why a node must not run after a failure, if so: it depends on a failed node, or it would write to something older than
  // the failure. In eager the program would have stopped there, so later writes must not show.
  std::shared_ptr<std::string> inherited_error(const Node& node) const;

  Batch& batch_;
  const c10::Device device_;
  const bool interruptible_;
  std::vector<at::Tensor> values_;
  std::vector<uint32_t> uses_; // edges and roots that still need the value
  torch::jit::Stack stack_;
  std::vector<std::pair<uint32_t, at::Tensor>> written_; // of the node in execution: slot and buffer written
  std::exception_ptr failure_;
  const Node* first_failure_ = nullptr;
  Clock::time_point next_check_ = Clock::now() + std::chrono::milliseconds(50);
};

void Interpreter::load(Node& node) {
  if (node.is_leaf()) {
    values_[node.first_slot] = on_real_device(std::move(node.data), *batch_.state);
  } else {
    for (size_t i = 0; i < node.results->size(); ++i) {
      at::Tensor& result = (*node.results)[i];
      values_[node.first_slot + i] = result.defined() ? on_real_device(std::move(result), *batch_.state) : at::Tensor();
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

c10::IValue Interpreter::tensor_argument(const Node& node, int16_t slot, bool is_mutable, size_t& edge, size_t& constant) {
  if (slot == kAbsent) {
    return at::Tensor();
  }
  if (slot == kWrappedNumber) {
    at::Tensor number = at::detail::scalar_tensor_static(
        node.constants[constant].toScalar(), node.constants[constant].isDouble() ? at::kDouble
            : node.constants[constant].isInt() ? at::kLong : node.constants[constant].isBool() ? at::kBool : at::kComplexDouble,
        at::kCPU);
    ++constant;
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  }
  const Edge& source = node.edges[edge++];
  const uint32_t from = source.node->first_slot + source.output;
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
        value.sizes() == c10::IntArrayRef(layout->sizes),
        "tarry: ", node.op->name, " gave a result of shape ", value.sizes(), " where its meta kernel promised ", layout->sizes);
    at::Tensor copy = at::empty_strided(layout->sizes, layout->strides, value.options().dtype(layout->dtype));
    copy.copy_(value);
    value = std::move(copy);
  } else if (value.is_conj() || value.is_neg() || value._is_zerotensor()) {
    value = clone_exactly(value);
  }
  if (uses_[node.first_slot + output] != 0) {
    values_[node.first_slot + output] = std::move(value);
  }
}

void Interpreter::execute(Node& node) {
  const Operator& op = *node.op;
  written_.clear();
  for (const Mutation& mutation : node.mutations) {
    const Edge& edge = node.edges[mutation.edge];
    const uint32_t from = edge.node->first_slot + edge.output;
    uint32_t own_uses = 0;
    for (const Edge& other : node.edges) {
      own_uses += other.node == edge.node && other.output == edge.output;
    }
    written_.emplace_back(from, take_for_write(from, own_uses));
  }
  stack_.clear();
  size_t edge = 0, constant = 0, slot = 0;
  for (const Argument& argument : op.arguments) {
    switch (argument.kind) {
      case ArgKind::Tensor: {
        const int16_t kind = node.slots.empty() ? kAbsent : node.slots[slot++];
        if (kind == kAbsent && argument.is_optional) {
          stack_.emplace_back();
        } else {
          stack_.push_back(tensor_argument(node, kind, argument.is_mutable, edge, constant));
        }
        break;
      }
      case ArgKind::TensorList: {
        const int n = node.slots[slot++];
        if (n < 0) {
          stack_.emplace_back();
        } else if (argument.is_optional) {
          c10::List<std::optional<at::Tensor>> list;
          for (int i = 0; i < n; ++i) {
            at::Tensor tensor = tensor_argument(node, node.slots[slot++], argument.is_mutable, edge, constant).toTensor();
            list.push_back(tensor.defined() ? std::make_optional(std::move(tensor)) : std::nullopt);
          }
          stack_.emplace_back(std::move(list));
        } else {
          c10::List<at::Tensor> list;
          list.reserve(static_cast<size_t>(n));
          for (int i = 0; i < n; ++i) {
            list.push_back(tensor_argument(node, node.slots[slot++], argument.is_mutable, edge, constant).toTensor());
          }
          stack_.emplace_back(std::move(list));
        }
        break;
      }
      default: {
        const c10::IValue& value = node.constants[constant++];
        if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
          stack_.emplace_back(device_);
        } else {
          stack_.push_back(value);
        }
      }
    }
  }
  {
    std::optional<SeededCall> seeded;
    if (op.draws(torch::jit::last(stack_, op.arguments.size()))) {
      seeded.emplace(op, node.constants.back().toInt(), stack_, device_);
    }
    struct Silence final : c10::WarningHandler {
      void process(const c10::Warning& /*warning*/) override {}
    } silence;
    std::optional<c10::WarningUtils::WarningHandlerGuard> given; // its warnings came when it was recorded
    if (C10_UNLIKELY(!node.signature->warnings.empty())) {
      given.emplace(&silence);
    }
    op.handle.callBoxed(&stack_);
  }
  for (const Edge& used : node.edges) {
    const uint32_t from = used.node->first_slot + used.output;
    if (--uses_[from] == 0) {
      values_[from].reset();
    }
  }
  // Results that are fresh, in order; those that are the written arguments are found in their buffers.
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
  if (node.signature->items.empty()) {
    if (!node.signature->fresh.empty()) {
      store(node, 0, std::move(stack_[0]).toTensor()); // the node of an uninitialised storage
    }
  } else {
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

bool Interpreter::try_execute(Node& node) {
  const auto where = [&node] { return "while executing " + node.op->name + ", recorded at " + describe_site(node.site); };
  const auto keep_buffers = [&] {
    // The arguments taken for writing are still the storages' last good contents.
    for (auto& [slot, buffer] : written_) {
      if (!values_[slot].defined()) {
        values_[slot] = std::move(buffer);
      }
    }
    written_.clear();
    stack_.clear();
  };
  try {
    execute(node);
    return true;
  } catch (c10::Error& error) {
    keep_buffers();
    error.add_context(where());
    node.error = std::make_shared<std::string>(error.what_without_backtrace());
    failure_ = failure_ ? failure_ : std::current_exception();
  } catch (python_error& error) {
    keep_buffers();
    node.error = std::make_shared<std::string>("a Python kernel failed " + where());
    failure_ = failure_ ? failure_ : std::current_exception();
  } catch (std::exception& error) {
    keep_buffers();
    node.error = std::make_shared<std::string>(std::string(error.what()) + " (" + where() + ")");
    failure_ = failure_ ? failure_ : std::make_exception_ptr(c10::Error({__func__, __FILE__, __LINE__}, *node.error));
  }
  return false;
}

void Interpreter::check_signals() {
  if (Clock::now() < next_check_) {
    return;
  }
  PyGILState_STATE gil = PyGILState_Ensure();
  const bool interrupted = PyErr_CheckSignals() != 0;
  if (interrupted) {
    python_error error;
    error.persist();
    PyGILState_Release(gil);
    throw error;
  }
  PyGILState_Release(gil);
  next_check_ = Clock::now() + std::chrono::milliseconds(50);
}

void Interpreter::keep_results() {
  for (const NodePtr& node : batch_.order) {
    if (node->is_leaf()) {
      if (values_[node->first_slot].defined()) {
        node->data = values_[node->first_slot];
      }
      continue;
    }
    for (uint32_t i = 0; i < node->outputs(); ++i) {
      at::Tensor& value = values_[node->first_slot + i];
      if (value.defined()) {
        if (!node->results) {
          node->results = std::make_unique<std::vector<at::Tensor>>(node->outputs());
        }
        (*node->results)[i] = value;
      }
    }
  }
}

std::shared_ptr<std::string> Interpreter::inherited_error(const Node& node) const {
  for (const Edge& edge : node.edges) {
    if (edge.node->error) {
      return edge.node->error;
    }
  }
  for (const Mutation& mutation : node.mutations) {
    const Node& source = *node.edges[mutation.edge].node;
    if (first_failure_ && (is_input(source) || source.first_slot < first_failure_->first_slot)) {
      return first_failure_->error;
    }
  }
  return nullptr;
}

at::Tensor Interpreter::last_good_value(const Root& root) const {
  const Node* node = root.node.get();
  uint32_t output = root.output;
  while (node->error && output >= node->signature->fresh.size()) {
    const Edge& edge = node->edges[node->mutations[output - node->signature->fresh.size()].edge];
    output = edge.output;
    node = edge.node.get();
    if (!node->op) {
      break;
    }
  }
  return node->error ? at::Tensor() : values_[node->first_slot + output];
}

void Interpreter::settle_failures() {
  Graveyard graveyard;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  {
    std::lock_guard<std::mutex> guard(batch_.state->mutex);
    if (batch_.state->position != 0) {
      keep_results(); // nodes recorded meanwhile may refer to these
    }
    for (size_t i = 0; i < batch_.roots.size(); ++i) {
      const Root& root = batch_.roots[i];
      const at::Tensor value = last_good_value(root);
      if (i < batch_.in_place.size() && batch_.in_place[i].defined()) {
        copies.emplace_back(batch_.in_place[i], value); // the next step may have this buffer already
        continue;
      }
      if (!root.storage || root.storage->value.node != root.node) {
        continue; // written meanwhile
      }
      if (value.defined() && root.storage->home->describes(value.unsafeGetTensorImpl())) {
        set_data(root.storage, value, graveyard);
      }
    }
  }
  for (auto& [buffer, value] : copies) {
    if (value.defined() && !value.is_same(buffer)) {
      buffer.copy_(value);
    }
  }
  batch_.in_place.clear();
}

void Interpreter::run() {
  for (const NodePtr& node : batch_.order) {
    if (!is_input(*node) && !node->error) {
      for (const Edge& edge : node->edges) {
        ++uses_[edge.node->first_slot + edge.output];
      }
    }
  }
  for (const Root& root : batch_.roots) {
    ++uses_[root.node->first_slot + root.output];
  }
  PlainDispatch plain;
  const RecordedSwitches switches(*batch_.state);
  bool failed = false;
  try {
    size_t count = 0;
    for (const NodePtr& node : batch_.order) {
      if (node->error) {
        failed = true;
        continue;
      }
      if (is_input(*node)) {
        load(*node);
        continue;
      }
      if (interruptible_ && (++count & 63) == 0) {
        check_signals();
      }
      if (failed) {
        node->error = inherited_error(*node);
      }
      if (!node->error && !try_execute(*node)) {
        failed = true;
        first_failure_ = first_failure_ ? first_failure_ : node.get();
      }
    }
  } catch (...) {
    // Interrupted: everything is still pending, and nothing is lost.
    std::lock_guard<std::mutex> guard(batch_.state->mutex);
    keep_results();
    throw;
  }
  if (failed) {
    settle_failures();
    if (failure_) {
      std::rethrow_exception(failure_);
    }
    return;
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(batch_.roots.size());
  for (const Root& root : batch_.roots) {
    outputs.push_back(values_[root.node->first_slot + root.output]);
  }
  values_.clear();
  batch_.commit(std::move(outputs));
}

} // namespace

void Batch::interpret(bool interruptible) {
  abandon(*this);
  Interpreter(*this, interruptible).run();
}

} // namespace tarry
