#include "failure.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <mutex>

namespace tarry {
namespace {

struct Owed {
  std::mutex mutex;
  std::vector<FailurePtr> failures;
  std::atomic<size_t> count{0}; // so that a thread that is owed nothing takes no lock
};

Owed& owed() {
  static auto* instance = new Owed();
  return *instance;
}

// An exception of Python's that can be raised again: `restore()` empties a python_error, so each raise copies it.
std::exception_ptr as_python_error(const std::string& where) {
  python_error error;
  error.persist();
  pybind11::gil_scoped_acquire gil;
  if (error.value) {
    PyObject* noted = PyObject_CallMethod(error.value, "add_note", "s", where.c_str());
    Py_XDECREF(noted);
    PyErr_Clear();
  }
  return std::make_exception_ptr(error);
}

} // namespace

void Failure::raise() const {
  raised = true;
  try {
    std::rethrow_exception(error);
  } catch (const python_error& found) {
    throw python_error(found);
  }
}

uint32_t current_lane() {
  static std::atomic<uint32_t> lanes{0};
  static thread_local const uint32_t lane = ++lanes;
  return lane;
}

FailurePtr caught_failure(uint32_t lane, const std::string& where) {
  std::exception_ptr error;
  try {
    throw;
  } catch (c10::Error& found) {
    found.add_context(where);
    error = std::current_exception();
  } catch (python_error& found) {
    pybind11::gil_scoped_acquire gil;
    found.restore();
    error = as_python_error(where);
  } catch (pybind11::error_already_set& found) {
    pybind11::gil_scoped_acquire gil;
    found.restore();
    error = as_python_error(where);
  } catch (std::exception& found) {
    error = std::make_exception_ptr(c10::Error({__func__, __FILE__, __LINE__}, std::string(found.what()) + " (" + where + ")"));
  }
  return std::make_shared<Failure>(std::move(error), lane);
}

bool caught_interrupt() {
  const auto is_interrupt = [](PyObject* type) { return type && !PyErr_GivenExceptionMatches(type, PyExc_Exception); };
  try {
    throw;
  } catch (const python_error& found) {
    pybind11::gil_scoped_acquire gil;
    return is_interrupt(found.type);
  } catch (const pybind11::error_already_set& found) {
    pybind11::gil_scoped_acquire gil;
    return is_interrupt(found.type().ptr());
  } catch (...) {
    return false;
  }
}

void owe(FailurePtr failure) {
  Owed& shared = owed();
  std::lock_guard<std::mutex> guard(shared.mutex);
  shared.failures.push_back(std::move(failure));
  shared.count = shared.failures.size();
}

std::vector<FailurePtr> take_all_owed() {
  Owed& shared = owed();
  std::vector<FailurePtr> found;
  std::lock_guard<std::mutex> guard(shared.mutex);
  for (FailurePtr& failure : shared.failures) {
    if (!failure->raised) {
      found.push_back(failure);
    }
  }
  shared.failures.clear();
  shared.count = 0;
  return found;
}

void raise_owed() {
  Owed& shared = owed();
  if (shared.count.load(std::memory_order_relaxed) == 0) {
    return;
  }
  const uint32_t lane = current_lane();
  FailurePtr mine;
  std::vector<FailurePtr> others, gone; // freed after the lock: a Python error takes the GIL
  {
    std::lock_guard<std::mutex> guard(shared.mutex);
    for (FailurePtr& failure : shared.failures) {
      if (failure->raised) {
        gone.push_back(std::move(failure));
      } else if (!mine && failure->lane == lane) {
        mine = std::move(failure);
      } else {
        others.push_back(std::move(failure));
      }
    }
    shared.failures = std::move(others);
    shared.count = shared.failures.size();
  }
  if (mine) {
    mine->raise();
  }
}

void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

std::exception_ptr caught_exception() {
  try {
    throw;
  } catch (python_error& python) {
    python.persist(); // takes the error out of the interpreter
    return std::current_exception();
  } catch (...) {
    return std::current_exception();
  }
}

bool is_not_implemented(const std::exception_ptr& error) {
  const auto matches = [](PyObject* type, const char* message) {
    pybind11::gil_scoped_acquire gil;
    return PyErr_GivenExceptionMatches(type, PyExc_NotImplementedError) != 0 || std::string(message).find("get_ctx()") != std::string::npos;
  };
  try {
    std::rethrow_exception(error);
  } catch (const c10::NotImplementedError&) {
    return true;
  } catch (const python_error& python) {
    return matches(python.type, python.what());
  } catch (const pybind11::error_already_set& python) {
    return matches(python.type().ptr(), python.what());
  } catch (...) {
    return false;
  }
}

} // namespace tarry
