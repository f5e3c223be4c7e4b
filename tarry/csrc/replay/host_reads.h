// Reads of host tensors by the operators of one thread, however the program asks for them: `float(t)` in Python, or a tensor
// given to an operator where it takes a number.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <utility>
#include <vector>

namespace tarry {

class HostReads {
 public:
  HostReads(); // watches this thread until stop(), which the same thread has to call; one at a time
  ~HostReads() { stop(); }
  HostReads(const HostReads&) = delete;
  void stop();

  std::vector<std::pair<at::Tensor, uint32_t>> found; // what was read, and at which site

 private:
  at::CallbackHandle handle_ = 0;
};

} // namespace tarry
