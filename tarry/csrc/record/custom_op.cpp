#include "record/custom_op.h"

#include <ATen/core/TensorBase.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/operator.h"

namespace py = pybind11;

namespace tarry {
namespace {

c10::OperatorName split(const std::string& qualname) {
  const size_t dot = qualname.find('.', qualname.find("::"));
  return {qualname.substr(0, dot), dot == std::string::npos ? "" : qualname.substr(dot + 1)};
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
    if (C10_UNLIKELY(c10::GradMode::is_enabled() && wants_gradient(*stack))) {
      constexpr auto from_autograd = c10::autograd_dispatch_keyset | c10::after_autograd_keyset;
      return rule.redispatchBoxed(keys & from_autograd, stack);
    }
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }

 private:
  // Tangents of forward-mode AD count as well: the rule refuses them, where a plain call would drop them.
  static bool wants_gradient(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      return tensor.defined() && (tensor.requires_grad() || tensor._fw_grad(/*level=*/0).defined());
    }
    if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        if (wants_gradient(item)) {
          return true;
        }
      }
    }
    return false;
  }

  bool wants_gradient(const torch::jit::Stack& stack) const {
    const size_t first = stack.size() - count;
    for (const size_t i : tensors) {
      if (wants_gradient(stack[first + i])) {
        return true;
      }
    }
    return false;
  }

  c10::OperatorHandle rule;
  const size_t count;
  std::vector<size_t> tensors; // positions of the arguments that are, or hold, tensors
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

// The kernels of one operator that are native. They are registered as long as it lives.
struct CustomOpKernels {
  CustomOpKernels(const std::string& qualname, const std::string& rule) {
    const auto find = [](const std::string& name) {
      auto handle = c10::Dispatcher::singleton().findSchema(split(name));
      TORCH_CHECK(handle, "tarry: there is no operator ", name);
      return *handle;
    };
    const auto op = find(qualname), autograd = find(rule);
    const size_t colons = qualname.find("::");
    const std::string ns = qualname.substr(0, colons), name = qualname.substr(colons + 2);
    add(ns, name, c10::DispatchKey::Autograd,
        torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AutogradGate>(op.schema(), autograd)));
    const auto aliases = [](const c10::Argument& item, bool writes) {
      return item.alias_info() && item.alias_info()->isWrite() == writes;
    };
    const auto &arguments = op.schema().arguments(), &returns = op.schema().returns();
    if (std::any_of(arguments.begin(), arguments.end(), [&](const auto& item) { return aliases(item, true); })) {
      add(ns, name, c10::DispatchKey::ADInplaceOrView,
          torch::CppFunction::makeFromBoxedFunctor(std::make_unique<VersionKernel>(op.schema())));
    } else if (std::any_of(returns.begin(), returns.end(), [&](const auto& item) { return aliases(item, false); })) {
      // Makes autograd know that the results are views.
      add(ns, name, c10::DispatchKey::ADInplaceOrView, torch::autograd::autogradNotImplementedInplaceOrViewFallback());
    }
  }

 private:
  void add(const std::string& ns, const std::string& name, c10::DispatchKey key, torch::CppFunction&& kernel) {
    libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, ns, key, __FILE__, __LINE__));
    libraries.back()->impl(name.c_str(), std::move(kernel));
  }

  std::vector<std::unique_ptr<torch::Library>> libraries;
};

} // namespace

void bind_custom_op(py::module& m) {
  py::class_<CustomOpKernels>(m, "CustomOpKernels", "The native kernels of a custom operator, registered while it lives.")
      .def(py::init<const std::string&, const std::string&>(), py::arg("qualname"), py::arg("rule"));
  m.def(
      "forget_operator",
      [](const std::string& qualname) {
        if (const auto handle = c10::Dispatcher::singleton().findSchema(split(qualname))) {
          forget_operator(*handle);
        }
      },
      "What was learned of an operator no longer holds: its shapes are inferred, and graphs with it compiled, anew.");
}

} // namespace tarry
