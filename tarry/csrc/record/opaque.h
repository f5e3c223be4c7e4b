// Sparse and nested tensors.
//
// On device tarry, such a tensor is PyTorch's own TensorImpl of its layout over strided tensors of ours, its *parts*: indices and
// values, or the buffer that nested tensors share. Parts are lazy as all others; making such a tensor and looking at its parts
// computes nothing (device/layouts.cpp). Every other operator on it runs eagerly, on a real tensor of the same layout over real parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace tarry {

inline bool is_opaque(const at::Tensor& tensor) {
  return tensor.layout() != c10::kStrided || tensor.is_nested();
}

std::vector<at::Tensor> parts_of(const at::Tensor& opaque);
inline std::vector<at::Tensor> strided_parts(const at::Tensor& tensor) {
  return is_opaque(tensor) ? parts_of(tensor) : std::vector<at::Tensor>{tensor};
}
// A tensor like `opaque` over other parts, which may be on another device.
at::Tensor with_parts(const at::Tensor& opaque, const std::vector<at::Tensor>& parts);
// `opaque` becomes what with_parts(like, parts) would be.
void set_parts(const at::Tensor& opaque, const at::Tensor& like, const std::vector<at::Tensor>& parts);

// For every operator that PyTorch has a kernel of these layouts for (device/layouts.cpp). Called once, when tarry is imported.
void register_layouts();
// Calls of this operator raise: what it takes or gives does not exist on the device.
void refuse_operator(const std::string& name);

} // namespace tarry
