// The native module, as Python sees it.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>

#include "bind/bind.h"
#include "record/custom_op.h"
#include "record/direct.h"
#include "core/gil.h"
#include "execute/async_step.h"
#include "execute/callbacks.h"
#include "execute/event_log.h"
#include "execute/executor.h"
#include "execute/host_value.h"
#include "core/fault.h"
#include "device/hooks.h"
#include "device/lend.h"
#include "device/lstm.h"
#include "record/host_mode.h"
#include "record/memory.h"
#include "core/numbers.h"
#include "core/switches.h"
#include "record/modules.h"
#include "record/opaque.h"
#include "record/provenance.h"
#include "record/probe.h"
#include "execute/serve.h"
#include "record/record.h"

namespace py = pybind11;

namespace tarry {
namespace {

// Functions of the Python runtime, kept for the life of the process.
struct Callbacks {
  PyObject *sync = nullptr, *batch = nullptr, *failure = nullptr, *diagnose = nullptr, *fallback = nullptr, *read = nullptr,
           *share = nullptr, *value = nullptr, *flush = nullptr, *synchronize = nullptr, *memory = nullptr;
};
Callbacks callbacks;
bool keeps_frames = false; // of tarry, in errors

void begin_writes(const std::vector<at::Tensor>& inputs) {
  fault_point();
  for (const at::Tensor& input : inputs) {
    begin_write(input);
  }
}

TORCH_LIBRARY_FRAGMENT(tarry, m) {
  m.def("wrapped_number(Scalar value) -> Tensor", &wrapped_number); // compiled programs make one from a number
  m.def("begin_writes(Tensor[] inputs) -> ()", &begin_writes);
}

void bind_custom_op(py::module& m) {
  py::class_<CustomOpKernels>(m, "CustomOpKernels", "The native kernels of a custom operator, registered while it lives.")
      .def(py::init<const std::string&, const std::string&>(), py::arg("qualname"), py::arg("rule"));
  py::class_<RecordedWhole>(m, "RecordedWhole", "Has an operator recorded as one node, while it lives.")
      .def(py::init<const std::string&>(), py::arg("qualname"));
  m.def(
      "forget_operator", py::overload_cast<const std::string&>(&forget_operator),
      "What was learned of an operator no longer holds: its shapes are inferred, and graphs with it compiled, anew.");
}

void bind_settings(py::module& m) {
  m.def("register_operator", &register_operator);
  m.def("refuse_operator", &refuse_operator);
  m.def("register_layouts", &register_layouts);
  m.def("register_lstm_layers", &register_lstm_layers);
  m.def(
      "set_callbacks",
      [](py::object sync, py::object batch, py::object failure, py::object diagnose, py::object fallback, py::object read,
         py::object share, py::object value, py::object flush, py::object synchronize, py::object memory) {
        const auto take = [](py::object& object) { return object.release().ptr(); };
        callbacks = {take(sync),  take(batch), take(failure), take(diagnose),    take(fallback), take(read),
                     take(share), take(value), take(flush),   take(synchronize), take(memory)};
      });
  m.def("set_real_device", [](int index, const std::string& device, bool opaque_data, bool asynchronous) {
    set_real_device(static_cast<c10::DeviceIndex>(index), c10::Device(device), opaque_data, asynchronous);
  });
  m.def("real_device", [](int index) { return real_device(static_cast<c10::DeviceIndex>(index)).str(); }, py::arg("index") = -1);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("set_max_pending", &set_max_pending);
  m.def("set_chunks", &set_chunks, py::arg("device"), py::arg("nodes"));
  m.def("hold_direct_calls", &hold_direct_calls, py::arg("on"));
  m.def("force_direct_calls", &force_direct_calls, py::arg("on"));
  m.def("set_direct_calls", &set_direct_calls, py::arg("after"), py::arg("until"));
  m.def("set_small_call", &set_small_call);
  m.def("set_max_pending_bytes", &set_max_pending_bytes);
  m.def("set_forced_eager", &set_forced_eager);
  m.def("set_keeps_frames", [](bool keeps) { keeps_frames = keeps; });
  m.def("set_host_mode", &set_host_mode);
  m.def("set_region", &set_region);
  m.def("set_file_judge", [](py::object judge) { set_file_judge(judge.ptr()); });
  m.def("set_module_namer", [](py::object type, py::object namer) { set_module_namer(type.ptr(), namer.ptr()); });
  m.def("name_modules", &name_modules);
  m.def("forget_module", &forget_module);
  m.def("frame_variables", [](py::object type) { return py::reinterpret_steal<py::object>(frame_variables(type.ptr())); });
  m.def(
      "current_place",
      [] {
        const PlaceText place = describe_place(current_place());
        return py::make_tuple(place.file, place.line, place.library, place.module);
      },
      "Where this thread is: the user's file and line, the library's line that it has called, the module.");
}

// By the names of tarry.metrics (_api.py adds those that follow from these).
py::dict counters_of(int device) {
  auto& state = state_of(device);
  std::lock_guard<std::mutex> guard(state.mutex);
  const Executor& executor = *state.executor;
  using namespace pybind11::literals;
  return py::dict(
      "record"_a = state.recorded, "direct"_a = state.direct.calls, "direct_steps"_a = state.direct.ended,
      "node_reuse"_a = state.reused, "run_ahead"_a = executor.speculator.used.load(),
      "run_ahead_miss"_a = executor.speculator.missed.load(), "run_ahead_off"_a = executor.counts.no_cores,
      "handed_over"_a = executor.counts.submitted, "overlapped"_a = executor.counts.overlapped,
      "reference"_a = executor.served.interpreted, "cache_hit"_a = executor.served.run);
}

void bind_counters(py::module& m) {
  m.def("counters", &counters_of);
  m.def("reset_counters", [](int device) {
    auto& state = state_of(device);
    std::lock_guard<std::mutex> guard(state.mutex);
    state.recorded = state.reused = state.direct.calls = state.direct.ended = 0;
    state.executor->speculator.used = state.executor->speculator.missed = 0;
    state.executor->counts = {};
    state.executor->served = {};
  });
  m.def(
      "fallbacks",
      [](int device) {
        auto& state = state_of(device);
        std::lock_guard<std::mutex> guard(state.mutex);
        py::list found;
        for (const auto& [place, counted] : state.executor->served.fallbacks) {
          const auto [file, line] = site_location(place.second);
          found.append(py::make_tuple(place.first->name, file, line, site_module(place.second), counted.count, counted.seconds));
        }
        return found;
      },
      "Operators that ran eagerly, as counted here: name, file, line, module, how often, for how many seconds.");
  m.def(
      "seconds",
      [](int device) {
        auto& state = state_of(device);
        std::lock_guard<std::mutex> guard(state.mutex);
        const ServedCounts& served = state.executor->served;
        return std::map<std::string, double>{{"sync", served.sync_seconds}, {"execute", served.execute_seconds}};
      },
      "Time that the native part has spent on the steps that it counts.");
  m.def(
      "pending",
      [](int device) {
        auto& state = state_of(device);
        std::lock_guard<std::mutex> guard(state.mutex);
        return state.position;
      },
      "Nodes recorded since the last cut.");
  m.def(
      "bytes",
      [](int device) {
        auto& state = state_of(device);
        std::lock_guard<std::mutex> guard(state.mutex);
        return std::make_pair(state.bytes.live.load(), pinned_bytes(state));
      },
      "What the device's storages hold, and what pending work holds of storages that are dead or were filled anew.");
}

void bind_values(py::module& m) {
  m.def("materialise", [](const at::Tensor& tensor) {
    py::gil_scoped_release release;
    std::vector<at::Tensor> parts = strided_parts(tensor);
    for (at::Tensor& part : parts) {
      part = materialise(part, "sync").detach(); // see Batch::inputs
    }
    return is_opaque(tensor) ? with_parts(tensor, parts) : parts[0];
  });
  m.def(
      "host_value",
      [](const at::Tensor& tensor) -> std::optional<at::Tensor> {
        TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
        const at::Tensor value = storage ? host_value(storage) : at::Tensor();
        return value.defined() ? std::make_optional(view_as_layout(value, layout_of(tensor.unsafeGetTensorImpl()))) : std::nullopt;
      },
      py::arg("tensor"), "What a pending tensor holds if that follows from numbers alone; computed on the host.");
  m.def("slice_storage", [](const at::Tensor& bytes, int64_t start, int64_t nbytes) {
    return py::reinterpret_steal<py::object>(torch::createPyObject(c10::Storage(slice_storage(bytes, start, nbytes))));
  });
  m.def("lend", &lend, py::arg("tensor"), py::arg("keep") = false, py::call_guard<py::gil_scoped_release>());
  m.def("swap_storages", [](const at::Tensor& left, const at::Tensor& right) {
    py::gil_scoped_release release;
    swap_storages(left, right);
  });
  m.def("is_pending", [](const at::Tensor& tensor) {
    TORCH_CHECK(is_tarry(tensor), "tarry: expected a tensor on device 'tarry', but got one on '", tensor.device(), "'");
    const std::vector<at::Tensor> parts = strided_parts(tensor);
    return std::any_of(parts.begin(), parts.end(), [](const at::Tensor& part) {
      TarryStorage* storage = storage_of(part.unsafeGetTensorImpl());
      TORCH_CHECK(storage, "tarry: this tensor was made from a raw pointer");
      std::lock_guard<std::mutex> guard(storage->state->mutex);
      return static_cast<bool>(storage->value.node);
    });
  });
}

void bind_steps(py::module& m) {
  m.def(
      "is_in_flight",
      [](int device) {
        auto& state = state_of(device);
        std::lock_guard<std::mutex> guard(state.mutex);
        return state.executor->is_busy() && state.position == 0;
      },
      "Whether a step is in flight, and nothing was recorded since.");
  m.def(
      "finish_step",
      [](int device) {
        py::gil_scoped_release release;
        return state_of(device).executor->finish();
      },
      "Waits for the step in flight. Gives it if it has failed.");
  py::class_<AsyncStep, std::shared_ptr<AsyncStep>>(m, "AsyncStep", "A step in flight, or one that has failed there.")
      .def_property_readonly("batch", [](const AsyncStep& step) { return step.batch; })
      .def_property_readonly(
          "diagnose",
          [](const AsyncStep& step) { return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(step.diagnose.get())); })
      .def("rethrow", [](const AsyncStep& step) { std::rethrow_exception(step.error); })
      .def("close", [](const AsyncStep& step) { step.batch->state->executor->close(step); });
  m.def("failed_steps", &failed_steps, "Device and epoch of each step that failed because of this lane's operators.");
  m.def(
      "epochs",
      [](int device) {
        auto& state = state_of(device);
        std::lock_guard<std::mutex> guard(state.mutex);
        const Batch* in_flight = state.executor->batch_in_flight();
        return std::make_pair(state.epoch, in_flight ? in_flight->epoch : state.epoch);
      },
      "The epoch that is being recorded, and the oldest that is not computed yet.");
  m.def("arm_fault", [](int fault, int64_t after) { arm_fault(static_cast<Fault>(fault), after); });
  m.def("disarm_fault", &disarm_fault);
  m.def("current_lane", &current_lane);
  m.def("current_switches", [] { return current_switches() | matmul_precision(); });
  m.def("raise_owed", &raise_owed, "Raises what another thread has found out about this thread's operators.");
  m.def(
      "owed_errors",
      [] {
        std::vector<std::string> found;
        for (const FailurePtr& failure : take_all_owed()) {
          try {
            failure->raise();
          } catch (const c10::Error& error) {
            found.emplace_back(error.what_without_backtrace());
          } catch (const std::exception& error) {
            found.emplace_back(error.what());
          }
        }
        return found;
      },
      "Errors that no thread has raised, as text. They are forgotten.");
}

c10::IValue number_of(py::handle number) {
  PyObject* const object = number.ptr();
  return PyBool_Check(object) ? c10::IValue(number.cast<bool>())
      : PyLong_Check(object)  ? c10::IValue(number.cast<int64_t>())
      : PyFloat_Check(object) ? c10::IValue(number.cast<double>())
                              : c10::IValue(number.cast<c10::complex<double>>());
}

// Waits without the GIL, and lets signal handlers run meanwhile. False if that took longer than `timeout` seconds, if one is given.
bool acquire(StepLock& lock, double timeout) {
  constexpr std::chrono::milliseconds kPoll{50};
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
  while (!lock.mutex.try_lock()) {
    if (timeout >= 0 && std::chrono::steady_clock::now() >= until) {
      return false;
    }
    {
      py::gil_scoped_release release;
      if (lock.mutex.try_lock_for(kPoll)) {
        return true;
      }
    }
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
  return true;
}

void bind_serving(py::module& m) {
  py::class_<StepLock, std::unique_ptr<StepLock, py::nodelete>>(
      m, "StepLock", "Held by the thread that computes a step, which may take it again.")
      .def("acquire", &acquire, py::arg("timeout") = -1.0)
      .def("release", [](StepLock& lock) { lock.mutex.unlock(); })
      .def("__enter__", [](StepLock& lock) { acquire(lock, -1); })
      .def("__exit__", [](StepLock& lock, py::object, py::object, py::object) { lock.mutex.unlock(); })
      .def_readwrite("in_step", &StepLock::in_step, "The thread that holds it is in the middle of a step.");
  m.def("step_lock", &step_lock, py::return_value_policy::reference);
  m.def(
      "set_watched",
      [](const std::string& watcher, bool watches) {
        static const std::unordered_map<std::string, Watcher> watchers{
            {"subscriber", Watcher::Subscriber},
            {"observer", Watcher::Observer},
            {"closure", Watcher::Closure},
            {"fallback", Watcher::Fallback},
            {"writer", Watcher::Writer}};
        set_watched(watchers.at(watcher), watches);
      },
      "Whether a Watcher has to see each step as it happens: Python then serves all of them.");
  m.def("set_compiling", &set_compiling, "Whether a backend compiles on this thread.");
  m.def("is_compiling", &is_compiling);
  m.def("set_small_step", &set_small_step, py::arg("operations"), py::arg("bytes"));
  m.def(
      "serve",
      [](int device, const std::string& reason, bool awaited) {
        check_fork();
        return serve(state_of(device), reason.c_str(), awaited);
      },
      "Computes what is pending. False, and nothing is done, if the runtime has to see to it.");
  m.def("serve_replay", &serve_replay, "The same for the batch of a replay.");
  m.def(
      "remember_program",
      [](std::shared_ptr<Structure> structure, const py::dict& constants, std::shared_ptr<Program> program,
         std::vector<int64_t> update, py::object diagnose) {
        KnownProgram known{std::move(structure), {}, std::move(program), std::move(update), kept_object(std::move(diagnose))};
        for (const auto& [index, number] : constants) {
          known.constants.emplace_back(index.cast<size_t>(), number_of(number));
        }
        remember_program(std::move(known));
      },
      "Batches of this structure, with these numbers, are computed by this program, without Python. The step lock is held.");
  m.def(
      "remember_reference", [](std::shared_ptr<Structure> structure) { remember_reference(std::move(structure)); },
      "Batches of this structure are computed by the reference path, without Python, until withdraw_references().");
  m.def("withdraw_references", &withdraw_references, "Python is asked again about those. From any thread.");
  m.def("forget_program", &forget_program);
  m.def("forget_programs", &forget_programs);
  m.def("was_served", &was_served, "Whether the program of a structure was run without Python since that was last asked.");
}

py::dict fields_of(const LoggedEvent& event) {
  static const char* const paths[] = {"reference", "native", "replayed", "direct"};
  const PlaceText place = describe_place(event.place);
  py::dict fields;
  fields["file"] = place.file;
  fields["line"] = place.line;
  fields["library"] = place.library;
  fields["module"] = place.module;
  fields["seconds"] = event.seconds;
  fields["device"] = static_cast<int>(event.device);
  if (event.kind == LoggedEvent::Kind::Read) {
    fields["method"] = event.reason;
    return fields;
  }
  fields["reason"] = event.reason;
  fields["operations"] = event.operations;
  fields["path"] = paths[static_cast<int>(event.kind)];
  fields["start"] = perf_counter(event.began);
  fields["record_seconds"] = seconds_between(event.began, event.begin);
  fields["wait_seconds"] = event.wait_seconds;
  fields["execute_seconds"] = event.execute_seconds;
  return fields;
}

void bind_event_log(py::module& m) {
  m.def("set_logging", &set_logging, "Whether events that happen without Python are kept for take_events().");
  m.def(
      "take_events",
      []() -> py::tuple {
        const LoggedEvents taken = take_events();
        py::list found;
        for (const LoggedEvent& event : taken.events) {
          const double time = perf_counter(event.begin) + event.seconds;
          found.append(
              py::make_tuple(event.kind == LoggedEvent::Kind::Read ? "read" : "sync", fields_of(event), time, event.thread));
        }
        return py::make_tuple(found, taken.lost);
      },
      "What was logged since the last time: kind, fields, time and thread of each; and how many more were overwritten.");
}

} // namespace

std::shared_ptr<void> kept_object(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* kept) {
    py::gil_scoped_acquire acquire;
    Py_DECREF(static_cast<PyObject*>(kept));
  });
}

