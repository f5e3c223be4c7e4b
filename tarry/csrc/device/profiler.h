#pragma once

#include <ATen/record_function.h>

#include <string>

namespace tarry {

// What torch.autograd.profiler.profile(use_device="tarry") takes for time on the device: the time in which one of these lives.
// Operators that are only recorded have none of it; a step, its kernels and an operator that runs eagerly have their own.
class DeviceTime {
 public:
  DeviceTime();
  ~DeviceTime();
  DeviceTime(const DeviceTime&) = delete;
  DeviceTime& operator=(const DeviceTime&) = delete;
};

void register_profiler();

// The row of a kernel in a profile: "tarry::kernel NAME (file.py:12)".
std::string kernel_row(const std::string& name, uint32_t site);

} // namespace tarry
