#include "execute/async_step.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/host_memory.h"
#include "execute/executor.h"

namespace tarry {

// Numbers that are published at most: on a device, each is copied on its own.
constexpr int kMaxEarlyValues = 4;

AsyncStep::AsyncStep(
    std::shared_ptr<Batch> batch, std::shared_ptr<const Program> program, std::vector<int64_t> update,
    std::vector<c10::IValue> numbers, std::shared_ptr<void> diagnose)
    : batch(std::move(batch)),
      program(std::move(program)),
      split(std::dynamic_pointer_cast<const SplitProgram>(this->program)),
      update(std::move(update)),
      numbers(std::move(numbers)),
      diagnose(std::move(diagnose)),
      lane(this->batch->replayed ? this->batch->lane : current_lane()) {}

bool AsyncStep::accepts_inputs() const {
  return split ? early || split->early_accepts(inputs) : program->accepts(inputs);
}

bool AsyncStep::accepts_everything() const {
  const bool early_done = early && early->is_done() && !early->error;
  return program->accepts_all() || (early_done && split->late_accepts(inputs, early->results));
}

bool AsyncStep::compute(bool asynchronously) {
  auto first = early ? batch->state->executor->speculator.results_of(*early) : std::nullopt;
  if (!asynchronously) {
    batch->left = {}; // of a run that failed; not before the early part is done, which may read it
  }
  if (!split) {
    batch->commit_results(program->run(std::move(inputs), numbers));
    return true;
  }
  if (!first) {
    first = split->run_early(inputs, numbers);
  }
  if (!split->late_accepts(inputs, *first)) {
    return false;
  }
  if (asynchronously) {
    publish_early(*first);
  }
  auto outputs = split->run_late(inputs, std::move(*first), numbers);
  inputs.clear();
  batch->commit_results(std::move(outputs));
  return true;
}

void AsyncStep::run() noexcept {
  WriteLog log;
  try {
    const c10::OptionalDeviceGuard device(inputs.empty() ? std::nullopt : std::make_optional(inputs[0].device()));
    PlainDispatch plain;
    const CountedMemory counted(batch->state->index);
    TORCH_CHECK(compute(/*asynchronously=*/true), "tarry: the late part of a step does not accept its inputs");
    batch->state->executor->note_done(*this, was_read_);
  } catch (...) {
    error = std::current_exception();
    inputs.clear();
    batch->recover(update, log, lane);
  }
}

void AsyncStep::publish_early(const std::vector<at::Tensor>& early_results) {
  const auto& outputs = split->parts().outputs;
  std::vector<at::Tensor> values(outputs.size());
  std::optional<c10::Device> from;
  int count = 0;
  for (size_t i = 0; i < outputs.size() && count < kMaxEarlyValues; ++i) {
    const at::Tensor* value = outputs[i] < 0 ? &early_results.at(-1 - outputs[i]) : nullptr;
    const Root& root = batch->roots[i];
    if (!value || value->numel() != 1 || !root.node->output_layout(root.output)->describes(value->unsafeGetTensorImpl())) {
      continue;
    }
    const auto options = value->options().device(c10::kCPU).pinned_memory(!value->is_cpu());
    values[i] = at::empty_strided(value->sizes(), value->strides(), options).copy_(*value, /*non_blocking=*/true);
    from = value->device();
    ++count;
  }
  if (from && !from->is_cpu()) {
    arrival_.emplace(from->type());
    arrival_->record(c10::impl::VirtualGuardImpl(from->type()).getStream(*from));
  }
  early_values_ = std::move(values);
  publish();
}

at::Tensor AsyncStep::read_early(size_t root) {
  wait(Progress::EarlyDone);
  if (root >= early_values_.size() || !early_values_[root].defined()) {
    return {};
  }
  if (arrival_) {
    arrival_->synchronize();
  }
  was_read_ = true;
  return early_values_[root];
}

} // namespace tarry