// ---- calls into the Python runtime

namespace {

py::tuple place_tuple(const Place& place) {
  const PlaceText at = describe_place(place);
  return py::make_tuple(at.file, at.line, at.library, at.module);
}

// Calls it under the GIL. The runtime's frames are taken out of an error, whose traceback then ends at the user's line; an assertion
// of tarry's own keeps them.
template <typename... Arguments>
py::object call(PyObject* callback, const Arguments&... arguments) {
  TORCH_CHECK(callback, "tarry: the runtime is not initialised; import tarry first");
  try {
    return py::handle(callback)(arguments...);
  } catch (py::error_already_set& error) {
    error.restore();
    if (!keeps_frames && !error.matches(PyExc_AssertionError)) {
      PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
      PyErr_Fetch(&type, &value, &traceback);
      Py_XDECREF(traceback);
      PyException_SetTraceback(value, Py_None);
      PyErr_Restore(type, value, nullptr);
    }
    throw_python_error();
  }
}

} // namespace

void call_sync(c10::DeviceIndex device, const char* reason, bool awaited) {
  const Gil gil;
  call(callbacks.sync, static_cast<int>(device), reason, awaited);
}

void hand_over(std::shared_ptr<Batch> batch, const char* reason) {
  const Gil gil;
  call(callbacks.batch, std::move(batch), reason);
}

