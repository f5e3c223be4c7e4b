#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include "core/operator.h"

namespace tarry {

// While it lives, a random operator draws from `seed`: through its generator argument if it has one (which is put on the
// stack), else through the real device's default generator, whose state is restored afterwards.
class SeededCall {
 public:
  SeededCall(const Operator& op, int64_t seed, torch::jit::Stack& stack, c10::Device device);
  ~SeededCall();

 private:
  at::Generator borrowed_;
  at::Generator saved_;
};

// The steps that have failed because of an operator that this thread recorded: device and epoch of each, in order.
std::vector<std::pair<int, uint64_t>> failed_steps(uint32_t lane);

} // namespace tarry
