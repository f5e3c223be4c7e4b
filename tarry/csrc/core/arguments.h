// The arguments of a recorded call, in the order of the schema: the one place that knows how a node's slots, edges and constants
// hang together.
#pragma once

#include "core/graph.h"

namespace tarry {

// A tensor among the arguments.
struct Operand {
  int16_t slot;   // kAbsent, kEdge, kWrappedNumber
  uint32_t index; // kEdge: which edge of the node; kWrappedNumber: which constant
};

// Calls, for each argument i: tensor(i, operand); list(i, given, operands), not given if the argument is None; or
// constant(i, index), for all that is not a tensor, with its index among the node's constants.
template <typename OnTensor, typename OnList, typename OnConstant>
void visit_arguments(const Operator& op, c10::ArrayRef<int16_t> slots, OnTensor&& tensor, OnList&& list, OnConstant&& constant) {
  size_t slot = 0;
  uint32_t edges = 0, constants = 0;
  const auto next = [&]() -> Operand {
    const int16_t kind = slots[slot++];
    return {kind, kind == kEdge ? edges++ : kind == kWrappedNumber ? constants++ : 0};
  };
  c10::SmallVector<Operand, 8> items;
  for (size_t i = 0; i < op.arguments.size(); ++i) {
    switch (op.arguments[i].kind) {
      case ArgKind::Tensor:
        tensor(i, next());
        break;
      case ArgKind::TensorList: {
        const int16_t length = slots[slot++];
        items.clear();
        for (int16_t k = 0; k < length; ++k) {
          items.push_back(next());
        }
        list(i, length >= 0, c10::ArrayRef<Operand>(items));
        break;
      }
      default:
        constant(i, constants++);
    }
  }
}

} // namespace tarry
