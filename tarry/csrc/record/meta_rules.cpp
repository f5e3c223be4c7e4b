#include "record/meta_rules.h"

#include <ATen/MetaFunctions.h>
#include <ATen/Operators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty_strided.h>

#include <unordered_map>

namespace tarry {
namespace {

using Rules = std::unordered_map<std::string, c10::KernelFunction>;

// ---- rules of our own, for operators without a meta kernel in C++

at::Tensor clone(const at::Tensor& self, std::optional<at::MemoryFormat> format) {
  return at::compositeexplicitautograd::empty_like(self, {}, {}, {}, {}, format);
}

at::Tensor to_copy(
    const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> /*pin_memory*/, bool /*non_blocking*/, std::optional<at::MemoryFormat> format) {
  const bool keeps_strides = format.value_or(at::MemoryFormat::Preserve) == at::MemoryFormat::Preserve &&
      self.is_non_overlapping_and_dense();
  if (!keeps_strides || layout.value_or(at::kStrided) != at::kStrided || (device && !device->is_meta())) {
    return {};
  }
  return at::empty_strided(self.sizes(), self.strides(), self.options().dtype(dtype.value_or(self.scalar_type())));
}

at::Tensor embedding(
    const at::Tensor& weight, const at::Tensor& indices, c10::SymInt /*padding*/, bool /*scale*/, bool /*sparse*/) {
  const bool usual = weight.dim() == 2 && (indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt);
  if (!usual) {
    return {};
  }
  c10::DimVector sizes(indices.sizes().begin(), indices.sizes().end());
  sizes.push_back(weight.size(1));
  return at::empty(sizes, weight.options());
}

at::Tensor safe_softmax(const at::Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  const bool usual = self.dim() > 0 && self.is_contiguous() && -self.dim() <= dim && dim < self.dim() && self.is_floating_point();
  return usual ? at::empty(self.sizes(), self.options().dtype(dtype.value_or(self.scalar_type()))) : at::Tensor();
}

template <typename Op, typename Op::schema* kernel>
void add(Rules& rules) {
  std::string name = Op::name;
  if (Op::overload_name[0]) {
    name += std::string(".") + Op::overload_name;
  }
  rules.emplace(
      std::move(name),
      c10::KernelFunction::makeFromUnboxedFunction(c10::CompileTimeFunctionPointer<typename Op::schema, kernel>()));
}

// An operator as at::_ops calls it, and its kernel.
#define TARRY_RULE(op, kernel) add<at::_ops::op, static_cast<at::_ops::op::schema*>(&kernel)>(rules)
#define TARRY_META(op, kernel) TARRY_RULE(op, at::meta::kernel)
// An operator and its in-place form.
#define TARRY_UNARY(name) \
  TARRY_META(name, name); \
  TARRY_META(name##_, name##_)
#define TARRY_BINARY(name)         \
  TARRY_META(name##_Tensor, name); \
  TARRY_META(name##__Tensor, name##_)
#define TARRY_COMPARISON(name)     \
  TARRY_META(name##_Tensor, name); \
  TARRY_META(name##_Scalar, name)

void add_pointwise(Rules& rules) {
  TARRY_BINARY(add);
  TARRY_BINARY(sub);
  TARRY_BINARY(mul);
  TARRY_BINARY(div);
  TARRY_BINARY(bitwise_and);
  TARRY_BINARY(bitwise_or);
  TARRY_BINARY(bitwise_xor);
  TARRY_META(div_Tensor_mode, div);
  TARRY_META(remainder_Tensor, remainder);
  TARRY_META(pow_Tensor_Scalar, pow);
  TARRY_META(pow_Tensor_Tensor, pow);
  TARRY_META(maximum, maximum);
  TARRY_META(minimum, minimum);
  TARRY_UNARY(addcmul);
  TARRY_UNARY(addcdiv);
  TARRY_META(lerp_Scalar, lerp);
  TARRY_META(lerp__Scalar, lerp_);
  TARRY_META(lerp_Tensor, lerp);
  TARRY_UNARY(clamp);
  TARRY_UNARY(clamp_min);
  TARRY_UNARY(clamp_max);
  TARRY_COMPARISON(eq);
  TARRY_COMPARISON(ne);
  TARRY_COMPARISON(lt);
  TARRY_COMPARISON(le);
  TARRY_COMPARISON(gt);
  TARRY_COMPARISON(ge);
  TARRY_UNARY(bitwise_not);
  TARRY_UNARY(neg);
  TARRY_UNARY(reciprocal);
  TARRY_UNARY(sqrt);
  TARRY_UNARY(rsqrt);
  TARRY_UNARY(exp);
  TARRY_UNARY(log);
  TARRY_UNARY(sin);
  TARRY_UNARY(cos);
  TARRY_UNARY(erf);
  TARRY_UNARY(tanh);
  TARRY_UNARY(sigmoid);
  TARRY_UNARY(silu);
  TARRY_UNARY(gelu);
  TARRY_UNARY(floor);
  TARRY_META(leaky_relu, leaky_relu);
  TARRY_META(elu, elu);
  TARRY_META(softplus, softplus);
  TARRY_META(tanh_backward, tanh_backward);
  TARRY_META(sigmoid_backward, sigmoid_backward);
  TARRY_META(silu_backward, silu_backward);
  TARRY_META(gelu_backward, gelu_backward);
  TARRY_META(threshold_backward, threshold_backward);
  TARRY_META(leaky_relu_backward, leaky_relu_backward);
}

void add_others(Rules& rules) {
  TARRY_META(mm, mm);
  TARRY_META(bmm, bmm);
  TARRY_META(addmm, addmm);
  TARRY_META(baddbmm, baddbmm);
  TARRY_META(cat, cat);
  TARRY_META(_softmax, _softmax);
  TARRY_META(_log_softmax, _log_softmax);
  TARRY_META(_softmax_backward_data, _softmax_backward_data);
  TARRY_META(_log_softmax_backward_data, _log_softmax_backward_data);
  TARRY_META(sum_dim_IntList, sum);
  TARRY_META(mean_dim, mean);
  TARRY_META(amax, amax);
  TARRY_META(amin, amin);
  TARRY_META(argmax, argmax);
  TARRY_META(argmin, argmin);
  TARRY_META(all, all);
  TARRY_META(all_dim, all);
  TARRY_META(any, any);
  TARRY_META(any_dim, any);
  TARRY_META(max_dim, max);
  TARRY_META(min_dim, min);
  TARRY_META(cumsum, cumsum);
  TARRY_META(gather, gather);
  TARRY_META(scatter_src, scatter);
  TARRY_META(scatter_value, scatter);
  TARRY_META(scatter_add, scatter_add);
  TARRY_META(isin_Tensor_Tensor, isin);
  TARRY_META(linalg_vector_norm, linalg_vector_norm);
  TARRY_META(arange_start_out, arange_outf);
  TARRY_META(fill__Scalar, fill_);
  TARRY_META(zero_, zero_);
  TARRY_RULE(clone, clone);
  TARRY_RULE(_to_copy, to_copy);
  TARRY_RULE(embedding, embedding);
  TARRY_RULE(_safe_softmax, safe_softmax);
}

} // namespace

const c10::KernelFunction* find_rule(const std::string& name) {
  static const auto* rules = [] {
    auto* made = new Rules();
    add_pointwise(*made);
    add_others(*made);
    return made;
  }();
  const auto it = rules->find(name);
  return it == rules->end() ? nullptr : &it->second;
}

} // namespace tarry
