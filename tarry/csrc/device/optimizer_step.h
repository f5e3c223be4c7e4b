// Steps of PyTorch's own optimizers while calls are direct (record/direct.h): the operators of tarry/device/fast_step.py, one parameter
// after the other as in eager PyTorch on a CPU, without Python and without a device tensor for each result.
#pragma once

#include <vector>

#include "core/graph.h"

namespace tarry {

// The options of one of an optimizer's groups, and how many of the parameters are in it.
struct OptimizerGroup {
  double rate = 0;
  double decay = 0;
  size_t count = 0;
  bool is_adam = false;
  bool decoupled = false; // Adam: the decay is
  double beta1 = 0, beta2 = 0, epsilon = 0;
  double momentum = 0, dampening = 0; // SGD
};

// What a step reads and writes: for each parameter of all groups that has a gradient, in order.
struct OptimizerTensors {
  std::vector<at::Tensor> params, grads;
  std::vector<at::Tensor> averages, squares, counters; // Adam. The counters are on the host
  std::vector<at::Tensor> momenta;                     // SGD, of groups with a momentum
};

// Takes the step, with the counters advanced. False, and nothing is done, if its operators have to be recorded.
bool step_directly(const std::vector<OptimizerGroup>& groups, const OptimizerTensors& tensors);

// Whether a tensor is one of the step counts that PyTorch's optimizers keep on the host.
bool is_counter(const at::Tensor& tensor);
double counter_value(const at::Tensor& counter);
void advance_counter(const at::Tensor& counter);

} // namespace tarry
