#include "record/host_mode.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <atomic>

#include "core/graph.h"

namespace tarry {
namespace {

std::atomic<bool> takes_tensors_{false};
std::atomic<bool> draws_{false};

// Uninitialised memory of the host in which `empty_like(tensor)` would lie in the same order.
at::Tensor host_like(const at::Tensor& tensor, at::ScalarType dtype) {
  const auto strides = tensor.is_non_overlapping_and_dense() ? tensor.strides().vec()
                                                             : at::infer_dense_strides(tensor.sizes(), tensor.strides());
  return at::empty_strided(tensor.sizes(), strides, at::TensorOptions(at::kCPU).dtype(dtype));
}

// Dropout as eager PyTorch has it on a CPU: a mask of the host, the product recorded.
void drop_out(torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 3);
  const at::Tensor input = arguments[0].toTensor();
  const double p = arguments[1].toDouble();
  at::Tensor mask;
  {
    PlainDispatch plain;
    mask = host_like(input, at::kBool).bernoulli_(1 - p);
  }
  mask = upload(*storage_of(input.unsafeGetTensorImpl())->state, mask);
  const at::Tensor result = at::mul(at::mul(input, mask), p == 1 ? 0. : 1 / (1 - p));
  torch::jit::drop(*stack, 3);
  stack->emplace_back(result);
  stack->emplace_back(mask);
}

} // namespace

void set_host_mode(bool takes_tensors, bool draws) {
  takes_tensors_ = takes_tensors;
  draws_ = draws;
}

bool takes_host_tensors() {
  return takes_tensors_.load(std::memory_order_relaxed);
}

bool draws_on_host(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (!draws_.load(std::memory_order_relaxed) || !op.draws(arguments)) {
    return false;
  }
  const int at = op.generator_argument;
  return at < 0 || arguments[at].isNone() || arguments[at].toGenerator().device().is_cpu();
}

bool draw_on_host(const Operator& op, torch::jit::Stack* stack) {
  const size_t count = op.arguments.size();
  const auto arguments = torch::jit::last(*stack, count);
  if (op.name == "aten::native_dropout" && (arguments[2].isNone() || arguments[2].toBool())) {
    drop_out(stack);
    return true;
  }
  at::Tensor written, drawn; // the one argument that it fills, and what takes its place
  torch::jit::Stack call;
  c10::DeviceIndex index = -1;
  for (size_t i = 0; i < count; ++i) {
    if (arguments[i].isTensor() && op.arguments[i].is_mutable && op.has(kOverwrites) && !written.defined()) {
      written = arguments[i].toTensor();
      drawn = host_like(written, written.scalar_type());
      call.emplace_back(drawn);
    } else if (arguments[i].isTensor() || arguments[i].isTensorList()) {
      return false;
    } else if (arguments[i].isDevice() && arguments[i].toDevice().type() == c10::DeviceType::PrivateUse1) {
      index = arguments[i].toDevice().index();
      call.emplace_back(c10::Device(at::kCPU));
    } else {
      call.push_back(arguments[i]);
    }
  }
  {
    PlainDispatch plain;
    op.handle.callBoxed(&call);
  }
  TORCH_INTERNAL_ASSERT(call.size() == 1 && call[0].isTensor(), op.name);
  const at::Tensor result = written.defined() ? written.copy_(drawn) : upload(device_state(index), call[0].toTensor());
  torch::jit::drop(*stack, count);
  stack->emplace_back(result);
  return true;
}

} // namespace tarry
