#include "voyage.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "ahead.h"
#include "hooks.h"
#include "record.h"

namespace tarry {
namespace {

// Handing over costs two changes of thread. It gains little if the step is waited for before anything else is recorded, or if it
// has landed by then after a brief time. After kPatience such steps in a row, the next kGrounded are computed where they are
// asked for.
constexpr int kPatience = 2;
constexpr int kGrounded = 16;
constexpr std::chrono::microseconds kBrief{200};

using Clock = std::chrono::steady_clock;
std::array<Clock::time_point, kMaxDevices> departures; // of the step in the air, by device; guarded by the device's lock

// Under the lock.
void note_pointless(DeviceState& state) {
  if (++state.pointless >= kPatience) {
    state.grounded = kGrounded;
  }
}

// The leaf whose buffer each root's storage is given beforehand: the one that the result replaces, if nobody else can see it.
// The program updates the buffer in place, or its result is copied there when the step lands: for the next step, both are
// the same. Null where there is no such leaf.
std::vector<Node*> leaves_replaced(const Voyage& voyage, const std::vector<int64_t>& update) {
  const Batch& batch = *voyage.batch;
  std::vector<Node*> inputs, by_slot(batch.slots);
  for (const NodePtr& node : batch.order) {
    if (node->is_leaf()) { // may_depart() has seen to it that there are no other inputs
      inputs.push_back(node.get());
      const bool own = node->data.use_count() == 1 && node->data.storage().use_count() == 2; // itself and the program's input
      by_slot[node->first_slot] = own ? node.get() : nullptr;
    }
  }
  for (const int64_t position : update) { // made its own by Batch::inputs()
    by_slot[inputs.at(position)->first_slot] = inputs[position];
  }
  std::vector<Node*> found;
  for (const int32_t slot : batch.replaces) {
    found.push_back(slot < 0 ? nullptr : by_slot[slot]);
  }
  return found;
}

} // namespace

bool may_depart(const Batch& batch) {
  DeviceState& state = *batch.state;
  if (!runs_ahead() || at::hasCallbacks()) { // a profiler wants to see this thread's work
    return false;
  }
  const c10::Device device = real_device(state.index);
  const bool simple = std::all_of(batch.order.begin(), batch.order.end(), [device](const NodePtr& node) {
    return !node->results && (!node->is_leaf() || node->data.device() == device);
  });
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.grounded > 0) {
    --state.grounded;
    return false;
  }
  return simple;
}

bool depart(const std::shared_ptr<Voyage>& voyage, const std::vector<int64_t>& update) {
  Batch& batch = *voyage->batch;
  DeviceState& state = *batch.state;
  auto leaves = leaves_replaced(*voyage, update);
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Root& root = batch.roots[i];
    if (leaves[i] && !root.node->output_layout(root.output)->describes(leaves[i]->data.unsafeGetTensorImpl())) {
      leaves[i] = nullptr;
    }
  }
  Graveyard graveyard;
  Replaced old;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.position != 0) {
    return false;
  }
  batch.aloft = true;
  batch.in_place.assign(leaves.size(), at::Tensor());
  for (size_t i = 0; i < leaves.size(); ++i) {
    Root& root = batch.roots[i];
    if (!leaves[i]) {
      continue;
    }
    batch.in_place[i] = leaves[i]->data;
    if (root.storage && root.storage->value.node == root.node && root.storage->value.output == root.output) {
      set_data(root.storage, leaves[i]->data, graveyard);
    }
  }
  if (!batch.replayed) {
    if (voyage->split) {
      renew_expectation(batch, voyage->split, old);
    }
    state.history.swap(state.other_history);
    state.expected.swap(state.other_expected);
    state.launch_at = voyage->split && state.expected->program == voyage->split ? state.expected->launch_at : kNever;
  }
  ++state.departed;
  departures[state.index] = Clock::now();
  state.voyage = voyage;
  hand_over(voyage);
  return true;
}

// Numbers that are offered at most: on a device, each is copied on its own.
constexpr int kMaxOffers = 4;

void Voyage::offer(const std::vector<at::Tensor>& early_results) {
  const auto& outputs = split->parts().outputs;
  std::vector<at::Tensor> offered(outputs.size());
  std::optional<c10::Device> from;
  int offers = 0;
  for (size_t i = 0; i < outputs.size() && offers < kMaxOffers; ++i) {
    const at::Tensor* value = outputs[i] < 0 ? &early_results.at(-1 - outputs[i]) : nullptr;
    const Root& root = batch->roots[i];
    if (!value || value->numel() != 1 || !root.node->output_layout(root.output)->describes(value->unsafeGetTensorImpl())) {
      continue;
    }
    const auto options = value->options().device(c10::kCPU).pinned_memory(!value->is_cpu());
    offered[i] = at::empty_strided(value->sizes(), value->strides(), options).copy_(*value, /*non_blocking=*/true);
    from = value->device();
    ++offers;
  }
  if (from && !from->is_cpu()) {
    arrival.emplace(from->type());
    arrival->record(c10::impl::VirtualGuardImpl(from->type()).getStream(*from));
  }
  read_early = std::move(offered);
  get_halfway();
}

