#include "record/shape_rules.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MetaFunctions.h>
#include <ATen/Operators.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <unordered_map>

#include "core/graph.h"
#include "record/scan.h"

namespace tarry {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Result = std::unique_ptr<Signature>;

// ---- what the arguments are like

// A tensor that is just what its sizes and strides say, and not empty.
const at::Tensor* plain(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    return nullptr;
  }
  const at::Tensor& tensor = value.toTensor();
  const bool is_plain = tensor.layout() == c10::kStrided && !tensor.key_set().has_any(kLazyBits) &&
      !tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.numel() > 0;
  return is_plain ? &tensor : nullptr;
}

// Contiguous with the very strides that a new tensor has: those of dimensions of size 1 may be anything otherwise.
const at::Tensor* contiguous(const c10::IValue& value) {
  const at::Tensor* tensor = plain(value);
  return tensor && tensor->strides() == c10::IntArrayRef(c10::contiguous_strides(tensor->sizes())) ? tensor : nullptr;
}

// Not a bool: operators that take numbers refuse it here and there (subtraction, alpha=).
bool is_number(const c10::IValue& value) {
  if (!value.isTensor()) {
    return value.isInt() || value.isDouble();
  }
  const at::Tensor& tensor = value.toTensor();
  return tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number() && !tensor.is_complex() &&
      tensor.scalar_type() != at::kBool;
}

