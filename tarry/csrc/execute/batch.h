// A batch is all that is pending on a device at one moment, ready to be compiled, executed and given back to its storages.
#pragma once

#include <chrono>

#include "core/graph.h"

namespace tarry {

struct Root {
  TarryStorage* storage; // set to null by the storage itself if it dies while the batch is in flight (TarryStorage::claim)
  NodePtr node;
  uint32_t output;
};

class WriteLog;
struct Structure;

struct Batch {
  Batch() = default;
  Batch(const Batch&) = delete;
  ~Batch();

  DeviceState* state;
  uint64_t epoch;
  Hash128 key;
  std::vector<NodePtr> order; // in program order, leaves among them
  std::vector<Root> roots;    // in program order of their nodes
  bool may_fail = false;      // one of its nodes may, on data
  bool replayed = false;      // the nodes are a replay's own (replay.h): the recorder will not come across them again
  bool is_partial = false;    // the first operators of its stretch ran directly (record/direct.h): the graph is not worth a program
  uint64_t stretch = 0;       // what the program has called
  bool by_reference = false;  // the reference path computes it, for a reason that lasts
  uint32_t lane = 0;          // of a replay: the thread that called it, whichever recorded its nodes
  std::chrono::steady_clock::time_point began; // when its recording began
  std::chrono::steady_clock::time_point asked; // when its values were asked for, if the native part was asked
  double waited = 0;                           // since then, for the step before
  uint32_t values = 0;                         // how many there are: output i of a node is value index_of(node) + i
  std::vector<int32_t> replaces;               // per root: the index of the leaf whose buffer the root's storage had, or -1
  enum class Mode : uint8_t {
    Awaited,    // a thread needs a value of it, or has waited for it
    MayOverlap, // no thread needs a value now: it may be computed while the next one is recorded (execute/executor.h)
    InFlight,   // and so it is
  };
  Mode mode = Mode::Awaited;
  std::vector<at::Tensor> in_place; // of one in flight, or that has failed there: per root, the buffer that its storage has already
  // While a program runs: leaves that it updates, each with its contents from before. The program updates a copy of what others
  // can see, too; of what it updates where it is, so that parameters stay where they are, there may be a copy to go back to.
  struct Original {
    Node* leaf;
    at::Tensor before;
    bool is_backup;
  };
  std::vector<Original> originals;
  // After a program has failed: leaves that it had begun to overwrite. Nothing is computed from them again.
  std::vector<const Node*> lost;
  FailurePtr loss; // why
  Graveyard left;  // what a batch in flight does not need any more; freed by the thread that waits for it, never by the worker

  uint32_t index_of(const Node& node) const {
    return C10_LIKELY(node.epoch == indexed_epoch_) ? indices_by_position_[node.position] : older_indices_.at(&node);
  }
  int32_t find_index(const Node& node) const; // -1: it is not in the batch
  void number_values(uint64_t epoch);         // of the nodes in `order`, most of which are of this epoch

  size_t operations() const; // nodes that are not inputs
  size_t leaves() const;     // nodes that are
  // The call site: which operators were recorded at which lines, however often. Not the same in every process.
  Hash128 call_site() const;
  // The tensors of the leaves, in order, as aliases: a tensor that Python has seen keeps a reference to itself, and its buffer
  // could never be known to be unshared again. Inputs in `update` (positions) are to be written: they get a buffer of their
  // own if theirs has another user; with `preserve`, there is a copy of the others. See `originals`.
  std::vector<at::Tensor> inputs(const std::vector<int64_t>& update, bool preserve);
  // A program that was to write these inputs has failed. Inputs become what they were; those that it has written to are lost.
  // Called where the exception is handled; the failure belongs to the thread `lane`.
  void recover(const std::vector<int64_t>& update, const WriteLog& log, uint32_t lane);
  // The very tensors, which a backend hangs its own data on (a tensor on the meta device stands for such data).
  std::vector<at::Tensor> own_inputs() const;
  // The numbers of all nodes, as often as they are used, in the order of the raw graph (bindings.cpp).
  std::vector<c10::IValue> numbers() const;
  // Where in the recording each input and each number came up.
  std::pair<std::vector<uint32_t>, std::vector<uint32_t>> positions() const;

  // Gives the roots' storages their data, and frees the nodes for the next step. An undefined output was written into the
  // buffer of the input that it replaces. Outputs become what was recorded: another layout, or memory shared with an input or
  // another output, means a copy.
  void commit_results(std::vector<at::Tensor> outputs);
  // The same for outputs that are known to be right.
  void commit(std::vector<at::Tensor> outputs);
  // Runs the nodes one by one on the real device and commits. If a node fails, all that does not depend on it is computed
  // all the same (failure.h), and the error is thrown at the end if it is this thread's. Whether all could be computed.
  // An `interruptible` run lets signal handlers run in between: they must not ask for values.
  bool interpret(bool interruptible);

  bool matches(const Structure& structure) const;

 private:
  void check_count(const std::vector<at::Tensor>& outputs) const;
  void release_nodes(bool quiet, std::vector<NodePtr>& history, Graveyard& graveyard);
  void separate(std::vector<at::Tensor>& outputs, const std::vector<bool>& given) const;

  // What index_of() looks up. Nodes of other epochs are results that an earlier batch has left: few.
  uint64_t indexed_epoch_ = 0;
  std::vector<uint32_t> indices_by_position_;
  ska::flat_hash_map<const Node*, uint32_t> older_indices_;
};

// What of a batch identifies its program: kept with the compiled program to check a hit of the cache.
struct Structure {
  // A node without what it is connected to: a structure must keep no data alive.
  struct Call {
    const Operator* op; // null: a leaf
    const Signature* signature;
    const Layout* leaf_layout;
    int32_t region;
    c10::SmallVector<int16_t, 8> slots;
    c10::SmallVector<c10::IValue, 4> constants;
    c10::SmallVector<const Layout*, 3> views;
  };

  explicit Structure(const Batch& batch);
  const DeviceState* state; // a program is one device's: its backend has compiled it
  Hash128 key;
  std::vector<Call> calls;
  std::vector<uint32_t> wiring; // the source value of each edge, then the roots
  std::vector<int32_t> replaces;
};

// No step may be in flight. Takes a snapshot of all pending storages and starts a new epoch; null if nothing is pending.
std::shared_ptr<Batch> collect(DeviceState& state);
// The graph that would compute some tensors, without starting a new epoch.
std::shared_ptr<Batch> peek(const std::vector<at::Tensor>& tensors);
// The same batch with nodes of its own and without storages, which the recorder does not come across again.
std::shared_ptr<Batch> copy_batch(const Batch& batch);

// An input of a batch: a leaf, or a node whose outputs were computed by an earlier, interrupted batch.
inline bool is_input(const Node& node) {
  return node.is_leaf() || node.results;
}

} // namespace tarry