void report_failure(const char* error) {
  const Gil gil;
  call(callbacks.failure, error);
}

void diagnose(std::shared_ptr<Batch> batch, void* diagnose, std::exception_ptr error) {
  const Gil gil;
  const py::cpp_function rethrow([error = std::move(error)] { std::rethrow_exception(error); });
  call(callbacks.diagnose, std::move(batch), py::handle(static_cast<PyObject*>(diagnose)), rethrow);
}

void report_fallback(const std::string& op, const char* reason, const Place& place, double seconds) {
  const Gil gil;
  call(callbacks.fallback, op, reason, place_tuple(place), seconds);
}

void report_read(const char* method, int device, const Place& place, double seconds) {
  const Gil gil;
  call(callbacks.value, method, device, place_tuple(place), seconds);
}

void request_flush() {
  const Gil gil;
  call(callbacks.flush);
}

void synchronize(c10::DeviceIndex device) {
  const Gil gil;
  call(callbacks.synchronize, static_cast<int>(device));
}

std::pair<size_t, size_t> memory_info(c10::DeviceIndex device) {
  const Gil gil;
  return call(callbacks.memory, static_cast<int>(device)).cast<std::pair<size_t, size_t>>();
}

at::Tensor read_backend_data(const at::Tensor& stand_in) {
  const Gil gil;
  return call(callbacks.read, stand_in).cast<at::Tensor>().detach(); // see Batch::inputs
}

at::Tensor share_backend_data(const at::Tensor& stand_in) {
  const Gil gil;
  return call(callbacks.share, stand_in).cast<at::Tensor>();
}

} // namespace tarry

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace tarry;
  register_hooks();
  bind_device(m);
  bind_optimizer(m);
  bind_program(m);
  bind_custom_op(m);
  bind_replay(m);
  bind_settings(m);
  bind_counters(m);
  bind_values(m);
  bind_steps(m);
  bind_serving(m);
  bind_event_log(m);
  bind_batch(m);
}
