#include "device/lend.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "device/hooks.h"
#include "execute/executor.h"
#include "execute/serve.h"

namespace tarry {

namespace detail {
std::atomic<int64_t> loans{0};
}

namespace {

// One look from outside, counted while it lives.
struct Loan {
  explicit Loan(std::shared_ptr<Loans> given) : loans(std::move(given)) {
    loans->count.fetch_add(1);
    detail::loans.fetch_add(1);
  }
  ~Loan() {
    loans->count.fetch_sub(1, std::memory_order_release);
    detail::loans.fetch_sub(1);
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  const std::shared_ptr<Loans> loans;
  at::Tensor real;
};

std::shared_ptr<Loan> begin(TarryStorage* storage) {
  std::lock_guard<std::mutex> guard(storage->state->mutex);
  if (!storage->is_lent()) {
    storage->loans = std::make_shared<Loans>();
  }
  return std::make_shared<Loan>(storage->loans);
}

} // namespace

at::Tensor lend(const at::Tensor& tensor, bool keep) {
  TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
  TORCH_CHECK(storage, "tarry: the memory of a ", tensor.layout(), " tensor, or of one made from an address, cannot be shared");
  TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "tarry: a conjugated or negated view has no memory of its own to share");
  mark_used();
  // From here on nothing that uses the storage is recorded; what was recorded before is computed next.
  std::shared_ptr<Loan> loan = begin(storage);
  request_sync(storage->state->index, "share memory"); // under no lock: it may run closures of the program's
  storage->state->executor->forget();                  // what was launched early reads memory that others may write from now on
  static auto* choosing = new std::recursive_mutex();
  std::lock_guard<std::recursive_mutex> turn(*choosing);
  // The first one gets memory that no other storage shares; all others get the same.
  loan->real = materialise_for_write(tensor, "share memory", /*is_shared=*/loan->loans->has_memory);
  loan->loans->has_memory = true;
  PlainDispatch plain;
  at::Tensor real = at::from_blob(
      loan->real.mutable_data_ptr(), loan->real.sizes(), loan->real.strides(), [loan](void*) mutable { loan.reset(); },
      loan->real.options(), loan->real.device());
  if (keep && !storage->lent.defined()) {
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    storage->lent = real;
  }
  return real;
}

} // namespace tarry
