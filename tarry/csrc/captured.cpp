#include "captured.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <unordered_map>

namespace tarry {
namespace {

constexpr size_t kSmall = 32; // bytes: a number or a few

// The same part of another storage.
at::Tensor over(const c10::Storage& storage, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), like.key_set(), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::Tensor all_bytes(const at::Tensor& tensor) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), caffe2::TypeMeta::Make<uint8_t>());
  made.unsafeGetTensorImpl()->set_sizes_contiguous(c10::IntArrayRef{static_cast<int64_t>(tensor.storage().nbytes())});
  return made;
}

at::Tensor copy_of(const at::Tensor& tensor) {
  const at::Tensor bytes = all_bytes(tensor);
  at::Tensor copy = at::empty({bytes.numel()}, bytes.options());
  copy.copy_(bytes);
  return copy;
}

// On the host, in memory from which the device may copy at any later time.
at::Tensor pinned_vector(const LaunchList::NumberVector& spec, const std::vector<c10::IValue>& numbers) {
  at::Tensor made = at::empty({static_cast<int64_t>(spec.indices.size())}, at::TensorOptions(spec.dtype).pinned_memory(true));
  fill_vector(spec, numbers, made);
  return made;
}

} // namespace

void CapturedProgram::clear() {
  parts_ = Parts();
  lent_.clear();
}

void CapturedProgram::set(Parts parts) {
  parts_ = std::move(parts);
  lent_.clear();
  std::unordered_map<const c10::StorageImpl*, int> users;
  for (const at::Tensor& result : parts_.results) {
    if (result.defined()) {
      ++users[result.storage().unsafeGetStorageImpl()];
    }
  }
  for (const at::Tensor& result : parts_.results) {
    // Small results, such as losses, are often held for long; a copy is cheap.
    lent_.push_back(
        result.defined() && users[result.storage().unsafeGetStorageImpl()] == 1 && result.storage().nbytes() > kSmall);
  }
}

bool CapturedProgram::accepts(const std::vector<at::Tensor>& inputs) const {
  if (!parts_.graph || inputs.size() != parts_.addresses.size()) {
    return false;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || (parts_.addresses[i] != 0 && reinterpret_cast<int64_t>(inputs[i].const_data_ptr()) != parts_.addresses[i])) {
      return false;
    }
  }
  // On another stream than the default one, the launch would have to name it.
  const c10::Device device = inputs.empty() ? c10::Device(c10::DeviceType::CUDA, 0) : inputs[0].device();
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id() == 0;
}

bool CapturedProgram::is_free() const {
  for (size_t i = 0; i < parts_.results.size(); ++i) {
    if (lent_[i] && parts_.results[i].storage().use_count() != 1) {
      return false;
    }
  }
  return true;
}

// What the last launch has left belongs to those who were given it: the next one must not change it.
void CapturedProgram::let_go_of_results() const {
  for (size_t i = 0; i < parts_.results.size(); ++i) {
    if (!lent_[i] || parts_.results[i].storage().use_count() == 1) {
      continue;
    }
    at::Tensor& result = parts_.results[i];
    at::Tensor copy = copy_of(result);
    c10::StorageImpl* theirs = result.storage().unsafeGetStorageImpl();
    c10::StorageImpl* ours = copy.storage().unsafeGetStorageImpl();
    ours->set_data_ptr_noswap(theirs->set_data_ptr(ours->set_data_ptr(c10::DataPtr())));
    result = over(copy.storage(), result);
  }
}

std::vector<at::Tensor> CapturedProgram::run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const {
  const c10::OptionalDeviceGuard device(inputs.empty() ? std::nullopt : std::make_optional(inputs[0].device()));
  let_go_of_results();
  std::vector<at::Tensor> to, from;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (parts_.placeholders[i].defined()) {
      to.push_back(parts_.placeholders[i]);
      from.push_back(inputs[i]);
    }
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  for (size_t i = 0; i < parts_.vectors.size(); ++i) {
    at::Tensor(parts_.vector_tensors[i]).copy_(pinned_vector(parts_.vectors[i], numbers), /*non_blocking=*/true);
  }
  const int failed = parts_.launch(parts_.graph, nullptr);
  TORCH_CHECK(failed == 0, "tarry: launching a CUDA graph gave error ", failed);
  for (const uint32_t i : parts_.written) {
    inputs[i].copy_(parts_.placeholders[i]);
  }
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < parts_.results.size(); ++i) {
    const at::Tensor& result = parts_.results[i];
    outputs.push_back(!result.defined() || lent_[i] ? result : over(copy_of(result).storage(), result));
  }
  return outputs;
}

} // namespace tarry
