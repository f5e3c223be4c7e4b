#include "core/fault.h"

#include <c10/util/Exception.h>

#include "core/failure.h"
#include "core/gil.h"

namespace tarry {
namespace fault {
std::atomic<int64_t> countdown{-1};
} // namespace fault

namespace {
std::atomic<Fault> armed{Fault::None};
std::atomic<int64_t> passed{0};

[[noreturn]] void interrupt() {
  const Gil gil;
  PyErr_SetNone(PyExc_KeyboardInterrupt);
  throw_python_error();
}

} // namespace

void fault::strike() {
  ++passed;
  if (countdown.fetch_sub(1) != 0) {
    return;
  }
  switch (armed.exchange(Fault::None)) {
    case Fault::Kernel:
      TORCH_CHECK_VALUE(false, "injected: a kernel fails");
    case Fault::Memory:
      TORCH_CHECK(false, "injected: can't allocate memory");
    case Fault::Interrupt:
      interrupt();
    case Fault::None:
      break;
  }
}

void arm_fault(Fault fault, int64_t after) {
  armed = fault;
  passed = 0;
  fault::countdown = after;
}

int64_t disarm_fault() {
  fault::countdown = -1;
  armed = Fault::None;
  return passed;
}

} // namespace tarry
