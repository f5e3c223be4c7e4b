// Running a call on stand-ins for its arguments: that says what comes out of it, or how PyTorch refuses it. On the CPU a wrong call
// raises the very error that eager PyTorch raises; on the meta device, shapes cost nothing.
#pragma once

#include <optional>

#include "core/graph.h"

namespace tarry {

using Arguments = c10::ArrayRef<c10::IValue>;

// What the stand-ins for the arguments are like.
struct StandIns {
  bool ones = false;          // instead of zeros
  int64_t most = 0;           // if not 0: elements in each dimension at most
  bool common_dtypes = false; // float32 for what is floating or complex, int64 for integers
  bool shared = false;        // they share memory as the arguments do
  int64_t chosen = -1;        // if not negative: how many elements masks choose
};

// Runs the call, or says in `error` why it could not be run.
std::unique_ptr<Signature> try_on(
    c10::Device device, const Operator& op, Arguments arguments, std::exception_ptr& error, StandIns form = {});
// On the CPU, on zeros; on others, if the call does not take these: a distribution does not, nor does an index that is a mask, which
// has to choose as many elements as are assigned.
std::unique_ptr<Signature> try_on_cpu(const Operator& op, Arguments arguments, std::exception_ptr& error, bool shared = false);
// What its meta kernel in C++ gives; null if it has none, or if that refuses the call.
std::unique_ptr<Signature> try_meta_kernel(const Operator& op, Arguments arguments);

// Whether a call may run on stand-ins: a bound on the elements that it gives follows from tensors and integers.
bool is_small_call(const Operator& op, Arguments arguments);
// The same once it is known what the call gives: a large integer need not make it large (the stride of a pool).
bool proves_small(const Operator& op, Arguments arguments, const Signature& signature);
void set_small_call(int64_t elements); // calls that are given up to this many may run on stand-ins
// Whether the operator can be tried on fewer elements. Kernels that relate tensors by broadcasting, or as factors, find these sizes
// consistent. Others trust what their integers say of sizes (the output size of a pool, in its backward pass) and read beyond.
bool takes_fewer_elements(const Operator& op);

template <typename F>
void for_each_tensor(const Operator& op, Arguments arguments, const F& act) {
  auto visit = [&](const c10::IValue& value, bool is_mutable) {
    if (value.isTensor() && value.toTensor().defined()) {
      act(value.toTensor(), is_mutable);
    }
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.arguments[i].kind == ArgKind::Tensor) {
      visit(arguments[i], op.arguments[i].is_mutable);
    } else if (op.arguments[i].kind == ArgKind::TensorList && !arguments[i].isNone()) {
      for (const c10::IValue& item : arguments[i].toListRef()) {
        visit(item, op.arguments[i].is_mutable);
      }
    }
  }
}

// The first and last byte that a tensor touches in its storage; nothing if it is empty.
std::optional<std::pair<int64_t, int64_t>> extent(const at::Tensor& tensor);

} // namespace tarry