void Voyage::fly() noexcept {
  WriteLog log;
  try {
    const c10::OptionalDeviceGuard device(inputs.empty() ? std::nullopt : std::make_optional(inputs[0].device()));
    PlainDispatch plain;
    std::vector<at::Tensor> outputs;
    if (split) {
      auto first = early ? land(*batch->state, *early) : std::nullopt;
      if (!first) {
        first = split->run_early(inputs, numbers);
      }
      TORCH_CHECK(split->late_accepts(inputs, *first), "tarry: the late part of a step does not accept its inputs");
      offer(*first);
      outputs = split->run_late(inputs, std::move(*first), numbers);
    } else {
      outputs = program->run(std::move(inputs), numbers);
    }
    inputs.clear();
    batch->commit_results(std::move(outputs));
    DeviceState& state = *batch->state;
    std::lock_guard<std::mutex> guard(state.mutex);
    if (state.position != 0 || was_read) {
      state.pointless = 0;
    } else if (Clock::now() - departures[state.index] < kBrief) {
      note_pointless(state);
    }
  } catch (...) {
    error = std::current_exception();
    inputs.clear();
    batch->recover(update, log, lane);
  }
}

namespace {

std::shared_ptr<Voyage> voyage_of(DeviceState& state) {
  std::lock_guard<std::mutex> guard(state.mutex);
  return state.voyage;
}

// `reader`: a value is needed, which another thread may ask for without holding up the one that records.
std::shared_ptr<Voyage> land_for(DeviceState& state, bool reader) {
  std::shared_ptr<Voyage> voyage = voyage_of(state);
  if (!voyage) {
    return nullptr;
  }
  const bool holds_up = reader && voyage->captain == std::this_thread::get_id();
  voyage->wait();
  Graveyard left; // freed after the lock is released, as is the voyage
  std::shared_ptr<Flight> next;
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    if (state.voyage != voyage) {
      return nullptr; // another thread was first
    }
    std::swap(left, voyage->batch->left);
    voyage->batch->aloft = false;
    if (!voyage->error) {
      if (holds_up && state.position == 0) {
        note_pointless(state);
      }
      state.voyage.reset(); // not the last reference
      return nullptr;
    }
    next = state.flight;
    state.launch_at = kNever;
  }
  if (next) { // it reads buffers whose contents are not there
    next->cancelled = true;
    next->wait();
    std::lock_guard<std::mutex> guard(state.mutex);
    if (state.flight == next) {
      state.flight.reset(); // not the last reference
    }
  }
  return voyage;
}

} // namespace

std::shared_ptr<Voyage> land_step(DeviceState& state) {
  return land_for(state, /*reader=*/false);
}

void close(DeviceState& state, const Voyage& voyage) {
  std::shared_ptr<Voyage> closed;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (state.voyage.get() == &voyage) {
    closed = std::move(state.voyage);
  }
}

at::Tensor read_aloft(const TarryStorage* storage) {
  DeviceState& state = *storage->state;
  std::shared_ptr<Voyage> voyage;
  size_t index = 0;
  {
    std::lock_guard<std::mutex> guard(state.mutex);
    if (!is_aloft(state, storage->value) || !state.voyage->split) {
      return {};
    }
    const auto& roots = state.voyage->batch->roots;
    const auto found = std::find_if(roots.begin(), roots.end(), [storage](const Root& root) { return root.storage == storage; });
    index = static_cast<size_t>(found - roots.begin());
    const auto& outputs = state.voyage->split->parts().outputs;
    if (found == roots.end() || found->node != storage->value.node || found->output != storage->value.output ||
        outputs.at(index) >= 0) {
      return {};
    }
    voyage = state.voyage;
  }
  voyage->wait_halfway();
  if (voyage->read_early.empty() || !voyage->read_early[index].defined()) {
    return {};
  }
  if (voyage->arrival) {
    voyage->arrival->synchronize();
  }
  voyage->was_read = true;
  return voyage->read_early[index];
}

void await_step(DeviceState& state) {
  while (land_for(state, /*reader=*/true)) {
    request_sync(state.index, "a step that failed"); // raises its error, unless another thread is the first to do so
  }
}

} // namespace tarry
