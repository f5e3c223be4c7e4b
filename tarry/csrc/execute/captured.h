// A compiled program as one CUDA graph: all its kernels in one launch.
//
// A graph reads and writes the addresses that it was captured with. Inputs that keep their place from step to step (parameters
// and all else that is updated) are read where they are, and their place is checked; others are copied to placeholders. Results
// are handed out where the graph leaves them: memory that a tensor still has when the next launch comes is exchanged for
// memory of the tensor's own, with the same contents.
//
// Random operators draw from generators that are seeded before each launch.
//
// No CUDA header is needed: the program is captured in Python (backends/inductor/capture.py), which hands over the addresses of
// the functions that launch it.
#pragma once

#include <ATen/core/Generator.h>

#include <memory>
#include <mutex>
#include <optional>

#include "execute/program.h"

namespace tarry {

class CapturedProgram final : public Program {
 public:
  using Launch = int (*)(void* graph, void* stream); // 0: it worked
  using Replay = void (*)(void* captured);
  struct Parts {
    Launch launch = nullptr;
    void* graph = nullptr;
    std::shared_ptr<void> owner;          // keeps the graph alive
    std::vector<int64_t> addresses;       // per input: where it must be; 0: it is copied
    std::vector<at::Tensor> placeholders; // per input; undefined: it is read where it is
    std::vector<uint32_t> written;        // inputs whose placeholders are copied back
    std::vector<LaunchList::NumberVector> vectors;
    std::vector<at::Tensor> vector_tensors; // on the device
    Replay replay = nullptr;                // launches a graph with generators
    void* captured = nullptr;               // PyTorch's graph, for replay()
    std::vector<at::Generator> generators;
    std::vector<uint32_t> seeds;     // per generator: which number
    std::vector<at::Tensor> results; // per output; undefined: written into the input that it replaces
  };
  // It takes no inputs until it has a graph.
  void set(Parts parts);
  void clear();

  bool accepts(const std::vector<at::Tensor>& inputs) const override;
  bool accepts_all() const override { return false; }
  bool makes_room(size_t in_use) const override;
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs, const std::vector<c10::IValue>& numbers) const override;

 private:
  void let_go_of_results() const;
  void launch(const std::vector<c10::IValue>& numbers) const;

  mutable std::mutex mutex_; // of the results' memory
  mutable Parts parts_;
  mutable std::vector<at::Tensor> uploaded_; // what each vector of numbers has on the device; undefined: not known
  std::vector<bool> lent_;                   // per output: handed out where it is; else, a copy of it
};

} // namespace tarry
