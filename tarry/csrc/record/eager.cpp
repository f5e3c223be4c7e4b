// Running an operator at once on the real device.
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "core/generator.h"
#include "core/graph.h"
#include "device/host_memory.h"
#include "device/profiler.h"
#include "execute/callbacks.h"
#include "execute/event_log.h"
#include "execute/executor.h"
#include "execute/outstanding.h"
#include "execute/serve.h"
#include "record/host_mode.h"
#include "record/opaque.h"
#include "record/provenance.h"
#include "record/record.h"

namespace tarry {
namespace {

// Where a call takes place: the device of its first tensor that is on one, else the one it asks for, else the current one.
DeviceState& device_of(c10::ArrayRef<c10::IValue> arguments) {
  c10::DeviceIndex asked = -1;
  auto state = [](const c10::IValue& value) -> DeviceState* {
    if (!value.isTensor() || !value.toTensor().defined() || !is_tarry(value.toTensor())) {
      return nullptr;
    }
    return &device_state(value.toTensor().device().index());
  };
  for (const c10::IValue& argument : arguments) {
    if (DeviceState* found = state(argument)) {
      return *found;
    }
    if (argument.isList()) {
      for (const c10::IValue& item : argument.toListRef()) {
        if (DeviceState* found = state(item)) {
          return *found;
        }
      }
    }
    if (argument.isDevice() && argument.toDevice().type() == c10::DeviceType::PrivateUse1) {
      asked = argument.toDevice().index();
    }
  }
  return device_state(asked);
}

// Real stand-ins for the arguments, in the order of the tensors met.
struct RealArguments {
  const char* reason;
  c10::Device device;
  bool gives_views; // the operator says so of a result
  std::vector<at::Tensor> originals;
  std::vector<at::Tensor> real;
  std::vector<bool> is_read;
  struct Written {
    TarryStorage* storage;
    at::Tensor data; // the storage's contents, whole
    size_t nbytes;   // of its memory before the call
  };
  std::vector<Written> written;
  struct Opaque {
    at::Tensor original;
    at::Tensor real;
    bool is_mutable;
  };
  std::vector<Opaque> opaque; // sparse and nested ones; their parts are among the others

  // Some kernels look at it, and compute more if a backward pass will need that (_sparse_mm_reduce_impl).
  static void mark_requires_grad(const at::Tensor& real, const at::Tensor& original) {
    if (original.requires_grad()) {
      real.unsafeGetTensorImpl()->set_requires_grad(true);
    }
  }

  at::Tensor convert_opaque(const at::Tensor& tensor, bool is_mutable) {
    for (const Opaque& other : opaque) {
      if (other.original.is_same(tensor)) {
        return other.real;
      }
    }
    std::vector<at::Tensor> parts = parts_of(tensor);
    for (at::Tensor& part : parts) {
      part = convert(part, is_mutable);
    }
    opaque.push_back({tensor, with_parts(tensor, parts), is_mutable});
    if (!is_mutable) {
      mark_requires_grad(opaque.back().real, tensor);
    }
    return opaque.back().real;
  }

  at::Tensor convert(const at::Tensor& tensor, bool is_mutable) {
    if (!tensor.defined() || !is_tarry(tensor)) {
      // Zero-dimensional tensors and indices may lie on the host; the real device may be another.
      if (tensor.defined() && !is_mutable && tensor.is_cpu() && !device.is_cpu() &&
          !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        return tensor.to(device);
      }
      return tensor;
    }
    if (is_opaque(tensor)) {
      return convert_opaque(tensor, is_mutable);
    }
    for (size_t i = 0; i < originals.size(); ++i) {
      if (originals[i].is_same(tensor)) {
        is_read[i] = is_read[i] || !is_mutable;
        return real[i];
      }
    }
    // Views of one storage stay views of one buffer, which is made the storage's own once, before any view is taken.
    TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
    const bool seen = std::any_of(written.begin(), written.end(), [&](const Written& other) { return other.storage == storage; });
    const bool owns = is_mutable && !seen;
    const at::Tensor view = owns ? materialise_for_write(tensor, reason) : materialise(tensor, reason);
    originals.push_back(tensor);
    is_read.push_back(!is_mutable);
    real.push_back(tarry::alias(view)); // the kernel may resize it; the storage's own data keep their layout
    if (!is_mutable) {
      mark_requires_grad(real.back(), tensor);
    }
    if (owns) {
      std::lock_guard<std::mutex> guard(storage->state->mutex);
      written.push_back({storage, storage->data, view.storage().nbytes()});
    }
    return real.back();
  }

