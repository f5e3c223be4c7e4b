// Random numbers on the device: a generator holds a seed and counts the random operators drawn since it was set.
//
// No number is made here. Each random operator takes one seed of its own from the generator when it is recorded; the
// backend makes the numbers from that seed when the operator runs, whenever that is. So a program draws the same seeds
// however its graph is cut, and (seed, offset) is all the state there is to save, fork or restore.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "core/operator.h"

namespace tarry {

// The seed of the operator drawn after `offset` others: non-negative, and `seed` itself (less its top bit) for offset 0,
// so that the first random operator after manual_seed(s) gives the numbers that eager PyTorch gives.
int64_t derive_seed(uint64_t seed, uint64_t offset) noexcept;

struct RandomState;

struct TarryGenerator final : c10::GeneratorImpl {
  explicit TarryGenerator(c10::DeviceIndex device);

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  // The state is 16 bytes: the seed, then the offset.
  void set_state(const c10::TensorImpl& new_state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  // These share the state instead of copying it, as PyTorch's CUDA generator does.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& new_state) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

  // The next operator's seed. Safe from any thread: the state has its own lock, `mutex_` need not be held.
  int64_t draw();
  // As `count` draws whose seeds are derive_seed(first, second), derive_seed(first, second + 1), ... of what it returns.
  std::pair<uint64_t, uint64_t> advance(uint64_t count);
  void undraw(uint64_t offset);       // the draw after so many others was none, unless there was another one since
  int64_t peek(uint64_t after) const; // the seed of the draw after so many others

 private:
  TarryGenerator(c10::DeviceIndex device, std::shared_ptr<RandomState> state);
  TarryGenerator* clone_impl() const override;

  std::shared_ptr<RandomState> state_;
};

// The device's own generator, made on first use and never destroyed. An index of -1 means the current device.
const at::Generator& default_generator(c10::DeviceIndex index);

// The seed that the device's own generator gives after so many others, without drawing it.
int64_t next_seed(c10::DeviceIndex device, uint64_t after);

// The generator that the user gave, or the device's own.
TarryGenerator& chosen_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device);
// The seed for one random operator on `device`, from the generator the user gave or from the device's own.
int64_t draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device);
// In place of a seed, where a random operator draws nothing (Operator::draws). No seed is negative.
constexpr int64_t kNoSeed = -1;

// While it lives, a random operator draws from `seed`: through its generator argument if it has one (which is put on the
// stack), else through the real device's default generator, whose state is restored afterwards.
class SeededCall {
 public:
  SeededCall(const Operator& op, int64_t seed, torch::jit::Stack& stack, c10::Device device);
  ~SeededCall();

 private:
  at::Generator borrowed_;
  at::Generator saved_;
};

} // namespace tarry
