// Replays and their guards, as Python sees them.
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

#include "bind/bind.h"
#include "bind/guard.h"
#include "core/generator.h"
#include "core/numbers.h"
#include "device/hooks.h"
#include "record/provenance.h"
#include "replay/replay.h"

namespace py = pybind11;

namespace tarry {
namespace {

using Sites = std::vector<std::pair<std::string, int>>;

Sites locations(const std::vector<uint32_t>& sites) {
  Sites found;
  for (const uint32_t site : sites) {
    found.push_back(site_location(site));
  }
  return found;
}

// A ref is written as (kind, index).
using RefTuple = std::pair<std::string, uint32_t>;

Replay::StorageRef to_ref(const RefTuple& ref) {
  static const std::pair<const char*, Replay::From> kinds[] = {
      {"argument", Replay::From::Argument}, {"gradient", Replay::From::Gradient}, {"kept", Replay::From::Kept},
      {"fresh", Replay::From::Fresh},       {"uploaded", Replay::From::Uploaded}, {"host", Replay::From::UploadedHost},
      {"dropped", Replay::From::Dropped}};
  for (const auto& [name, from] : kinds) {
    if (ref.first == name) {
      return {from, ref.second};
    }
  }
  TORCH_CHECK(false, "tarry: there is no ref '", ref.first, "'");
}

std::vector<Replay::StorageRef> to_refs(const std::vector<RefTuple>& refs) {
  std::vector<Replay::StorageRef> found;
  for (const RefTuple& ref : refs) {
    found.push_back(to_ref(ref));
  }
  return found;
}

// A tensor to be made is written as its ref, dtype, sizes, strides and offset.
using TensorTuple = std::tuple<RefTuple, c10::ScalarType, std::vector<int64_t>, std::vector<int64_t>, int64_t>;

Replay::Tensor to_tensor(const TensorTuple& spec) {
  const auto& [ref, dtype, sizes, strides, offset] = spec;
  return {to_ref(ref), intern_layout(dtype, sizes, strides, offset)};
}

std::shared_ptr<Replay> make_replay(
    const Snapshot& snapshot, const std::vector<RefTuple>& sources, const std::vector<RefTuple>& targets,
    const std::vector<TensorTuple>& results, const std::vector<std::pair<RefTuple, std::optional<TensorTuple>>>& gradients,
    std::vector<at::Tensor> holders, std::vector<at::Tensor> hosts, std::vector<at::Tensor> written,
    const std::vector<uint64_t>& kept, std::vector<std::pair<uint32_t, uint64_t>> seeds, uint64_t draws,
    std::vector<uint32_t> numbers) {
  Replay::Plan plan;
  plan.sources = to_refs(sources);
  plan.targets = to_refs(targets);
  for (const auto& result : results) {
    plan.results.push_back(to_tensor(result));
  }
  for (const auto& [holder, tensor] : gradients) {
    plan.gradients.push_back({to_ref(holder), tensor ? std::make_optional(to_tensor(*tensor)) : std::nullopt});
  }
  plan.holders = std::move(holders);
  plan.hosts = std::move(hosts);
  plan.written = std::move(written);
  plan.seeds = std::move(seeds);
  plan.draws = draws;
  plan.numbers = std::move(numbers);
  for (const uint64_t serial : kept) {
    const auto leaf = std::find_if(
        snapshot.leaves.begin(), snapshot.leaves.end(), [serial](const Trace::Leaf& leaf) { return leaf.serial == serial; });
    const auto root = std::find(snapshot.serials.begin(), snapshot.serials.end(), serial);
    TORCH_CHECK(
        leaf != snapshot.leaves.end() || root != snapshot.serials.end(), "tarry: a replay can keep only what its step uses");
    plan.kept.push_back(leaf != snapshot.leaves.end() ? leaf->storage : snapshot.storages[root - snapshot.serials.begin()]);
  }
  return std::make_shared<Replay>(snapshot, std::move(plan));
}

std::vector<at::Tensor> tensors_in(const py::list& leaves) {
  std::vector<at::Tensor> found;
  found.reserve(leaves.size());
  for (const py::handle& leaf : leaves) {
    found.push_back(THPVariable_Check(leaf.ptr()) ? THPVariable_Unpack(leaf.ptr()) : at::Tensor());
  }
  return found;
}

py::object arm(Replay& replay, const py::list& leaves, const std::vector<double>& numbers) {
  auto armed = replay.arm(tensors_in(leaves), numbers);
  if (const auto* reason = std::get_if<std::string>(&armed)) {
    return py::str(*reason);
  }
  py::list results;
  for (at::Tensor& tensor : std::get<std::vector<at::Tensor>>(armed)) {
    results.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor))));
  }
  return results;
}

