// Recording one operator call: the hot path.
#pragma once

#include <ATen/core/stack.h>

#include "core/graph.h"

typedef struct _object PyObject; // not by Python.h, which most sources need not read

namespace tarry {

struct Batch;

void record(const Operator& op, torch::jit::Stack* stack);
// Runs the operator now, on the real device, after computing all that is pending.
void run_eagerly(const Operator& op, torch::jit::Stack* stack, const char* reason);

// Calls into the Python runtime (they take the GIL; no lock may be held).
struct Callbacks {
  PyObject* sync = nullptr;     // compute what is pending on a device
  PyObject* batch = nullptr;    // compute this batch
  PyObject* failure = nullptr;  // of a step that was computed here
  PyObject* diagnose = nullptr; // of a program that was run here
  PyObject* fallback = nullptr; // an operator runs eagerly
  PyObject* read = nullptr;     // the real tensor for one that stands in for data of the backend's own
};
void set_callbacks(const Callbacks& given);                     // borrowed references
void set_keeps_frames(bool keeps);                              // whether their errors show frames of tarry
void request_sync(c10::DeviceIndex device, const char* reason); // without Python where that is possible (execute/serve.h)
void request_cut(c10::DeviceIndex device, const char* reason);  // the same; no thread needs a value now
void hand_over(std::shared_ptr<Batch> batch, const char* reason);
void report_failure(const char* error);
void diagnose(std::shared_ptr<Batch> batch, void* diagnose, std::exception_ptr error); // see AsyncStep
at::Tensor read_backend_data(const at::Tensor& stand_in);

void set_max_pending(uint32_t nodes);
void set_forced_eager(const std::vector<std::string>& names);
// Whether something of this thread's may still fail that was recorded before: a write must then be one that can be taken back.
// Under the lock.
bool may_be_taken_back(const DeviceState& state);
int32_t set_region(int32_t region); // returns the previous one of this thread

} // namespace tarry
