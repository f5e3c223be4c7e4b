#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/api/object.h>
#include <torch/csrc/utils/pybind.h>

#include "bind/bind.h"
#include "core/generator.h"
#include "device/hooks.h"
#include "device/host_memory.h"
#include "device/profiler.h"
#include "execute/callbacks.h"
#include "execute/outstanding.h"
#include "record/provenance.h"

namespace py = pybind11;

namespace tarry {
namespace {

using MemoryRow = std::tuple<bool, int, uint64_t, int64_t, int64_t, std::string, int>;

MemoryRow memory_row(const MemoryEvent& event) {
  const auto [file, line] = site_location(event.site);
  return {event.is_alloc, event.device, event.address, event.bytes, event.microseconds, file, line};
}

c10::DeviceIndex narrow(int64_t index) {
  return static_cast<c10::DeviceIndex>(-1 <= index && index < kMaxDevices ? index : kMaxDevices);
}

} // namespace

// A reduction of torch.distributed, as its operators get it, by its number and its factor: a number, a tensor, or None. Python cannot
// look into it.
std::pair<int, py::object> reduction(const torch::jit::Object& boxed) {
  const auto op = c10::IValue(boxed._ivalue()).toCustomClass<c10d::ReduceOp>();
  if (op->op_ != c10d::ReduceOp::PREMUL_SUM) {
    return {op->op_, py::none()};
  }
  const auto& factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op->supplement_);
  return {op->op_, factor.tensor_factor.defined() ? py::cast(factor.tensor_factor) : py::cast(factor.double_factor)};
}

#ifndef TARRY_WITHOUT_C10D
namespace {

// What a recorded collective returns. It is done: the host waits where it reads.
class RecordedWork : public c10d::Work {
 public:
  explicit RecordedWork(std::vector<at::Tensor> results)
      : results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices(results_))) {
    future_->markCompleted(c10::IValue(results_));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
  void synchronize() override {}
  void blockCurrentStream() override {}
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  static std::vector<c10::Device> devices(const std::vector<at::Tensor>& tensors) {
    std::vector<c10::Device> found;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.device().is_cpu() && std::find(found.begin(), found.end(), tensor.device()) == found.end()) {
        found.push_back(tensor.device());
      }
    }
    return found;
  }

  const std::vector<at::Tensor> results_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace

torch::jit::Object recorded_work(std::vector<at::Tensor> results) {
  c10::intrusive_ptr<c10d::Work> work = c10::make_intrusive<RecordedWork>(std::move(results));
  return torch::jit::Object(c10::IValue(std::move(work)).toObject());
}
#else
torch::jit::Object recorded_work(const std::vector<at::Tensor>& /*results*/) {
  TORCH_CHECK(false, "this PyTorch has no torch.distributed");
}
#endif

void bind_collectives(py::module& m) {
  m.def("recorded_work", &recorded_work, py::arg("results"), "A boxed `Work` of torch.distributed that is done.");
  m.def("reduction", &reduction, py::arg("boxed"));
  m.def(
      "leave_outstanding", &CollectTickets::leave, py::arg("ticket"),
      "Whether a collective that was started may go on: what runs it waits for it later.");
  m.def(
      "collect_tickets",
      [](const py::object& call) {
        std::vector<double> tickets;
        const CollectTickets collecting(&tickets);
        call();
        return tickets;
      },
      py::arg("call"), "The tickets of the collectives that `call()` has started and left outstanding.");
}

void bind_device(py::module& m) {
  register_profiler();
  py::class_<DeviceTime>(m, "DeviceTime", "While it lives, a profiler takes what happens for work of the device.")
      .def(py::init<>());
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("set_device_count", &set_device_count, py::arg("count"));
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int64_t index) { set_device(narrow(index)); }, py::arg("index"));
  m.def("exchange_device", [](int64_t index) { return static_cast<int>(exchange_device(narrow(index))); }, py::arg("index"));
  m.def("is_used", [] { return detail::use.load() != detail::Use::None; }, "Whether anything was ever made on the device.");
  m.def("in_bad_fork", &in_bad_fork);
  bind_collectives(m);
  m.def("check_fork", &check_fork);
  m.def(
      "default_generator",
      [](int64_t index) { return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(narrow(index)))); },
      py::arg("index") = -1);
  m.def("derive_seed", &derive_seed, py::arg("seed"), py::arg("offset"));
  m.def("memory_info", [](int64_t index) { return memory_info(checked_device(narrow(index))); }, py::arg("index"));
  m.def(
      "count_memory", [](int64_t index) { return static_cast<int>(exchange_counted_device(static_cast<c10::DeviceIndex>(index))); },
      py::arg("index"),
      "From now on this thread's allocations on the CPU are the device's (-1: no device's). Returns the device before.");
  m.def(
      "set_memory_limit", [](int64_t index, int64_t bytes) { set_memory_limit(narrow(index), bytes); }, py::arg("index"),
      py::arg("bytes"));
  m.def("keep_memory_history", &keep_memory_history, py::arg("entries"));
  m.def("memory_history", [] {
    const MemoryHistory history = memory_history();
    std::pair<std::vector<MemoryRow>, std::vector<MemoryRow>> rows; // what happened; what is allocated
    for (const MemoryEvent& event : history.events) {
      rows.first.push_back(memory_row(event));
    }
    for (const auto& each : history.live) {
      rows.second.push_back(memory_row(each.second));
    }
    return rows;
  });
}

} // namespace tarry