// Every kernel of these operators is there for these types, on any device.
bool is_real(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

bool can_broadcast(c10::IntArrayRef a, c10::IntArrayRef b) {
  for (size_t i = 1; i <= std::min(a.size(), b.size()); ++i) {
    const int64_t m = a[a.size() - i], n = b[b.size() - i];
    if (m != n && m != 1 && n != 1) {
      return false;
    }
  }
  return true;
}

// ---- what the results are like

void add_result(Signature& signature, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  signature.items.push_back({Signature::Return::Fresh, static_cast<uint32_t>(signature.fresh.size()), {}});
  signature.fresh.push_back(intern_layout(dtype, sizes, strides, 0));
}

Result fresh(at::ScalarType dtype, c10::IntArrayRef sizes) {
  auto signature = std::make_unique<Signature>();
  add_result(*signature, dtype, sizes, c10::contiguous_strides(sizes));
  return signature;
}

// ---- operators

Result unary(Arguments arguments) {
  const at::Tensor* self = contiguous(arguments[0]);
  return self && is_real(*self) ? fresh(self->scalar_type(), self->sizes()) : nullptr;
}

Result gelu(Arguments arguments) {
  const auto approximate = arguments[1].toStringView();
  return approximate == "none" || approximate == "tanh" ? unary(arguments) : nullptr;
}

// The first of two arguments of an operator on pairs of elements: two tensors of a dtype, or a tensor and a number.
const at::Tensor* first_of_pair(Arguments arguments) {
  const at::Tensor* self = plain(arguments[0]);
  if (!self || is_number(arguments[1])) {
    return self;
  }
  const at::Tensor* other = plain(arguments[1]);
  const bool fits = other && other->scalar_type() == self->scalar_type() && can_broadcast(self->sizes(), other->sizes());
  return fits ? self : nullptr;
}

at::Tensor on_meta(const c10::IValue& value) {
  if (is_number(value)) {
    return at::detail::empty_strided_meta({}, {}, at::kFloat);
  }
  return at::detail::empty_strided_meta(value.toTensor().sizes(), value.toTensor().strides(), at::kFloat);
}

// What an operator on pairs of elements gives. Two that are alike give one like them; otherwise, PyTorch's iterator puts the
// dimensions in an order of its own.
Result elementwise(at::ScalarType dtype, Arguments arguments) {
  const at::Tensor* self = contiguous(arguments[0]);
  const at::Tensor* other = self ? contiguous(arguments[1]) : nullptr;
  if (other && other->sizes() == self->sizes()) {
    return fresh(dtype, self->sizes());
  }
  const auto iterator = at::TensorIteratorConfig()
                            .set_check_mem_overlap(false)
                            .add_owned_output(at::Tensor())
                            .add_owned_const_input(on_meta(arguments[0]))
                            .add_owned_const_input(on_meta(arguments[1]))
                            .build();
  auto signature = std::make_unique<Signature>();
  add_result(*signature, dtype, iterator.output().sizes(), iterator.output().strides());
  return signature;
}

Result arithmetic(Arguments arguments) {
  const at::Tensor* self = first_of_pair(arguments);
  const bool scaled = arguments.size() > 2 && !(arguments[2].isInt() || arguments[2].isDouble()); // alpha, complex or a bool
  return self && is_real(*self) && !scaled ? elementwise(self->scalar_type(), arguments) : nullptr;
}

// Of add, sub and mul, which keep integers.
Result exact_arithmetic(Arguments arguments) {
  const at::Tensor* self = first_of_pair(arguments);
  if (!self || self->scalar_type() != at::kLong) {
    return arithmetic(arguments);
  }
  const bool integers = std::all_of(arguments.begin() + 1, arguments.end(), [](const c10::IValue& value) {
    return value.isInt() || (value.isTensor() && value.toTensor().scalar_type() == at::kLong);
  });
  return integers ? elementwise(at::kLong, arguments) : nullptr;
}

Result comparison(Arguments arguments) {
  const at::Tensor* self = first_of_pair(arguments);
  const bool fits = self && (is_real(*self) || (self->scalar_type() == at::kLong && !arguments[1].isDouble()));
  return fits ? elementwise(at::kBool, arguments) : nullptr;
}

Result bitwise(Arguments arguments) {
  const at::Tensor* self = contiguous(arguments[0]);
  const at::Tensor* other = contiguous(arguments[1]);
  const bool fits = self && other && self->sizes() == other->sizes() && self->scalar_type() == at::kBool &&
      other->scalar_type() == at::kBool;
  return fits ? fresh(at::kBool, self->sizes()) : nullptr;
}

Result cat(Arguments arguments) {
  const auto tensors = arguments[0].toListRef();
  const at::Tensor* first = tensors.empty() ? nullptr : plain(tensors[0]);
  if (!first || first->dim() == 0) {
    return nullptr;
  }
  const int64_t dim = arguments[1].toInt() + (arguments[1].toInt() < 0 ? first->dim() : 0);
  if (dim < 0 || dim >= first->dim()) {
    return nullptr;
  }
  c10::DimVector sizes(first->sizes());
  sizes[dim] = 0;
  for (const c10::IValue& item : tensors) {
    const at::Tensor* tensor = plain(item);
    if (!tensor || tensor->dim() != first->dim() || tensor->scalar_type() != first->scalar_type() ||
        tensor->suggest_memory_format() != at::MemoryFormat::Contiguous) {
      return nullptr;
    }
    for (int64_t i = 0; i < first->dim(); ++i) {
      if (i != dim && tensor->size(i) != first->size(i)) {
        return nullptr;
      }
    }
    sizes[dim] += tensor->size(dim);
  }
  return fresh(first->scalar_type(), sizes);
}

Result clone(Arguments arguments) {
  const auto format = arguments[1].toOptional<at::MemoryFormat>().value_or(at::MemoryFormat::Preserve);
  const at::Tensor* self = format == at::MemoryFormat::Contiguous ? plain(arguments[0]) : contiguous(arguments[0]);
  const bool fits = self && (format == at::MemoryFormat::Contiguous || format == at::MemoryFormat::Preserve);
  return fits ? fresh(self->scalar_type(), self->sizes()) : nullptr;
}

Result mm(Arguments arguments) {
  const at::Tensor* a = plain(arguments[0]);
  const at::Tensor* b = plain(arguments[1]);
  const bool fits = a && b && a->dim() == 2 && b->dim() == 2 && is_real(*a) && a->scalar_type() == b->scalar_type() &&
      a->size(1) == b->size(0);
  return fits ? fresh(a->scalar_type(), {a->size(0), b->size(1)}) : nullptr;
}

// With a bias for each column: (bias, a, b, *, beta, alpha).
Result addmm(Arguments arguments) {
  const at::Tensor* bias = plain(arguments[0]);
  auto product = bias && is_number(arguments[3]) && is_number(arguments[4]) ? mm(arguments.slice(1, 2)) : nullptr;
  const bool fits = product && bias->scalar_type() == product->fresh[0]->dtype &&
      bias->sizes() == c10::IntArrayRef(product->fresh[0]->sizes).slice(1);
  return fits ? std::move(product) : nullptr;
}

Result bmm(Arguments arguments) {
  const at::Tensor* a = plain(arguments[0]);
  const at::Tensor* b = plain(arguments[1]);
  const bool fits = a && b && a->dim() == 3 && b->dim() == 3 && is_real(*a) && a->scalar_type() == b->scalar_type() &&
      a->size(0) == b->size(0) && a->size(2) == b->size(1);
  return fits ? fresh(a->scalar_type(), {a->size(0), a->size(1), b->size(2)}) : nullptr;
}

// (self, dim, half to float or the dtype of the result)
Result softmax(Arguments arguments) {
  const at::Tensor* self = contiguous(arguments[0]);
  const bool keeps_dtype = arguments[2].isNone() || (arguments[2].isBool() && !arguments[2].toBool());
  const bool fits = self && is_real(*self) && self->dim() > 0 && arguments[1].toInt() >= -self->dim() &&
      arguments[1].toInt() < self->dim() && keeps_dtype;
  return fits ? fresh(self->scalar_type(), self->sizes()) : nullptr;
}

Result embedding(Arguments arguments) {
  const at::Tensor* weight = plain(arguments[0]);
  const at::Tensor* indices = plain(arguments[1]);
  if (!weight || !indices || weight->dim() != 2 || (indices->scalar_type() != at::kLong && indices->scalar_type() != at::kInt)) {
    return nullptr;
  }
  c10::DimVector sizes(indices->sizes());
  sizes.push_back(weight->size(1));
  return fresh(weight->scalar_type(), sizes);
}

// On a CPU: (input, normalized sizes, weight, bias, epsilon) -> (output, mean, reciprocal of the deviation).
Result layer_norm(Arguments arguments) {
  const at::Tensor* input = contiguous(arguments[0]);
  if (!input || !real_device().is_cpu() || (input->scalar_type() != at::kFloat && input->scalar_type() != at::kDouble)) {
    return nullptr;
  }
  const auto normalized = arguments[1].toIntVector();
  const auto sizes = input->sizes();
  if (normalized.empty() || normalized.size() > sizes.size() ||
      sizes.slice(sizes.size() - normalized.size()) != c10::IntArrayRef(normalized)) {
    return nullptr;
  }
  for (const c10::IValue& value : arguments.slice(2, 2)) {
    const at::Tensor* factors = value.isNone() ? nullptr : contiguous(value);
    const bool fits = factors && factors->sizes() == c10::IntArrayRef(normalized) && factors->scalar_type() == input->scalar_type();
    if (!value.isNone() && !fits) {
      return nullptr;
    }
  }
  auto signature = fresh(input->scalar_type(), sizes);
  c10::DimVector rows(sizes);
  std::fill(rows.end() - static_cast<ptrdiff_t>(normalized.size()), rows.end(), 1);
  for (int i = 0; i < 2; ++i) {
    add_result(*signature, input->scalar_type(), rows, c10::contiguous_strides(rows));
  }
  return signature;
}

// Whether attention on a CPU gives an output that lies as the query does. In other versions of PyTorch, heads are next to each other.
bool output_is_like_query() {
  static const bool is_like = [] {
    PlainDispatch plain;
    const at::Tensor query = at::zeros({2, 3, 2, 4});
    const auto output = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, query, query));
    return output.strides() == query.strides();
  }();
  return is_like;
}

