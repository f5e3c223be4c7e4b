// Calls into the Python runtime (Runtime.on_... in runtime/runtime.py). They take the GIL; no lock may be held, but for the step lock.
// Defined in bind/bindings.cpp.
#pragma once

#include "execute/batch.h"
#include "record/provenance.h"

namespace tarry {

void call_sync(c10::DeviceIndex device, const char* reason, bool awaited); // compute what is pending on a device
void hand_over(std::shared_ptr<Batch> batch, const char* reason);          // compute this batch
void report_failure(const char* error);                                    // of a step that was computed here
void diagnose(
    std::shared_ptr<Batch> batch, void* diagnose, std::exception_ptr error); // of a program that was run here: see AsyncStep
// An operator is about to run eagerly (`seconds` is negative then), or has.
void report_fallback(const std::string& op, const char* reason, const Place& place, double seconds);
void report_read(const char* method, int device, const Place& place, double seconds); // the program has read a value
void request_flush();                                      // many events are logged (execute/event_log.h)
at::Tensor read_backend_data(const at::Tensor& stand_in);  // the real tensor for one that stands in for data of the backend's own
at::Tensor share_backend_data(const at::Tensor& stand_in); // another one that stands in for the same data
void synchronize(c10::DeviceIndex device);                 // torch.accelerator.synchronize() and the like
std::pair<size_t, size_t> memory_info(c10::DeviceIndex device); // free and total bytes of the real device

} // namespace tarry
