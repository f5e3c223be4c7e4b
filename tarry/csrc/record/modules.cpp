#include "record/modules.h"

#include <Python.h>

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <unordered_map>

#include "core/gil.h"

namespace tarry {
namespace {

// Guarded by the GIL. Each thread has a copy of what it has met, which it reads without the GIL.
struct Modules {
  PyTypeObject* type = nullptr;
  PyObject* namer = nullptr;
  std::vector<std::string> paths{""};
  std::unordered_map<std::string, uint32_t> ids{{"", 0}};
  ska::flat_hash_map<PyObject*, uint32_t> named;
};

struct ThreadModules {
  uint64_t version = 0;
  ska::flat_hash_map<PyObject*, uint32_t> named;
  ska::flat_hash_map<PyTypeObject*, bool> others; // classes that are no modules; owned: their addresses must not be used again
};

std::atomic<uint64_t> version{1}; // grows when a module dies: its address may be used again

Modules& modules() {
  static auto* instance = new Modules();
  return *instance;
}

ThreadModules& thread_modules() {
  static thread_local ThreadModules instance;
  return instance;
}

// An error of ours must not become the program's, nor an interrupt be lost.
void drop_error() {
  const bool interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
  PyErr_Clear();
  if (interrupted) {
    PyErr_SetInterrupt();
  }
}

uint32_t meet(PyObject* object, ThreadModules& known) {
  Gil gil;
  Modules& shared = modules();
  if (!shared.type || !PyType_IsSubtype(Py_TYPE(object), shared.type)) {
    Py_INCREF(Py_TYPE(object));
    known.others.emplace(Py_TYPE(object), true);
    return 0;
  }
  auto found = shared.named.find(object);
  if (found == shared.named.end()) {
    PyObject *type, *value, *traceback; // what is being raised is not ours
    PyErr_Fetch(&type, &value, &traceback);
    PyObject* const result = PyObject_CallFunctionObjArgs(shared.namer, object, nullptr);
    if (!result) {
      drop_error();
    }
    Py_XDECREF(result);
    PyErr_Restore(type, value, traceback);
    found = shared.named.find(object);
    if (found == shared.named.end()) {
      return 0;
    }
  }
  known.named[object] = found->second;
  return found->second;
}

} // namespace

uint32_t module_of(PyObject* object) {
  ThreadModules& known = thread_modules();
  const uint64_t now = version.load(std::memory_order_acquire);
  if (known.version != now) {
    known.named.clear();
    known.version = now;
  }
  const auto found = known.named.find(object);
  if (found != known.named.end()) {
    return found->second;
  }
  return known.others.count(Py_TYPE(object)) ? 0 : meet(object, known);
}

std::string module_path(uint32_t module) {
  return modules().paths[module];
}

void set_module_namer(PyObject* type, PyObject* namer) {
  Py_INCREF(type);
  Py_INCREF(namer);
  modules().type = reinterpret_cast<PyTypeObject*>(type);
  modules().namer = namer;
}

void name_modules(const std::vector<std::pair<uint64_t, std::string>>& named) {
  Modules& shared = modules();
  for (const auto& [address, path] : named) {
    const auto [entry, inserted] = shared.ids.emplace(path, static_cast<uint32_t>(shared.paths.size()));
    if (inserted) {
      shared.paths.push_back(path);
    }
    shared.named[reinterpret_cast<PyObject*>(address)] = entry->second;
  }
}

void forget_module(uint64_t address) {
  modules().named.erase(reinterpret_cast<PyObject*>(address));
  version.fetch_add(1, std::memory_order_release);
}

} // namespace tarry
