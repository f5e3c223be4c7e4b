// What tarry/device/fast_step.py does to optimizers: their step counts, and whole steps while calls are direct.
#include <torch/csrc/autograd/python_variable.h>

#include "bind/bind.h"
#include "device/optimizer_step.h"
#include "record/direct.h"

namespace py = pybind11;

namespace tarry {
namespace {

// Not by operators, which would take longer, and which a replay would take for the user's.
std::vector<double> read_counters(const std::vector<at::Tensor>& counters) {
  std::vector<double> values;
  values.reserve(counters.size());
  for (const at::Tensor& counter : counters) {
    if (!is_counter(counter)) {
      return {};
    }
    values.push_back(counter_value(counter));
  }
  return values;
}

// Adds one to each, and gives the values that all have then: several may share memory, which counts once for each.
std::vector<double> advance_counters(const std::vector<at::Tensor>& counters) {
  for (const at::Tensor& counter : counters) {
    advance_counter(counter);
  }
  return read_counters(counters);
}

void write_counters(const std::vector<at::Tensor>& counters, const std::vector<double>& values) {
  TORCH_CHECK(counters.size() == values.size());
  for (size_t i = 0; i < counters.size(); ++i) {
    const at::Tensor& counter = counters[i];
    TORCH_CHECK(is_counter(counter));
    if (counter.scalar_type() == at::kFloat) {
      *counter.mutable_data_ptr<float>() = static_cast<float>(values[i]);
    } else {
      *counter.mutable_data_ptr<double>() = values[i];
    }
    counter.unsafeGetTensorImpl()->bump_version();
  }
}

// Names that are looked up in dictionaries, made once.
struct Names {
  py::str params{"params"}, grad{"grad"}, lr{"lr"}, weight_decay{"weight_decay"}, betas{"betas"}, eps{"eps"};
  py::str momentum{"momentum"}, dampening{"dampening"}, nesterov{"nesterov"}, decoupled{"decoupled_weight_decay"};
  py::str foreach{"foreach"}, fused{"fused"}, maximize{"maximize"}, differentiable{"differentiable"};
  py::str amsgrad{"amsgrad"}, capturable{"capturable"};
  py::str average{"exp_avg"}, square{"exp_avg_sq"}, step{"step"}, buffer{"momentum_buffer"};
};

const Names& names() {
  static const auto* made = new Names();
  return *made;
}

// Collects a step; each function is false where PyTorch's own code has to decide.
class PlainStep {
 public:
  PlainStep(bool is_adam, py::dict state) : is_adam_(is_adam), state_(std::move(state)) {}

  bool add(const py::dict& options);

  std::vector<OptimizerGroup> groups;
  OptimizerTensors tensors;

 private:
  bool read(const py::dict& options, OptimizerGroup& group) const;
  bool add_parameter(PyObject* parameter, OptimizerGroup& group);
  PyObject* entry_of(PyObject* parameter);
  bool take(PyObject* entry, const py::str& name, std::vector<at::Tensor>& into) const;
  static bool is_off(const py::dict& options, const py::str& name);
  static bool number(PyObject* value, double& into);

