// The native module, as Python sees it.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "execute/batch.h"
#include "bind/bind_device.h"
#include "bind/bind_program.h"
#include "bind/bind_replay.h"
#include "record/custom_op.h"
#include "execute/async_step.h"
#include "execute/executor.h"
#include "execute/host_value.h"
#include "core/fault.h"
#include "device/hooks.h"
#include "bind/jit.h"
#include "record/host_mode.h"
#include "record/memory.h"
#include "core/numbers.h"
#include "core/switches.h"
#include "execute/outline.h"
#include "record/provenance.h"
#include "execute/raw_graph.h"
#include "record/probe.h"
#include "execute/serve.h"
#include "record/record.h"

namespace py = pybind11;

namespace tarry {
namespace {

py::tuple key_of(const Hash128& hash) {
  return py::make_tuple(hash.hi, hash.lo);
}

// A Python object that may be let go of on any thread.
std::shared_ptr<void> kept_object(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* kept) {
    py::gil_scoped_acquire acquire;
    Py_DECREF(static_cast<PyObject*>(kept));
  });
}

void recover_from(Batch& batch, py::object error, const std::vector<int64_t>& update, bool lost) {
  WriteLog log;
  if (lost) {
    for (const at::Tensor& input : batch.own_inputs()) {
      if (input.defined() && !input.is_meta()) {
        log.add(input);
      }
    }
  }
  try {
    PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
    throw python_error();
  } catch (...) {
    batch.recover(update, log, current_lane());
    PyErr_Clear();
  }
}

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

DeviceState& state_of(int device) {
  return device_state(static_cast<c10::DeviceIndex>(device));
}

void bind_settings(py::module& m) {
  m.def("register_operator", &register_operator);
  m.def(
      "set_callbacks",
      [](py::object sync, py::object batch, py::object failure, py::object diagnose, py::object fallback, py::object read) {
        set_callbacks({sync.ptr(), batch.ptr(), failure.ptr(), diagnose.ptr(), fallback.ptr(), read.ptr()});
      });
  m.def("set_real_device", [](int index, const std::string& device) {
    set_real_device(static_cast<c10::DeviceIndex>(index), c10::Device(device));
  });
  m.def("real_device", [](int index) { return real_device(static_cast<c10::DeviceIndex>(index)).str(); }, py::arg("index") = -1);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("set_max_pending", &set_max_pending);
  m.def("set_small_call", &set_small_call);
  m.def("set_max_pending_bytes", &set_max_pending_bytes);
  m.def("set_forced_eager", &set_forced_eager);
  m.def("set_keeps_frames", &set_keeps_frames);
  m.def("set_host_mode", &set_host_mode);
  m.def("set_region", &set_region);
  m.def("add_internal_path", &add_internal_path);
  m.def("current_site", [] { return site_location(current_site()); });
}

py::dict counters_of(int device) {
  auto& state = state_of(device);
  std::lock_guard<std::mutex> guard(state.mutex);
  py::dict result;
  result["record"] = state.recorded;
  result["node_reuse"] = state.reused;
  const Executor& executor = *state.executor;
  if (executor.speculator.used || executor.speculator.missed) {
    result["run_ahead"] = executor.speculator.used.load();
    result["run_ahead_miss"] = executor.speculator.missed.load();
  }
  if (executor.counts.submitted) {
    result["handed_over"] = executor.counts.submitted;
    result["overlapped"] = executor.counts.overlapped;
  }
  const ServedCounts& served = executor.served;
  const std::pair<const char*, uint64_t> steps[] = {
      {"sync", served.interpreted + served.run},
      {"execute", served.interpreted + served.run},
      {"reference", served.interpreted},
      {"cache_hit", served.run}};
  for (const auto& [name, count] : steps) {
    if (count) {
      result[name] = count;
    }
  }
  std::map<std::string, uint64_t> fallbacks;
  for (const auto& [place, count] : executor.served.fallbacks) {
    fallbacks["fallback/" + place.first->name] += count;
  }
  for (const auto& [name, count] : fallbacks) {
    result[name.c_str()] = count;
  }
  if (executor.counts.no_cores) {
    result["run_ahead_off"] = executor.counts.no_cores;
  }
  return result;
}