// Whether it takes keys and values that several heads of the query share.
bool takes_shared_heads() {
  static const bool takes = [] {
    PlainDispatch plain;
    const at::Tensor query = at::zeros({1, 2, 1, 4}), key = at::zeros({1, 1, 1, 4});
    try {
      return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, key)).sizes() == query.sizes();
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return takes;
}

// Attention on a CPU: (query, key, value, dropout, is_causal, *, mask, scale) -> (output, log of the sums of exponentials).
Result attention(Arguments arguments) {
  const at::Tensor* query = plain(arguments[0]);
  const at::Tensor* key = plain(arguments[1]);
  const at::Tensor* value = plain(arguments[2]);
  if (!query || !key || !value || query->dim() != 4 || key->dim() != 4 || value->sizes() != key->sizes()) {
    return nullptr;
  }
  const auto dtype = query->scalar_type();
  const int64_t batch = query->size(0), heads = query->size(1), length = query->size(2), width = query->size(3);
  bool fits = (dtype == at::kFloat || dtype == at::kDouble) && key->scalar_type() == dtype && value->scalar_type() == dtype &&
      key->size(0) == batch && key->size(3) == width && arguments[3].toDouble() == 0 &&
      (key->size(1) == heads || (heads % key->size(1) == 0 && takes_shared_heads()));
  if (fits && !arguments[5].isNone()) {
    const at::Tensor* mask = plain(arguments[5]);
    fits = mask && mask->dim() == 4 && mask->scalar_type() == dtype && (mask->size(0) == batch || mask->size(0) == 1) &&
        (mask->size(1) == heads || mask->size(1) == 1) && mask->size(2) == length && mask->size(3) == key->size(2);
  }
  const auto strides = query->strides();
  if (!fits || std::find(strides.begin(), strides.end(), 0) != strides.end() || !output_is_like_query()) {
    return nullptr;
  }
  auto signature = std::make_unique<Signature>();
  const bool dense = query->unsafeGetTensorImpl()->is_non_overlapping_and_dense();
  add_result(*signature, dtype, query->sizes(), dense ? strides.vec() : at::infer_dense_strides(query->sizes(), strides));
  add_result(*signature, dtype, {batch, heads, length}, {length * heads, 1, heads});
  return signature;
}

