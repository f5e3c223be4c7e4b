#include "execute/program.h"

#include <ATen/record_function.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <utility>

#include "core/fault.h"
#include "core/graph.h"

namespace tarry {

static thread_local const std::atomic<bool>* break_off = nullptr;
static thread_local WriteLog* write_log = nullptr;

WriteLog::WriteLog() : outer_(std::exchange(write_log, this)) {}

WriteLog::~WriteLog() {
  write_log = outer_;
}

WriteLog* WriteLog::current() {
  return write_log;
}

void WriteLog::add(const at::Tensor& input) {
  begun_.push_back(input.storage().data());
}

bool WriteLog::has(const at::Tensor& input) const {
  return std::find(begun_.begin(), begun_.end(), input.storage().data()) != begun_.end();
}

MayBreakOff::MayBreakOff(const std::atomic<bool>& flag) {
  break_off = &flag;
}

MayBreakOff::~MayBreakOff() {
  break_off = nullptr;
}

namespace {

template <size_t>
using Pointer = void*;

template <size_t... I>
void call_with(void* kernel, void* const* pointers, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(Pointer<I>...)>(kernel)(pointers[I]...);
}

using Caller = void (*)(void*, void* const*);

template <size_t N>
void call_kernel(void* kernel, void* const* pointers) {
  call_with(kernel, pointers, std::make_index_sequence<N>());
}

// The calling conventions of x86-64 and AArch64 let a caller pass more arguments than the function takes, which is what happens
// here: there is no need for a caller of each number.
Caller caller_for(size_t pointers) {
  return pointers <= 8  ? &call_kernel<8>
      : pointers <= 32  ? &call_kernel<32>
      : pointers <= 128 ? &call_kernel<128>
      : pointers <= 512 ? &call_kernel<512>
                        : &call_kernel<LaunchList::kMaxPointers>;
}

c10::DimVector picked(const std::vector<int64_t>& integers, const std::vector<int64_t>& positions) {
  c10::DimVector found;
  for (const int64_t position : positions) {
    found.push_back(integers[position]);
  }
  return found;
}

at::Tensor make_view(const LaunchList::Instruction& view, const at::Tensor& source, const std::vector<int64_t>& integers) {
  const int64_t offset = source.storage_offset() + (view.varies ? integers[view.offset] : view.offset);
  return view.varies ? view_of(source, source.dtype(), picked(integers, view.sizes), picked(integers, view.strides), offset)
                     : view_of(source, source.dtype(), view.sizes, view.strides, offset);
}

void call_operator(const LaunchList::Instruction& call, std::vector<at::Tensor>& registers) {
  torch::jit::Stack stack = call.arguments;
  for (const auto& operand : call.operands) {
    if (operand.item < 0) {
      stack[operand.argument] = registers[operand.source];
    } else {
      if (operand.item == 0) { // the list in the template belongs to all runs
        stack[operand.argument] = stack[operand.argument].toList().copy();
      }
      stack[operand.argument].toList().set(operand.item, registers[operand.source]);
    }
  }
  if (call.generator >= 0) {
    const auto seed = static_cast<uint64_t>(*registers[call.seed].const_data_ptr<int64_t>());
    stack[call.generator] = at::detail::createCPUGenerator(seed);
  }
  call.op->callBoxed(&stack);
  for (size_t i = 0; i < call.targets.size() && i < stack.size(); ++i) {
    if (call.targets[i] != LaunchList::kNowhere) {
      registers[call.targets[i]] = std::move(stack[i]).toTensor();
    }
  }
}

} // namespace

at::Tensor vector_of(const LaunchList::NumberVector& spec, const std::vector<c10::IValue>& numbers) {
  at::Tensor vector = at::detail::empty_cpu({static_cast<int64_t>(spec.indices.size())}, spec.dtype);
  for (size_t i = 0; i < spec.indices.size(); ++i) {
    const c10::Scalar value = numbers.at(spec.indices[i]).toScalar();
    if (spec.dtype == c10::ScalarType::Double) {
      vector.mutable_data_ptr<double>()[i] = value.toDouble();
    } else {
      vector.mutable_data_ptr<int64_t>()[i] = value.toLong();
    }
  }
  return vector;
}

LaunchList::LaunchList(
    uint32_t registers, std::vector<NumberVector> vectors, std::vector<Instruction> instructions, std::vector<at::Tensor> constants,
    std::vector<uint32_t> results, std::vector<uint32_t> returned, size_t outputs, std::vector<Polynomial> integers, size_t numbers)
    : registers_(registers),
      vectors_(std::move(vectors)),
      instructions_(std::move(instructions)),
      constants_(std::move(constants)),
      results_(std::move(results)),
      returned_(std::move(returned)),
      outputs_(outputs),
      integers_(std::move(integers)),
      numbers_(numbers) {
  for (const Instruction& step : instructions_) {
    if (step.kind == Instruction::Kind::Kernel && step.sources.size() + step.integers.size() > 512) {
      most_pointers_ = kMaxPointers;
    }
  }
  TORCH_CHECK(
      results_.size() == returned_.size(), "tarry: a program returns ", results_.size(), " of ", returned_.size(), " results");
}

std::vector<int64_t> LaunchList::integers_for(const std::vector<c10::IValue>& numbers) const {
  std::vector<int64_t> symbols;
  for (size_t i = numbers_; i < numbers.size() && !integers_.empty(); ++i) {
    symbols.push_back(numbers[i].toInt());
  }
  return values_of(integers_, symbols);
}

std::vector<at::Tensor> LaunchList::run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const {
  std::vector<at::Tensor> registers = std::move(inputs);
  registers.reserve(registers_);
  for (const NumberVector& spec : vectors_) {
    registers.push_back(vector_of(spec, numbers));
  }
  registers.insert(registers.end(), constants_.begin(), constants_.end());
  registers.resize(registers_);
  std::vector<void*> pointers(most_pointers_);
  const std::atomic<bool>* unwanted = break_off;
  const std::vector<int64_t> integers = integers_for(numbers);
  for (const Instruction& step : instructions_) {
    TORCH_CHECK(!unwanted || !unwanted->load(std::memory_order_relaxed), "tarry: not needed any more");
    fault_point();
    for (const uint32_t overwritten : step.overwrites) {
      begin_write(registers[overwritten]);
    }
    switch (step.kind) {
      case Instruction::Kind::Allocate:
        registers[step.targets[0]] = step.varies
            ? at::detail::empty_strided_cpu(picked(integers, step.sizes), picked(integers, step.strides), step.dtype)
            : at::detail::empty_strided_cpu(step.sizes, step.strides, step.dtype);
        break;
      case Instruction::Kind::View:
        registers[step.targets[0]] = make_view(step, registers[step.sources[0]], integers);
        break;
      case Instruction::Kind::Kernel:
        for (size_t i = 0; i < step.sources.size(); ++i) {
          pointers[i] = registers[step.sources[i]].data_ptr();
        }
        // An integer is passed like a pointer on both architectures.
        for (size_t i = 0; i < step.integers.size(); ++i) {
          pointers[step.sources.size() + i] = reinterpret_cast<void*>(integers[step.integers[i]]); // NOLINT
        }
        {
          RECORD_FUNCTION(step.name, c10::ArrayRef<const c10::IValue>());
          caller_for(step.sources.size() + step.integers.size())(step.kernel, pointers.data());
        }
        break;
      case Instruction::Kind::Call:
        call_operator(step, registers);
        break;
      case Instruction::Kind::Move:
        registers[step.targets[0]] = registers[step.sources[0]];
        break;
    }
    for (const uint32_t dead : step.drops) {
      registers[dead].reset();
    }
  }
  std::vector<at::Tensor> outputs(outputs_);
  for (size_t i = 0; i < results_.size(); ++i) {
    outputs[returned_[i]] = registers[results_[i]];
  }
  return outputs;
}

// ---- in two parts

namespace {

std::vector<at::Tensor> pick(const std::vector<at::Tensor>& inputs, const std::vector<uint32_t>& positions) {
  std::vector<at::Tensor> picked;
  picked.reserve(positions.size());
  for (const uint32_t k : positions) {
    picked.push_back(inputs[k]);
  }
  return picked;
}

} // namespace

std::vector<at::Tensor> SplitProgram::run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const {
  return run_late(inputs, run_early(inputs, numbers), numbers);
}

bool SplitProgram::early_accepts(const std::vector<at::Tensor>& inputs) const {
  return parts_.early->accepts(pick(inputs, parts_.early_takes));
}

std::vector<at::Tensor> SplitProgram::run_early(
    const std::vector<at::Tensor>& inputs, const std::vector<c10::IValue>& numbers) const {
  return parts_.early->run(pick(inputs, parts_.early_takes), numbers);
}

std::vector<at::Tensor> SplitProgram::late_inputs(
    const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& early) const {
  std::vector<at::Tensor> taken;
  taken.reserve(parts_.late_takes.size());
  for (const int32_t k : parts_.late_takes) {
    taken.push_back(k >= 0 ? inputs[k] : early[-1 - k]);
  }
  return taken;
}

bool SplitProgram::late_accepts(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& early) const {
  return parts_.late->accepts(late_inputs(inputs, early));
}

std::vector<at::Tensor> SplitProgram::run_late(
    const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> early, const std::vector<c10::IValue>& numbers) const {
  auto taken = late_inputs(inputs, early);
  std::vector<bool> returned(early.size());
  for (const int32_t k : parts_.outputs) {
    if (k < 0) {
      returned[-1 - k] = true;
    }
  }
  for (size_t k = 0; k < early.size(); ++k) {
    if (!returned[k]) {
      early[k].reset();
    }
  }
  const auto late = parts_.late->run(std::move(taken), numbers);
  std::vector<at::Tensor> outputs;
  for (const int32_t k : parts_.outputs) {
    outputs.push_back(k >= 0 ? late[k] : early[-1 - k]);
  }
  return outputs;
}

// ---- one after the other

Sequence::Sequence(size_t registers, std::vector<Call> calls, std::vector<int32_t> outputs)
    : registers_(registers),
      calls_(std::move(calls)),
      outputs_(std::move(outputs)) {
  for (const Call& call : calls_) {
    TORCH_CHECK(call.program->accepts_all(), "tarry: a program in a sequence is not asked where its inputs may lie");
    TORCH_CHECK(call.gives.size() == call.updates.size(), "tarry: a call with ", call.gives.size(), " results");
  }
}

std::vector<at::Tensor> Sequence::run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const {
  std::vector<at::Tensor> registers = std::move(inputs);
  registers.resize(registers_);
  std::vector<c10::IValue> given;
  for (const Call& call : calls_) {
    auto taken = pick(registers, call.takes);
    given.clear();
    for (const uint32_t k : call.numbers) {
      given.push_back(numbers.at(k));
    }
    for (size_t k = 0; k < call.gives.size(); ++k) {
      if (call.gives[k] >= 0 && call.updates[k] >= 0) {
        registers[call.gives[k]] = taken[call.updates[k]];
      }
    }
    for (const uint32_t dead : call.drops) { // the program may free them as soon as it has read them
      registers[dead].reset();
    }
    auto results = call.program->run(std::move(taken), given);
    for (size_t k = 0; k < call.gives.size(); ++k) {
      if (call.gives[k] >= 0 && call.updates[k] < 0) {
        registers[call.gives[k]] = std::move(results[k]);
      }
    }
  }
  std::vector<at::Tensor> outputs;
  outputs.reserve(outputs_.size());
  for (const int32_t k : outputs_) {
    outputs.push_back(k >= 0 ? registers[k] : at::Tensor());
  }
  return outputs;
}

} // namespace tarry
