// Tensors of the real device that share memory with tarry's: what DLPack and __cuda_array_interface__ hand out.
//
// The holder of such a tensor may read and write its memory at any time, so nothing about the storage may be deferred: as long as
// any is alive, operators that read or write the storage run at once, on that memory (record.cpp). They see what was written there
// before the call, and what they write can be seen after it, as in eager PyTorch. Afterwards the storage is as any other.
#pragma once

#include <atomic>

#include "core/graph.h"

namespace tarry {

namespace detail {
extern std::atomic<int64_t> loans; // of all storages: the recorder looks at this one first
}

inline bool any_loans() {
  return detail::loans.load(std::memory_order_relaxed) > 0;
}

// Computes all that is pending, and gives a tensor of the real device over the memory that `tensor` looks at. With `keep`, the
// storage counts as lent as long as it lives: for those who are given an address and hold on to `tensor`. No lock may be held.
at::Tensor lend(const at::Tensor& tensor, bool keep);

} // namespace tarry
