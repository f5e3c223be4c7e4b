// Replaying a step without running its Python: see tarry/replay, which decides what may be replayed.
//
// A Trace watches a call of a step function while it is recorded: where the leaves of its graph come from, and whether the call
// reads values. A Replay has the call's batch, with nodes of its own. It is armed before each run: leaves get the data of their
// sources, seeds are drawn, and the storages that the step gives new contents become pending. From then on all is as if the
// step had just been recorded, so that programs, the reference path, errors and updates in place need not know of replays.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "execute/batch.h"

namespace tarry {

using WeakStorage = c10::weak_intrusive_ptr<TarryStorage>;

struct Trace {
  struct Leaf {
    NodePtr node;
    WeakStorage storage;
    uint64_t serial;     // of the storage
    at::Tensor uploaded; // the foreign tensor that the storage was made from, if it was
  };

  // Nothing may be pending. Starts a new epoch, so that every leaf is seen.
  explicit Trace(DeviceState& state);
  ~Trace();
  Trace(const Trace&) = delete;
  void leaf(const NodePtr& node, TarryStorage& storage); // under the lock

  DeviceState& state;
  const std::thread::id thread = std::this_thread::get_id(); // what other threads read and upload does not count
  const uint64_t first_serial;                               // storages with a smaller one existed before
  std::vector<Leaf> leaves;
  ska::flat_hash_map<uint64_t, at::Tensor> uploads; // by the serial of the storage
  std::vector<uint32_t> reads;                      // sites where values were read
  std::vector<uint32_t> overwritten;                // sites where foreign data were copied into a storage that existed before
  bool shared = false;                              // whether another thread has recorded something meanwhile
  const uint32_t lane = current_lane();
};

// To be called without the lock where a value is read, and where a storage gets a copy of a foreign tensor.
void note_read(DeviceState& state);
void note_upload(const TarryStorage& storage, const at::Tensor& source);
inline void trace_read(DeviceState& state) {
  if (C10_UNLIKELY(state.trace.load(std::memory_order_relaxed))) {
    note_read(state);
  }
}
inline void trace_upload(const TarryStorage& storage, const at::Tensor& source) {
  if (C10_UNLIKELY(storage.state->trace.load(std::memory_order_relaxed))) {
    note_upload(storage, source);
  }
}

uint64_t serial_of(const at::Tensor& tensor); // of its storage; 0 if that is not one of ours

// The batch of a traced call, copied before it runs: nodes of its own, and storages by weak reference.
struct Snapshot {
  Snapshot(const Batch& batch, Trace& trace); // notes in the trace whether another thread has recorded a part of the batch
  // Numbers by their positions in Batch::numbers().
  void set_numbers(const std::vector<uint32_t>& positions, const std::vector<double>& numbers);

  std::shared_ptr<Batch> batch;
  std::vector<Trace::Leaf> leaves;   // in the batch's order
  std::vector<WeakStorage> storages; // of the roots
  std::vector<uint64_t> serials;     // of the roots' storages
  bool whole = true;                 // whether all of the batch was recorded in the traced call
};

class Replay {
 public:
  // Where a storage comes from when the step is replayed.
  enum class From : uint8_t {
    Argument,     // that of a tensor among the arguments
    Gradient,     // that of the gradient which a holder has when the call begins
    Kept,         // one that outlives calls
    Fresh,        // made anew
    Uploaded,     // of a leaf: a copy of a host tensor among the arguments
    UploadedHost, // of a leaf: a copy of a host tensor that outlives calls
    Dropped,      // of a root: nothing has it when the call is over
  };
  struct StorageRef {
    From from;
    uint32_t index;
  };
  struct Tensor { // one that is made at each replay
    StorageRef storage;
    const Layout* layout;
  };
  struct Gradient {               // what becomes of a holder's .grad
    StorageRef holder;            // Argument, or Kept: one of the holders
    std::optional<Tensor> tensor; // none: cleared
  };
  struct Plan {
    std::vector<StorageRef> sources; // per leaf
    std::vector<StorageRef> targets; // per root
    std::vector<Tensor> results;
    std::vector<Gradient> gradients;
    std::vector<at::Tensor> holders; // tensors whose gradients the step reads or sets
    std::vector<at::Tensor> hosts;
    std::vector<at::Tensor> written; // tensors whose version grows
    std::vector<WeakStorage> kept;
    std::vector<std::pair<uint32_t, uint64_t>> seeds; // a random node, and how many seeds were drawn before its own
    uint64_t draws = 0;
    std::vector<uint32_t> numbers; // those that are given anew for each run, by their positions in Batch::numbers()
  };

  Replay(const Snapshot& snapshot, Plan plan);
  // No step may be in flight. Makes the step pending, with these arguments and numbers, and gives the results; or says why it
  // cannot, and changes nothing.
  std::variant<std::vector<at::Tensor>, std::string> arm(
      const std::vector<at::Tensor>& arguments, const std::vector<double>& numbers);
  // Why arm() would do nothing with these arguments, if it would not.
  std::optional<std::string> refusal(const std::vector<at::Tensor>& arguments) const;
  const std::shared_ptr<Batch>& batch() { return batch_; }

 private:
  struct Storages; // by reference, for the time of one call of arm()
  std::optional<std::string> find_storages(const std::vector<at::Tensor>& arguments, Storages& found) const;
  std::optional<std::string> check_contents(const Storages& found) const;
  void make_fresh(Storages& storages) const;
  std::vector<at::Tensor> upload(const std::vector<at::Tensor>& arguments) const;
  void make_pending(const Storages& storages, Graveyard& graveyard);
  std::vector<at::Tensor> publish(const std::vector<at::Tensor>& arguments, const Storages& storages) const;
  void renew_nodes();
  void draw_seeds();
  void set_numbers(const std::vector<double>& numbers);

  std::shared_ptr<Batch> batch_;
  std::vector<Node*> leaves_;
  Plan plan_;
  std::vector<std::pair<uint32_t, uint32_t>> number_positions_; // of plan_.numbers: a node, and which of its numbers
};

// Reads of host tensors by the operators of one thread, however the program asks for them: `float(t)` in Python, or a tensor
// given to an operator where it takes a number.
class HostReads {
 public:
  HostReads(); // watches this thread until stop(), which the same thread has to call; one at a time
  ~HostReads() { stop(); }
  HostReads(const HostReads&) = delete;
  void stop();

  std::vector<std::pair<at::Tensor, uint32_t>> found; // what was read, and at which site

 private:
  at::CallbackHandle handle_ = 0;
};

} // namespace tarry
