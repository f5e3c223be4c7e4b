// Whether the surroundings of a step function are as they were when it was recorded.
//
// tarry/replay/guards.py makes the checks, and knows what to look at and why; here they are only carried out, fast.
// Guards look at Python objects without owning them: the maker of a guard keeps them alive in a list, where Python's garbage
// collector can see them. A model that knows its own step function would never be freed otherwise.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <array>

#include "core/graph.h"

namespace tarry {

// What must not change about a tensor that is looked at in place.
struct TensorState {
  explicit TensorState(const at::Tensor& tensor);
  // Without `same_storage`, any storage will do that is like the one it had.
  bool describes(const at::Tensor& tensor, bool same_storage, bool with_gradient = true) const;

  c10::Device device;
  const Layout* layout;         // null: not strided
  const Layout* home = nullptr; // of the storage, on a tarry device
  uint64_t serial = 0;          // of the storage, on a tarry device
  bool requires_grad;
  bool is_leaf;
  bool has_gradient = false;
  const Layout* gradient = nullptr; // of .grad; null without one, or if it is not strided
  size_t hooks = 0;
};

// What a thread, and the process, have switched on, as words to compare.
using Ambient = std::array<uint64_t, 24>;
Ambient current_ambient();

class Guard {
 public:
  // A value is compared by identity or, if it is a plain one (a number, a string, a tuple of them), as a value.
  void dict_item(pybind11::handle dict, pybind11::handle key, pybind11::handle expected);
  // All that is in a dict, in order: without looking anything up, which would hash tensors in Python. What is under the key `rate`
  // may be anything: see rate().
  void dict_entries(pybind11::handle dict, pybind11::handle rate);
  // A float that may be another if the caller of failing() allows it.
  void rate(pybind11::handle dict, pybind11::handle key, pybind11::handle expected);
  void list_item(pybind11::handle list, size_t index, pybind11::handle expected);
  void attribute(pybind11::handle object, pybind11::handle name, pybind11::handle expected);
  void cell(pybind11::handle cell, pybind11::handle expected);
  void length(pybind11::handle sized);
  void tensor(pybind11::handle tensor);
  // The number of the first check that fails; -1 if none does, and -2 if something of Ambient has changed. Unless
  // `with_gradients`, tensors may have got or lost their .grad; unless `with_rates`, rates may be others.
  int64_t failing(bool with_gradients, bool with_rates) const;
  size_t size() const { return checks_.size(); }

 private:
  enum class Kind : uint8_t { DictItem, Rate, DictEntries, ListItem, Attribute, Cell, Length, Tensor };
  struct Check {
    Kind kind;
    PyObject* object;
    PyObject* key = nullptr;
    PyObject* expected = nullptr;
    Py_ssize_t number = 0; // an index, a length, or that of a TensorState or a list of entries
  };
  using Entries = std::vector<std::pair<PyObject*, PyObject*>>;
  bool holds(const Check& check, bool with_gradients, bool with_rates) const;

  const Ambient ambient_ = current_ambient();
  std::vector<Check> checks_;
  std::vector<TensorState> tensors_;
  std::vector<Entries> entries_;
};

// The leaves of the arguments: tensors by their types and by which of them share memory, all else by identity or value.
class ArgumentGuard {
 public:
  explicit ArgumentGuard(const pybind11::list& leaves);
  int64_t failing(const pybind11::list& leaves) const; // as above; -2 if their number is another

 private:
  std::vector<PyObject*> leaves_; // borrowed; null for a tensor
  std::vector<std::optional<TensorState>> tensors_;
  std::vector<uint32_t> first_alias_;
};

} // namespace tarry
