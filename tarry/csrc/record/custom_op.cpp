#include "record/custom_op.h"

#include <ATen/core/TensorBase.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <algorithm>

#include "core/operator.h"
#include "record/record.h"

namespace tarry {
namespace {

c10::OperatorName split(const std::string& qualname) {
  const size_t dot = qualname.find('.', qualname.find("::"));
  return {qualname.substr(0, dot), dot == std::string::npos ? "" : qualname.substr(dot + 1)};
}

// Tangents of forward-mode AD count as well, and torch.no_grad() does not switch them off.
bool wants_gradient(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() && ((c10::GradMode::is_enabled() && tensor.requires_grad()) || tensor._fw_grad(/*level=*/0).defined());
  }
  if (value.isList()) {
    const auto items = value.toListRef();
    return std::any_of(items.begin(), items.end(), [](const c10::IValue& item) { return wants_gradient(item); });
  }
  return false;
}

// The autograd kernel of a custom operator. A call that needs no gradient goes straight on to the device's kernel, as it would
// without an autograd kernel; any other is handed to `rule`, an operator of the same schema with a kernel in Python.
struct AutogradGate final : c10::OperatorKernel {
  AutogradGate(const c10::FunctionSchema& schema, c10::OperatorHandle rule) : rule(rule), count(schema.arguments().size()) {
    for (size_t i = 0; i < count; ++i) {
      if (schema.arguments()[i].type()->str().find("Tensor") != std::string::npos) {
        tensors.push_back(i);
      }
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (C10_UNLIKELY(wants_gradient(*stack))) {
      constexpr auto from_autograd = c10::autograd_dispatch_keyset | c10::after_autograd_keyset;
      return rule.redispatchBoxed(keys & from_autograd, stack);
    }
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }

 private:
  bool wants_gradient(const torch::jit::Stack& stack) const {
    const size_t first = stack.size() - count;
    return std::any_of(tensors.begin(), tensors.end(), [&](size_t i) { return tarry::wants_gradient(stack[first + i]); });
  }

  c10::OperatorHandle rule;
  const size_t count;
  std::vector<size_t> tensors; // positions of the arguments that are, or hold, tensors
};

// The autograd kernel of an operator that PyTorch takes apart, while it is recorded whole: a call that needs a gradient is taken apart
// still, since its parts have the gradients.
struct CompositeGate final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const auto given = torch::jit::last(*stack, op.schema().arguments().size());
    if (std::any_of(given.begin(), given.end(), [](const auto& value) { return wants_gradient(value); })) {
      return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    }
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
};

// Counts the versions of written arguments, which is how autograd finds out that a saved tensor was changed.
struct VersionKernel final : c10::OperatorKernel {
  explicit VersionKernel(const c10::FunctionSchema& schema) : count(schema.arguments().size()) {
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias && alias->isWrite()) {
        written.push_back(i);
      }
    }
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    c10::SmallVector<c10::IValue, 4> values;
    for (const size_t i : written) {
      values.push_back((*stack)[stack->size() - count + i]);
    }
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
    for (const c10::IValue& value : values) {
      bump(value);
    }
  }

 private:
  static void bump(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined() && !value.toTensor().is_inference()) {
      value.toTensor().unsafeGetTensorImpl()->bump_version();
    } else if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        bump(item);
      }
    }
  }

  const size_t count;
  std::vector<size_t> written;
};

c10::OperatorHandle find(const std::string& name) {
  auto handle = c10::Dispatcher::singleton().findSchema(split(name));
  TORCH_CHECK(handle, "tarry: there is no operator ", name);
  return *handle;
}

} // namespace

Kernels::Kernels(const std::string& qualname) : op(find(qualname)) {}

void Kernels::add(c10::DispatchKey key, torch::CppFunction&& kernel) {
  const std::string& qualname = op.schema().name();
  const size_t colons = qualname.find("::");
  const std::string& overload = op.schema().overload_name();
  const std::string name = qualname.substr(colons + 2) + (overload.empty() ? "" : "." + overload);
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, qualname.substr(0, colons), key, __FILE__, __LINE__));
  libraries.back()->impl(name.c_str(), std::move(kernel));
}

CustomOpKernels::CustomOpKernels(const std::string& qualname, const std::string& rule) : Kernels(qualname) {
  add(c10::DispatchKey::Autograd,
      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AutogradGate>(op.schema(), find(rule))));
  const auto aliases = [](const c10::Argument& item, bool writes) {
    return item.alias_info() && item.alias_info()->isWrite() == writes;
  };
  const auto &arguments = op.schema().arguments(), &returns = op.schema().returns();
  if (std::any_of(arguments.begin(), arguments.end(), [&](const auto& item) { return aliases(item, true); })) {
    add(c10::DispatchKey::ADInplaceOrView, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<VersionKernel>(op.schema())));
  } else if (std::any_of(returns.begin(), returns.end(), [&](const auto& item) { return aliases(item, false); })) {
    // Makes autograd know that the results are views.
    add(c10::DispatchKey::ADInplaceOrView, torch::autograd::autogradNotImplementedInplaceOrViewFallback());
  }
}

RecordedWhole::RecordedWhole(const std::string& qualname) : Kernels(qualname) {
  add(c10::DispatchKey::PrivateUse1, torch::CppFunction::makeFromBoxedFunction<&record_boxed>());
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    add(c10::DispatchKey::AutogradPrivateUse1, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CompositeGate>()));
  }
}

void forget_operator(const std::string& qualname) {
  if (const auto handle = c10::Dispatcher::singleton().findSchema(split(qualname))) {
    forget_operator(*handle);
  }
}

} // namespace tarry
