// Holds Python's global lock for a scope. Not pybind11's guard: its headers take seconds to compile.
#pragma once

#include <Python.h>

namespace tarry {

struct Gil {
  Gil() : state(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  const PyGILState_STATE state;
};

} // namespace tarry
