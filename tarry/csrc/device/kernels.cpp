// Operators that are not simply recorded: views (PyTorch's own kernels, which only touch metadata), allocation, transfer
// between devices, reading values, and a few composites whose stock decomposition is wrong or slow for a lazy device.
#include <ATen/EmptyTensor.h>
#include <ATen/Context.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/kaiser_window.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/COW.h>
#include <torch/library.h>

#include "execute/event_log.h"
#include "execute/executor.h"
#include "device/hooks.h"
#include "device/host_memory.h"
#include "execute/callbacks.h"
#include "execute/serve.h"
#include "record/record.h"
#include "replay/replay.h"

namespace tarry {
namespace {

// ---- allocation

void check_strided(std::optional<at::Layout> layout) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !layout || *layout == at::kStrided, "tarry: expected the layout torch.strided, not ", *layout,
      ". Make a strided tensor, and call .to_sparse() on it.");
}

bool fills_uninitialised() {
  return at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory();
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  check_strided(layout);
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  at::detail::check_size_nonnegative(size);
  if (C10_UNLIKELY(dtype == at::kComplexHalf)) {
    TORCH_WARN_ONCE("ComplexHalf support is experimental and many operators don't support it yet.");
  }
  const auto type = c10::dtype_or_default(dtype);
  at::detail::computeStorageNbytes(size, stride, c10::elementSize(type)); // refuses what has no size
  auto& state = device_state(device ? checked_device(device->index()) : -1);
  at::Tensor result = make_uninitialised(state, intern_layout(type, size, stride));
  if (C10_UNLIKELY(fills_uninitialised())) {
    at::native::fill_empty_deterministic_(result);
  }
  return result;
}

// PyTorch's kernel computes it on the host, or by a kernel of the device's own.
at::Tensor kaiser_window_beta(
    int64_t length, bool periodic, double beta, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  check_strided(layout);
  const auto target = device.value_or(at::Device(c10::DeviceType::PrivateUse1));
  return at::kaiser_window(length, periodic, beta, dtype, layout, at::Device(at::kCPU), false).to(target);
}

at::Tensor kaiser_window_periodic(
    int64_t length, bool periodic, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  return kaiser_window_beta(length, periodic, 12.0, dtype, layout, device, pin_memory);
}

at::Tensor kaiser_window(
    int64_t length, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return kaiser_window_beta(length, true, 12.0, dtype, layout, device, pin_memory);
}

// The strides of a tensor of these sizes in this memory format.
c10::DimVector strides_of(at::IntArrayRef size, std::optional<at::MemoryFormat> format = std::nullopt) {
  c10::DimVector strides(size.size());
  if (format == at::MemoryFormat::ChannelsLast) {
    TORCH_CHECK(size.size() == 4, "required rank 4 tensor to use channels_last format");
    const auto computed = c10::get_channels_last_strides_2d(size);
    std::copy(computed.begin(), computed.end(), strides.begin());
  } else if (format == at::MemoryFormat::ChannelsLast3d) {
    TORCH_CHECK(size.size() == 5, "required rank 5 tensor to use channels_last_3d format");
    const auto computed = c10::get_channels_last_strides_3d(size);
    std::copy(computed.begin(), computed.end(), strides.begin());
  } else {
    TORCH_CHECK(!format || format == at::MemoryFormat::Contiguous, "unsupported memory format ", *format);
    uint64_t stride = 1; // may overflow; the allocation raises then
    for (size_t i = size.size(); i-- > 0;) {
      strides[i] = static_cast<int64_t>(stride);
      stride *= static_cast<uint64_t>(std::max<int64_t>(size[i], 1));
    }
  }
  return strides;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  return empty_strided(size, strides_of(size, format), dtype, layout, device, pin_memory);
}

// Exactly these strides, which may overlap or leave gaps: what is recorded has neither.
at::Tensor new_empty_strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  return at::empty_strided(size, stride, dtype.value_or(self.scalar_type()), layout, device.value_or(self.device()), pin_memory);
}

at::Tensor zero_tensor(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  return at::zeros(size, dtype, layout, device, pin_memory);
}

// ---- storages that tensors look at

