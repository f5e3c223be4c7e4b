// The arguments of one call, looked over once: what they are, and the hash of all that identifies the call.
#pragma once

#include <forward_list>

#include "core/graph.h"
#include "core/switches.h"

namespace tarry {

struct TensorArgument {
  const at::Tensor* tensor;
  TarryStorage* storage;
  const Layout* view; // null: the home layout
  bool is_mutable;
};

// Conjugation and negation that PyTorch only notes on the tensor. Nodes read storages, which know nothing of it.
constexpr c10::DispatchKeySet kLazyBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
at::Tensor without_lazy_bits(const at::Tensor& tensor);

// One look over the arguments: what they are, and the hash of all that identifies the call but its tensors' values.
struct Scan {
  // The default dtype decides what integers divided by integers give.
  explicit Scan(const Operator& op)
      : op(op),
        switches(current_switches() | (op.has(kProduct) ? matmul_precision() : 0)),
        hash(mix(op.hash, switches)) {
    if (C10_UNLIKELY(op.has(kProduct))) {
      hash = mix(hash, product_precision());
    }
  }

  const Operator& op;
  const uint64_t switches;
  Hash128 hash;
  c10::SmallVector<TensorArgument, 4> tensors;
  c10::SmallVector<int16_t, 8> slots;
  c10::SmallVector<c10::IValue, 4> constants;
  std::forward_list<at::Tensor> uploaded; // stand-ins for arguments that cannot be recorded as they are; addresses stay valid
  DeviceState* state = nullptr;
  const char* eager_reason = nullptr;
  bool writes_through_lazy_bits = false;
  bool shares_written = false;     // see needs_check()
  bool in_list = false;            // of an operator that PyTorch defines element by element (Operator::takes_lists)
  bool on_several_devices = false; // such lists; the rest of the scan means nothing then
  double largest_number = 0;       // by its absolute value

  void argument(const c10::IValue& value, const Argument& declared);
  void tensor(const at::Tensor& tensor, bool is_mutable);
  void host_tensor(const at::Tensor& tensor, bool is_mutable);
  void number(const c10::IValue& value);
  void constant(const c10::IValue& value);
};

// Of what is remembered for each new number.
constexpr size_t kMaxNumbers = 1 << 14;

// Every dtype holds numbers up to this one.
constexpr double kTameNumber = 127;

// The signature of the call, found or inferred (shapes.cpp). Holds the lock again when it returns.
const Signature* find_signature(Scan& scan, c10::ArrayRef<c10::IValue> arguments, std::unique_lock<std::mutex>& lock);

// What eager PyTorch checks of a call, but the key of its signature leaves out (checks.cpp): numbers (those of some operators, and
// those too large for the tensors' dtypes), and memory that is written and reached through another argument as well.
bool needs_check(Scan& scan);
// Raises what is wrong, once for all that it depends on. Holds the lock again when it returns.
void check_once(Scan& scan, c10::ArrayRef<c10::IValue> arguments, std::unique_lock<std::mutex>& lock);

// Whether a node is such a call, but for its numbers.
bool same_call(const Node& node, c10::ArrayRef<int16_t> slots, c10::ArrayRef<c10::IValue> constants);

} // namespace tarry
