#include <ATen/EmptyTensor.h>
#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DispatchKeySet.h>

#include <array>
#include <atomic>
#include <typeinfo>
#include <utility>

#include "execute/executor.h"
#include "execute/host_value.h"
#include "core/graph.h"
#include "device/hooks.h"
#include "device/host_memory.h"
#include "record/direct.h"
#include "record/memory.h"
#include "execute/callbacks.h"
#include "execute/serve.h"
#include "replay/replay.h"

namespace tarry {
namespace {

// Addresses without memory: distinct storages have distinct, non-overlapping ranges, as programs that compare
// data_ptr() expect, and touching one faults at once.
void* claim_address_range(size_t nbytes) {
  static std::atomic<uint64_t> next{1ULL << 60};
  return nbytes == 0 ? nullptr : reinterpret_cast<void*>(next.fetch_add((nbytes + 127) & ~size_t{63}));
}

std::atomic<uint64_t> serials{1};

c10::Device tarry_device(c10::DeviceIndex index) {
  return c10::Device(c10::DeviceType::PrivateUse1, index);
}

// The address is its own context, as an allocator's is: c10 can then share it between a tensor and its lazy clone.
at::DataPtr claim_data_ptr(size_t nbytes, c10::Device device) {
  void* const address = claim_address_range(nbytes);
  return at::DataPtr(address, address, &c10::detail::deleteNothing, device);
}

// Allocates addresses, never memory. PyTorch asks for one when a lazy clone, which shares its address, is written.
struct AddressAllocator final : c10::Allocator {
  c10::DeviceIndex index = 0;
  at::DataPtr allocate(size_t nbytes) override { return claim_data_ptr(nbytes, tarry_device(index)); }
  void copy_data(void* /*destination*/, const void* /*source*/, std::size_t /*count*/) const override {} // contents have no address
};

AddressAllocator* allocator_of(c10::DeviceIndex index) {
  static auto* allocators = [] {
    auto* array = new std::array<AddressAllocator, kMaxDevices>();
    for (size_t i = 0; i < array->size(); ++i) {
      (*array)[i].index = static_cast<c10::DeviceIndex>(i);
    }
    return array;
  }();
  return &(*allocators)[index];
}

std::atomic<int>& packed_device(c10::DeviceIndex index) {
  // Two flags, then the device type, and index + 1 in the low byte.
  static std::array<std::atomic<int>, kMaxDevices> packed{};
  return packed[index < 0 ? current_device() : index];
}

constexpr int kOpaque = 1 << 30;
constexpr int kAsynchronous = 1 << 29;

} // namespace

c10::Device real_device(c10::DeviceIndex index) {
  const int packed = packed_device(index).load(std::memory_order_relaxed) & ~(kOpaque | kAsynchronous);
  return c10::Device(static_cast<c10::DeviceType>(packed >> 8), static_cast<c10::DeviceIndex>((packed & 0xff) - 1));
}

bool has_opaque_data(c10::DeviceIndex index) {
  return packed_device(index).load(std::memory_order_relaxed) & kOpaque;
}

bool is_asynchronous(c10::DeviceIndex index) {
  return packed_device(index).load(std::memory_order_relaxed) & kAsynchronous;
}

void set_real_device(c10::DeviceIndex index, c10::Device device, bool opaque_data, bool asynchronous) {
  const int real = device.is_cpu() ? -1 : device.has_index() ? device.index() : 0;
  const int flags = (opaque_data ? kOpaque : 0) | (asynchronous ? kAsynchronous : 0);
  packed_device(index).store(flags | static_cast<int>(device.type()) << 8 | (real + 1));
}

// ---- nodes and storages

// A chain of nodes is freed in a loop: freeing it by recursion would overflow the stack.
Node::~Node() {
  static thread_local std::vector<NodePtr>* doomed = nullptr;
  static thread_local bool draining = false;
  if (!doomed) {
    doomed = new std::vector<NodePtr>(); // never freed: nodes may die while a thread's statics are destroyed
  }
  for (Edge& edge : edges) {
    if (edge.node && edge.node.use_count() == 1) {
      doomed->push_back(std::move(edge.node));
    }
  }
  edges.clear();
  if (draining) {
    return;
  }
  draining = true;
  while (!doomed->empty()) {
    NodePtr next = std::move(doomed->back());
    doomed->pop_back();
  }
  draining = false;
}

TarryStorage::TarryStorage(DeviceState* state, const Layout* home, size_t nbytes)
    : TarryStorage(state, home, nbytes, claim_data_ptr(nbytes, tarry_device(state->index))) {}

TarryStorage::TarryStorage(DeviceState* state, const Layout* home, size_t nbytes, at::DataPtr address)
    : c10::StorageImpl(
          use_byte_size_t(), static_cast<int64_t>(nbytes), std::move(address),
          /*allocator=*/allocator_of(state->index),
          /*resizable=*/false),
      state(state),
      serial(serials.fetch_add(1, std::memory_order_relaxed)),
      home(home) {
  state->bytes.live.fetch_add(static_cast<int64_t>(home->nbytes), std::memory_order_relaxed);
}

uint64_t next_serial() {
  return serials.load(std::memory_order_relaxed);
}

void TarryStorage::become(const Layout* layout) {
  if (layout->nbytes > nbytes()) {
    mutable_data_ptr(); // shares its address with no lazy clone any more
    set_data_ptr_noswap(claim_data_ptr(layout->nbytes, device()));
  }
  state->bytes.live += static_cast<int64_t>(layout->nbytes) - static_cast<int64_t>(home->nbytes);
  home = layout;
  set_nbytes(layout->nbytes);
  note_stored();
}

void TarryStorage::note_stored() {
  const int64_t now = data.defined() && !data.is_meta() ? static_cast<int64_t>(home->nbytes) : 0;
  if (now != stored_) {
    state->bytes.stored.fetch_add(now - std::exchange(stored_, now), std::memory_order_relaxed);
  }
}

void TarryStorage::leave() {
  if (in_bad_fork()) {
    // The lock may have been held when the process was forked. Whatever is left here dies with the child.
    value.node.release();
    leaf.release();
    return;
  }
  state->bytes.live.fetch_sub(static_cast<int64_t>(home->nbytes), std::memory_order_relaxed);
  state->bytes.stored.fetch_sub(std::exchange(stored_, 0), std::memory_order_relaxed);
  if (!keeps_count && !leaf && !claim && !value.node) { // no graph has known it: nothing but this thread can reach it
    data.reset();
    lent.reset();
    failure.reset();
    return;
  }
  Graveyard graveyard;
  std::lock_guard<std::mutex> guard(state->mutex);
  if (claim) {
    *claim = nullptr;
    claim = nullptr;
  }
  if (value.node) {
    state->unlink(this);
    graveyard.nodes.push_back(std::move(value.node));
  }
  drop_leaf(this, graveyard);
  graveyard.tensors.push_back(std::move(data));
  graveyard.tensors.push_back(std::move(lent));
  graveyard.failures.push_back(std::move(failure));
}

TarryStorage::~TarryStorage() {
  if (!released_) {
    leave();
  }
}

void TarryStorage::release_resources() {
  leave();
  released_ = true; // nothing can reach it any more
  c10::StorageImpl::release_resources();
  if (keeps_count) {
    c10::raw::weak_intrusive_ptr::decref(static_cast<c10::intrusive_ptr_target*>(this));
  }
}

uint64_t DeviceState::next_epoch(Graveyard& graveyard) {
  executor->speculator.end_epoch(graveyard);
  position = 0;
  direct.begin_stretch();
  return epoch++;
}

void DeviceState::link(TarryStorage* storage) {
  if (!storage->keeps_count) {
    c10::raw::weak_intrusive_ptr::incref(static_cast<c10::intrusive_ptr_target*>(storage));
    storage->keeps_count = true;
  }
  storage->previous = nullptr;
  storage->next = pending;
  if (pending) {
    pending->previous = storage;
  }
  pending = storage;
}

void DeviceState::unlink(TarryStorage* storage) {
  (storage->previous ? storage->previous->next : pending) = storage->next;
  if (storage->next) {
    storage->next->previous = storage->previous;
  }
  storage->previous = storage->next = nullptr;
}

DeviceState::DeviceState(c10::DeviceIndex index) : index(index), executor(std::make_unique<Executor>(*this)) {}

DeviceState& device_state(c10::DeviceIndex index) {
  static auto* states = [] {
    auto* array = new std::array<DeviceState*, kMaxDevices>();
    for (size_t i = 0; i < array->size(); ++i) {
      (*array)[i] = new DeviceState(static_cast<c10::DeviceIndex>(i));
    }
    return array;
  }();
  return *(*states)[index < 0 ? current_device() : index];
}

TarryStorage* as_tarry(c10::StorageImpl* storage) {
  const bool ours = storage && storage->device_type() == c10::DeviceType::PrivateUse1 && typeid(*storage) == typeid(TarryStorage);
  return ours ? static_cast<TarryStorage*>(storage) : nullptr;
}

TarryStorage* storage_of(const c10::TensorImpl* tensor) {
  return as_tarry(tensor->unsafe_storage().unsafeGetStorageImpl());
}

void refuse_bounds(const Layout* view, const Layout* home) {
  TORCH_CHECK(
      false, "tarry: a tensor of sizes ", c10::IntArrayRef(view->sizes), ", strides ", c10::IntArrayRef(view->strides),
      " and storage offset ", view->offset, " needs a storage of ", view->nbytes, " bytes, but its storage was resized to ",
      home->nbytes, " bytes. Resize the storage, or the tensor, before it is used.");
}

at::Tensor make_tensor(DeviceState& state, const Layout* layout, StoragePtr storage) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(layout->dtype));
  auto* impl = tensor.unsafeGetTensorImpl();
  if (layout->sizes.size() != 1 || layout->sizes[0] != 0) {
    impl->set_sizes_and_strides(layout->sizes, layout->strides, layout->offset);
  }
  return tensor;
}