using ShapeRules = std::unordered_map<std::string, ShapeRule>;

ShapeRules all_shape_rules() {
  ShapeRules found{
      {"aten::cat", cat},
      {"aten::clone", clone},
      {"aten::mm", mm},
      {"aten::addmm", addmm},
      {"aten::bmm", bmm},
      {"aten::native_layer_norm", layer_norm},
      {"aten::_softmax", softmax},
      {"aten::_safe_softmax", softmax},
      {"aten::embedding", embedding},
      {"aten::gelu", gelu},
      {"aten::div.Tensor", arithmetic},
      {"aten::bitwise_and.Tensor", bitwise},
      {"aten::bitwise_or.Tensor", bitwise},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
  };
  for (const char* name : {"neg", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "erf", "tanh", "sigmoid", "relu", "silu"}) {
    found.emplace("aten::" + std::string(name), unary);
  }
  for (const char* name : {"add", "sub", "mul"}) {
    found.emplace("aten::" + std::string(name) + ".Tensor", exact_arithmetic);
  }
  for (const char* name : {"eq", "ne", "lt", "le", "gt", "ge"}) {
    found.emplace("aten::" + std::string(name) + ".Tensor", comparison);
    found.emplace("aten::" + std::string(name) + ".Scalar", comparison);
  }
  return found;
}

// ---- PyTorch's meta kernels in C++

using MetaKernels = std::unordered_map<std::string, c10::KernelFunction>;