void bind_guards(py::module& m) {
  py::class_<Guard>(m, "Guard", "Checks of Python objects and tensors. Does not keep them alive: its maker has to.")
      .def(py::init<>())
      .def("dict_item", &Guard::dict_item)
      .def("dict_entries", &Guard::dict_entries, py::arg("dict"), py::arg("rate") = py::none())
      .def("rate", &Guard::rate)
      .def("list_item", &Guard::list_item)
      .def("attribute", &Guard::attribute)
      .def("cell", &Guard::cell)
      .def("length", &Guard::length)
      .def("tensor", &Guard::tensor)
      .def("failing", &Guard::failing, py::arg("with_gradients") = true, py::arg("with_rates") = true)
      .def("__len__", &Guard::size);
  py::class_<ArgumentGuard>(m, "ArgumentGuard", "As Guard, for the leaves of a call's arguments.")
      .def(py::init<const py::list&>())
      .def("failing", &ArgumentGuard::failing);
}

} // namespace

static void bind_traces(py::module& m) {
  m.def("storage_serial", &serial_of, "The number of a tensor's storage; 0 if it is not one of ours.");
  m.def(
      "gradient_serials",
      [](const std::vector<at::Tensor>& tensors) {
        std::vector<uint64_t> found;
        for (const at::Tensor& tensor : tensors) {
          found.push_back(tensor.grad().defined() ? serial_of(tensor.grad()) : 0);
        }
        return found;
      },
      "The numbers of the storages of tensors' gradients; 0 for none.");
  m.def(
      "random_position",
      [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)).get<TarryGenerator>()->advance(0); },
      "The seed of a device's generator, and how many seeds were drawn.");
  bind_guards(m);
  py::class_<Trace>(m, "Trace", "While it lives, what is recorded on a device is watched.")
      .def(py::init([](int device) { return std::make_unique<Trace>(device_state(static_cast<c10::DeviceIndex>(device))); }))
      .def_readonly("first_serial", &Trace::first_serial)
      .def(
          "upload_of",
          [](const Trace& trace, const at::Tensor& tensor) -> std::optional<at::Tensor> {
            std::lock_guard<std::mutex> guard(trace.state.mutex);
            const auto found = trace.uploads.find(serial_of(tensor));
            return found == trace.uploads.end() ? std::nullopt : std::make_optional(found->second);
          },
          "The foreign tensor that was copied into the storage of this one last.")
      .def_readonly("shared", &Trace::shared)
      .def_property_readonly("reads", [](const Trace& trace) { return locations(trace.reads); })
      .def_property_readonly("overwritten", [](const Trace& trace) { return locations(trace.overwritten); });
  py::class_<HostReads>(m, "HostReads", "Watches the reads of host tensors by this thread, until stop().")
      .def(py::init<>())
      .def("stop", &HostReads::stop)
      .def_property_readonly("found", [](const HostReads& reads) {
        std::vector<std::pair<at::Tensor, std::pair<std::string, int>>> described;
        for (const auto& [tensor, site] : reads.found) {
          described.emplace_back(tensor, site_location(site));
        }
        return described;
      });
}