// Part of a storage: `storage[a:b]`. A tensor that is set to it looks at the storage that it is part of.
struct StorageSlice final : c10::StorageImpl {
  StorageSlice(StoragePtr whole, int64_t start, int64_t nbytes)
      : c10::StorageImpl(
            use_byte_size_t(), nbytes,
            at::DataPtr(static_cast<char*>(whole->_mutable_data_ptr_no_checks().get()) + start, whole->device()),
            /*allocator=*/nullptr, /*resizable=*/false),
        whole(std::move(whole)),
        start(start) {}

  const StoragePtr whole;
  const int64_t start;
};

at::Tensor& set_storage_and_size(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device_type() == c10::DeviceType::PrivateUse1, "Expected a storage on device 'tarry' but found one on ",
      source.device());
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  at::detail::check_size_nonnegative(size);
  c10::DimVector strides(stride.begin(), stride.end());
  if (stride.size() != size.size()) {
    strides = strides_of(size);
  }
  at::detail::computeStorageNbytes(size, strides, self.element_size(), offset); // refuses what has no size
  const size_t nbytes = intern_layout(self.scalar_type(), size, strides, offset)->nbytes;
  if (const auto* slice = dynamic_cast<StorageSlice*>(source.unsafeGetStorageImpl())) {
    const auto item = static_cast<int64_t>(self.element_size());
    TORCH_CHECK(nbytes <= slice->nbytes(), "Trying to resize storage that is not resizable");
    TORCH_CHECK_NOT_IMPLEMENTED(
        slice->start % item == 0, "tarry: a slice of a storage from byte ", slice->start, " on cannot be seen as ",
        self.scalar_type(), ", whose size is ", item, " bytes. Copy it first: storage[a:b].clone()");
    offset += slice->start / item;
    source = c10::Storage(slice->whole);
  }
  TORCH_CHECK(
      as_tarry(source.unsafeGetStorageImpl()), "tarry: this storage was made from a raw pointer; copy it to the device instead");
  if (nbytes > source.nbytes()) {
    resize_storage(source.unsafeGetStorageImpl(), nbytes);
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, strides, offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_and_size(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_and_size(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() == size && !format) {
    return self;
  }
  at::detail::check_size_nonnegative(size);
  const int64_t offset = impl->storage_offset();
  const auto strides = strides_of(size, format);
  at::detail::computeStorageNbytes(size, strides, self.element_size(), offset); // refuses what has no size
  const Layout* layout = intern_layout(self.scalar_type(), size, strides, offset);
  const auto old_nbytes = static_cast<int64_t>(impl->unsafe_storage().nbytes());
  if (layout->nbytes > impl->unsafe_storage().nbytes()) {
    TarryStorage* storage = storage_of(impl);
    TORCH_CHECK(storage, "tarry: cannot resize a ", self.layout(), " tensor, or one that was made from a raw pointer");
    std::unique_lock<std::mutex> lock(storage->state->mutex);
    if (layout->dense && storage->contents() == Contents::Uninitialised) {
      storage->become(layout); // nothing written yet: it simply becomes a storage of this layout
    } else {
      lock.unlock();
      resize_storage(storage, layout->nbytes); // may fail, with what is pending: the tensor is then as before
    }
  }
  impl->set_sizes_and_strides(size, strides, offset);
  if (C10_UNLIKELY(fills_uninitialised())) {
    at::native::fill_resize_deterministic_(self, old_nbytes);
  }
  return self;
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  // A tarry tensor is a plain TensorImpl, as is a CPU or CUDA one: `parameter.data = ...` keeps the same Parameter across
  // devices, and with it tied weights.
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

// ---- transfer and reading

Operator* copy_operator() {
  static Operator* op = find_operator("aten::copy_", "");
  return op;
}

// A copy to a tensor that is not ours.
at::Tensor& read_into(at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  ReadTimer timer;
  destination.copy_(materialise_for_reading(source, "copy to another device"), non_blocking);
  timer.done("copy", source.device().index());
  return destination;
}

// Whether all of the tensor's storage may get other contents at once: nothing else has to see what was there.
bool may_replace(const at::Tensor& tensor, TarryStorage& storage) {
  if (!storage.home->describes(tensor.unsafeGetTensorImpl())) {
    return false;
  }
  std::lock_guard<std::mutex> guard(storage.state->mutex);
  return !storage.is_lent() && // others have to see what is written
      !(tarry::may_be_taken_back(*storage.state) && storage.contents() != Contents::Uninitialised);
}

// What is pending on the source's device is computed. What is pending here does not wait for that: it is launched, too, so that
// devices which compute asynchronously do so at the same time.
void launch_both(TarryStorage& source, const DeviceState& here) {
  std::unique_lock<std::mutex> lock(source.state->mutex);
  const bool pending = source.contents() == Contents::Pending;
  lock.unlock();
  if (pending) {
    request_sync(source.state->index, "copy to another device");
    if (is_asynchronous(here.index)) {
      request_cut(here.index, "copy from another device");
    }
  }
}

// A tensor of this device with the contents of one of another device, which is all of its storage. They are data that only the
// backend can read: those of the other device, until a step here reads them. Nothing is waited for.
at::Tensor hand_on(DeviceState& here, TarryStorage& source) {
  const at::Tensor data = settled_data(&source, "copy to another device");
  if (!data.is_meta()) {
    return {};
  }
  trace_read(here); // a replay would not come by
  const Layout* layout = layout_of(data.unsafeGetTensorImpl());
  auto storage = c10::make_intrusive<TarryStorage>(&here, layout, layout->nbytes);
  storage->data = share_backend_data(data);
  return make_tensor(here, layout, std::move(storage));
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking);

at::Tensor& copy_between(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  TarryStorage* from = storage_of(source.unsafeGetTensorImpl());
  TarryStorage* to = storage_of(self.unsafeGetTensorImpl());
  at::Tensor moved;
  if (from && to && has_opaque_data(from->state->index)) {
    launch_both(*from, *to->state);
    if (from->home->describes(source.unsafeGetTensorImpl()) && !source.is_conj() && !source.is_neg()) {
      moved = hand_on(*to->state, *from);
    }
  } else if (from && to && is_asynchronous(to->state->index)) {
    launch_both(*from, *to->state);
  }
  if (!moved.defined()) {
    return copy(self, materialise_for_reading(source, "copy to another device"), non_blocking);
  }
  TarryStorage* whole = storage_of(moved.unsafeGetTensorImpl());
  if (to->home != whole->home || !may_replace(self, *to)) {
    return copy(self, moved, non_blocking);
  }
  raise_owed();
  Graveyard graveyard;
  std::lock_guard<std::mutex> guard(to->state->mutex);
  to->mutable_data_ptr(); // see set_pending()
  set_data(to, whole->data, graveyard);
  return self;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!is_tarry(self)) {
    return read_into(self, source, non_blocking);
  }
  if (self.is_conj() || self.is_neg()) {
    // Write the conjugated (negated) source to what the view stands for.
    at::Tensor plain = self, value = source;
    if (plain.is_conj()) {
      plain = at::_conj(plain);
      value = at::conj_physical(value);
    }
    if (plain.is_neg()) {
      plain = at::_neg_view(plain);
      value = at::neg(value);
    }
    copy(plain, value, non_blocking);
    return self;
  }
  if (is_tarry(source) && source.device() != self.device()) {
    return copy_between(self, source, non_blocking);
  }
  if (is_tarry(source) || source.unsafeGetTensorImpl()->is_wrapped_number()) {
    torch::jit::Stack stack{self, source, non_blocking};
    record(*copy_operator(), &stack);
    return self;
  }
  TarryStorage* storage = storage_of(self.unsafeGetTensorImpl());
  TORCH_CHECK(storage, "tarry: cannot copy into a ", self.layout(), " tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(
      source.layout() == at::kStrided, "tarry: cannot copy from a ", source.layout(), " tensor. Call .to_dense() on it first.");
  raise_owed();
  if (may_replace(self, *storage)) {
    mark_used();
    const CountedMemory counted(storage->state->index);
    at::Tensor real = empty_real(storage->home, *storage->state);
    fill_from(real, source);
    trace_upload(*storage, source);
    Graveyard graveyard;
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    storage->mutable_data_ptr(); // see set_pending()
    set_data(storage, std::move(real), graveyard);
    storage->state->executor->speculator.note_upload(storage);
    return self;
  }
  torch::jit::Stack stack{self, upload(*storage->state, source), non_blocking};
  record(*copy_operator(), &stack);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor destination = target;
  if (is_tarry(target)) {
    copy(destination, self, non_blocking);
  } else {
    read_into(destination, self, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  ReadTimer timer;
  at::Scalar value = at::_local_scalar_dense(materialise_for_reading(self, "item"));
  timer.done("item", self.device().index());
  return value;
}

void record_stream(at::Tensor& /*self*/, at::Stream /*stream*/) {
  // Memory belongs to the backend's program; there is no stream to protect it from.
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() && self.strides() == other.strides();
}

// The device copies on write anyway. c10 makes the clone's storage, so that the two share an address until one is written.
at::Tensor lazy_clone(const at::Tensor& self) {
  TarryStorage* storage = storage_of(self.unsafeGetTensorImpl());
  TORCH_CHECK(storage, "tarry: cannot clone a ", self.layout(), " tensor lazily");
  const Layout* layout = layout_of(self.unsafeGetTensorImpl());
  check_bounds(layout, storage->home);
  const auto made = c10::impl::cow::lazy_clone_storage(*storage);
  TarryStorage* clone = as_tarry(made.get());
  TORCH_INTERNAL_ASSERT(clone);
  clone->become(storage->home);
  at::Tensor whole;
  std::unique_lock<std::mutex> lock(storage->state->mutex, std::defer_lock);
  const TarryStorage* from = nullptr;
  do { // again if another thread has taken the clone for its step: that step does not know the storage made here
    if (lock.owns_lock()) {
      lock.unlock();
    }
    whole = make_tensor(*storage->state, storage->home, StoragePtr::reclaim_copy(storage)).clone();
    lock.lock();
    from = storage_of(whole.unsafeGetTensorImpl());
  } while (from->value.node && from->value.node->epoch != storage->state->epoch);
  clone->value = from->value;
  clone->data = from->data;
  clone->failure = from->failure;
  clone->note_stored();
  if (clone->value.node) {
    storage->state->link(clone);
  }
  lock.unlock();
  return make_tensor(*storage->state, layout, StoragePtr::reclaim_copy(clone));
}

// ---- operators whose schema is wrong

// The stock operator writes to the running statistics without saying so; this one says so.
std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, bool training, double momentum,
    double eps) {
  const bool has_statistics = running_mean && running_mean->defined() && running_var && running_var->defined();
  if (!has_statistics) {
    return at::_native_batch_norm_legit(input, weight, bias, training, momentum, eps);
  }
  at::Tensor mean = *running_mean, variance = *running_var;
  return at::_native_batch_norm_legit(input, weight, bias, mean, variance, training, momentum, eps);
}

// ---- storages that PyTorch makes by itself (UntypedStorage, torch.load)

c10::intrusive_ptr<c10::StorageImpl> make_storage(
    c10::StorageImpl::use_byte_size_t, c10::SymInt size, c10::DataPtr data, c10::Allocator* /*allocator*/, bool /*resizable*/) {
  mark_used();
  const int64_t nbytes = size.expect_int();
  if (c10::impl::cow::is_cow_data_ptr(data)) { // lazy_clone() sets its contents
    DeviceState& state = device_state(data.device().index());
    return c10::make_intrusive<TarryStorage>(&state, flat_layout(at::kByte, nbytes), static_cast<size_t>(nbytes), std::move(data));
  }
  TORCH_CHECK(!data, "tarry: a storage cannot be made from an address on this device, which has none; copy tensors instead");
  return c10::make_intrusive<TarryStorage>(&device_state(-1), flat_layout(at::kByte, nbytes), static_cast<size_t>(nbytes));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&record_boxed>()); // of custom operators and what the table does not list
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  c10::SetStorageImplCreate(c10::DeviceType::PrivateUse1, &make_storage);
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("new_empty_strided", TORCH_FN(new_empty_strided));
  m.impl("_lazy_clone", TORCH_FN(lazy_clone));
  m.impl("_efficientzerotensor", TORCH_FN(zero_tensor));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl)); // views: they change nothing but the tensor's layout
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_and_size));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("is_set_to", TORCH_FN(is_set_to));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  m.impl("copy_", TORCH_FN(copy));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("kaiser_window", TORCH_FN(kaiser_window));
  m.impl("kaiser_window.periodic", TORCH_FN(kaiser_window_periodic));
  m.impl("kaiser_window.beta", TORCH_FN(kaiser_window_beta));
  m.impl("native_batch_norm", TORCH_FN(native_batch_norm));
}

} // namespace