  const bool is_adam_;
  const py::dict state_;
  Py_ssize_t next_ = 0; // where the entry of the next parameter stands, if they have the parameters' order
};

bool PlainStep::is_off(const py::dict& options, const py::str& name) {
  PyObject* value = PyDict_GetItemWithError(options.ptr(), name.ptr());
  return value == Py_False || value == Py_None;
}

bool PlainStep::number(PyObject* value, double& into) {
  if (!value || !(PyFloat_CheckExact(value) || PyLong_CheckExact(value))) {
    return false;
  }
  into = PyFloat_AsDouble(value);
  if (into == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return false;
  }
  return true;
}

bool PlainStep::read(const py::dict& options, OptimizerGroup& group) const {
  const auto given = [&](const py::str& name) { return PyDict_GetItemWithError(options.ptr(), name.ptr()); };
  PyObject* const foreach = given(names().foreach);
  const bool is_default = (foreach == Py_None && given(names().fused) == Py_None) || foreach == Py_True;
  group.is_adam = is_adam_;
  if (!is_default || !is_off(options, names().fused) || !is_off(options, names().maximize) ||
      !is_off(options, names().differentiable) || !number(given(names().lr), group.rate) ||
      !number(given(names().weight_decay), group.decay)) {
    return false;
  }
  if (!is_adam_) { // Nesterov's changes gradients
    return is_off(options, names().nesterov) && number(given(names().momentum), group.momentum) &&
        number(given(names().dampening), group.dampening);
  }
  PyObject* const betas = given(names().betas);
  PyObject* const decoupled = given(names().decoupled);
  group.decoupled = decoupled == Py_True;
  return (group.decoupled || decoupled == Py_False) && is_off(options, names().amsgrad) && is_off(options, names().capturable) &&
      betas && PyTuple_CheckExact(betas) && PyTuple_GET_SIZE(betas) == 2 && number(PyTuple_GET_ITEM(betas, 0), group.beta1) &&
      number(PyTuple_GET_ITEM(betas, 1), group.beta2) && number(given(names().eps), group.epsilon);
}

PyObject* PlainStep::entry_of(PyObject* parameter) {
  PyObject *key = nullptr, *entry = nullptr;
  if (PyDict_Next(state_.ptr(), &next_, &key, &entry) && key == parameter) { // hashing a tensor is slow
    return entry;
  }
  next_ = PY_SSIZE_T_MAX;
  entry = PyDict_GetItemWithError(state_.ptr(), parameter);
  if (!entry) {
    PyErr_Clear();
  }
  return entry;
}

bool PlainStep::take(PyObject* entry, const py::str& name, std::vector<at::Tensor>& into) const {
  PyObject* value = PyDict_GetItemWithError(entry, name.ptr());
  if (!value || !THPVariable_CheckExact(value)) {
    return false;
  }
  into.push_back(THPVariable_Unpack(value));
  return true;
}

// Of one dtype that eager PyTorch has kernels for on a CPU, and no more than tensors of their device.
bool are_alike(const at::Tensor& tensor, const at::Tensor& first, const at::Tensor& parameter) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return is_tarry(tensor) && tensor.layout() == at::kStrided && tensor.scalar_type() == first.scalar_type() &&
      (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble) && tensor.sizes() == parameter.sizes() &&
      !impl->is_python_dispatch() && !tensor.is_inference();
}

bool PlainStep::add_parameter(PyObject* parameter, OptimizerGroup& group) {
  if (!THPVariable_CheckExact(parameter)) {
    return false;
  }
  const auto grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(parameter, names().grad.ptr()));
  if (!grad) {
    throw py::error_already_set();
  }
  if (grad.is_none()) {
    return true;
  }
  if (!THPVariable_CheckExact(grad.ptr())) {
    return false;
  }
  ++group.count;
  tensors.params.push_back(THPVariable_Unpack(parameter));
  tensors.grads.push_back(THPVariable_Unpack(grad.ptr()));
  const at::Tensor &param = tensors.params.back(), &first = tensors.params.front();
  if (!are_alike(param, first, param) || !are_alike(tensors.grads.back(), first, param)) {
    return false;
  }
  if (!is_adam_ && group.momentum == 0) {
    return true;
  }
  PyObject* entry = entry_of(parameter);
  if (!entry || !PyDict_Check(entry)) {
    return false;
  }
  const auto is_state = [&](const at::Tensor& tensor) { return are_alike(tensor, first, param) && !tensor.requires_grad(); };
  if (!is_adam_) {
    return take(entry, names().buffer, tensors.momenta) && is_state(tensors.momenta.back());
  }
  return take(entry, names().average, tensors.averages) && is_state(tensors.averages.back()) &&
      take(entry, names().square, tensors.squares) && is_state(tensors.squares.back()) &&
      take(entry, names().step, tensors.counters) && is_counter(tensors.counters.back());
}

bool PlainStep::add(const py::dict& options) {
  OptimizerGroup group;
  PyObject* const params = PyDict_GetItemWithError(options.ptr(), names().params.ptr());
  if (!params || !PyList_CheckExact(params) || !read(options, group)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
    if (!add_parameter(PyList_GET_ITEM(params, i), group)) {
      return false;
    }
  }
  groups.push_back(group);
  return true;
}

bool take_step_directly(bool is_adam, const py::list& groups, const py::dict& state) {
  PlainStep step(is_adam, state);
  for (const py::handle& options : groups) {
    if (!PyDict_CheckExact(options.ptr()) || !step.add(py::reinterpret_borrow<py::dict>(options))) {
      return false;
    }
  }
  if (step.tensors.params.empty()) {
    return false;
  }
  const py::gil_scoped_release without_gil;
  return step_directly(step.groups, step.tensors);
}

} // namespace

void bind_optimizer(py::module& m) {
  m.def("read_counters", &read_counters, "The values of an optimizer's step counts; none if one is no plain number on the host.");
  m.def("advance_counters", &advance_counters);
  m.def("write_counters", &write_counters);
  m.def("may_call_directly", &may_call_directly);
  m.def(
      "take_step_directly", &take_step_directly, py::arg("is_adam"), py::arg("groups"), py::arg("state"),
      "The whole step of an optimizer, while calls are direct. False, and nothing is done, if it is no plain one.");
}

} // namespace tarry
