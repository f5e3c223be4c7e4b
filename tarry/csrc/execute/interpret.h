// The interpreter of the reference path: interpret.cpp runs the nodes, settle.cpp says what is left after a failure.
#pragma once

#include <ATen/core/stack.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>

#include "core/arguments.h"
#include "execute/batch.h"
#include "execute/outstanding.h"

namespace tarry {

class Interpreter {
 public:
  Interpreter(Batch& batch, bool interruptible, c10::Device device)
      : batch_(batch),
        device_(device),
        interruptible_(interruptible),
        profiled_(at::hasCallbacks()),
        values_(batch.values),
        uses_(batch.values, 0) {}

  bool run();                         // and commit; whether all could be computed
  std::vector<at::Tensor> evaluate(); // the same without a commit: the roots' values, or what a kernel raises

 private:
  void count_uses();
  std::vector<at::Tensor> take_outputs();
  void load(Node& node);
  void execute(Node& node);
  void try_execute(Node& node); // if it fails, the error is kept
  void fail(const Node& node, FailurePtr failure);
  at::Tensor take_for_write(uint32_t index, uint32_t own_uses);
  uint32_t index_of(const Edge& edge, const Node& reader) const {
    if (C10_LIKELY(failed_.empty())) {
      return batch_.index_of(*edge.node) + edge.output;
    }
    const Remains source = source_of(edge, lane_of(reader));
    return batch_.index_of(*source.node) + source.output; // a node without it does not run: inherited_failure()
  }
  void take_written(const Node& node);
  at::Tensor tensor_argument(const Node& node, Operand operand, bool is_mutable);
  c10::IValue list_argument(const Node& node, const Argument& argument, c10::ArrayRef<Operand> items);
  void push_arguments(const Node& node);
  void call(const Node& node);
  void store_results(Node& node);
  void store(Node& node, uint32_t output, at::Tensor value);
  // Collectives are waited for where their results are first read. One that fails then has left its arguments as they are.
  struct Outstanding {
    double ticket;
    Node* node;
  };
  void wait_for(const Outstanding& collective);
  void wait_for_inputs(const Node& node);
  void give_up_waiting(); // after an interrupt: as if the collectives that fail now had not run
  void take_back(const Node& node);
  void check_signals();
  // Keeps what is computed so far with its nodes, for nodes that still need it: the batch can be taken up again later.
  void keep_results(); // under the lock
  void settle_failures();
  // What a storage is left with. `failure`: why, if that is not what was recorded.
  struct Remains {
    NodePtr node; // the last value that could be computed; null if there is none to go back to
    uint32_t output = 0;
    FailurePtr failure;
    bool uninitialised = false; // it goes back to before anything was written
  };
  Remains remains_of(NodePtr node, uint32_t output) const; // back along the writes
  at::Tensor value_of(const Remains& remains) const {
    return remains.node ? values_[batch_.index_of(*remains.node) + remains.output] : at::Tensor();
  }
  void settle(TarryStorage* storage, const Remains& remains, Graveyard& graveyard);
  void fail_later_nodes(const std::vector<at::Tensor>& lost, Graveyard& graveyard);
  FailurePtr failure_of(const Node& node) const {
    const auto found = failed_.find(&node);
    return found == failed_.end() ? nullptr : found->second;
  }
  // What an edge reads: the very value or, if another thread's write to it failed, the value from before that write.
  Remains source_of(const Edge& edge, uint32_t lane) const;
  // Why a node must not run after a failure, if so: it reads what has failed, or its thread has failed before and it would write
  // to something older than that. In eager the program would have stopped there, so later writes must not show.
  FailurePtr inherited_failure(const Node& node) const;
  static const Node* origin_of(const Edge& edge);
  uint32_t lane_of(const Node& node) const { return batch_.replayed ? batch_.lane : node.lane; }
  void raise_failures(); // those of this thread; settle_failures() keeps the others for theirs

  Batch& batch_;
  const c10::Device device_;
  const bool interruptible_;
  const bool profiled_; // a profiler records: each node has a row
  std::vector<at::Tensor> values_;
  std::vector<uint32_t> uses_; // edges and roots that still need the value
  torch::jit::Stack stack_;
  std::vector<std::pair<uint32_t, at::Tensor>> written_; // of the node in execution: index and buffer written
  std::vector<double> started_;                          // collectives, by the node in execution
  std::vector<Outstanding> outstanding_;
  ska::flat_hash_map<const Node*, FailurePtr> failed_;
  struct FirstFailure {
    const Node* node; // null: a program, before any node
    FailurePtr failure;
  };
  std::vector<FirstFailure> first_failures_; // of each lane that has failed
  const FirstFailure* first_failure(uint32_t lane) const {
    const auto found = std::find_if(
        first_failures_.begin(), first_failures_.end(), [lane](const FirstFailure& first) { return first.failure->lane == lane; });
    return found == first_failures_.end() ? nullptr : &*found;
  }
  std::chrono::steady_clock::time_point next_check_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
};

} // namespace tarry
