// Running ahead: while a step is still being recorded, the part of it that is known already is computed on another thread.
//
// A training loop records the same graph step after step, and most of that graph depends only on tensors that are known by the
// end of the forward pass. So after a step whose program comes in two parts, the next one is expected to be the same: as soon as
// all inputs of the early part are known, it is launched with them. An input is known when it has been recorded; or before that,
// if it was the same storage twice (a parameter), or the storage that was filled from the host in the same turn (a batch). The
// early part is a pure function of its inputs and numbers, so that nothing can go wrong: when the step is complete, what was
// computed ahead is used if the program, the inputs and the numbers are those that it was launched with, and thrown away
// otherwise.
#pragma once

#include <exception>

#include "graph.h"
#include "pilot.h"
#include "program.h"

namespace tarry {

struct Batch;

// A program in two parts, of which only the late one writes to inputs.
class SplitProgram final : public Program {
 public:
  struct Parts {
    std::shared_ptr<const Program> early, late;
    std::vector<uint32_t> early_takes; // inputs
    std::vector<int32_t> late_takes; // inputs; -1 - k is result k of the early part
    std::vector<int32_t> outputs; // result k of the late part; -1 - k is one of the early part
    std::vector<uint32_t> numbers; // what the early part depends on
    std::vector<uint32_t> seeds; // those among them that are new in every step
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

  // How often in a row what was computed ahead had to be thrown away. After kMaxMisses it is not tried any more.
  static constexpr int kMaxMisses = 4;
  mutable std::atomic<int> misses{0};

 private:
  std::vector<at::Tensor> late_inputs(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& early) const;

  Parts parts_;
};

// The early part of a step, on its way.
struct Flight final : Task {
  std::shared_ptr<const SplitProgram> program;
  uint64_t epoch = 0;
  std::vector<at::Tensor> sources; // the inputs as the leaves have them
  std::vector<at::Tensor> inputs; // others over the same memory, given to the program
  std::vector<c10::IValue> numbers;
  bool foreseen = false; // launched before all inputs were recorded
  std::atomic<bool> cancelled{false}; // nobody wants it any more

  // When it is done:
  std::vector<at::Tensor> results;
  std::exception_ptr error;

 protected:
  void fly() noexcept override;
};

// What the next step is expected to be.
struct Expectation {
  std::shared_ptr<const SplitProgram> program;
  std::vector<NodePtr> order; // of the last batch; a node that is recorded again is the same object (DeviceState::history)
  std::vector<NodePtr> inputs; // the leaves that the early part takes
  std::vector<int32_t> uploads; // for each of them, which upload of the step it was; -1: none
  bool foresees = true; // inputs are told before they are recorded; wrong once, never tried again
  uint32_t complete_at = kNever; // the position at which all inputs of the early part are recorded
  uint32_t launch_at = kNever; // the same, or an earlier one if all can be foreseen
  static constexpr uint32_t kLookAgain = 8; // nodes recorded until it is looked at again
};

// A batch was computed by this program: expect the next one to be the same. Never throws: the batch is committed.
void expect_again(const Batch& batch, std::shared_ptr<const SplitProgram> program) noexcept;
// The same, for a batch that is about to be computed. Under the lock; what is replaced goes into `old`.
struct Replaced {
  Expectation expected;
  std::vector<WeakStorageImpl> results;
};
void renew_expectation(const Batch& batch, const std::shared_ptr<const SplitProgram>& program, Replaced& old) noexcept;
// Called when `state.launch_at` is reached, without the lock.
void launch(DeviceState& state);
// What was launched ahead for a batch that `program` is to compute, if with its very inputs and numbers. It has let go of the
// inputs; on a CPU it may still be in the air.
std::shared_ptr<Flight> claim_flight(Batch& batch, const SplitProgram& program, const std::vector<c10::IValue>& numbers);
// Its results, which are given away; none if it has failed.
std::optional<std::vector<at::Tensor>> land(DeviceState& state, Flight& flight);

// Something else computes the batch: what is in the air for it breaks off, and lets go of its inputs.
void abandon(Batch& batch);

// Where in the recording each input and each number of a batch came up.
std::pair<std::vector<uint32_t>, std::vector<uint32_t>> positions_of(const Batch& batch);

bool runs_ahead();
void set_run_ahead(bool on);
void forget_expectations(); // on all devices
void wait_for_flights(); // at the end of the process, for good: nothing may run while libraries are unloaded

} // namespace tarry
