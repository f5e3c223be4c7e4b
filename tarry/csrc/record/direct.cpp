#include "record/direct.h"

#include <algorithm>
#include <utility>

#include "core/generator.h"
#include "device/hooks.h"
#include "device/host_memory.h"
#include "execute/event_log.h"
#include "execute/executor.h"
#include "execute/serve.h"
#include "record/opaque.h"
#include "record/scan.h"

namespace tarry {
namespace {

constexpr size_t kMostKnown = 1024; // stretches; a program with more of them takes another course each time
constexpr uint32_t kMostBackoff = 20;

std::atomic<uint32_t> first_streak{0};
std::atomic<uint32_t> longest{0};
std::atomic<bool> held{false};
std::atomic<bool> forced{false};
std::atomic<int> devices_with_direct_calls{0};

// Where results are there when an operator returns, and are tensors.
bool can_call_directly(c10::DeviceIndex index) {
  return real_device(index).is_cpu() && !has_opaque_data(index) && !is_asynchronous(index);
}

// Whether the contents can be written: nothing but direct calls looks at them. Under the lock.
bool is_own(const TarryStorage& storage) {
  return is_being_written(storage) || (storage.data.use_count() == 1 && storage.data.storage().use_count() == 1);
}

// A device tensor among the arguments.
struct DirectTensor {
  at::Tensor original; // if it is written: a result may be the same tensor
  TarryStorage* storage;
  const Layout* view; // null: the home layout
  bool is_mutable;
  at::Tensor real;

  bool lacks_memory() const { return !storage->data.defined() || (is_mutable && !is_own(*storage)); }
};

// The device tensors that a direct call is given: notes them, then takes their contents.
class DirectTensors {
 public:
  DirectTensors() = default;
  ~DirectTensors();
  DirectTensors(const DirectTensors&) = delete;
  DirectTensors& operator=(const DirectTensors&) = delete;

  bool note(const at::Tensor& tensor, bool is_mutable); // false for one that the recorder has to look at
  bool take_contents(c10::ArrayRef<const Operator*> ops);
  bool is_on() const { return state_ && state_->direct.is_on.load(std::memory_order_relaxed); }
  const DeviceState* state() const { return state_; }
  at::Tensor next_real(); // in the order in which they were noted

 protected:
  bool is_possible() const;
  void take(c10::ArrayRef<const Operator*> ops);
  void give_memory(TarryStorage* storage, const at::Tensor& before);

  c10::SmallVector<DirectTensor, 4> tensors_;
  size_t put_ = 0; // how many of these next_real() has given
  DeviceState* state_ = nullptr;
  uint64_t stretch_ = 0; // its number
  bool writes_ = false;  // it is counted in TarryStorage::direct_writers
};

class DirectCall : DirectTensors {
 public:
  DirectCall(const Operator& op, torch::jit::Stack& stack) : op_(op), stack_(stack), first_(stack.size() - op.arguments.size()) {}

  bool run();

 private:
  bool note_tensor(const at::Tensor& tensor, const Argument& declared);
  bool note_argument(const c10::IValue& value, const Argument& declared);
  at::Tensor real_of(const at::Tensor& tensor);
  c10::IValue real_argument(const c10::IValue& value, const Argument& declared);
  void call();
  c10::IValue adopt(c10::IValue result) const;
  at::Tensor wrap(at::Tensor real) const;