c10::intrusive_ptr<c10::StorageImpl> slice_storage(const at::Tensor& bytes, int64_t start, int64_t nbytes) {
  TarryStorage* storage = storage_of(bytes.unsafeGetTensorImpl());
  TORCH_CHECK(storage && start >= 0 && nbytes >= 0 && start + nbytes <= bytes.numel(), "tarry: not a slice of this storage");
  return c10::make_intrusive<StorageSlice>(StoragePtr::reclaim_copy(storage), bytes.storage_offset() + start, nbytes);
}

void swap_storages(const at::Tensor& left, const at::Tensor& right) {
  TarryStorage* const a = storage_of(left.unsafeGetTensorImpl());
  TarryStorage* const b = storage_of(right.unsafeGetTensorImpl());
  TORCH_CHECK(a && b && a->state == b->state, "tarry: only storages on the same device can be swapped");
  TORCH_CHECK_NOT_IMPLEMENTED(
      left.nbytes() == a->nbytes() && right.nbytes() == b->nbytes(),
      "tarry: a slice of a storage cannot be swapped with another storage");
  TORCH_CHECK(
      a->nbytes() == b->nbytes() || a->nbytes() == 0 || b->nbytes() == 0,
      "_swap_data_ptr_: storages must have the same nbytes or one must have 0, got ", a->nbytes(), " and ", b->nbytes());
  if (a == b) {
    return;
  }
  materialise(left, "swap of storages");
  materialise(right, "swap of storages");
  Graveyard graveyard;
  std::lock_guard<std::mutex> guard(a->state->mutex);
  TORCH_CHECK(!a->value.node && !b->value.node, "tarry: another thread writes to a storage that is being swapped");
  at::Tensor data = a->data;
  set_data(a, b->data, graveyard);
  set_data(b, std::move(data), graveyard);
  std::swap(a->home, b->home);
  std::swap(a->loans, b->loans);
  std::swap(a->lent, b->lent);
  const size_t nbytes = a->nbytes(); // not by StorageImpl::swap_data_ptr, which torch 2.11 lacks
  a->set_nbytes(b->nbytes());
  b->set_nbytes(nbytes);
  a->set_data_ptr_noswap(b->set_data_ptr(a->set_data_ptr(at::DataPtr())));
}

