#include "core/failure.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace tarry {
namespace {

struct Owed {
  std::mutex mutex;
  std::vector<FailurePtr> failures;
  std::atomic<size_t> count{0}; // so that a thread that is owed nothing takes no lock
};

struct FailedSteps {
  std::mutex mutex;
  std::unordered_map<uint32_t, StepList> by_lane;
};

FailedSteps& all_failed_steps() {
  static auto* steps = new FailedSteps();
  return *steps;
}

Owed& owed() {
  static auto* instance = new Owed();
  return *instance;
}

namespace py = pybind11;

// Lets go of the frames that an exception has passed through, and with them of all that their variables hold: a failure may be
// kept for as long as the tensors that it has left. The text of the traceback becomes a note.
void forget_frames(const py::object& value, const std::string& where) {
  const auto format = py::module_::import("traceback").attr("format_tb");
  const auto lines = py::str("").attr("join")(format(value.attr("__traceback__"))).cast<std::string>();
  value.attr("add_note")(lines.empty() ? where : where + "\n" + lines);
  for (py::object at = value; !at.is_none() && !at.attr("__traceback__").is_none();) {
    at.attr("__traceback__") = py::none();
    at = at.attr("__cause__").is_none() ? at.attr("__context__") : at.attr("__cause__");
  }
}

std::exception_ptr as_python_error(const std::string& where) {
  python_error error;
  error.persist();
  py::gil_scoped_acquire gil;
  PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
  if (error.traceback) {
    PyException_SetTraceback(error.value, error.traceback);
    Py_CLEAR(error.traceback);
  }
  try {
    forget_frames(py::reinterpret_borrow<py::object>(error.value), where);
  } catch (py::error_already_set&) { // an exception class that refuses: it keeps its frames
  }
  return std::make_exception_ptr(error);
}

// Raises a copy: each catch has an exception with a traceback of its own. Under the GIL.
[[noreturn]] void raise_copy(const python_error& found) {
  py::object raised = py::reinterpret_borrow<py::object>(found.value);
  try {
    const py::object made = raised.attr("__class__").attr("__new__")(raised.attr("__class__"), *raised.attr("args"));
    made.attr("__dict__").attr("update")(raised.attr("__dict__"));
    made.attr("__cause__") = raised.attr("__cause__");
    raised = made;
  } catch (py::error_already_set&) { // it cannot be copied, and is raised itself
  }
  PyErr_SetObject(found.type, raised.ptr());
  python_error fresh;
  fresh.persist();
  throw fresh;
}

} // namespace

void Failure::raise() const {
  raised = true;
  try {
    std::rethrow_exception(error);
  } catch (const python_error& found) {
    py::gil_scoped_acquire gil;
    raise_copy(found);
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

bool is_owed(uint32_t lane) {
  Owed& shared = owed();
  if (shared.count.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  std::lock_guard<std::mutex> guard(shared.mutex);
  return std::any_of(shared.failures.begin(), shared.failures.end(), [lane](const FailurePtr& failure) {
    return failure->lane == lane && !failure->raised;
  });
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
    // Of the fake kernels that PyTorch makes for its custom operators: they have no errors of their own for this.
    const std::string text(message);
    return PyErr_GivenExceptionMatches(type, PyExc_NotImplementedError) != 0 || text.find("get_ctx()") != std::string::npos ||
        text.find("There was no fake impl registered for") != std::string::npos;
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

void note_failed_step(uint32_t lane, int device, uint64_t epoch) {
  FailedSteps& shared = all_failed_steps();
  std::lock_guard<std::mutex> guard(shared.mutex);
  shared.by_lane[lane].emplace_back(device, epoch);
}

StepList failed_steps(uint32_t lane) {
  FailedSteps& shared = all_failed_steps();
  std::lock_guard<std::mutex> guard(shared.mutex);
  const auto found = shared.by_lane.find(lane);
  return found == shared.by_lane.end() ? StepList() : found->second;
}

} // namespace tarry
