// Whether a recorded call is what a replay of an earlier one would have been: the verification behind tarry.compile.
#pragma once

#include "replay/replay.h"

namespace tarry {

// What a call will do if it does what its replay would do. Quick: it says only whether, and gives up where an order or an object is
// another, which need not mean anything; replay/comparison.py finds the rest. Made before the call. Knows storages by their serials: holding
// them would keep alive what the call drops.
class Expectation {
 public:
  // No step may be in flight, nor may the replay be armed before the call is over.
  Expectation(std::shared_ptr<Replay> replay, std::vector<at::Tensor> arguments, const std::vector<double>& numbers);
  // Whether it was met by the call that a batch was collected after, with these tensors among its results.
  bool met(const Batch& batch, const Trace& trace, const std::vector<at::Tensor>& results) const;
  const std::vector<uint64_t>& gradient_serials() const { return gradient_serials_; } // per holder, before the call
  std::pair<uint64_t, uint64_t> random() const { return random_; }                    // seed and offset before the call

 private:
  struct Storages; // serials by reference, once the call is over
  bool same_leaf(const Trace::Leaf& leaf, const Replay::StorageRef& source, const Storages& storages) const;
  bool same_nodes(const Batch& batch, const Trace& trace, const Storages& storages) const;
  bool same_roots(const Batch& batch, const Trace& trace, Storages& storages, std::vector<StoragePtr>& held) const;
  bool same_gradients(const Storages& storages) const;

  const std::shared_ptr<Replay> replay_;
  const Batch& expected_;
  const Replay::Plan& plan_;
  const std::vector<at::Tensor> arguments_;
  std::vector<uint64_t> argument_serials_, gradient_serials_, kept_serials_;
  std::pair<uint64_t, uint64_t> random_;
};

} // namespace tarry