void bind_counters(py::module& m) {
  m.def("counters", &counters_of);
  m.def("reset_counters", [](int device) {
    auto& state = state_of(device);
    std::lock_guard<std::mutex> guard(state.mutex);
    state.recorded = state.reused = 0;
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
        for (const auto& [place, count] : state.executor->served.fallbacks) {
          const auto [file, line] = site_location(place.second);
          found.append(py::make_tuple(place.first->name, file, line, count));
        }
        return found;
      },
      "Operators that ran eagerly, as counted here: name, file, line, how often.");
  m.def(
      "seconds",
      [](int device) {
        auto& state = state_of(device);
        std::lock_guard<std::mutex> guard(state.mutex);
        const ServedCounts& served = state.executor->served;
        py::dict result;
        if (served.interpreted + served.run) {
          result["sync"] = served.sync_seconds;
          result["execute"] = served.execute_seconds;
        }
        if (!served.fallbacks.empty()) {
          result["fallback"] = served.fallback_seconds;
        }
        return result;
      },
      "Time that the native part has spent on what it counts.");
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
    return materialise(tensor, "sync").detach(); // see Batch::inputs
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
  m.def("swap_storages", [](const at::Tensor& left, const at::Tensor& right) {
    py::gil_scoped_release release;
    swap_storages(left, right);
  });
  m.def("is_pending", [](const at::Tensor& tensor) {
    TORCH_CHECK(is_tarry(tensor), "tarry: expected a tensor on device 'tarry', but got one on '", tensor.device(), "'");
    TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
    TORCH_CHECK(storage, "tarry: this tensor has no storage on device 'tarry' (it is sparse, say)");
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    return static_cast<bool>(storage->value.node);
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
      [](const std::string& who, bool watches) {
        static const std::unordered_map<std::string, Watcher> watchers{
            {"subscriber", Watcher::Subscriber},
            {"observer", Watcher::Observer},
            {"closure", Watcher::Closure},
            {"fallback", Watcher::Fallback},
            {"writer", Watcher::Writer}};
        set_watched(watchers.at(who), watches);
      },
      "Whether somebody (see Watcher) has to see each step as it happens: Python then serves all of them.");
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
  m.def("forget_program", &forget_program);
  m.def("forget_programs", &forget_programs);
  m.def("was_served", &was_served, "Whether the program of a structure was run without Python since that was last asked.");
}

void bind_structures(py::module& m) {
  py::class_<Outline>(m, "Outline")
      .def_property_readonly("key", [](const Outline& outline) { return key_of(outline.key); })
      .def_property_readonly("integers", [](const Outline& outline) { return outline.integers; })
      .def_property_readonly("ranks", [](const Outline& outline) { return outline.ranks; })
      .def_property_readonly("comes_again", [](const Outline& outline) { return outline.comes_again; })
      .def("same", &Outline::same, "Whether they differ in integers only.");
  py::class_<SizeTemplate>(m, "SizeTemplate")
      .def(py::init([](std::vector<uint32_t> symbols, const RawPolynomials& polynomials, std::vector<uint32_t> places) {
        return SizeTemplate{std::move(symbols), to_polynomials(polynomials), std::move(places)};
      }))
      .def("match", [](const SizeTemplate& self, const Outline& outline) { return self.match(outline.integers); });
  py::class_<Structure, std::shared_ptr<Structure>>(m, "Structure")
      .def_property(
          "key", [](const Structure& s) { return key_of(s.key); },
          [](Structure& s, std::pair<uint64_t, uint64_t> key) { std::tie(s.key.hi, s.key.lo) = key; }, "Tests make keys collide.");
}

py::list numbers_of(const Batch& batch) {
  py::list result;
  for (const c10::IValue& number : batch.numbers()) {
    result.append(to_python(number));
  }
  return result;
}

void commit(Batch& batch, std::vector<std::optional<at::Tensor>> results) {
  std::vector<at::Tensor> outputs;
  for (auto& result : results) {
    outputs.push_back(result ? std::move(*result) : at::Tensor());
  }
  py::gil_scoped_release release;
  batch.commit_results(std::move(outputs));
}

void bind_batch(py::module& m) {
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch")
      .def_property_readonly("key", [](const Batch& batch) { return key_of(batch.key); })
      .def_property_readonly("num_operations", &Batch::operations)
      .def_property_readonly("num_inputs", &Batch::leaves)
      .def_property_readonly(
          "is_small", [](const Batch& batch) { return is_small(batch); }, "No program pays for it: see set_small_step.")
      .def("place", [](const Batch& batch) { return key_of(batch.place()); })
      .def_property_readonly("num_outputs", [](const Batch& batch) { return batch.roots.size(); })
      .def_property_readonly("device", [](const Batch& batch) { return static_cast<int>(batch.state->index); })
      .def("switches_are_set", [](const Batch& batch) { return are_recorded_switches(batch); })
      .def(
          "inputs",
          [](Batch& batch, const std::vector<int64_t>& update, bool preserve) {
            batch.state->executor->speculator.drop();
            return batch.inputs(update, preserve);
          },
          py::arg("update") = std::vector<int64_t>(), py::arg("preserve") = false)
      .def(
          "recover", &recover_from, py::arg("error"), py::arg("update"), py::arg("lost"),
          "A program in Python has failed. `lost`: inputs that it updates where they are may be half-written.")
      .def("own_inputs", &Batch::own_inputs)
      .def("numbers", &numbers_of)
      .def(
          "raw",
          [](const Batch& batch, const std::optional<std::vector<int64_t>>& integers) {
            return raw_graph(batch, integers ? &*integers : nullptr);
          },
          py::arg("integers") = py::none(), "The graph as plain data; with other integers than its own, if given (see Outline).")
      .def("outline", [](const Batch& batch) { return std::make_unique<Outline>(batch); })
      .def("positions", &Batch::positions)
      .def("structure", [](const Batch& batch) { return std::make_shared<Structure>(batch); })
      .def("matches", &Batch::matches)
      .def_property(
          "unawaited", [](const Batch& batch) { return batch.mode == Batch::Mode::MayOverlap; },
          [](Batch& batch, bool unawaited) { batch.mode = unawaited ? Batch::Mode::MayOverlap : Batch::Mode::Awaited; },
          "No thread needs a value of it now.")
      .def(
          "run",
          [](const std::shared_ptr<Batch>& batch, const std::shared_ptr<Program>& program, const std::vector<int64_t>& update,
             const std::vector<int64_t>& symbols, bool preserve, py::object diagnose) {
            std::shared_ptr<void> kept = batch->mode == Batch::Mode::MayOverlap ? kept_object(std::move(diagnose)) : nullptr;
            py::gil_scoped_release release;
            return batch->state->executor->run(batch, program, update, symbols, preserve, std::move(kept));
          },
          py::arg("program"), py::arg("update"), py::arg("symbols"), py::arg("preserve"), py::arg("diagnose"))
      .def("interpret", &Batch::interpret, py::arg("interruptible"), py::call_guard<py::gil_scoped_release>())
      .def("commit", &commit);
  m.def("collect", [](int device) { return collect(state_of(device)); });
  m.def("peek", &peek);
  py::class_<PlainDispatch>(m, "PlainDispatch", "While it lives, operators of this thread are kernels and nothing else.")
      .def(py::init<>());
}

} // namespace

PyObject* batch_object(std::shared_ptr<Batch> batch) {
  return py::cast(std::move(batch)).release().ptr();
}

PyObject* rethrower(std::exception_ptr error) {
  return py::cpp_function([error = std::move(error)] { std::rethrow_exception(error); }).release().ptr();
}

} // namespace tarry

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace tarry;
  register_hooks();
  bind_device(m);
  bind_program(m);
  bind_custom_op(m);
  bind_replay(m);
  bind_settings(m);
  bind_counters(m);
  bind_values(m);
  bind_steps(m);
  bind_serving(m);
  bind_structures(m);
  bind_batch(m);
}