static py::list numbers_of(const Snapshot& snapshot) {
  py::list result;
  for (const NodePtr& node : snapshot.batch->order) {
    std::vector<c10::IValue> numbers;
    if (!node->is_leaf()) {
      append_numbers(*node, numbers);
    }
    for (const c10::IValue& number : numbers) {
      const bool is_seed = node->op->has(kRandom) && number.isInt() && number.toInt() == node->constants.back().toInt();
      result.append(is_seed ? py::object(py::none()) : to_python(number));
    }
  }
  return result;
}

static std::vector<std::pair<uint32_t, int64_t>> random_nodes(const Snapshot& snapshot) {
  std::vector<std::pair<uint32_t, int64_t>> found;
  for (uint32_t i = 0; i < snapshot.batch->order.size(); ++i) {
    const Node& node = *snapshot.batch->order[i];
    if (!node.is_leaf() && node.op->has(kRandom) && node.constants.back().toInt() != kNoSeed) {
      found.emplace_back(i, node.constants.back().toInt());
    }
  }
  return found;
}

static void bind_snapshots(py::module& m) {
  py::class_<Snapshot>(m, "Snapshot", "The batch of a traced call, copied before it runs.")
      .def(py::init<const Batch&, Trace&>())
      .def_readonly("whole", &Snapshot::whole)
      .def_property_readonly("batch", [](Snapshot& snapshot) { return snapshot.batch; })
      .def(
          "leaves",
          [](const Snapshot& snapshot) {
            py::list result;
            for (const Trace::Leaf& leaf : snapshot.leaves) {
              const auto [file, line] = site_location(leaf.node->site);
              result.append(
                  py::make_tuple(
                      leaf.serial, leaf.uploaded.defined() ? py::cast(leaf.uploaded) : py::object(py::none()), file, line));
            }
            return result;
          },
          "Per leaf: its storage's number, the host tensor it is a copy of or None, and the line that used it first.")
      .def(
          "forget_uploads",
          [](Snapshot& snapshot) {
            for (Trace::Leaf& leaf : snapshot.leaves) {
              leaf.uploaded.reset();
            }
          })
      .def("numbers", &numbers_of, "The numbers of all nodes, None for seeds.")
      .def("set_numbers", &Snapshot::set_numbers)
      .def(
          "type_hashes",
          [](const Snapshot& snapshot) {
            std::vector<uint64_t> found;
            for (const NodePtr& node : snapshot.batch->order) {
              if (!node->is_leaf()) {
                found.push_back(node->type_hash.lo);
              }
            }
            return found;
          },
          "Per operator: a hash of its arguments' types and constants, and of all switches that decide what it does.")
      .def_readonly("root_serials", &Snapshot::serials)
      .def("root_is_alive", [](const Snapshot& snapshot, size_t i) { return !snapshot.storages.at(i).expired(); })
      .def(
          "root_location", [](const Snapshot& snapshot, size_t i) { return site_location(snapshot.batch->roots.at(i).node->site); })
      .def("random_nodes", &random_nodes, "Positions of the nodes that draw random numbers among all, with their seeds.");
}

void bind_replay(py::module& m) {
  bind_traces(m);
  bind_snapshots(m);
  py::class_<Replay, std::shared_ptr<Replay>>(m, "Replay", "A step that can be made pending again without being recorded.")
      .def(
          py::init(&make_replay), py::kw_only(), py::arg("snapshot"), py::arg("sources"), py::arg("targets"), py::arg("results"),
          py::arg("gradients"), py::arg("holders"), py::arg("hosts"), py::arg("written"), py::arg("kept"), py::arg("seeds"),
          py::arg("draws"), py::arg("numbers"))
      .def(
          "refusal", [](const Replay& replay, const py::list& leaves) { return replay.refusal(tensors_in(leaves)); },
          "Why the step cannot be replayed now, if so.")
      .def("arm", &arm, "The results, pending; or a string that says why the step cannot be replayed now.")
      .def_property_readonly("batch", [](Replay& replay) { return replay.batch(); });
}

// ---- guards
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