  const Operator& op_;
  torch::jit::Stack& stack_;
  const size_t first_; // where the arguments begin, and later the results
};

DirectTensors::~DirectTensors() {
  if (writes_) {
    std::lock_guard<std::mutex> guard(state_->mutex);
    for (const DirectTensor& each : tensors_) {
      each.storage->direct_writers -= each.is_mutable;
    }
  }
}

bool DirectTensors::note(const at::Tensor& tensor, bool is_mutable) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  TarryStorage* storage = impl->key_set().has_any(kLazyBits) ? nullptr : storage_of(impl);
  if (!storage || (state_ && state_ != storage->state)) {
    return false;
  }
  state_ = storage->state;
  const Layout* view = storage->home->describes(impl) ? nullptr : layout_of(impl);
  if (view && (view->nbytes > storage->home->nbytes || (is_mutable && view->may_overlap))) {
    return false;
  }
  tensors_.push_back({is_mutable ? tensor : at::Tensor(), storage, view, is_mutable, {}});
  return true;
}

// False for what the recorder has to look at: it refuses the tensor, or treats it in a way of its own.
bool DirectCall::note_tensor(const at::Tensor& tensor, const Argument& declared) {
  if (!tensor.defined()) {
    return true;
  }
  if (op_.has(kMaskIndices) && !tensors_.empty() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) {
    return false;
  }
  if (tensor.unsafeGetTensorImpl()->device_type() != c10::DeviceType::PrivateUse1) {
    return tensor.is_cpu() && tensor.dim() == 0 && declared.kind == ArgKind::Tensor && !declared.is_mutable &&
        !tensor.requires_grad();
  }
  return note(tensor, declared.is_mutable);
}

bool DirectCall::note_argument(const c10::IValue& value, const Argument& declared) {
  if (value.isTensor()) {
    return note_tensor(value.toTensor(), declared);
  }
  if (declared.kind == ArgKind::TensorList && value.isList()) {
    const auto items = value.toListRef();
    return std::all_of(items.begin(), items.end(), [&](const c10::IValue& item) {
      return item.isNone() || note_tensor(item.toTensor(), declared);
    });
  }
  if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1 && !state_) {
    state_ = &device_state(value.toDevice().index());
  }
  return true;
}

// Under the lock.
bool DirectTensors::is_possible() const {
  const Executor& executor = *state_->executor; // what was launched early reads memory that would be written in place
  return !state_->pending && !executor.is_busy() && !executor.speculator.has_launched() && can_call_directly(state_->index) &&
      std::all_of(tensors_.begin(), tensors_.end(), [](const DirectTensor& each) {
        const Contents contents = each.storage->contents();
        return !each.storage->is_lent() &&
            (contents == Contents::Uninitialised || (contents == Contents::Data && each.storage->data.is_cpu()));
      });
}

// Memory for a storage that has none, or memory of its own for one that shares what it has.
void DirectTensors::give_memory(TarryStorage* storage, const at::Tensor& before) {
  const PlainDispatch plain;
  const CountedMemory counted(state_->index);
  at::Tensor own = before.defined() ? clone_exactly(before) : empty_real(storage->home, *state_);
  Graveyard graveyard;
  std::lock_guard<std::mutex> guard(state_->mutex);
  const Contents contents = before.defined() ? Contents::Data : Contents::Uninitialised;
  if (storage->contents() == contents && storage->data.is_same(before) && !is_being_written(*storage)) {
    set_data(storage, std::move(own), graveyard);
  }
}

// Under the lock.
void DirectTensors::take(c10::ArrayRef<const Operator*> ops) {
  DirectCalls& direct = state_->direct;
  for (DirectTensor& each : tensors_) {
    each.real = each.storage->data;
    if (each.is_mutable) {
      each.storage->mutable_data_ptr(); // see set_pending()
      each.storage->made_in = direct.number;
      ++each.storage->direct_writers;
      writes_ = true;
    }
  }
  if (C10_UNLIKELY(is_logging()) && direct.direct == 0) {
    direct.began = Clock::now();
  }
  for (const Operator* op : ops) {
    direct.add(*op);
  }
  direct.direct += static_cast<uint32_t>(ops.size());
  direct.calls += ops.size();
  stretch_ = direct.number;
}

bool DirectTensors::take_contents(c10::ArrayRef<const Operator*> ops) {
  for (int attempt = 0; attempt < 1000; ++attempt) { // other threads may share the memory again
    TarryStorage* storage = nullptr;
    at::Tensor before;
    {
      std::lock_guard<std::mutex> guard(state_->mutex);
      if (!is_possible()) {
        return false;
      }
      const auto lacking = std::find_if(
          tensors_.begin(), tensors_.end(), [](const DirectTensor& each) { return each.lacks_memory(); });
      if (lacking == tensors_.end()) {
        take(ops);
        return true;
      }
      storage = lacking->storage;
      before = storage->data;
    }
    give_memory(storage, before);
  }
  return false;
}

