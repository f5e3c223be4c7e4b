// Steps that are served without Python.
//
// At a read or a cut, what is pending is collected here, and computed here if it is known how:
//   - by the reference path, if the batch is so small that no program pays for it (runtime/limits.py says how small that is,
//     runtime/decide.py for which policies). The way through Python would take longer than the kernels.
//   - by its program, if Python has said so of batches of this structure and with these constants (remember_program()): one that
//     is native and has run before. Its entry is READY, which it stays; runtime/entry.py forgets both together;
//   - by the reference path, if Python has said that it does nothing else with batches of this structure for now: a program is
//     being made of them, or there will be none (remember_reference()).
// All other batches are handed to the Python runtime, and so is everything while a Watcher has to see each step.
#pragma once

#include <mutex>

#include "execute/batch.h"

namespace tarry {

class Program;

// Held by the thread that computes a step; one step of the process is computed at a time. The thread itself may take it again:
// it then finds `in_step` set if it is in the middle of a step, where no other can be computed.
struct StepLock {
  std::recursive_timed_mutex mutex;
  bool in_step = false; // guarded by the mutex
};
StepLock& step_lock();

// Who has to see each step, or each operator that runs eagerly, as it happens.
enum class Watcher : uint32_t {
  Subscriber = 1, // of tarry.events
  Observer = 2,   // a call that may be replayed later
  Closure = 4,    // runs when the step is done
  Writer = 16,    // writes the graph of each step to a file (tarry.config.save_graphs)
  Fallback = 8,   // refuses operators that run eagerly (tarry.config.fallback)
};
void set_watched(Watcher who, bool watches);
bool is_watched();
bool has_watcher(Watcher who);
void set_compiling(bool on); // on this thread: a value that is asked for meanwhile is an error, which the Python runtime raises
bool is_compiling();

// Steps of up to so many operators, whose results take up to so many bytes, are small. 0 operators: no step is. Before this is
// called there is no backend, and nothing is served here.
void set_small_step(int64_t operations, int64_t bytes);
bool is_small(const Batch& batch);

// A program that computes batches of this structure whose numbers, where they are constants to it, are these. `diagnose`: see
// AsyncStep.
struct KnownProgram {
  std::shared_ptr<const Structure> structure;
  std::vector<std::pair<size_t, c10::IValue>> constants; // the index and the value of each
  std::shared_ptr<const Program> program;                // null: the reference path, until withdraw_references()
  std::vector<int64_t> update;                           // positions of inputs that it writes
  std::shared_ptr<void> diagnose;
  uint64_t references = 0;     // of the reference path: the number of withdrawals before it was told
  mutable bool served = false; // since that was last asked
};
// These are called under the step lock.
void remember_program(KnownProgram known);
void remember_reference(std::shared_ptr<const Structure> structure);
void forget_program(const Structure& structure);
void forget_programs();
bool was_served(const Structure& structure); // since the last call
// A program may be there now: Python is asked again about all batches that the reference path was to compute. From any thread.
void withdraw_references();
uint64_t withdrawals_of_references(); // how many there were

// Computes what is pending, or has Python compute the batch. False, and nothing is done, if Python has to see to it from the
// start. `awaited`: see Batch::Mode. No lock may be held.
bool serve(DeviceState& state, const char* reason, bool awaited);
// The same for the batch of a replay. The caller has the step lock, and has waited, for so long, until nothing else was pending
// or in flight.
bool serve_replay(const std::shared_ptr<Batch>& batch, double waited);
// As serve(), and has Python see to it where that is needed.
void request_sync(c10::DeviceIndex device, const char* reason);
void request_cut(c10::DeviceIndex device, const char* reason); // no thread needs a value now

} // namespace tarry
