// The recorded graph: nodes, the storages that hold their values, and the state of a device.
//
// What a TarryStorage holds is one of four (Contents): nothing yet, an output of a node that is still to be computed, a tensor on
// the real device, or the error of what could not be computed (failure.h). `home` covers the whole storage. A tensor may look at the
// storage through any other layout: the layout then stands on the edge by which a node reads it (Edge::view) or writes it (the node's
// output is the new value of the whole storage).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/failure.h"
#include "core/hash.h"
#include "core/layout.h"
#include "core/operator.h"

namespace tarry {

struct Node;
using NodePtr = c10::intrusive_ptr<Node>;

using WeakStorageImpl = c10::weak_intrusive_ptr<c10::StorageImpl>;
inline WeakStorageImpl weak(c10::StorageImpl* storage) {
  return WeakStorageImpl(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
}

struct Edge {
  NodePtr node;
  uint32_t output = 0;
  const Layout* view = nullptr; // null: read in the value's home layout
};

struct Value {
  NodePtr node;
  uint32_t output = 0;
};

// How an operator's results come out, for given argument types and constants. Cached; immutable.
struct Signature {
  enum class Return : uint8_t { Fresh, Argument, View, Undefined, List, Constant };
  struct Item {
    Return kind;
    uint32_t index = 0; // Fresh: which output; Argument, View: position among the tensor arguments; List: its length
    c10::IValue constant;
    const Layout* view = nullptr; // View: how it lies in the argument's storage, counted from where the argument begins
  };
  bool runs_eagerly = false; // no shape is known before the data are there
  bool only_views = false;   // nothing to compute: all results look at the arguments' storages
  std::vector<const Layout*> fresh;
  std::vector<Item> items;            // a List item is followed by its elements
  std::vector<c10::Warning> warnings; // that eager PyTorch gives at every such call
  // Per mutable tensor argument without elements: its new layout, or null if unchanged. A call that would change the sizes or
  // strides of any other argument runs eagerly.
  std::vector<const Layout*> resized;
};

// What stands in a tensor slot of the schema.
enum Slot : int16_t { kAbsent = 0, kEdge = 1, kWrappedNumber = 2 };

struct Mutation {
  uint32_t edge; // the (first) edge that this storage's old value comes in by
  const Layout* home;
  bool discards = false; // that old value is not the contents from before the write, which were dropped uncomputed
};

// Immutable once recorded, but for its numbers and data when the node is used again in the next step.
struct Node final : c10::intrusive_ptr_target {
  ~Node() override;

  const Operator* op = nullptr; // null: a leaf, whose value is `data`
  const Signature* signature = nullptr;
  Hash128 type_hash;  // operator, argument types and constants
  Hash128 hash;       // type_hash and the hashes of all that flows in
  uint64_t epoch = 0; // with position: the place in the program
  uint32_t position = 0;
  uint32_t site = 0;
  int32_t region = 0;    // of activation recomputation; 0 outside
  uint32_t lane = 0;     // the thread that recorded it (failure.h)
  bool may_fail = false; // on data, itself or something that flows in; a leaf does not
  c10::SmallVector<Edge, 3> edges;
  c10::SmallVector<c10::IValue, 4> constants; // non-tensor arguments and wrapped numbers in schema order, then the seed if random
  c10::SmallVector<int16_t, 8> slots;         // for each tensor argument a Slot; for each list its length and its Slots
  c10::SmallVector<Mutation, 1> mutations;

  const Layout* leaf_layout = nullptr;
  at::Tensor data;                                                // of a leaf
  WeakStorageImpl source{c10::intrusive_ptr<c10::StorageImpl>()}; // of a leaf: the storage that it last stood for
  bool steady = false;                                            // of a leaf: it was that storage the time before, too
  std::unique_ptr<std::vector<at::Tensor>> results; // outputs computed already, kept because something pending needs them

  bool is_leaf() const { return op == nullptr; }
  size_t outputs() const { return op ? signature->fresh.size() + mutations.size() : 1; }
  const Layout* output_layout(uint32_t i) const {
    if (!op) {
      return leaf_layout;
    }
    return i < signature->fresh.size() ? signature->fresh[i] : mutations[i - signature->fresh.size()].home;
  }
};

struct DeviceState;
class Executor; // execute/executor.h
struct Trace;   // replay.h

enum class Contents : uint8_t {
  Uninitialised, // arbitrary (torch.empty): neither of the fields below is set
  Pending,       // output `value.output` of `value.node`, to be computed
  Data,   // `data`: on the real device, with the layout `home`. While a step is in flight, perhaps a buffer that is being filled
  Failed, // could not be computed: reading raises `failure` until all of it is overwritten
};

// Tensors outside of tarry that look at a storage's data (device/lend.h). While there is one, nothing that reads or writes the storage is
// recorded.
struct Loans {
  std::atomic<int64_t> count{0};
  bool has_memory = false; // which one all look at is decided: under the lock of lend()
};

struct TarryStorage final : c10::StorageImpl {
  TarryStorage(DeviceState* state, const Layout* home, size_t nbytes);
  TarryStorage(DeviceState* state, const Layout* home, size_t nbytes, at::DataPtr address); // one that a lazy clone shares
  ~TarryStorage() override;
  void release_resources() override;

  // Takes on another home layout and its size; the caller sets the contents.
  void become(const Layout* layout);
  void
  note_stored(); // after each change of `data` or `home`: counts what is stored. Under the lock, or before another thread knows the storage

  DeviceState* const state;
  const uint64_t serial; // no two storages of a process have the same; later ones have greater ones
  const Layout* home;
  // At most one of these is set; set_pending(), set_data() and set_failed() change it.
  at::Tensor data;
  Value value;
  FailurePtr failure;
  Contents contents() const {
    return value.node ? Contents::Pending : data.defined() ? Contents::Data : failure ? Contents::Failed : Contents::Uninitialised;
  }
  NodePtr leaf; // the leaf that stands for `data` (or what it was before this step's writes), if leaf->epoch is the device's
  uint64_t leaf_epoch = 0;
  // Once it was pending, a storage has a weak reference to itself until it is released: without any, c10 would delete it without
  // looking whether a thread that holds the device's lock has taken a weak reference meanwhile.
  bool keeps_count = false;
  std::shared_ptr<Loans> loans; // null if none was ever made
  at::Tensor lent;              // such a look that lasts as long as the storage
  bool is_lent() const { return loans && loans->count.load(std::memory_order_acquire) > 0; }
  uint64_t made_in = 0;           // the number of the stretch whose direct call has filled or written it last
  uint32_t direct_writers = 0;    // direct calls that are writing to it; see record/direct.h
  TarryStorage** claim = nullptr; // the root of the batch in flight that will fill this storage, to be cleared on death
  // Links of the device's list of pending storages.
  TarryStorage* previous = nullptr;
  TarryStorage* next = nullptr;

 private:
  void leave();
  bool released_ = false;
  int64_t stored_ = 0; // what it adds to DeviceBytes::stored
};

using StoragePtr = c10::intrusive_ptr<TarryStorage>;

uint64_t next_serial(); // of the next storage that will be made

constexpr uint32_t kNever = UINT32_MAX;

// What the device's tensors would hold in eager, and what pending work holds besides: see memory.h.
struct DeviceBytes {
  std::atomic<int64_t> live{0};   // of all storages. This one and the next are not guarded by the device's lock
  std::atomic<int64_t> stored{0}; // of those that hold real memory
  uint64_t epoch = 0;             // of the two below
  int64_t pinned = 0;             // at most: what has read a leaf may be dead
  int64_t peak = 0;
};

// Declared before the lock, so that what it holds is freed after the lock is released.
struct Graveyard {
  c10::SmallVector<NodePtr, 4> nodes;
  c10::SmallVector<at::Tensor, 2> tensors;
  std::vector<WeakStorageImpl> storages;
  std::vector<FailurePtr> failures;
};

// Which calls are direct: see record/direct.h. Guarded by the device's lock, but for `is_on`.
struct DirectCalls {
  std::atomic<bool> is_on{false};
  uint64_t stretch = 0;                        // identifies the operators since the last read or cut, recorded or direct
  uint32_t direct = 0;                         // how many of these were direct
  uint64_t number = 1;                         // of the stretch
  std::unordered_set<uint64_t> known;          // stretches that the reference path has computed
  uint32_t streak = 0;                         // of such stretches
  uint32_t backoff = 0;                        // how often direct calls were ended by another one
  uint32_t since = 0;                          // stretches since they began
  uint64_t withdrawals = 0;                    // when they began
  std::chrono::steady_clock::time_point began; // the stretch
  uint64_t calls = 0;                          // all of them
  uint64_t ended = 0;                          // stretches with direct calls

  void add(const Operator& op) { stretch = (stretch ^ op.hash.lo) * 0x9e3779b97f4a7c15ULL; }
  void begin_stretch() {
    stretch = 0;
    direct = 0;
    ++number;
  }
};

// All that is recorded on a device. `mutex` guards the fields below and those of the device's storages. Nothing that may
// take the GIL, run a kernel or free a tensor happens under it: what is replaced goes into a Graveyard first.
struct DeviceState {
  explicit DeviceState(c10::DeviceIndex index);

  const c10::DeviceIndex index;
  std::mutex mutex;
  TarryStorage* pending = nullptr;
  uint64_t epoch = 1;                          // what is recorded between two cuts
  uint32_t position = 0;                       // of the next node in this epoch
  std::chrono::steady_clock::time_point began; // when the first was recorded
  std::vector<NodePtr> history;                // nodes of an executed step by position, free to be used again
  ska::flat_hash_map<Hash128, std::unique_ptr<Signature>, HashOfHash> signatures;
  // Of custom operators: a call with its numbers, to the call's hash with the shapes that they make of it.
  ska::flat_hash_map<Hash128, Hash128, HashOfHash> shapes_by_numbers;
  DeviceBytes bytes;
  std::unordered_set<Hash128, HashOfHash> checked; // what check_once() has found to be right
  uint64_t recorded = 0;
  uint64_t reused = 0;
  const std::unique_ptr<Executor> executor; // how batches are computed
  DirectCalls direct;
  std::atomic<Trace*> trace{nullptr}; // while a call is watched that may be replayed later

  uint64_t next_epoch(Graveyard& graveyard); // begins it, and gives the one that ends. Under the lock
  void link(TarryStorage* storage);
  void unlink(TarryStorage* storage);
};

DeviceState& device_state(c10::DeviceIndex index);
// Null if it is not one of ours: made from a raw pointer, or a slice of one (kernels.cpp).
TarryStorage* as_tarry(c10::StorageImpl* storage);
// Null if the tensor has no storage of ours: it is sparse (record/opaque.h), or was made from a raw pointer.
TarryStorage* storage_of(const c10::TensorImpl* tensor);

[[noreturn]] void refuse_bounds(const Layout* view, const Layout* home);
// A tensor may be larger than its storage, once that was made smaller. It must not be read or written.
inline void check_bounds(const Layout* view, const Layout* home) {
  if (C10_UNLIKELY(view->nbytes > home->nbytes)) {
    refuse_bounds(view, home);
  }
}
inline bool is_tarry(const at::Tensor& tensor) {
  return tensor.device().type() == c10::DeviceType::PrivateUse1;
}

at::Tensor make_tensor(DeviceState& state, const Layout* layout, StoragePtr storage);
at::Tensor make_uninitialised(DeviceState& state, const Layout* layout);
// A tarry tensor over a real one, which nothing else may write from now on.
at::Tensor wrap_real(DeviceState& state, at::Tensor real);
// A tensor on the real device becomes a copy of one on the host (or elsewhere). What is on its way there need not be waited for.
void fill_from(at::Tensor& real, const at::Tensor& source);
// A tarry tensor with a copy of a host (or other foreign) tensor.
at::Tensor upload(DeviceState& state, const at::Tensor& source);

// `storage[start : start + nbytes]` of the storage that `bytes` shows, and UntypedStorage._swap_data_ptr_ (kernels.cpp).
c10::intrusive_ptr<c10::StorageImpl> slice_storage(const at::Tensor& bytes, int64_t start, int64_t nbytes);
void swap_storages(const at::Tensor& left, const at::Tensor& right);

// Sets the storage's contents. The caller holds the lock; what is replaced goes into the graveyard.
void set_pending(TarryStorage* storage, NodePtr node, uint32_t output, Graveyard& graveyard);
void set_data(TarryStorage* storage, at::Tensor data, Graveyard& graveyard);
void set_failed(TarryStorage* storage, FailurePtr failure, Graveyard& graveyard); // null: uninitialised
// The storage's current value as a node output. The caller holds the lock.
Value current_value(TarryStorage* storage, Graveyard& graveyard);

// Computes all that is pending (through the Python runtime), then gives the storage's contents: perhaps a tensor on the meta device.
at::Tensor settled_data(TarryStorage* storage, const char* reason);
// As above, and gives the real tensor that `tensor` looks at.
at::Tensor materialise(const at::Tensor& tensor, const char* reason);
// As above, for a caller that copies it at once: perhaps not the tensor itself, and on the host.
at::Tensor materialise_for_reading(const at::Tensor& tensor, const char* reason);
// As above, for writing: nothing else sees the buffer.
at::Tensor materialise_for_write(const at::Tensor& tensor, const char* reason);
// As above; with `is_shared`, others may see the buffer, and have to see what is written.
at::Tensor materialise_for_write(const at::Tensor& tensor, const char* reason, bool is_shared);
at::Tensor clone_exactly(const at::Tensor& tensor); // same strides
at::Tensor alias(const at::Tensor& tensor);         // another tensor over the same storage, as detach() makes it
at::Tensor view_as_layout(const at::Tensor& home, const Layout* layout);
// Not by as_strided(): the caller knows the bounds. Perhaps of another dtype over the same bytes.
at::Tensor view_of(
    const at::Tensor& tensor, caffe2::TypeMeta dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);
at::Tensor empty_real(const Layout* home, const DeviceState& state); // uninitialised, on the real device

// Data made by a backend on another device are moved when they are next needed. A tensor on the meta device stands for data
// that only the backend can read: the Python runtime makes a tensor of them.
at::Tensor on_real_device(at::Tensor data, const DeviceState& state);

// While it lives, operators on real tensors run as plain kernels: no autograd, and nothing of what the user's thread has
// switched on (autocast, dispatch modes, function transforms), which has had its effect on what was recorded already.
struct PlainDispatch {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

// The real device of tarry:index; -1 is the current one.
c10::Device real_device(c10::DeviceIndex index = -1);
// What its backend says of it: whether results are data that only the backend can read, and whether they may be there later than
// the program returns (Capabilities in backends/base.py).
bool has_opaque_data(c10::DeviceIndex index);
bool is_asynchronous(c10::DeviceIndex index);
void set_real_device(c10::DeviceIndex index, c10::Device device, bool opaque_data, bool asynchronous);

} // namespace tarry
