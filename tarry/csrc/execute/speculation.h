// Speculation: while a step is still being recorded, the worker computes the part of it that is known already.
//
// A training loop records the same graph step after step, and most of that graph depends only on tensors that are known by the
// end of the forward pass. So after a step whose program comes in two parts (SplitProgram), the next one is expected to be the
// same: as soon as all inputs of the early part are known, the part is launched with them. An input is known when it has been
// recorded; or before that, if it was the same storage twice (a parameter), or the storage that was filled from the host in the
// same turn (a batch). So is a seed: the device's generator will give it. The early part is a pure function of its inputs and
// numbers: when the step is complete, its results are used if program, inputs and numbers are those that it was launched with, and
// dropped otherwise.
#pragma once

#include <exception>
#include <optional>

#include "execute/worker.h"
#include "core/graph.h"
#include "execute/program.h"

namespace tarry {

struct Batch;

// The early part of a step.
struct Speculation final : Task {
  std::shared_ptr<const SplitProgram> program;
  std::vector<at::Tensor> sources; // the inputs as the leaves have them
  std::vector<at::Tensor> inputs;  // others over the same memory, given to the program
  std::vector<c10::IValue> numbers;
  c10::DeviceIndex device = 0;
  bool predicted = false; // launched before all inputs were recorded
  std::atomic<bool> cancelled{false};

  // When it is done:
  std::vector<at::Tensor> results;
  std::exception_ptr error;

  void cancel(); // breaks off; waits until the worker has let go of the inputs

 protected:
  void run() noexcept override;
};

// What a device speculates on. "Under the lock" is the device's lock; the others take it.
class Speculator {
 public:
  explicit Speculator(DeviceState& state) : state_(state) {}

  // ---- while a step is recorded
  bool is_due() const { return state_.position >= launch_at_; } // under the lock
  bool has_launched() const { return launched_ != nullptr; }    // under the lock
  void launch(bool is_busy);                                    // when it is due. `is_busy`: a step is in flight
  void note_upload(c10::StorageImpl* storage);                  // the host has filled it; under the lock
  void end_epoch(Graveyard& graveyard); // what was launched is for the batch that is computed next; under the lock

  // ---- while a batch is computed
  // What was launched for the batch, if with the program's very inputs and numbers. It has let go of the inputs; on a CPU it may
  // still be running. Without a program, or with another one, it is dropped.
  std::shared_ptr<Speculation> claim(const Batch& batch, const SplitProgram* program, const std::vector<c10::IValue>& numbers);
  // The results, which are given away; none if the early part has failed.
  std::optional<std::vector<at::Tensor>> results_of(Speculation& claimed);
  void drop();   // something else computes the batch
  void cancel(); // also what was launched in this epoch: it reads what is not there
  void forget(); // and what is expected

  // ---- what comes next
  // What the next step is expected to be.
  struct Expectation {
    std::shared_ptr<const SplitProgram> program;
    std::vector<NodePtr> order;    // of the last batch; a node that is recorded again is the same object (DeviceState::history)
    std::vector<NodePtr> inputs;   // the leaves that the early part takes
    std::vector<int32_t> uploads;  // for each of them, which upload of the step it was; -1: none
    bool predicts = true;          // inputs may be known before they are recorded; wrong once, never tried again
    uint32_t complete_at = kNever; // the position at which all inputs of the early part are recorded
    uint32_t launch_at = kNever;   // the same, or an earlier one if all can be predicted
  };
  struct Replaced {
    Expectation expected;
    std::vector<WeakStorageImpl> results;
  };
  // The step after this batch is expected to be the same; without a program, nothing is expected. `overlaps`: it is recorded
  // while this one is computed, with the other set of nodes (Executor::submit), and what is expected is in terms of those. Under
  // the lock; what is replaced goes into `old`.
  void expect(const Batch& batch, const std::shared_ptr<const SplitProgram>& program, bool overlaps, Replaced& old) noexcept;

  std::atomic<uint64_t> used{0}; // launches whose results were right
  std::atomic<uint64_t> missed{0};

 private:
  static constexpr uint32_t kFewNodes = 4; // recorded before anything is predicted, and before it is tried again
  static constexpr size_t kMaxUploads = 256;

  bool has_room(bool is_busy);
  void renew(const Batch& batch, const std::shared_ptr<const SplitProgram>& program, Replaced& old);
  void set_inputs(const Batch& batch);
  at::Tensor predict(const Node& leaf, int32_t upload, std::vector<c10::intrusive_ptr<c10::StorageImpl>>& held) const;
  bool fill(Speculation& made, uint32_t until, std::vector<c10::intrusive_ptr<c10::StorageImpl>>& held);
  void miss(const Speculation& speculation);

  DeviceState& state_;
  Expectation expected_, other_expected_;
  uint32_t launch_at_ = kNever;                          // a position; until the launch, or the end of the epoch
  std::shared_ptr<Speculation> launched_;                // in this epoch
  std::shared_ptr<Speculation> for_batch_;               // launched for the batch that is being computed
  std::vector<WeakStorageImpl> uploads_, batch_uploads_; // the first storages filled from the host in the epoch, in order
  // What the early part of the last step has computed for the program: gradients, above all. The next ones are not computed
  // while too much of these is still there: see Program::makes_room.
  std::vector<WeakStorageImpl> early_results_;
};

} // namespace tarry