at::Tensor DirectTensors::next_real() {
  DirectTensor& each = tensors_[put_++];
  if (each.view) {
    each.real = view_as_layout(each.real, each.view);
  }
  return each.real;
}

at::Tensor DirectCall::real_of(const at::Tensor& tensor) {
  return tensor.defined() && is_tarry(tensor) ? next_real() : tensor;
}

c10::IValue DirectCall::real_argument(const c10::IValue& value, const Argument& declared) {
  if (value.isTensor()) {
    return real_of(value.toTensor());
  }
  if (declared.kind == ArgKind::TensorList) {
    auto copy = value.toList().copy();
    for (size_t i = 0; i < copy.size(); ++i) {
      const c10::IValue item = copy.get(i);
      if (item.isTensor()) {
        copy.set(i, real_of(item.toTensor()));
      }
    }
    return copy;
  }
  const bool is_ours = value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1;
  return is_ours ? c10::IValue(real_device(state_->index)) : value;
}

// The operator's kernel, with the real tensors on the stack in place of ours.
void DirectCall::call() {
  const bool draws = op_.draws(torch::jit::last(stack_, op_.arguments.size()));
  std::optional<at::Generator> given;
  for (size_t i = 0; i < op_.arguments.size(); ++i) {
    c10::IValue& value = stack_[first_ + i];
    if (op_.arguments[i].kind == ArgKind::Generator && !value.isNone()) {
      given = value.toGenerator();
      value = c10::IValue();
    } else if (value.isTensor() || value.isDevice() || (value.isList() && op_.arguments[i].kind == ArgKind::TensorList)) {
      value = real_argument(value, op_.arguments[i]);
    }
  }
  std::optional<SeededCall> seeded;
  if (draws) {
    seeded.emplace(op_, draw_seed(given, state_->index), stack_, real_device(state_->index));
  }
  op_.handle.callBoxed(&stack_);
}

// Ours for a result of the kernel's: an argument that it has written, or a new tensor.
c10::IValue DirectCall::adopt(c10::IValue result) const {
  if (result.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& item : result.toListRef()) {
      list.push_back(adopt(item).toTensor());
    }
    return list;
  }
  if (!result.isTensor() || !result.toTensor().defined()) {
    return result;
  }
  at::Tensor tensor = std::move(result).toTensor();
  for (const DirectTensor& each : tensors_) {
    if (each.is_mutable && each.real.is_same(tensor)) {
      return each.original;
    }
  }
  if (is_opaque(tensor)) {
    std::vector<at::Tensor> parts = parts_of(tensor);
    for (at::Tensor& part : parts) {
      part = wrap(part);
    }
    return with_parts(tensor, parts);
  }
  return wrap(std::move(tensor));
}

at::Tensor DirectCall::wrap(at::Tensor real) const {
  at::Tensor ours = wrap_plainly(*state_, std::move(real));
  storage_of(ours.unsafeGetTensorImpl())->made_in = stretch_;
  return ours;
}

bool DirectCall::run() {
  for (size_t i = 0; i < op_.arguments.size(); ++i) {
    if (!note_argument(stack_[first_ + i], op_.arguments[i])) {
      return false;
    }
  }
  const Operator* op = &op_;
  if (!is_on() || !take_contents(op)) {
    return false;
  }
  const PlainDispatch plain;
  const CountedMemory counted(state_->index);
  call();
  for (size_t i = first_; i < stack_.size(); ++i) {
    stack_[i] = adopt(std::move(stack_[i]));
  }
  return true;
}

// Under the lock.
void stop(DirectCalls& direct) {
  direct.streak = direct.since = 0;
  if (direct.is_on.exchange(false)) {
    --devices_with_direct_calls;
  }
}

// Under the lock.
void judge(DirectCalls& direct) {
  if (C10_UNLIKELY(forced.load(std::memory_order_relaxed))) {
    return;
  }
  if (direct.withdrawals != withdrawals_of_references()) {
    stop(direct);
  } else if (!direct.known.count(direct.stretch)) {
    stop(direct);
    direct.backoff = std::min(direct.backoff + 1, kMostBackoff);
  } else if (++direct.since >= longest.load(std::memory_order_relaxed)) {
    stop(direct);
  }
}

} // namespace

