// A whole step in the air: it is computed by the second thread while the next step is recorded.
//
// A step that nobody waits for (optimizer.step(), mark_step()) and that a native program computes is handed over: on a CPU, its
// kernels run on the second thread; on another device they are launched from there, if the early part was launched ahead. Then
//   - what the program updates in place (parameters, the optimizer's state) is committed at once: its storage has the buffer
//     already, and the buffer has the contents when the step has landed. The next step records it as any other leaf.
//   - all other results (gradients, the loss) stay pending, and get their data when the step lands. Gradients that are dropped
//     before are never waited for. A number that the early part of the program has computed (the loss, mostly) can be read as
//     soon as that part is done: whoever prints a loss does not wait for the backward pass and the optimizer.
//
// So two things have to wait until the step has landed, and they are the only ones:
//   - whoever looks at real memory. All reads and writes of it by the host go through settled_data() in storage.cpp; all that
//     computes a batch (programs, the reference path, replays) goes through Runtime.sync() and Runtime.replay(), which land the
//     step first. What is launched ahead (ahead.h) takes its turn on the second thread.
//   - whoever would refer to a node of the step: record() with a pending result as its argument, collect() and peek().
// Other looks at TarryStorage::data and Node::data are at handles: whether they are there, and which ones they are. A storage
// that gets other contents from the host, or dies, lets go of its handle; the batch has its own.
//
// The error of a step that fails is kept, with the batch, for the next of those who wait; the Python runtime then has the
// reference path compute it, from inputs that the program has not begun to overwrite (failure.h, passes/donation.py).
#pragma once

#include <c10/core/Event.h>

#include <exception>
#include <optional>
#include <thread>

#include "batch.h"
#include "pilot.h"
#include "program.h"

namespace tarry {

struct Flight;
class SplitProgram;

struct Voyage final : Task {
  std::shared_ptr<Batch> batch;
  std::shared_ptr<const Program> program;
  std::shared_ptr<const SplitProgram> split; // the same, if it comes in two parts
  std::shared_ptr<Flight> early; // what was launched ahead: it is before this one in the queue
  std::vector<at::Tensor> inputs;
  std::vector<c10::IValue> numbers;
  const std::thread::id captain = std::this_thread::get_id(); // who has handed it over
  const uint32_t lane = current_lane(); // the same (failure.h)
  std::vector<int64_t> update; // inputs that the program writes
  std::shared_ptr<void> diagnose; // a Python object: what to call with the batch and the error if it fails
  // Half way: per root, a number of the early part's on the host, or nothing; and when it has arrived there, if it is on its way.
  std::vector<at::Tensor> read_early;
  std::optional<c10::Event> arrival;
  std::atomic<bool> was_read{false};
  std::exception_ptr error; // when it is done

 protected:
  void fly() noexcept override;

 private:
  void offer(const std::vector<at::Tensor>& early_results);
};

// Whether a step that nobody waits for should be handed over: not if others like it were waited for at once.
bool may_depart(const Batch& batch);
// Hands over a batch whose program writes to the inputs `update` (positions). False, and nothing is done, if something was
// recorded since it was collected: it may refer to the batch's nodes.
bool depart(const std::shared_ptr<Voyage>& voyage, const std::vector<int64_t>& update);

// Waits for the step in the air, if there is one. If it failed, gives it, and it stays where it is until close().
std::shared_ptr<Voyage> land_step(DeviceState& state);
void close(DeviceState& state, const Voyage& voyage); // one that failed, and has been computed otherwise
// The same for those who need a value or a node of it; an error is raised through the runtime. Without the lock.
void await_step(DeviceState& state);
// The storage's contents, if it is a number that the step in the air has computed already or will have half way; undefined if
// not. On the host, to be read only. Without the lock.
at::Tensor read_aloft(const TarryStorage* storage);
// Whether a value is that of a step in the air: all later nodes have a later epoch. Under the lock.
inline bool is_aloft(const DeviceState& state, const Value& value) {
  return state.voyage && value.node && value.node->epoch <= state.voyage->batch->epoch;
}

} // namespace tarry
