// Operators on sparse, nested and quantized tensors (record/opaque.h). PyTorch's own kernels make such tensors and give their parts:
// they compute nothing, whatever the device. All that PyTorch has another kernel for runs eagerly; the rest decomposes, as on a CPU.
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_dimI_native.h>
#include <ATen/ops/_dimV_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nested_tensor_size_native.h>
#include <ATen/ops/_nested_tensor_storage_offsets_native.h>
#include <ATen/ops/_nested_tensor_strides_native.h>
#include <ATen/ops/_nested_view_from_buffer_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/ccol_indices_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/col_indices_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/crow_indices_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/detach_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/is_same_size_native.h>
#include <ATen/ops/row_indices_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/unbind_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "core/failure.h"
#include "device/hooks.h"
#include "record/host_mode.h"
#include "record/opaque.h"
#include "record/record.h"

namespace tarry {
namespace {

// All on one device. Host tensors of no dimension mix with it, as on any accelerator.
void check_device(const Operator& op, const at::Tensor& tensor, std::optional<c10::Device>& device) {
  if (!tensor.defined() || (tensor.is_cpu() && (tensor.dim() == 0 || (takes_host_tensors() && !is_opaque(tensor))))) {
    return;
  }
  TORCH_CHECK(
      is_tarry(tensor) && tensor.device() == device.value_or(tensor.device()),
      "Expected all tensors to be on the same device, but found at least two devices, ",
      device.value_or(c10::Device(c10::DeviceType::PrivateUse1, 0)), " and ", tensor.device(), "! (", op.name,
      "). Move the tensor with .to(\"tarry\") first.");
  device = tensor.device();
}

void run_opaque(const c10::OperatorHandle& handle, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  check_fork();
  const Operator& op = *find_operator(handle);
  if (op.mutates) {
    raise_owed();
  }
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false); // see record()
  std::optional<c10::Device> device;
  for (const c10::IValue& argument : torch::jit::last(*stack, op.arguments.size())) {
    if (argument.isTensor()) {
      check_device(op, argument.toTensor(), device);
    } else if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) {
        check_device(op, tensor, device);
      }
    }
  }
  run_eagerly(op, stack, "it has a sparse or nested argument");
}

void refuse_quantized(const c10::OperatorHandle& handle, c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, handle.schema().name(),
      ": there are no quantized or oneDNN tensors on device 'tarry'. Run this part on the CPU "
      "(.cpu()), or quantize to integers of an ordinary dtype, as torchao does.");
}

// ---- factories: PyTorch makes empty parts first, on the current device

at::Tensor make_coo(
    int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size, const at::Tensor& indices, const at::Tensor& values,
    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin_memory, std::optional<bool> is_coalesced) {
  c10::OptionalDeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse_dim, dense_dim, size, indices, values, dtype, layout, device, pin_memory, is_coalesced);
}

at::Tensor make_empty_coo(
    int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  c10::OptionalDeviceGuard guard(device);
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, size, dtype, layout, device, pin_memory);
}

at::Tensor empty_coo(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::native::empty_sparse(size, dtype, layout, device, pin_memory, format);
}

at::Tensor clone_coo(const at::Tensor& self, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(self.device());
  return at::native::clone_sparse(self, format);
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &make_coo);
  m.impl("_sparse_coo_tensor_with_dims", &make_empty_coo);
  m.impl("empty.memory_format", &empty_coo);
  m.impl("empty_like", &at::native::empty_like_sparse_coo);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("_dimI", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("_dimV", &at::native::dense_dim_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("sparse_resize_", &at::native::sparse_resize_);
  m.impl("sparse_resize_and_clear_", &at::native::sparse_resize_and_clear_);
  m.impl("copy_", &at::native::copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
  m.impl("clone", &clone_coo);
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("empty.memory_format", &at::native::empty_sparse_compressed);
  m.impl("empty_like", &at::native::empty_like_sparse_csr);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse_csr);
  m.impl("dense_dim", &at::native::dense_dim_sparse_csr);
  m.impl("_nnz", &at::native::_nnz_sparse_csr);
  m.impl("values", &at::native::values_sparse_csr);
  m.impl("crow_indices", &at::native::crow_indices_sparse_csr);
  m.impl("col_indices", &at::native::col_indices_sparse_csr);
  m.impl("ccol_indices", &at::native::ccol_indices_sparse_csr);
  m.impl("row_indices", &at::native::row_indices_sparse_csr);
  m.impl("copy_", &at::native::copy_sparse_compressed_);
  m.impl("clone", &at::native::clone_sparse_compressed);
}

TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_nested_tensor_size", &at::native::_nested_tensor_size); // sizes, strides and offsets lie on the host
  m.impl("_nested_tensor_strides", &at::native::_nested_tensor_strides);
  m.impl("_nested_tensor_storage_offsets", &at::native::_nested_tensor_storage_offsets);
  m.impl("is_same_size", &at::native::nested_is_same_size);
  m.impl("alias", &at::native::alias_nested);
  m.impl("detach", &at::native::detach);
  m.impl("unbind.int", &at::native::NestedTensor_unbind);
  m.impl("values", &at::native::values_nested);
  m.impl("empty_like", &at::native::empty_like_nested);
  m.impl("clone", &at::native::clone_nested);
  m.impl("_to_copy", &at::native::_to_copy_nested);
  m.impl("copy_", &at::native::copy_nested_);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_nested_view_from_buffer", &at::native::_nested_view_from_buffer);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_opaque>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_opaque>());
}

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_opaque>());
}

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>());
}

struct LayoutKeys {
  c10::DispatchKey ours, cpu, cuda;
};

constexpr LayoutKeys kLayouts[] = {
    {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCUDA},
    {c10::DispatchKey::SparseCsrPrivateUse1, c10::DispatchKey::SparseCsrCPU, c10::DispatchKey::SparseCsrCUDA},
    {c10::DispatchKey::NestedTensorPrivateUse1, c10::DispatchKey::NestedTensorCPU, c10::DispatchKey::NestedTensorCUDA},
};

} // namespace

// The fallbacks above do not suffice: a composite kernel comes before them.
void register_layouts() {
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const LayoutKeys& keys : kLayouts) {
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", keys.ours, __FILE__, __LINE__);
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto handle = dispatcher.findSchema(name);
      if (handle && name.name.rfind("aten::", 0) == 0 && !handle->hasKernelForDispatchKey(keys.ours) &&
          (handle->hasKernelForDispatchKey(keys.cpu) || handle->hasKernelForDispatchKey(keys.cuda))) {
        const std::string local = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
        library->impl(local.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_opaque>());
      }
    }
    libraries->push_back(std::move(library));
  }
}

void refuse_operator(const std::string& name) {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->impl(name.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>());
}

} // namespace tarry
