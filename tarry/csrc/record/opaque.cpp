#include "record/opaque.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "core/graph.h"

namespace tarry {
namespace {

at::SparseTensorImpl* coo(const at::Tensor& tensor) {
  return at::sparse::get_sparse_impl(tensor);
}

at::SparseCsrTensorImpl* compressed(const at::Tensor& tensor) {
  return at::sparse_csr::get_sparse_csr_impl(tensor);
}

} // namespace

std::vector<at::Tensor> parts_of(const at::Tensor& opaque) {
  if (opaque.is_nested()) {
    return {at::native::get_nested_tensor_impl(opaque)->get_unsafe_storage_as_tensor()};
  }
  if (opaque.is_sparse()) {
    return {coo(opaque)->indices(), coo(opaque)->values()};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      at::sparse_csr::is_sparse_compressed(opaque), "tarry has no tensors of layout ", opaque.layout(),
      ". Keep this one on the CPU.");
  return {compressed(opaque)->compressed_indices(), compressed(opaque)->plain_indices(), compressed(opaque)->values()};
}

at::Tensor with_parts(const at::Tensor& opaque, const std::vector<at::Tensor>& parts) {
  PlainDispatch plain;
  if (opaque.is_nested()) {
    const auto* nested = at::native::get_nested_tensor_impl(opaque);
    return at::detail::make_tensor<at::native::NestedTensorImpl>(
        parts[0], nested->get_nested_sizes(), nested->get_nested_strides(), nested->get_storage_offsets());
  }
  const at::Tensor& values = parts.back();
  c10::OptionalDeviceGuard guard(values.device()); // PyTorch makes empty parts first, on the current device
  const auto options = values.options().layout(opaque.layout());
  if (opaque.is_sparse()) {
    return at::_sparse_coo_tensor_with_dims_and_tensors(
        opaque.sparse_dim(), opaque.dense_dim(), opaque.sizes(), parts[0], values, options, coo(opaque)->coalesced());
  }
  return at::_sparse_compressed_tensor_unsafe(parts[0], parts[1], values, opaque.sizes(), options);
}

void set_parts(const at::Tensor& opaque, const at::Tensor& like, const std::vector<at::Tensor>& parts) {
  if (opaque.is_nested()) {
    return; // its sizes never change, nor does its buffer but for the contents
  }
  // Only what has changed: a tensor that was detached refuses more.
  const std::vector<at::Tensor> before = parts_of(opaque);
  const bool same_sizes = opaque.sizes() == like.sizes();
  const bool same_parts = std::equal(
      parts.begin(), parts.end(), before.begin(), [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); });
  if (!opaque.is_sparse()) {
    if (!same_parts || !same_sizes) {
      compressed(opaque)->set_member_tensors(parts[0], parts[1], parts[2], like.sizes());
    }
    return;
  }
  if (!same_sizes || opaque.sparse_dim() != like.sparse_dim() || opaque.dense_dim() != like.dense_dim()) {
    coo(opaque)->raw_resize_(like.sparse_dim(), like.dense_dim(), like.sizes());
  }
  if (!same_parts) {
    coo(opaque)->set_indices_and_values_unsafe(parts[0], parts[1]);
  }
  if (coo(opaque)->coalesced() != coo(like)->coalesced()) {
    coo(opaque)->set_coalesced(coo(like)->coalesced());
  }
}

} // namespace tarry
