// The law of failure: what is left when an operator cannot be computed.
//
//   - A storage holds the contents from before the operator that failed, or what eager PyTorch would have left there. What could
//     not be computed is *failed* (Contents in graph.h): every read of it raises the same error until it is overwritten.
//   - Later writes of the thread that recorded the operator do not happen: in eager PyTorch its program would have stopped there.
//     Other threads' operators are computed as if the failed ones had never been recorded, unless they read what has failed.
//   - Nothing is computed from an input that a program has begun to overwrite (WriteLog in program.h).
//
// An error belongs to the thread that recorded the operator (its *lane*) and is raised there: by the read or the cut that computes
// it or, if another thread computed the step, by this thread's next one, or before this thread writes anything else.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tarry {

struct Failure {
  Failure(std::exception_ptr error, uint32_t lane) : error(std::move(error)), lane(lane) {}
  // Raises the error, with its own type, however often. No lock may be held: an error of Python's takes the GIL.
  [[noreturn]] void raise() const;

  const std::exception_ptr error;
  const uint32_t lane;
  mutable std::atomic<bool> raised{false};
};
using FailurePtr = std::shared_ptr<const Failure>;

// The number of this thread; no two threads of a process have the same.
uint32_t current_lane();
// The failure of the exception that is being handled. `where` says which operator it was, and where it was recorded.
FailurePtr caught_failure(uint32_t lane, const std::string& where);
// Whether the exception that is being handled ends a program rather than reporting an error: KeyboardInterrupt, SystemExit.
bool caught_interrupt();

// Errors of Python as C++ exceptions. bind/bindings.cpp defines these, caught_failure() and Failure::raise(): PyTorch's header for such
// errors brings pybind11 with it, which takes seconds to compile.
//
// Throws the error that Python has set in this thread. The caller holds the GIL.
[[noreturn]] void throw_python_error();
// The exception that is being handled, to be raised later and on any thread.
std::exception_ptr caught_exception();
// Whether a kernel raised NotImplementedError, in C++ or in Python, or called get_ctx(). The latter makes sizes that depend on data,
// which only fake tensors can have; on meta tensors, PyTorch raises an error that names it (2.11, 2.13).
bool is_not_implemented(const std::exception_ptr& error);

// Keeps a failure for the thread that it belongs to.
void owe(FailurePtr failure);
// Whether a failure is kept for a thread, and nothing has raised it yet.
bool is_owed(uint32_t lane);
// Raises what another thread has found out about this thread's operators and nothing has raised yet. No lock may be held.
void raise_owed();
// Errors that no thread will raise any more: at the end of the process.
std::vector<FailurePtr> take_all_owed();

// The steps that have failed because of an operator that a thread recorded: device and epoch of each, in order.
using StepList = std::vector<std::pair<int, uint64_t>>;
void note_failed_step(uint32_t lane, int device, uint64_t epoch);
StepList failed_steps(uint32_t lane);

} // namespace tarry
