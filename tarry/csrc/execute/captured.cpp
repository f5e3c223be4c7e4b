#include "execute/captured.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <unordered_map>

namespace tarry {
namespace {

constexpr size_t kSmall = 32; // bytes: a number or a few

// Results of which so many bytes are in use belong to a step that keeps the device busy: it should begin, and they are moved. Less
// than that is freed before the device would be idle.
constexpr size_t kWorthMoving = 16 << 20;

// The part of the storage of `whole` that `like` is of its own.
at::Tensor over(const at::Tensor& whole, const at::Tensor& like) {
  return view_of(whole, like.dtype(), like.sizes(), like.strides(), like.storage_offset());
}

// All of a tensor's storage, in elements that are copied fast.
at::Tensor contents(const at::Tensor& tensor) {
  const size_t bytes = tensor.storage().nbytes();
  const Layout* layout = flat_home(c10::kDouble, bytes);
  return view_of(tensor, c10::scalarTypeToTypeMeta(layout->dtype), layout->sizes, layout->strides, 0);
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> from, to;
  for (const at::Tensor& tensor : tensors) {
    from.push_back(contents(tensor));
    to.push_back(at::empty(from.back().sizes(), from.back().options()));
  }
  if (!to.empty()) {
    at::_foreach_copy_(to, from);
  }
  return to;
}

// In memory from which the device may copy at any later time.
at::Tensor pinned(const at::Tensor& tensor) {
  at::Tensor made = at::empty(tensor.sizes(), tensor.options().pinned_memory(true));
  std::memcpy(made.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return made;
}

} // namespace

void CapturedProgram::clear() {
  parts_ = Parts();
  lent_.clear();
  uploaded_.clear();
}

void CapturedProgram::set(Parts parts) {
  clear();
  parts_ = std::move(parts);
  uploaded_.resize(parts_.vectors.size());
  std::unordered_map<const c10::StorageImpl*, int> users;
  for (const at::Tensor& result : parts_.results) {
    if (result.defined()) {
      ++users[result.storage().unsafeGetStorageImpl()];
    }
  }
  for (const at::Tensor& result : parts_.results) {
    // Small results, such as losses, are often held for long; a copy is cheap.
    lent_.push_back(result.defined() && users[result.storage().unsafeGetStorageImpl()] == 1 && result.storage().nbytes() > kSmall);
  }
}

bool CapturedProgram::accepts(const std::vector<at::Tensor>& inputs) const {
  if (!parts_.graph || inputs.size() != parts_.addresses.size()) {
    return false;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() ||
        (parts_.addresses[i] != 0 && reinterpret_cast<int64_t>(inputs[i].const_data_ptr()) != parts_.addresses[i])) {
      return false;
    }
  }
  // On another stream than the default one, the launch would have to name it.
  const c10::Device device = inputs.empty() ? c10::Device(c10::DeviceType::CUDA, 0) : inputs[0].device();
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id() == 0;
}

bool CapturedProgram::makes_room(size_t) const {
  std::lock_guard<std::mutex> guard(mutex_);
  size_t held = 0;
  for (size_t i = 0; i < parts_.results.size(); ++i) {
    if (lent_[i] && parts_.results[i].storage().use_count() != 1) {
      held += parts_.results[i].storage().nbytes();
    }
  }
  if (held >= kWorthMoving) {
    let_go_of_results();
    return true;
  }
  return held == 0;
}

// What the last launch has left belongs to those who were given it: the next one must not change it.
void CapturedProgram::let_go_of_results() const {
  std::vector<at::Tensor> held;
  std::vector<size_t> indices;
  for (size_t i = 0; i < parts_.results.size(); ++i) {
    if (lent_[i] && parts_.results[i].storage().use_count() != 1) {
      held.push_back(parts_.results[i]);
      indices.push_back(i);
    }
  }
  const auto copies = copies_of(held);
  for (size_t k = 0; k < held.size(); ++k) {
    c10::StorageImpl* theirs = held[k].storage().unsafeGetStorageImpl();
    c10::StorageImpl* ours = copies[k].storage().unsafeGetStorageImpl();
    ours->set_data_ptr_noswap(theirs->set_data_ptr(ours->set_data_ptr(c10::DataPtr())));
    parts_.results[indices[k]] = over(copies[k], held[k]);
  }
}

void CapturedProgram::launch(const std::vector<c10::IValue>& numbers) const {
  if (parts_.generators.empty()) {
    const int failed = parts_.launch(parts_.graph, nullptr);
    TORCH_CHECK(failed == 0, "tarry: launching a CUDA graph gave error ", failed);
    return;
  }
  for (size_t i = 0; i < parts_.generators.size(); ++i) {
    at::Generator& generator = parts_.generators[i];
    std::lock_guard<std::mutex> guard(generator.mutex());
    generator.set_current_seed(static_cast<uint64_t>(numbers.at(parts_.seeds[i]).toInt()));
  }
  parts_.replay(parts_.captured);
}

std::vector<at::Tensor> CapturedProgram::run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const {
  const c10::OptionalDeviceGuard device(inputs.empty() ? std::nullopt : std::make_optional(inputs[0].device()));
  std::lock_guard<std::mutex> guard(mutex_);
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
    at::Tensor vector = vector_of(parts_.vectors[i], numbers);
    at::Tensor& uploaded = uploaded_[i];
    if (!uploaded.defined() || std::memcmp(uploaded.const_data_ptr(), vector.const_data_ptr(), vector.nbytes()) != 0) {
      at::Tensor(parts_.vector_tensors[i]).copy_(pinned(vector), /*non_blocking=*/true);
      uploaded = std::move(vector);
    }
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!parts_.placeholders[i].defined()) {
      begin_write(inputs[i]); // it is where the graph was captured, and perhaps updated there
    }
  }
  launch(numbers);
  for (const uint32_t i : parts_.written) {
    begin_write(inputs[i]);
    inputs[i].copy_(parts_.placeholders[i]);
  }
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < parts_.results.size(); ++i) {
    const at::Tensor& result = parts_.results[i];
    outputs.push_back(!result.defined() || lent_[i] ? result : over(copies_of({result})[0], result));
  }
  return outputs;
}

} // namespace tarry
