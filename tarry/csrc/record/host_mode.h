// Lazy mode in place of the CPU (tarry.lazy_mode): a program that was written for the host finds on this device what it had there.
#pragma once

#include <ATen/core/stack.h>

#include "core/operator.h"

namespace tarry {

// `takes_tensors`: an operator may be given tensors of the host, which it reads a copy of. `draws`: random numbers are those that
// eager PyTorch draws on the CPU, one after the other, from the CPU's generator. Process-wide.
void set_host_mode(bool takes_tensors, bool draws);
bool takes_host_tensors();

// Whether a call draws its random numbers on the host: not if it was given a generator of this device.
bool draws_on_host(const Operator& op, c10::ArrayRef<c10::IValue> arguments);
// Runs a random call on the host and uploads what it has drawn. False if that takes the contents of its arguments: run it eagerly.
bool draw_on_host(const Operator& op, torch::jit::Stack* stack);

} // namespace tarry