  // A kernel that resizes what it has still to read computes with anything. Those that PyTorch generates have a result before.
  bool read_after_resizing(const Operator& op) const {
    for (size_t i = 0; i < real.size(); ++i) {
      if (is_read[i] && real[i].sizes() != originals[i].sizes()) {
        return !op.handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
      }
    }
    return false;
  }

  // What the kernel has done to sizes, strides and memory is done to the arguments and their storages. Also after an error: eager
  // PyTorch leaves an argument resized, too.
  void write_back(DeviceState& state) {
    std::vector<const c10::StorageImpl*> memory;
    for (Written& each : written) {
      memory.push_back(each.data.storage().unsafeGetStorageImpl());
      const size_t nbytes = each.data.storage().nbytes();
      const Layout* home = nbytes == each.nbytes ? each.storage->home : flat_home(each.storage->home->dtype, nbytes);
      // Another tensor than before: what was launched early while the kernel wrote may have read anything, and must not be taken
      // for a reader of the result.
      at::Tensor renewed = home == each.storage->home ? tarry::alias(each.data) : view_as_layout(each.data, home);
      Graveyard graveyard;
      std::lock_guard<std::mutex> guard(each.storage->state->mutex);
      if (each.storage->data.is_same(each.data)) {
        graveyard.tensors.push_back(std::exchange(each.storage->data, std::move(renewed)));
        each.storage->note_stored();
        if (home != each.storage->home) {
          each.storage->become(home);
        }
      }
      graveyard.tensors.push_back(std::move(each.data));
    }
    for (size_t i = 0; i < real.size(); ++i) {
      auto* impl = originals[i].unsafeGetTensorImpl();
      const auto* before = storage_of(impl);
      const auto at = std::find_if(written.begin(), written.end(), [&](const Written& each) { return each.storage == before; });
      if (at == written.end()) {
        continue;
      }
      if (real[i].storage().unsafeGetStorageImpl() != memory[at - written.begin()]) {
        const at::Tensor moved = wrap_real(state, real[i]); // the kernel has set_() it to other memory
        impl->set_storage_keep_dtype(moved.storage());
        impl->set_sizes_and_strides(moved.sizes(), moved.strides(), moved.storage_offset());
      } else if (!layout_of(real[i].unsafeGetTensorImpl())->describes(impl)) {
        impl->set_sizes_and_strides(real[i].sizes(), real[i].strides(), real[i].storage_offset());
      }
    }
    for (const Opaque& each : opaque) {
      if (each.is_mutable) {
        set_parts(each.original, each.real, adopt_parts(state, each.real));
      }
    }
  }

  // The argument whose memory a tensor of the kernel's looks at, and in the same way if `exactly`; null if there is none.
  const at::Tensor* base_of(const at::Tensor& tensor, bool exactly) const {
    const auto* memory = tensor.storage().unsafeGetStorageImpl();
    for (size_t i = 0; i < real.size(); ++i) {
      const bool same = real[i].storage().unsafeGetStorageImpl() == memory && !tensor.is_conj() && !tensor.is_neg();
      if (same && (!exactly || layout_of(tensor.unsafeGetTensorImpl())->describes(originals[i].unsafeGetTensorImpl()))) {
        return &originals[i];
      }
    }
    return nullptr;
  }

  // Ours for one that the kernel gives: an argument, a new tensor or, of an operator for views or from a sparse or nested one, a view.
  at::Tensor adopt(DeviceState& state, const at::Tensor& tensor) const {
    for (size_t i = 0; i < real.size(); ++i) {
      if (real[i].is_same(tensor)) {
        return originals[i];
      }
    }
    for (const Opaque& each : opaque) {
      if (each.real.is_same(tensor)) {
        return each.original;
      }
    }
    const bool may_share = gives_views || !opaque.empty();
    const at::Tensor* base = may_share ? base_of(is_opaque(tensor) ? parts_of(tensor).back() : tensor, /*exactly=*/false) : nullptr;
    c10::InferenceMode mode(base ? base->is_inference() : c10::InferenceMode::is_enabled()); // a view is what its base is
    if (is_opaque(tensor)) {
      return with_parts(tensor, adopt_parts(state, tensor));
    }
    if (base) {
      return make_tensor(
          state, layout_of(tensor.unsafeGetTensorImpl()), StoragePtr::reclaim_copy(storage_of(base->unsafeGetTensorImpl())));
    }
    return wrap_real(state, tensor);
  }

