#include "bind/guard.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>

#include "device/hooks.h"

namespace py = pybind11;

namespace tarry {
namespace {

bool same_value(PyObject* a, PyObject* b) {
  if (a == b) {
    return true;
  }
  if (!a || !b || Py_TYPE(a) != Py_TYPE(b)) {
    return false;
  }
  if (PyFloat_CheckExact(a)) { // -0.0 is not 0.0, and NaN is NaN
    const double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof(double)) == 0;
  }
  if (PyTuple_CheckExact(a)) {
    if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) {
      return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i) {
      if (!same_value(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) {
        return false;
      }
    }
    return true;
  }
  if (PyLong_CheckExact(a) || PyUnicode_CheckExact(a) || PyBytes_CheckExact(a) || PyComplex_CheckExact(a) || THPDevice_Check(a)) {
    const int same = PyObject_RichCompareBool(a, b, Py_EQ);
    if (same < 0) {
      PyErr_Clear();
    }
    return same == 1;
  }
  return false;
}

uint32_t first_with_storage(const std::vector<const c10::StorageImpl*>& storages, size_t i) {
  for (size_t k = 0; k < i; ++k) {
    if (storages[k] && storages[k] == storages[i]) {
      return static_cast<uint32_t>(k);
    }
  }
  return static_cast<uint32_t>(i);
}

std::vector<const c10::StorageImpl*> storages_of(const py::list& leaves) {
  std::vector<const c10::StorageImpl*> storages;
  for (const py::handle& leaf : leaves) {
    const bool has_one = THPVariable_Check(leaf.ptr()) && THPVariable_Unpack(leaf.ptr()).has_storage();
    storages.push_back(
        has_one ? THPVariable_Unpack(leaf.ptr()).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr);
  }
  return storages;
}

bool has_attributes(PyObject* tensor) {
  PyObject** attributes = _PyObject_GetDictPtr(tensor);
  return attributes && *attributes && PyDict_GET_SIZE(*attributes) != 0;
}

bool is_plain_strided(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_conj() && !tensor.is_neg();
}

size_t hooks_of(const at::Tensor& tensor) {
  auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta ? meta->hooks_.size() + (meta->post_acc_grad_hooks_ ? 1 : 0) : 0;
}

} // namespace

// ---- tensors

TensorState::TensorState(const at::Tensor& tensor)
    : device(tensor.device()),
      layout(is_plain_strided(tensor) ? layout_of(tensor.unsafeGetTensorImpl()) : nullptr),
      requires_grad(tensor.requires_grad()),
      is_leaf(tensor.is_leaf()),
      hooks(hooks_of(tensor)) {
  if (const TarryStorage* storage = layout && is_tarry(tensor) ? storage_of(tensor.unsafeGetTensorImpl()) : nullptr) {
    serial = storage->serial;
    home = storage->home;
  }
  has_gradient = requires_grad && is_leaf && tensor.grad().defined();
  if (has_gradient && is_plain_strided(tensor.grad())) {
    gradient = layout_of(tensor.grad().unsafeGetTensorImpl());
  }
}

bool TensorState::describes(const at::Tensor& tensor, bool same_storage, bool with_gradient) const {
  if (!layout || !is_plain_strided(tensor) || tensor.device() != device || !layout->describes(tensor.unsafeGetTensorImpl()) ||
      tensor.requires_grad() != requires_grad || tensor.is_leaf() != is_leaf || hooks_of(tensor) != hooks) {
    return false;
  }
  if (home) {
    const TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
    if (!storage || storage->home != home || (same_storage && storage->serial != serial)) {
      return false;
    }
  }
  if (!with_gradient || !(requires_grad && is_leaf)) {
    return true;
  }
  const at::Tensor& grad = tensor.grad();
  if (!grad.defined() || !has_gradient) {
    return grad.defined() == has_gradient;
  }
  return gradient && is_plain_strided(grad) && gradient->describes(grad.unsafeGetTensorImpl());
}

// ---- what is switched on

static const void* innermost_hooks() {
  const auto& stack = at::SavedTensorDefaultHooks::get_tls_state().stack;
  return stack.empty() ? nullptr : stack.top().first.ptr(getPyInterpreter());
}

Ambient current_ambient() {
  const at::Context& context = at::globalContext();
  const auto keys = c10::impl::tls_local_dispatch_key_set(); // autocast, inference mode, dispatch modes, function transforms
  const auto word = [](auto value) { return static_cast<uint64_t>(value); };
  return {
      keys.included_.raw_repr(),
      keys.excluded_.raw_repr(),
      word(at::impl::PythonTorchFunctionTLS::stack_len()),
      reinterpret_cast<uint64_t>(innermost_hooks()),
      c10::GradMode::is_enabled(),
      c10::InferenceMode::is_enabled(),
      at::autocast::is_autocast_enabled(c10::DeviceType::PrivateUse1),
      at::autocast::is_autocast_enabled(c10::DeviceType::CPU),
      at::autocast::is_autocast_cache_enabled(),
      word(at::autocast::get_autocast_dtype(c10::DeviceType::PrivateUse1)),
      word(at::autocast::get_autocast_dtype(c10::DeviceType::CPU)),
      context.deterministicAlgorithms(),
      context.deterministicAlgorithmsWarnOnly(),
      context.deterministicFillUninitializedMemory(),
      torch::autograd::AnomalyMode::is_enabled(),
      torch::autograd::AnomalyMode::should_check_nan(),
      context.userEnabledFlashSDP(),
      context.userEnabledMemEfficientSDP(),
      context.userEnabledMathSDP(),
      context.userEnabledCuDNNSDP(),
      context.userEnabledOverrideableSDP(),
      word(context.float32MatmulPrecision()),
      word(c10::get_default_dtype_as_scalartype()),
      word(current_device()),
  };
}