at::Tensor make_uninitialised(DeviceState& state, const Layout* layout) {
  mark_used();
  const Layout* home = layout->dense
      ? layout
      : flat_layout(layout->dtype, static_cast<int64_t>(layout->nbytes / c10::elementSize(layout->dtype)));
  return make_tensor(state, layout, c10::make_intrusive<TarryStorage>(&state, home, home->nbytes));
}

at::Tensor wrap_real(DeviceState& state, at::Tensor real) {
  PlainDispatch plain;
  const CountedMemory counted(state.index);
  return wrap_plainly(state, std::move(real));
}

at::Tensor wrap_plainly(DeviceState& state, at::Tensor real) {
  mark_used();
  const Layout* layout = layout_of(real.unsafeGetTensorImpl());
  if (real.storage().use_count() != 1 || real.is_conj() || real.is_neg()) {
    real = real.clone(at::MemoryFormat::Preserve).resolve_conj().resolve_neg();
    layout = layout_of(real.unsafeGetTensorImpl());
  }
  const size_t nbytes = real.storage().nbytes();
  const bool fills = layout->dense && nbytes == layout->nbytes;
  const Layout* home = fills ? layout : flat_home(layout->dtype, nbytes); // strides and gaps stay what the kernel has made
  auto storage = c10::make_intrusive<TarryStorage>(&state, home, home->nbytes);
  storage->data = fills ? std::move(real) : view_as_layout(real, home);
  storage->note_stored();
  return make_tensor(state, layout, std::move(storage));
}