  // Parts keep their strides: eager leaves indices in a larger buffer, and PyTorch decides by that whether it copies a gradient.
  at::Tensor adopt_part(DeviceState& state, const at::Tensor& part) const {
    const auto item = static_cast<int64_t>(part.element_size()), nbytes = static_cast<int64_t>(part.storage().nbytes());
    const Layout* layout = layout_of(part.unsafeGetTensorImpl());
    if (base_of(part, /*exactly=*/false) || part.storage().use_count() != 1 || nbytes % item != 0 || part.is_conj() ||
        part.is_neg() || layout->dense) {
      return adopt(state, part);
    }
    const Layout* home = flat_layout(layout->dtype, nbytes / item);
    auto storage = c10::make_intrusive<TarryStorage>(&state, home, home->nbytes);
    storage->data = view_as_layout(part, home);
    storage->note_stored();
    return make_tensor(state, layout, std::move(storage));
  }

  std::vector<at::Tensor> adopt_parts(DeviceState& state, const at::Tensor& tensor) const {
    std::vector<at::Tensor> parts = parts_of(tensor);
    for (at::Tensor& part : parts) {
      const at::Tensor* same = base_of(part, /*exactly=*/true);
      part = same ? *same : adopt_part(state, part);
    }
    return parts;
  }

  c10::IValue convert(const c10::IValue& value, const Argument& declared) {
    if (value.isTensor()) {
      return convert(value.toTensor(), declared.is_mutable);
    }
    if (declared.kind == ArgKind::TensorList && value.isList()) {
      auto copy = value.toList().copy();
      for (size_t i = 0; i < copy.size(); ++i) {
        const c10::IValue item = copy.get(i);
        if (item.isTensor()) {
          copy.set(i, convert(item.toTensor(), declared.is_mutable));
        }
      }
      return copy;
    }
    return value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1 ? c10::IValue(device) : value;
  }
};

c10::IValue wrap_result(const c10::IValue& value, DeviceState& state, const RealArguments& arguments) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return value;
    }
    return arguments.adopt(state, tensor);
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& item : value.toListRef()) {
      list.push_back(wrap_result(item, state, arguments).toTensor());
    }
    return list;
  }
  return value;
}

// Asks whether the operator may run eagerly, before it does; says afterwards what it took, in seconds.
void count_fallback(DeviceState& state, const Operator& op, const char* reason, const Place& place, double seconds) {
  if (C10_LIKELY(!is_watched() && !is_logging())) {
    if (seconds >= 0) {
      std::lock_guard<std::mutex> guard(state.mutex);
      ServedCounts::Fallback& counted = state.executor->served.fallbacks[{&op, place.site}];
      ++counted.count;
      counted.seconds += seconds;
    }
    return;
  }
  report_fallback(op.name, reason, place, seconds);
}

} // namespace

void run_eagerly(const Operator& op, torch::jit::Stack* stack, const char* reason) {
  const auto start = std::chrono::steady_clock::now();
  const Place place = current_place();
  const size_t count = op.arguments.size();
  const auto arguments = torch::jit::last(*stack, count);
  DeviceState* const state = &device_of(arguments);
  count_fallback(*state, op, reason, place, -1);
  RealArguments real{reason, real_device(state->index), op.gives_views, {}, {}, {}, {}, {}};
  std::optional<at::Generator> given;
  torch::jit::Stack call_stack;
  // The written ones first: they may get a new buffer.
  for (const bool writes : {true, false}) {
    for (size_t i = 0; i < count; ++i) {
      if (op.arguments[i].is_mutable == writes) {
        real.convert(arguments[i], op.arguments[i]);
      }
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (op.arguments[i].kind == ArgKind::Generator) {
      if (!arguments[i].isNone()) {
        given = arguments[i].toGenerator();
      }
      call_stack.emplace_back();
    } else {
      call_stack.push_back(real.convert(arguments[i], op.arguments[i]));
    }
  }
  try {
    PlainDispatch plain;
    const CollectTickets none(nullptr);
    const CountedMemory counted(state->index);
    std::optional<SeededCall> seeded;
    if (draws_on_host(op, arguments)) {
      if (given) {
        call_stack[op.generator_argument] = *given;
      }
    } else if (op.draws(arguments)) {
      seeded.emplace(op, draw_seed(given, state->index), call_stack, real.device);
    }
    const DeviceTime time;
    op.handle.callBoxed(&call_stack);
  } catch (...) {
    real.write_back(*state);
    throw;
  }
  const bool undefined = real.read_after_resizing(op);
  real.write_back(*state);
  TORCH_CHECK(
      !undefined, op.name,
      ": an out= argument of the wrong shape is an input, too, and was resized before it was read. Its contents "
      "are undefined; give another tensor as out=");
  torch::jit::Stack results;
  for (const c10::IValue& value : call_stack) {
    results.push_back(wrap_result(value, *state, real));
  }
  torch::jit::drop(*stack, count);
  std::move(results.begin(), results.end(), std::back_inserter(*stack));
  count_fallback(*state, op, reason, place, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

// ---- sparse and nested tensors
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
