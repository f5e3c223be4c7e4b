#include "core/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <mutex>

#include "device/hooks.h"

namespace tarry {
namespace {

constexpr int64_t kStateBytes = 2 * sizeof(uint64_t);

// Both mixers are one-to-one on their word, which derive_seed relies on.
uint64_t scramble64(uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

uint32_t scramble32(uint32_t x) noexcept {
  x = (x ^ (x >> 16)) * 0x85ebca6bU;
  x = (x ^ (x >> 13)) * 0xc2b2ae35U;
  return x ^ (x >> 16);
}

uint32_t permute32(uint32_t x, uint64_t key) noexcept {
  const auto low = static_cast<uint32_t>(key);
  const auto high = static_cast<uint32_t>(key >> 32);
  return scramble32(scramble32(x ^ low) + high);
}

} // namespace

// PyTorch's CPU generator looks at the low 32 bits of a seed only. These are therefore a permutation of the offset (another
// one for each seed): no two of the first 2**32 operators get the same numbers, where independent 32-bit seeds would
// be expected to meet after some 70,000 operators. The high half is an ordinary hash, for generators that use it (CUDA's).
// Both halves are shifted so that offset 0 gives the seed itself.
int64_t derive_seed(uint64_t seed, uint64_t offset) noexcept {
  const uint64_t key = scramble64(seed + 0x9e3779b97f4a7c15ULL);
  const uint32_t low = permute32(static_cast<uint32_t>(offset), key) ^ permute32(0, key) ^ static_cast<uint32_t>(seed);
  const uint64_t high = scramble64(key + offset) ^ scramble64(key) ^ seed;
  constexpr uint64_t high_bits = 0x7fffffff00000000ULL;
  return static_cast<int64_t>((high & high_bits) | low);
}

struct RandomState {
  std::mutex mutex;
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
};

TarryGenerator::TarryGenerator(c10::DeviceIndex device) : TarryGenerator(device, std::make_shared<RandomState>()) {}

TarryGenerator::TarryGenerator(c10::DeviceIndex device, std::shared_ptr<RandomState> state)
    : c10::GeneratorImpl(c10::Device(c10::DeviceType::PrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      state_(std::move(state)) {}

void TarryGenerator::set_current_seed(uint64_t seed) {
  std::lock_guard<std::mutex> guard(state_->mutex);
  state_->seed = seed;
  state_->offset = 0;
}

uint64_t TarryGenerator::current_seed() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->seed;
}

uint64_t TarryGenerator::seed() {
  const uint64_t random = c10::detail::getNonDeterministicRandom();
  set_current_seed(random);
  return random;
}

void TarryGenerator::set_offset(uint64_t offset) {
  std::lock_guard<std::mutex> guard(state_->mutex);
  state_->offset = offset;
}

uint64_t TarryGenerator::get_offset() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->offset;
}

void TarryGenerator::set_state(const c10::TensorImpl& new_state) {
  at::detail::check_rng_state(new_state);
  TORCH_CHECK(
      new_state.numel() == kStateBytes, "tarry: the state of a random generator is ", kStateBytes, " bytes, but ",
      new_state.numel(), " were given; pass what get_rng_state() or Generator.get_state() returned for a tarry device");
  const auto* bytes = static_cast<const char*>(new_state.data());
  std::lock_guard<std::mutex> guard(state_->mutex);
  std::memcpy(&state_->seed, bytes, sizeof(uint64_t));
  std::memcpy(&state_->offset, bytes + sizeof(uint64_t), sizeof(uint64_t));
}

c10::intrusive_ptr<c10::TensorImpl> TarryGenerator::get_state() const {
  // Made without the dispatcher: under a default device or a dispatch mode the state must still be a plain host tensor.
  at::TensorBase state = at::detail::empty_cpu({kStateBytes}, c10::ScalarType::Byte);
  auto* bytes = static_cast<char*>(state.mutable_data_ptr());
  std::lock_guard<std::mutex> guard(state_->mutex);
  std::memcpy(bytes, &state_->seed, sizeof(uint64_t));
  std::memcpy(bytes + sizeof(uint64_t), &state_->offset, sizeof(uint64_t));
  return state.getIntrusivePtr();
}

void TarryGenerator::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& new_state) {
  auto* other = dynamic_cast<TarryGenerator*>(new_state.get());
  TORCH_CHECK(other, "tarry: graphsafe_set_state expects a generator of a tarry device");
  state_ = other->state_;
}

c10::intrusive_ptr<c10::GeneratorImpl> TarryGenerator::graphsafe_get_state() const {
  return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(new TarryGenerator(device().index(), state_));
}

TarryGenerator* TarryGenerator::clone_impl() const {
  auto state = std::make_shared<RandomState>();
  std::lock_guard<std::mutex> guard(state_->mutex);
  state->seed = state_->seed;
  state->offset = state_->offset;
  return new TarryGenerator(device().index(), std::move(state));
}

int64_t TarryGenerator::draw() {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return derive_seed(state_->seed, state_->offset++);
}

std::pair<uint64_t, uint64_t> TarryGenerator::advance(uint64_t count) {
  std::lock_guard<std::mutex> guard(state_->mutex);
  const uint64_t offset = state_->offset;
  state_->offset += count;
  return {state_->seed, offset};
}

void TarryGenerator::undraw(uint64_t offset) {
  std::lock_guard<std::mutex> guard(state_->mutex);
  state_->offset -= state_->offset == offset + 1;
}

int64_t TarryGenerator::peek(uint64_t after) const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return derive_seed(state_->seed, state_->offset + after);
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  struct Generators {
    std::mutex mutex;
    std::array<at::Generator, kMaxDevices> by_device;
  };
  // Leaked: Python may still hold one of them when static objects are destroyed.
  static auto* generators = new Generators();
  index = checked_device(index);
  std::lock_guard<std::mutex> guard(generators->mutex);
  at::Generator& generator = generators->by_device[index];
  if (!generator.defined()) {
    generator = at::make_generator<TarryGenerator>(index);
  }
  return generator;
}

int64_t next_seed(c10::DeviceIndex device, uint64_t after) {
  return default_generator(device).get<TarryGenerator>()->peek(after);
}

TarryGenerator& chosen_generator(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  if (!given.has_value() || !given->defined()) {
    return *default_generator(device).get<TarryGenerator>();
  }
  auto* chosen = at::check_generator<TarryGenerator>(given);
  TORCH_CHECK(
      chosen->device().index() == device, "Expected a '", c10::Device(c10::DeviceType::PrivateUse1, device),
      "' device for generator but found '", chosen->device(), "'");
  return *chosen;
}

int64_t draw_seed(const std::optional<at::Generator>& generator, c10::DeviceIndex device) {
  return chosen_generator(generator, device).draw();
}

SeededCall::SeededCall(const Operator& op, int64_t seed, torch::jit::Stack& stack, c10::Device device) {
  if (op.generator_argument >= 0) {
    at::Generator generator;
    if (device.is_cpu()) {
      generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
    } else {
      generator = at::globalContext().defaultGenerator(device).clone();
      generator.set_current_seed(static_cast<uint64_t>(seed));
    }
    stack[stack.size() - op.arguments.size() + op.generator_argument] = c10::IValue(std::move(generator));
  } else {
    borrowed_ = at::globalContext().defaultGenerator(device);
    saved_ = borrowed_.clone();
    borrowed_.set_current_seed(static_cast<uint64_t>(seed));
  }
}

SeededCall::~SeededCall() {
  if (borrowed_.defined()) {
    borrowed_.set_state(saved_.get_state());
  }
}

} // namespace tarry