template <typename Op>
void add(MetaKernels& kernels, typename Op::schema* kernel) {
  const std::string overload = Op::overload_name;
  // Called through a pointer: kernels of one signature then share the code that takes their arguments from a stack.
  kernels.emplace(Op::name + (overload.empty() ? "" : "." + overload), c10::KernelFunction::makeFromUnboxedRuntimeFunction(kernel));
}

// An operator as at::_ops calls it, and its kernel.
#define TARRY_META(op, kernel) add<at::_ops::op>(kernels, &at::meta::kernel)
#define TARRY_SAME(name) TARRY_META(name, name)
// An operator and its in-place form.
#define TARRY_UNARY(name) \
  TARRY_SAME(name);       \
  TARRY_SAME(name##_)
#define TARRY_BINARY(name) TARRY_META(name##_Tensor, name)
#define TARRY_COMPARISON(name)     \
  TARRY_META(name##_Tensor, name); \
  TARRY_META(name##_Scalar, name)

void add_pointwise(MetaKernels& kernels) {
  TARRY_BINARY(add);
  TARRY_BINARY(sub);
  TARRY_BINARY(mul);
  TARRY_BINARY(div);
  TARRY_BINARY(bitwise_and);
  TARRY_BINARY(bitwise_or);
  TARRY_BINARY(bitwise_xor);
  TARRY_BINARY(remainder);
  TARRY_COMPARISON(eq);
  TARRY_COMPARISON(ne);
  TARRY_COMPARISON(lt);
  TARRY_COMPARISON(le);
  TARRY_COMPARISON(gt);
  TARRY_COMPARISON(ge);
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
  TARRY_UNARY(gelu);
  TARRY_UNARY(floor);
  TARRY_UNARY(bitwise_not);
  TARRY_SAME(leaky_relu);
  TARRY_SAME(elu);
  TARRY_SAME(softplus);
  TARRY_SAME(maximum);
  TARRY_SAME(minimum);
  TARRY_UNARY(addcmul);
  TARRY_UNARY(addcdiv);
  TARRY_UNARY(clamp);
  TARRY_UNARY(clamp_min);
  TARRY_UNARY(clamp_max);
  TARRY_SAME(tanh_backward);
  TARRY_SAME(sigmoid_backward);
  TARRY_SAME(gelu_backward);
  TARRY_SAME(threshold_backward);
  TARRY_SAME(leaky_relu_backward);
  TARRY_META(div_Tensor_mode, div);
  TARRY_META(pow_Tensor_Scalar, pow);
  TARRY_META(pow_Tensor_Tensor, pow);
  TARRY_META(lerp_Scalar, lerp);
  TARRY_META(lerp_Tensor, lerp);
}

MetaKernels all_meta_kernels() {
  MetaKernels kernels;
  add_pointwise(kernels);
  TARRY_SAME(addmm);
  TARRY_SAME(cat);
  TARRY_SAME(_log_softmax);
  TARRY_SAME(_softmax_backward_data);
  TARRY_SAME(_log_softmax_backward_data);
  TARRY_SAME(all);
  TARRY_SAME(any);
  TARRY_META(sum_dim_IntList, sum);
  TARRY_SAME(amax);
  TARRY_SAME(amin);
  TARRY_META(max_dim, max);
  TARRY_META(min_dim, min);
  TARRY_SAME(cumsum);
  TARRY_SAME(linalg_vector_norm);
  TARRY_META(mean_dim, mean);
  TARRY_META(all_dim, all);
  TARRY_META(any_dim, any);
  return kernels;
}

} // namespace

ShapeRule find_shape_rule(const std::string& name) {
  static const auto* rules = new ShapeRules(all_shape_rules());
  const auto it = rules->find(name);
  return it == rules->end() ? nullptr : it->second;
}

const c10::KernelFunction* find_meta_kernel(const std::string& name) {
  static const auto* kernels = new MetaKernels(all_meta_kernels());
  const auto it = kernels->find(name);
  return it == kernels->end() ? nullptr : &it->second;
}

} // namespace tarry