void fill_from(at::Tensor& real, const at::Tensor& source) {
  if (!real.is_cuda() || !source.is_cpu()) {
    real.copy_(source);
    return;
  }
  // A copy from ordinary memory waits for all that the device has still to do; from pinned memory, it takes its turn.
  at::Tensor pinned = at::empty_strided(real.sizes(), real.strides(), real.options().device(c10::kCPU).pinned_memory(true));
  pinned.copy_(source);
  real.copy_(pinned, /*non_blocking=*/true);
}

at::Tensor upload(DeviceState& state, const at::Tensor& source) {
  PlainDispatch plain;
  const CountedMemory counted(state.index);
  auto real = at::empty_strided(
      source.sizes(), source.is_non_overlapping_and_dense() ? source.strides() : source.contiguous().strides(),
      source.options().device(real_device(state.index)));
  fill_from(real, source);
  at::Tensor made = wrap_real(state, std::move(real));
  trace_upload(*storage_of(made.unsafeGetTensorImpl()), source);
  return made;
}

// ---- values

// What is known of the contents goes.
static void drop_contents(TarryStorage* storage, Graveyard& graveyard) {
  if (storage->data.defined()) {
    graveyard.tensors.push_back(std::move(storage->data));
  }
  if (C10_UNLIKELY(storage->failure != nullptr)) {
    graveyard.failures.push_back(std::move(storage->failure));
  }
}

