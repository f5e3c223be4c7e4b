// A step: a batch, and the program that computes it, perhaps asynchronously while the next step is recorded.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <exception>
#include <optional>
#include <thread>

#include "execute/batch.h"
#include "execute/speculation.h"

namespace tarry {

struct AsyncStep final : Task {
  AsyncStep(
      std::shared_ptr<Batch> batch, std::shared_ptr<const Program> program, std::vector<int64_t> update,
      std::vector<c10::IValue> numbers, std::shared_ptr<void> diagnose);

  const std::shared_ptr<Batch> batch;
  const std::shared_ptr<const Program> program;
  const std::shared_ptr<const SplitProgram> split; // the same, if it comes in two parts
  const std::vector<int64_t> update;               // inputs that the program writes
  const std::vector<c10::IValue> numbers;
  const std::shared_ptr<void> diagnose; // a Python object: what to call with the batch and the error if the step fails
  const std::thread::id owner = std::this_thread::get_id(); // the thread that submitted it
  const uint32_t lane;                                      // of the owner (failure.h)
  std::shared_ptr<Speculation> early; // the early part, if it was launched: it is before this one in the queue
  std::vector<at::Tensor> inputs;
  std::chrono::steady_clock::time_point submitted;
  std::exception_ptr error; // when it is done

  // Whether the program takes the inputs, as far as that is known before it runs.
  bool accepts_inputs() const;
  // Whether the program is sure to take the inputs of both parts. The worker could not do anything about a refusal.
  bool accepts_everything() const;
  // Computes and commits; false, and nothing is committed, if the late part does not accept its inputs.
  bool compute(bool asynchronously);
  // A number that the early part has computed, on the host; undefined if there is none for this root. Waits for that part.
  at::Tensor read_early(size_t root);

 protected:
  void run() noexcept override;

 private:
  void publish_early(const std::vector<at::Tensor>& early_results);

  // Per root, a number on the host, or nothing; and when the numbers have arrived there, if they are on their way.
  std::vector<at::Tensor> early_values_;
  std::optional<c10::Event> arrival_;
  std::atomic<bool> was_read_{false};
};

} // namespace tarry
