// Compiled programs that run without Python: what a backend hands over so that a step takes no GIL and no wrapping of tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <vector>

#include "execute/backoff.h"
#include "core/polynomial.h"

namespace tarry {

// While it lives, a program that runs on this thread may break off, by an exception, when the flag is set.
class MayBreakOff {
 public:
  explicit MayBreakOff(const std::atomic<bool>& flag);
  ~MayBreakOff();
};

// While it lives, notes which inputs a program that runs on this thread has begun to overwrite.
class WriteLog {
 public:
  WriteLog();
  ~WriteLog();
  WriteLog(const WriteLog&) = delete;
  bool has(const at::Tensor& input) const;
  void add(const at::Tensor& input);
  static WriteLog* current(); // null if none lives

 private:
  WriteLog* const outer_;
  std::vector<const void*> begun_; // addresses
};
// A program is about to overwrite an input. Said before the first byte is written.
inline void begin_write(const at::Tensor& input) {
  if (WriteLog* log = WriteLog::current()) {
    log->add(input);
  }
}

class Program {
 public:
  virtual ~Program() = default;
  // Inputs and numbers are those of the IR graph; the results are its outputs, undefined where one was written into the buffer
  // of the input that it replaces. Runs under PlainDispatch, on any thread. Says begin_write() of each input that it overwrites.
  virtual std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const = 0;
  // Whether it can be run with inputs that lie where these do.
  virtual bool accepts(const std::vector<at::Tensor>& inputs) const { return true; }
  virtual bool accepts_all() const { return true; } // wherever they lie
  // Whether it may run again while so many bytes of its last results are still in use. By default, only a few: eager would not
  // have new gradients beside the old ones. Asked by threads that record; what is in use may be moved elsewhere.
  virtual bool makes_room(size_t in_use) const { return in_use <= kFewBytes; }
  static constexpr size_t kFewBytes = 4 << 20;
};

// A list of instructions on numbered registers, of which the first hold the inputs: buffers, views of them, kernels that take
// pointers, calls of operators. That is all that Inductor's programs for a CPU consist of.
class LaunchList final : public Program {
 public:
  // Where an argument of an operator is a register, or a list with registers in it.
  struct Operand {
    uint32_t argument;
    int32_t item; // -1: the argument itself
    uint32_t source;
  };
  struct Instruction {
    enum class Kind { Allocate, View, Kernel, Call, Move } kind;
    std::vector<uint32_t> targets; // registers that are written; kNowhere: an unused result
    std::vector<uint32_t> sources;
    std::vector<uint32_t> drops;         // registers that are dead afterwards
    std::vector<uint32_t> overwrites;    // those among the registers it writes whose memory is an input's
    std::vector<int64_t> sizes, strides; // Allocate, View
    int64_t offset = 0;
    bool varies = false;            // sizes, strides and offset are positions in the list of integers
    std::vector<uint32_t> integers; // Kernel: positions of those that follow the pointers
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    void* kernel = nullptr;
    std::string name; // Kernel: the row of a profile
    const c10::OperatorHandle* op = nullptr;
    torch::jit::Stack arguments; // Call: with gaps at the operands
    std::vector<Operand> operands;
    int32_t generator = -1; // Call: the argument that is a generator, seeded by the number in register `seed`
    uint32_t seed = 0;
  };
  // A tensor made of numbers, which follows the inputs.
  struct NumberVector {
    c10::ScalarType dtype;
    std::vector<uint32_t> indices;
  };
  static constexpr uint32_t kNowhere = UINT32_MAX;
  static constexpr size_t kMaxPointers = 2048; // of a kernel

  LaunchList(
      uint32_t registers, std::vector<NumberVector> vectors, std::vector<Instruction> instructions,
      std::vector<at::Tensor> constants, std::vector<uint32_t> results, std::vector<uint32_t> returned, size_t outputs,
      std::vector<Polynomial> integers, size_t numbers);
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const override;

 private:
  std::vector<int64_t> integers_for(const std::vector<c10::IValue>& numbers) const; // at the symbols' values

  uint32_t registers_;
  std::vector<NumberVector> vectors_;
  std::vector<Instruction> instructions_;
  std::vector<at::Tensor> constants_; // they follow the vectors
  std::vector<uint32_t> results_;     // registers
  std::vector<uint32_t> returned_;    // the output that each of them is
  size_t outputs_;
  std::vector<Polynomial> integers_; // those that depend on symbols
  size_t numbers_;                   // how many come before the symbols' values
  size_t most_pointers_ = 512;       // room for those of any kernel, and for what its caller passes beyond them
};

// A program in two parts, of which only the late one writes to inputs.
class SplitProgram final : public Program {
 public:
  struct Parts {
    std::shared_ptr<const Program> early, late;
    std::vector<uint32_t> early_takes; // inputs
    std::vector<int32_t> late_takes;   // inputs; -1 - k is result k of the early part
    std::vector<int32_t> outputs;      // result k of the late part; -1 - k is one of the early part
    std::vector<uint32_t> numbers;     // what the early part depends on
    std::vector<uint32_t> seeds;       // those among them that are new in every step
  };
  explicit SplitProgram(Parts parts) : parts_(std::move(parts)) {}
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const override;
  bool accepts_all() const override { return parts_.early->accepts_all() && parts_.late->accepts_all(); }
  bool early_accepts(const std::vector<at::Tensor>& inputs) const;
  std::vector<at::Tensor> run_early(const std::vector<at::Tensor>& inputs, const std::vector<c10::IValue>& numbers) const;
  bool late_accepts(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& early) const;
  // `early` is given away: an activation has to be freed as soon as the late part is done with it.
  std::vector<at::Tensor> run_late(
      const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> early, const std::vector<c10::IValue>& numbers) const;
  const Parts& parts() const { return parts_; }

  mutable Backoff speculation; // whether the early part is launched before a step is complete (execute/speculation.h)

 private:
  std::vector<at::Tensor> late_inputs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& early) const;

  Parts parts_;
};

// Programs that run one after the other on numbered registers, of which the first hold the inputs (passes/pieces.py).
class Sequence final : public Program {
 public:
  struct Call {
    std::shared_ptr<const Program> program; // takes its inputs wherever they lie
    std::vector<uint32_t> takes;            // registers
    std::vector<int32_t> gives;             // registers; negative: an unused result
    std::vector<uint32_t> numbers;          // those of the sequence that are the program's
    std::vector<uint32_t> drops;            // registers that are dead afterwards
    std::vector<int32_t> updates;           // per result: which of its inputs it is written into; negative: none
  };
  Sequence(size_t registers, std::vector<Call> calls, std::vector<int32_t> outputs); // negative: written into an input
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const override;

 private:
  size_t registers_;
  std::vector<Call> calls_;
  std::vector<int32_t> outputs_;
};

at::Tensor vector_of(const LaunchList::NumberVector& spec, const std::vector<c10::IValue>& numbers);

} // namespace tarry
