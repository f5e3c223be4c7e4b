// The executor of a device: how batches are computed.
//
// The thread that needs a value computes the batch itself. A step that no thread waits for (optimizer.step(), mark_step(), a
// replay) and that a native program computes is submitted to the worker and is then *in flight*: on a CPU, its kernels run on the
// worker; on another device they are launched from there, if the early part was launched ahead. Meanwhile the next step is recorded:
//   - what the program updates in place (parameters, the optimizer's state) is committed at once: its storage has the buffer
//     already, and the buffer has the contents when the step is done. The next step records it as any other leaf.
//   - all other results (gradients, the loss) stay pending, and get their data when the step is done. Gradients that are dropped
//     before are never waited for. A number that the early part of the program has computed (the loss, mostly) can be read as
//     soon as that part is done: a loop that prints each loss does not wait for the backward pass and the optimizer.
//
// Two kinds of access wait for the step in flight, and no others:
//   - Looks at real memory. All reads and writes of it by the host go through settled_data() in storage.cpp; all that computes a
//     batch (programs, the reference path, replays) goes through Runtime.sync() and Runtime.replay(), which wait first.
//   - References to a node of the step: record() with a pending result as its argument, collect() and peek().
// Other looks at TarryStorage::data and Node::data are at handles: whether they are there, and which ones they are. A storage
// that gets other contents from the host, or dies, lets go of its handle; the batch has its own.
//
// The error of a step that fails is kept, with the batch, for the next thread that waits; the Python runtime then has the reference
// path compute it, from inputs that the program has not begun to overwrite (failure.h, passes/donation.py).
//
// Before a step is complete, the executor may launch its early part: see speculation.h. The worker is used only where it does not
// compete with the threads of other kernels: see may_use_second_thread().
#pragma once

#include <map>

#include "execute/backoff.h"
#include "execute/speculation.h"

namespace tarry {

struct AsyncStep;

// What was done without Python (serve.h), and how long it took: tarry.metrics adds it to what Python has counted.
struct ServedCounts {
  uint64_t interpreted = 0;
  uint64_t run = 0; // by programs
  double sync_seconds = 0;
  double execute_seconds = 0;
  struct Fallback {
    uint64_t count = 0;
    double seconds = 0;
  };
  std::map<std::pair<const Operator*, uint32_t>, Fallback> fallbacks; // by operator and site
};

class Executor {
 public:
  explicit Executor(DeviceState& state) : speculator(state), state_(state) {}

  // Runs a program and commits what it gives; or submits that to the worker, if the batch may overlap with the next and it pays.
  // Inputs in `update` are written by the program. The values of its symbols, if its sizes vary, follow the numbers. With
  // `preserve`, there are copies of all that it updates, and it is not submitted. False, and nothing is done, if the program does
  // not accept the inputs. `diagnose`: see AsyncStep.
  bool run(
      const std::shared_ptr<Batch>& batch, const std::shared_ptr<const Program>& program, const std::vector<int64_t>& update,
      const std::vector<int64_t>& symbols, bool preserve, std::shared_ptr<void> diagnose);

  // ---- the step in flight. Under the device's lock:
  bool is_busy() const { return step_ != nullptr; }
  bool computes(const Value& value) const; // whether the value is one of the step in flight
  const Batch* batch_in_flight() const;    // null if there is none
  bool is_step_done() const;               // or there is none; one that has failed is done, too
  // The nodes of the last step but one: the recorder uses them again while the last one is in flight.
  std::vector<NodePtr>& other_history() { return other_history_; }
  // Without the lock:
  void wait(); // for a value or a node of it; an error is raised through the runtime
  std::shared_ptr<AsyncStep> finish() { return finish(/*for_value=*/false); } // gives it if it failed; it is kept until close()
  void close(const AsyncStep& step);                                          // one that failed, and has been computed otherwise
  // The storage's contents, if it is a number that the early part of the step in flight computes; undefined if not. On the host,
  // to be read only.
  at::Tensor read_early(const TarryStorage* storage);
  void note_done(const AsyncStep& step, bool was_read); // by the worker

  // ---- speculation
  void speculate(); // when speculator.is_due(), without the lock
  void forget();    // what is expected, and that steps were waited for at once

  Speculator speculator;
  struct Counts {
    uint64_t submitted = 0;
    uint64_t overlapped = 0; // steps among them that were not done when something was recorded again
    uint64_t no_cores = 0;   // steps for which the worker was not used because it would compete
  };
  Counts counts;       // under the lock
  ServedCounts served; // likewise

 private:
  bool may_use_worker();
  bool may_overlap(const Batch& batch);
  bool submit_step(const std::shared_ptr<AsyncStep>& step, const std::shared_ptr<const SplitProgram>& expected);
  std::shared_ptr<AsyncStep> finish(bool for_value);

  DeviceState& state_;
  std::shared_ptr<AsyncStep> step_; // in flight, or failed
  std::vector<NodePtr> other_history_;
  Backoff overlap_; // fails if a step is waited for before anything else is recorded, or takes no time
};

bool can_run_ahead(c10::Device device); // tarry.config.run_ahead is set, and there are cores for it
void set_run_ahead(bool on);
void forget_speculations(); // on all devices
void stop_executors();      // at the end of the process, for good: nothing may run while libraries are unloaded

} // namespace tarry