void set_pending(TarryStorage* storage, NodePtr node, uint32_t output, Graveyard& graveyard) {
  if (storage->value.node) {
    graveyard.nodes.push_back(std::move(storage->value.node));
  } else {
    storage->state->link(storage);
  }
  drop_contents(storage, graveyard);
  storage->mutable_data_ptr(); // a lazy clone that is written gets an address of its own
  storage->value = {std::move(node), output};
  storage->note_stored();
}

void set_data(TarryStorage* storage, at::Tensor data, Graveyard& graveyard) {
  if (storage->value.node) {
    storage->state->unlink(storage);
    graveyard.nodes.push_back(std::move(storage->value.node));
  }
  if (storage->leaf) {
    drop_leaf(storage, graveyard);
  }
  drop_contents(storage, graveyard);
  storage->data = std::move(data);
  storage->note_stored();
}

void set_failed(TarryStorage* storage, FailurePtr failure, Graveyard& graveyard) {
  set_data(storage, at::Tensor(), graveyard);
  storage->failure = std::move(failure);
}

// ---- real tensors

at::Tensor view_of(
    const at::Tensor& tensor, caffe2::TypeMeta dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

// The recorder has checked the bounds. Called for each view that a node takes.
at::Tensor view_as_layout(const at::Tensor& home, const Layout* layout) {
  return layout->describes(home.unsafeGetTensorImpl())
      ? home
      : view_of(home, c10::scalarTypeToTypeMeta(layout->dtype), layout->sizes, layout->strides, layout->offset);
}

at::Tensor empty_real(const Layout* home, const DeviceState& state) {
  const CountedMemory counted(state.index);
  return at::empty_strided(home->sizes, home->strides, at::TensorOptions().dtype(home->dtype).device(real_device(state.index)));
}

at::Tensor on_real_device(at::Tensor data, const DeviceState& state) {
  const c10::Device device = real_device(state.index);
  if (C10_LIKELY(data.device() == device)) {
    return data;
  }
  PlainDispatch plain;
  if (data.is_meta()) {
    data = read_backend_data(data);
  }
  return data.device() == device ? data : data.to(device);
}

at::Tensor settled_data(TarryStorage* storage, const char* reason) {
  check_fork();
  trace_read(*storage->state);
  for (int attempt = 0;; ++attempt) {
    storage->state->executor->wait(); // what is there may be a buffer whose contents are still being computed
    FailurePtr failure;
    at::Tensor data;
    bool ends_stretch = false;
    {
      std::lock_guard<std::mutex> guard(storage->state->mutex);
      if (storage->state->executor->is_busy()) {
        continue; // another thread was fast
      }
      const Contents contents = storage->contents();
      if (contents == Contents::Uninitialised) {
        break;
      }
      data = storage->data;
      const DirectCalls& direct = storage->state->direct;
      ends_stretch = direct.is_on && storage->made_in == direct.number && !storage->state->pending;
      failure = storage->failure;
    }
    if (failure) {
      failure->raise();
    }
    if (data.defined()) {
      if (ends_stretch) { // if it had been recorded, it would be computed now
        judge_stretch(*storage->state, reason);
      }
      return data;
    }
    // Another thread may write to the storage between the sync and the look at it; that is its race, not an endless loop.
    TORCH_CHECK(attempt < 1000, "tarry: a tensor is written by another thread faster than it can be computed");
    request_sync(storage->state->index, reason);
  }
  at::Tensor fresh = empty_real(storage->home, *storage->state);
  std::lock_guard<std::mutex> guard(storage->state->mutex);
  if (storage->contents() == Contents::Uninitialised) {
    storage->data = fresh;
    storage->note_stored();
  }
  return fresh;
}

namespace {

constexpr const char* kNotOurs =
    "tarry: this tensor has no storage on device 'tarry': it was made from a raw pointer. Copy it to the device instead";

at::Tensor settle(TarryStorage* storage, const char* reason) {
  at::Tensor data = settled_data(storage, reason);
  if (C10_UNLIKELY(data.device() != real_device(storage->state->index))) {
    const bool backends_own = data.is_meta(); // stays with the backend, which computes with it
    data = on_real_device(std::move(data), *storage->state);
    if (backends_own) {
      return data;
    }
    Graveyard graveyard;
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    if (!storage->value.node) {
      set_data(storage, data, graveyard);
      storage->loans.reset(); // those see the memory of the real device before
      graveyard.tensors.push_back(std::move(storage->lent));
    }
  }
  return data;
}

} // namespace

// What `tensor` looks at, given the contents of its storage.
at::Tensor look(const at::Tensor& data, const TarryStorage* storage, const at::Tensor& tensor) {
  const Layout* layout = layout_of(tensor.unsafeGetTensorImpl());
  check_bounds(layout, storage->home);
  at::Tensor real = view_as_layout(data, layout);
  if (tensor.is_conj()) {
    real = at::_conj(real);
  }
  return tensor.is_neg() ? at::_neg_view(real) : real;
}

at::Tensor materialise(const at::Tensor& tensor, const char* reason) {
  TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
  TORCH_CHECK(storage, kNotOurs);
  return look(settle(storage, reason), storage, tensor);
}

at::Tensor materialise_for_reading(const at::Tensor& tensor, const char* reason) {
  TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
  TORCH_CHECK(storage, kNotOurs);
  check_fork();
  at::Tensor early = storage->state->executor->read_early(storage);
  if (!early.defined() && !storage->state->trace && !real_device(storage->state->index).is_cpu()) {
    early = host_value(storage);
  }
  if (!early.defined()) {
    return materialise(tensor, reason);
  }
  trace_read(*storage->state);
  return look(early, storage, tensor);
}

at::Tensor materialise_for_write(const at::Tensor& tensor, const char* reason) {
  TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
  TORCH_CHECK(storage, kNotOurs);
  std::unique_lock<std::mutex> lock(storage->state->mutex);
  const bool is_shared = storage->is_lent() || is_being_written(*storage);
  lock.unlock();
  return materialise_for_write(tensor, reason, is_shared);
}

at::Tensor materialise_for_write(const at::Tensor& tensor, const char* reason, bool is_shared) {
  PlainDispatch plain;
  TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
  TORCH_CHECK(storage, kNotOurs);
  at::Tensor data = settle(storage, reason);
  bool backends_own = false; // data that were read from the backend, which may look at the same memory
  {
    Graveyard graveyard;
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    backends_own = storage->data.defined() && storage->data.is_meta();
    drop_leaf(storage, graveyard); // it stands for the contents before the write
    storage->mutable_data_ptr();   // see set_pending()
  }
  // This handle and the storage's own: any other owner would see the write.
  if (!is_shared && (backends_own || data.use_count() > 2 || data.storage().use_count() > 1)) {
    const CountedMemory counted(storage->state->index);
    at::Tensor copy = clone_exactly(data);
    Graveyard graveyard;
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    set_data(storage, copy, graveyard);
    data = copy;
  }
  return look(data, storage, tensor);
}

} // namespace tarry