void resize_storage(c10::StorageImpl* raw, size_t nbytes) {
  TarryStorage* storage = as_tarry(raw);
  TORCH_CHECK(storage, "Trying to resize storage that is not resizable");
  const Layout* home = flat_home(storage->home->dtype, nbytes);
  at::Tensor old;
  {
    std::unique_lock<std::mutex> lock(storage->state->mutex);
    const bool written = storage->contents() != Contents::Uninitialised;
    lock.unlock();
    if (written && nbytes != 0 && storage->nbytes() != 0) {
      const auto bytes = make_tensor(
          *storage->state, flat_layout(at::kByte, static_cast<int64_t>(storage->nbytes())), StoragePtr::reclaim_copy(storage));
      old = materialise(bytes, "resize");
    }
  }
  at::Tensor fresh;
  if (old.defined()) {
    fresh = empty_real(home, *storage->state);
    const auto kept = static_cast<int64_t>(std::min(nbytes, storage->nbytes()));
    view_as_layout(fresh, flat_layout(at::kByte, kept)).copy_(view_as_layout(old, flat_layout(at::kByte, kept)));
  }
  Graveyard graveyard;
  std::lock_guard<std::mutex> guard(storage->state->mutex);
  set_data(storage, std::move(fresh), graveyard);
  storage->become(home);
  storage->loans.reset(); // they keep the old memory
  graveyard.tensors.push_back(std::move(storage->lent));
}

} // namespace tarry