// ---- Python objects

void Guard::dict_item(py::handle dict, py::handle key, py::handle expected) {
  checks_.push_back({Kind::DictItem, dict.ptr(), key.ptr(), expected.ptr()});
}

void Guard::rate(py::handle dict, py::handle key, py::handle expected) {
  checks_.push_back({Kind::Rate, dict.ptr(), key.ptr(), expected.ptr()});
}

void Guard::dict_entries(py::handle dict, py::handle rate) {
  checks_.push_back({Kind::DictEntries, dict.ptr(), nullptr, nullptr, static_cast<Py_ssize_t>(entries_.size())});
  Entries& entries = entries_.emplace_back();
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict.ptr(), &position, &key, &value)) {
    entries.emplace_back(key, key == rate.ptr() ? nullptr : value);
  }
}

void Guard::list_item(py::handle list, size_t index, py::handle expected) {
  checks_.push_back({Kind::ListItem, list.ptr(), nullptr, expected.ptr(), static_cast<Py_ssize_t>(index)});
}

void Guard::attribute(py::handle object, py::handle name, py::handle expected) {
  checks_.push_back({Kind::Attribute, object.ptr(), name.ptr(), expected.ptr()});
}

void Guard::cell(py::handle cell, py::handle expected) {
  checks_.push_back({Kind::Cell, cell.ptr(), nullptr, expected.ptr()});
}

void Guard::length(py::handle sized) {
  checks_.push_back({Kind::Length, sized.ptr(), nullptr, nullptr, PyObject_Size(sized.ptr())});
}

void Guard::tensor(py::handle tensor) {
  checks_.push_back({Kind::Tensor, tensor.ptr(), nullptr, nullptr, static_cast<Py_ssize_t>(tensors_.size())});
  tensors_.emplace_back(THPVariable_Unpack(tensor.ptr()));
}

namespace {

bool has_entries(PyObject* dict, const std::vector<std::pair<PyObject*, PyObject*>>& entries) {
  if (PyDict_GET_SIZE(dict) != static_cast<Py_ssize_t>(entries.size())) {
    return false;
  }
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  for (const auto& [expected_key, expected] : entries) {
    if (!PyDict_Next(dict, &position, &key, &value) || key != expected_key || (expected && !same_value(value, expected))) {
      return false;
    }
  }
  return true;
}

} // namespace

bool Guard::holds(const Check& check, bool with_gradients, bool with_rates) const {
  switch (check.kind) {
    case Kind::DictItem:
      return same_value(PyDict_GetItemWithError(check.object, check.key), check.expected);
    case Kind::Rate: {
      PyObject* now = PyDict_GetItemWithError(check.object, check.key);
      return with_rates ? same_value(now, check.expected) : now && PyFloat_CheckExact(now);
    }
    case Kind::DictEntries:
      return has_entries(check.object, entries_[check.number]);
    case Kind::ListItem:
      return check.number < PyList_GET_SIZE(check.object) &&
          same_value(PyList_GET_ITEM(check.object, check.number), check.expected);
    case Kind::Attribute: {
      const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(check.object, check.key));
      return value && same_value(value.ptr(), check.expected);
    }
    case Kind::Cell:
      return same_value(PyCell_GET(check.object), check.expected);
    case Kind::Length:
      return PyObject_Size(check.object) == check.number;
    case Kind::Tensor:
      return tensors_[check.number].describes(THPVariable_Unpack(check.object), true, with_gradients);
  }
  return false;
}

int64_t Guard::failing(bool with_gradients, bool with_rates) const {
  if (current_ambient() != ambient_) {
    return -2;
  }
  for (size_t i = 0; i < checks_.size(); ++i) {
    if (!holds(checks_[i], with_gradients, with_rates)) {
      PyErr_Clear();
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

// ---- arguments

ArgumentGuard::ArgumentGuard(const py::list& leaves) {
  const auto storages = storages_of(leaves);
  for (size_t i = 0; i < leaves.size(); ++i) {
    PyObject* leaf = PyList_GET_ITEM(leaves.ptr(), static_cast<Py_ssize_t>(i));
    const bool is_tensor = THPVariable_Check(leaf);
    leaves_.push_back(is_tensor ? nullptr : leaf);
    tensors_.push_back(is_tensor ? std::make_optional<TensorState>(THPVariable_Unpack(leaf)) : std::nullopt);
    first_alias_.push_back(first_with_storage(storages, i));
  }
}

int64_t ArgumentGuard::failing(const py::list& leaves) const {
  if (leaves.size() != leaves_.size()) {
    return -2;
  }
  const auto storages = storages_of(leaves);
  for (size_t i = 0; i < leaves_.size(); ++i) {
    PyObject* leaf = PyList_GET_ITEM(leaves.ptr(), static_cast<Py_ssize_t>(i));
    // A subclass may have a say in what operators do, and an attribute in what the function does.
    const bool same = tensors_[i]
        ? THPVariable_CheckExact(leaf) && !has_attributes(leaf) && tensors_[i]->describes(THPVariable_Unpack(leaf), false)
        : same_value(leaf, leaves_[i]);
    if (!same || first_with_storage(storages, i) != first_alias_[i]) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

} // namespace tarry
