// Errors of Python as failures (core/failure.h): kept for later, raised on any thread, each time with a traceback of its own.
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include "core/failure.h"

namespace py = pybind11;

namespace tarry {
namespace {

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

} // namespace tarry
