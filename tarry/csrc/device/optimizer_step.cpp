#include "device/optimizer_step.h"

#include <ATen/CPUFunctions.h>
#include <ATen/ScalarOps.h>

#include <array>
#include <cmath>

#include "record/direct.h"

namespace tarry {
namespace {

using Reals = std::vector<std::vector<at::Tensor>>;
using Operators = c10::SmallVector<const Operator*, 16>;

const Operator* on_lists(const char* name, const char* overload) {
  return find_operator((std::string("aten::_foreach_") + name).c_str(), overload);
}

// Those that fast_step.py would call, in its order: by them, a stretch is known.
void add_operators(Operators& operators, const OptimizerGroup& group) {
  static const Operator* const add = on_lists("add", "List");
  static const Operator* const add_ = on_lists("add_", "List");
  static const Operator* const mul_ = on_lists("mul_", "Scalar");
  static const std::array<const Operator*, 6> adam{on_lists("addcmul_", "Scalar"),     on_lists("sqrt", ""),
                                                   on_lists("div_", "ScalarList"),     on_lists("add_", "Scalar"),
                                                   on_lists("addcdiv_", "ScalarList"), on_lists("lerp_", "Scalar")};
  if (group.decay != 0) {
    operators.push_back(group.decoupled ? mul_ : add);
  }
  if (group.is_adam) {
    operators.append({adam[5], mul_});
    operators.append(adam.begin(), adam.begin() + 5);
    return;
  }
  if (group.momentum != 0) {
    operators.append({mul_, add_});
  }
  operators.push_back(add_);
}

// As PyTorch makes one of a number beside a tensor; in the tensor's dtype, which it would be converted to.
at::Tensor number_like(double value, const at::Tensor& tensor) {
  at::Tensor number = at::detail::scalar_tensor_static(value, tensor.scalar_type(), at::kCPU);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

struct AdamNumbers {
  AdamNumbers(const OptimizerGroup& group, const at::Tensor& like)
      : kept(number_like(1 - group.rate * group.decay, like)),
        beta2(number_like(group.beta2, like)),
        epsilon(number_like(group.epsilon, like)) {}

  // Those that depend on how many steps there were.
  void count(const OptimizerGroup& group, double steps, const at::Tensor& like) {
    if (steps != counted) {
      counted = steps;
      size = -(group.rate / (1 - std::pow(group.beta1, steps)));
      root = number_like(std::pow(1 - std::pow(group.beta2, steps), 0.5), like);
    }
  }

  at::Tensor kept, beta2, epsilon, root;
  double counted = -1;
  double size = 0;
};

void adam(
    const OptimizerGroup& group, AdamNumbers& numbers, at::Tensor& param, at::Tensor grad, at::Tensor& average,
    at::Tensor& square) {
  if (group.decay != 0) {
    if (group.decoupled) {
      at::cpu::mul_(param, numbers.kept);
    } else {
      grad = at::cpu::add(grad, param, group.decay);
    }
  }
  at::cpu::lerp_(average, grad, 1 - group.beta1);
  at::cpu::mul_(square, numbers.beta2);
  at::cpu::addcmul_(square, grad, grad, 1 - group.beta2);
  at::Tensor root = at::cpu::sqrt(square);
  at::cpu::div_(root, numbers.root);
  at::cpu::add_(root, numbers.epsilon, 1);
  at::cpu::addcdiv_(param, average, root, numbers.size);
}

void sgd(const OptimizerGroup& group, const at::Tensor& momentum, at::Tensor& param, at::Tensor grad, at::Tensor* buffer) {
  if (group.decay != 0) {
    grad = at::cpu::add(grad, param, group.decay);
  }
  if (buffer) {
    at::cpu::mul_(*buffer, momentum);
    at::cpu::add_(*buffer, grad, 1 - group.dampening);
    grad = *buffer;
  }
  at::cpu::add_(param, grad, -group.rate);
}

void compute(const std::vector<OptimizerGroup>& groups, const OptimizerTensors& tensors, Reals& reals) {
  for (const at::Tensor& counter : tensors.counters) { // all, before one is read: they may share memory
    advance_counter(counter);
  }
  enum : size_t { kParams, kGrads, kAverages, kSquares, kMomenta };
  size_t i = 0, adams = 0, momenta = 0;
  for (const OptimizerGroup& group : groups) {
    const size_t end = i + group.count;
    if (group.is_adam && group.count != 0) {
      AdamNumbers numbers(group, reals[kParams][i]);
      for (; i < end; ++i, ++adams) {
        numbers.count(group, counter_value(tensors.counters[adams]), reals[kParams][i]);
        adam(group, numbers, reals[kParams][i], reals[kGrads][i], reals[kAverages][adams], reals[kSquares][adams]);
      }
    } else if (group.count != 0) {
      const at::Tensor momentum = number_like(group.momentum, reals[kParams][i]);
      for (; i < end; ++i) {
        at::Tensor* buffer = group.momentum != 0 ? &reals[kMomenta][momenta++] : nullptr;
        sgd(group, momentum, reals[kParams][i], reals[kGrads][i], buffer);
      }
    }
  }
}

// As many times as the operators would have.
void bump_versions(const std::vector<at::Tensor>& tensors, int times) {
  for (const at::Tensor& tensor : tensors) {
    for (int i = 0; i < times; ++i) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

} // namespace

bool is_counter(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return (dtype == at::kFloat || dtype == at::kDouble) && tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
      tensor.numel() == 1 && !tensor.is_neg() && !tensor.unsafeGetTensorImpl()->is_python_dispatch() && !tensor.requires_grad() &&
      !tensor.is_inference();
}

double counter_value(const at::Tensor& counter) {
  return counter.scalar_type() == at::kFloat ? *counter.const_data_ptr<float>() : *counter.const_data_ptr<double>();
}

void advance_counter(const at::Tensor& counter) {
  TORCH_CHECK(is_counter(counter));
  if (counter.scalar_type() == at::kFloat) {
    *counter.mutable_data_ptr<float>() += 1; // in the counter's own precision, as an operator would
  } else {
    *counter.mutable_data_ptr<double>() += 1;
  }
  counter.unsafeGetTensorImpl()->bump_version();
}

bool step_directly(const std::vector<OptimizerGroup>& groups, const OptimizerTensors& tensors) {
  Operators operators;
  for (const OptimizerGroup& group : groups) {
    if (group.count != 0) {
      add_operators(operators, group);
    }
  }
  const DirectList lists[] = {
      {&tensors.params, true},
      {&tensors.grads, false},
      {&tensors.averages, true},
      {&tensors.squares, true},
      {&tensors.momenta, true}};
  if (!update_directly(operators, lists, [&](Reals& reals) { compute(groups, tensors, reals); })) {
    return false;
  }
  size_t first = 0;
  for (const OptimizerGroup& group : groups) {
    const std::vector<at::Tensor> params(tensors.params.begin() + first, tensors.params.begin() + first + group.count);
    bump_versions(params, group.decoupled && group.decay != 0 ? 2 : 1);
    first += group.count;
  }
  bump_versions(tensors.averages, 1);
  bump_versions(tensors.squares, 2);
  bump_versions(tensors.momenta, 2);
  return true;
}

} // namespace tarry
