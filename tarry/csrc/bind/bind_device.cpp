#include "bind/bind_device.h"

#include <torch/csrc/Generator.h>

#include "core/generator.h"
#include "device/hooks.h"

namespace py = pybind11;

namespace tarry {
namespace {

// Kept for the life of the process: a thread may synchronize while the interpreter shuts down.
PyObject* synchronize_callable = nullptr;

void call_synchronize(c10::DeviceIndex index) {
  py::gil_scoped_acquire gil;
  if (synchronize_callable) {
    const py::handle callable{synchronize_callable};
    callable(static_cast<int>(index));
  }
}

c10::DeviceIndex narrow(int64_t index) {
  return static_cast<c10::DeviceIndex>(-1 <= index && index < kMaxDevices ? index : kMaxDevices);
}

} // namespace

void bind_device(py::module& m) {
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("set_device_count", &set_device_count, py::arg("count"));
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int64_t index) { set_device(narrow(index)); }, py::arg("index"));
  m.def("exchange_device", [](int64_t index) { return static_cast<int>(exchange_device(narrow(index))); }, py::arg("index"));
  m.def("is_used", [] { return detail::use.load() != detail::Use::None; }, "Whether anything was ever made on the device.");
  m.def("in_bad_fork", &in_bad_fork);
  m.def("check_fork", &check_fork);
  m.def(
      "default_generator",
      [](int64_t index) { return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(narrow(index)))); },
      py::arg("index") = -1);
  m.def("derive_seed", &derive_seed, py::arg("seed"), py::arg("offset"));
  m.def(
      "set_synchronize",
      [](py::object callable) {
        PyObject* previous = synchronize_callable;
        synchronize_callable = callable.is_none() ? nullptr : callable.release().ptr();
        set_synchronize(synchronize_callable ? &call_synchronize : nullptr);
        Py_XDECREF(previous);
      },
      py::arg("callable"),
      "Sets what synchronize() does: callable(device_index), which must return when the device has nothing left to do.");
}

} // namespace tarry