void set_direct_calls(uint32_t after, uint32_t until) {
  first_streak = after;
  longest = until;
  withdraw_references();
  for (c10::DeviceIndex index = 0; index < kMaxDevices; ++index) {
    DeviceState& state = device_state(index);
    std::lock_guard<std::mutex> guard(state.mutex);
    stop(state.direct);
  }
}

void hold_direct_calls(bool on) {
  held = on;
}

void force_direct_calls(bool on) {
  forced = on;
  DeviceState& state = device_state(-1);
  state.executor->forget();
  std::lock_guard<std::mutex> guard(state.mutex);
  if (!on) {
    stop(state.direct);
  } else if (!state.direct.is_on.exchange(true)) {
    ++devices_with_direct_calls;
  }
}

bool may_call_directly() {
  return C10_UNLIKELY(devices_with_direct_calls.load(std::memory_order_relaxed) != 0) && ((!held && !is_watched()) || forced);
}

namespace {

// Kernels in Python, results that look at an argument's memory or depend on data, out= arguments: the recorder knows what to do.
bool is_plain(const Operator& op) {
  return op.has(kListed) && !op.has(kForcedEager) && !op.has(kDynamic) && !op.has_out && !op.gives_views && op.recordable;
}

} // namespace

bool call_directly(const Operator& op, torch::jit::Stack* stack) {
  return may_call_directly() && is_plain(op) && DirectCall(op, *stack).run();
}

bool update_directly(
    c10::ArrayRef<const Operator*> ops, c10::ArrayRef<DirectList> lists,
    c10::function_ref<void(std::vector<std::vector<at::Tensor>>&)> update) {
  if (!may_call_directly() || !std::all_of(ops.begin(), ops.end(), [](const Operator* op) { return is_plain(*op); })) {
    return false;
  }
  DirectTensors tensors;
  for (const DirectList& list : lists) {
    for (const at::Tensor& tensor : *list.tensors) {
      if (!tensors.note(tensor, list.is_mutable)) {
        return false;
      }
    }
  }
  if (!tensors.is_on() || !tensors.take_contents(ops)) {
    return false;
  }
  const PlainDispatch plain;
  const CountedMemory counted(tensors.state()->index);
  std::vector<std::vector<at::Tensor>> reals(lists.size());
  for (size_t i = 0; i < lists.size(); ++i) {
    for (size_t k = 0; k < lists[i].tensors->size(); ++k) {
      reals[i].push_back(tensors.next_real());
    }
  }
  update(reals);
  return true;
}

void note_computed(DeviceState& state, uint64_t stretch, bool by_reference) {
  const uint64_t least = first_streak.load(std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    DirectCalls& direct = state.direct;
    if (const uint64_t now = withdrawals_of_references(); direct.withdrawals != now) { // nothing is known of what comes
      stop(direct);
      direct.known.clear();
      direct.backoff = 0;
      direct.withdrawals = now;
    }
    if (!by_reference) {
      direct.streak = 0;
      direct.known.erase(stretch);
      return;
    }
    if (direct.known.size() >= kMostKnown) {
      direct.known.clear();
    }
    direct.known.insert(stretch);
    if (direct.is_on || least == 0 || ++direct.streak < least << direct.backoff || !can_call_directly(state.index)) {
      return;
    }
    direct.is_on = true;
    ++devices_with_direct_calls;
  }
  state.executor->forget(); // what is launched early reads memory that is written in place from now on
}

void judge_stretch(DeviceState& state, const char* reason) {
  if (C10_LIKELY(!state.direct.is_on.load(std::memory_order_relaxed))) {
    return;
  }
  LoggedEvent event{LoggedEvent::Kind::Direct, static_cast<int8_t>(state.index)};
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    DirectCalls& direct = state.direct;
    event.operations = direct.direct;
    event.began = event.begin = direct.began;
    if (direct.direct == 0) {
      return;
    }
    ++direct.ended;
    judge(direct);
    if (!state.pending) {
      direct.begin_stretch();
    }
  }
  if (is_logging()) {
    event.seconds = event.execute_seconds = seconds_between(event.began, Clock::now());
    log_event(std::move(event), reason);
  }
}

} // namespace tarry
