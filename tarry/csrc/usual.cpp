#include "usual.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <unordered_map>

#include "graph.h"
#include "scan.h"

namespace tarry {
namespace {

using Arguments = c10::ArrayRef<c10::IValue>;
using Result = std::unique_ptr<Signature>;

// ---- what is usual

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

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool() ||
      (value.isTensor() && value.toTensor().defined() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number() &&
       !value.toTensor().is_complex());
}

// Kernels put dimensions in order when they meet tensors of several shapes, and dimensions of size 1 have no place in it.
bool has_size_one(const at::Tensor& tensor) {
  return std::any_of(tensor.sizes().begin(), tensor.sizes().end(), [](int64_t size) { return size == 1; });
}

// ---- what it gives

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
  return self && self->is_floating_point() ? fresh(self->scalar_type(), self->sizes()) : nullptr;
}

Result gelu(Arguments arguments) {
  const auto approximate = arguments[1].toStringView();
  return approximate == "none" || approximate == "tanh" ? unary(arguments) : nullptr;
}

// The first two arguments of an operator on pairs of elements: two tensors that are alike, or a tensor and a number.
const at::Tensor* pair(Arguments arguments) {
  const at::Tensor* self = contiguous(arguments[0]);
  if (!self) {
    return nullptr;
  }
  if (is_number(arguments[1])) {
    return has_size_one(*self) ? nullptr : self;
  }
  const at::Tensor* other = contiguous(arguments[1]);
  return other && other->sizes() == self->sizes() && other->scalar_type() == self->scalar_type() ? self : nullptr;
}

Result arithmetic(Arguments arguments) {
  const at::Tensor* self = pair(arguments);
  const bool scaled = arguments.size() > 2 && !is_number(arguments[2]); // alpha
  return self && self->is_floating_point() && !scaled ? fresh(self->scalar_type(), self->sizes()) : nullptr;
}

Result comparison(Arguments arguments) {
  const at::Tensor* self = pair(arguments);
  const bool usual = self && (self->is_floating_point() || (self->scalar_type() == at::kLong && !arguments[1].isDouble()));
  return usual ? fresh(at::kBool, self->sizes()) : nullptr;
}

Result bitwise(Arguments arguments) {
  const at::Tensor* self = contiguous(arguments[0]);
  const at::Tensor* other = contiguous(arguments[1]);
  const bool usual = self && other && self->sizes() == other->sizes() && self->scalar_type() == at::kBool && other->scalar_type() == at::kBool;
  return usual ? fresh(at::kBool, self->sizes()) : nullptr;
}

Result cat(Arguments arguments) {
  const auto tensors = arguments[0].toListRef();
  const at::Tensor* first = tensors.empty() ? nullptr : contiguous(tensors[0]);
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
    const at::Tensor* tensor = contiguous(item);
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
  const at::Tensor* self = contiguous(arguments[0]);
  const auto format = arguments[1].toOptional<at::MemoryFormat>().value_or(at::MemoryFormat::Preserve);
  const bool usual = self && (format == at::MemoryFormat::Preserve || format == at::MemoryFormat::Contiguous);
  return usual ? fresh(self->scalar_type(), self->sizes()) : nullptr;
}

Result bmm(Arguments arguments) {
  const at::Tensor* a = plain(arguments[0]);
  const at::Tensor* b = plain(arguments[1]);
  const bool usual = a && b && a->dim() == 3 && b->dim() == 3 && a->is_floating_point() && a->scalar_type() == b->scalar_type() &&
      a->size(0) == b->size(0) && a->size(2) == b->size(1);
  return usual ? fresh(a->scalar_type(), {a->size(0), a->size(1), b->size(2)}) : nullptr;
}

Result softmax(Arguments arguments) {
  const at::Tensor* self = contiguous(arguments[0]);
  const bool usual = self && self->is_floating_point() && self->dim() > 0 && arguments[1].toInt() >= -self->dim() &&
      arguments[1].toInt() < self->dim() && !arguments[2].toBool();
  return usual ? fresh(self->scalar_type(), self->sizes()) : nullptr;
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
  bool usual = (dtype == at::kFloat || dtype == at::kDouble) && key->scalar_type() == dtype && value->scalar_type() == dtype &&
      key->size(0) == batch && key->size(1) == heads && key->size(3) == width && arguments[3].toDouble() == 0;
  if (usual && !arguments[5].isNone()) {
    const at::Tensor* mask = plain(arguments[5]);
    usual = mask && mask->dim() == 4 && mask->scalar_type() == dtype && (mask->size(0) == batch || mask->size(0) == 1) &&
        (mask->size(1) == heads || mask->size(1) == 1) && mask->size(2) == length && mask->size(3) == key->size(2);
  }
  const auto strides = query->strides();
  if (!usual || std::find(strides.begin(), strides.end(), 0) != strides.end() || !output_is_like_query()) {
    return nullptr;
  }
  auto signature = std::make_unique<Signature>();
  const bool dense = query->unsafeGetTensorImpl()->is_non_overlapping_and_dense();
  add_result(*signature, dtype, query->sizes(), dense ? strides.vec() : at::infer_dense_strides(query->sizes(), strides));
  add_result(*signature, dtype, {batch, heads, length}, {length * heads, 1, heads});
  return signature;
}

std::unordered_map<std::string, Usual> all() {
  std::unordered_map<std::string, Usual> found{
      {"aten::cat", cat},
      {"aten::clone", clone},
      {"aten::bmm", bmm},
      {"aten::_softmax", softmax},
      {"aten::embedding", embedding},
      {"aten::gelu", gelu},
      {"aten::bitwise_and.Tensor", bitwise},
      {"aten::bitwise_or.Tensor", bitwise},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", attention},
  };
  for (const char* name : {"neg", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "erf", "tanh", "sigmoid", "relu", "silu"}) {
    found.emplace("aten::" + std::string(name), unary);
  }
  for (const char* name : {"add", "sub", "mul", "div"}) {
    found.emplace("aten::" + std::string(name) + ".Tensor", arithmetic);
  }
  for (const char* name : {"eq", "ne", "lt", "le", "gt", "ge"}) {
    found.emplace("aten::" + std::string(name) + ".Tensor", comparison);
    found.emplace("aten::" + std::string(name) + ".Scalar", comparison);
  }
  return found;
}

} // namespace

Usual find_usual(const std::string& name) {
  static const auto* usual = new std::unordered_map<std::string, Usual>(all());
  const auto it = usual->find(name);
  return it == usual->end() ? nullptr : it->second;
}

} // namespace tarry
