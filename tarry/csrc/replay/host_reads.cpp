#include "replay/host_reads.h"

#include <cstring>

#include "record/provenance.h"

namespace tarry {
namespace {

thread_local HostReads* watcher = nullptr;

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction& call) {
  if (watcher && std::strcmp(call.name(), "aten::_local_scalar_dense") == 0 && !call.inputs().empty() &&
      call.inputs()[0].isTensor()) {
    const at::Tensor& tensor = call.inputs()[0].toTensor();
    // A wrapped number is a number of the program that some operator takes as a tensor.
    if (tensor.defined() && tensor.is_cpu() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      watcher->found.emplace_back(tensor, current_site());
    }
  }
  return nullptr;
}

} // namespace

HostReads::HostReads() {
  TORCH_CHECK(!watcher, "tarry: this thread's reads are being watched already");
  watcher = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&look).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

void HostReads::stop() {
  if (watcher == this) {
    watcher = nullptr;
    at::removeCallback(handle_);
  }
}

} // namespace tarry
