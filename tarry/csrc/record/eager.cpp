// Running an operator at once on the real device, and the calls into the Python runtime.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <chrono>

#include "core/generator.h"
#include "core/gil.h"
#include "device/hooks.h"
#include "execute/executor.h"
#include "execute/serve.h"
#include "record/host_mode.h"
#include "record/provenance.h"
#include "record/record.h"

namespace tarry {
namespace {

Callbacks callbacks; // kept for the life of the process

bool keeps_frames = false;

// Takes the runtime's frames out of the error that Python has set: its traceback then ends at the user's line. An assertion of
// tarry's own keeps them.
void forget_frames() {
  if (keeps_frames || PyErr_ExceptionMatches(PyExc_AssertionError)) {
    return;
  }
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(traceback);
  PyException_SetTraceback(value, Py_None);
  PyErr_Restore(type, value, nullptr);
}

// Takes over the arguments, and hands out a new reference.
PyObject* call(PyObject* callback, PyObject* arguments) {
  PyObject* result = callback && arguments ? PyObject_CallObject(callback, arguments) : nullptr;
  Py_XDECREF(arguments);
  if (!result) {
    TORCH_CHECK(callback, "tarry: the runtime is not initialised; import tarry first");
    forget_frames();
    throw_python_error();
  }
  return result;
}

// Where a call takes place: the device of its first tensor that is on one, else the one it asks for, else the current one.
DeviceState& device_of(c10::ArrayRef<c10::IValue> arguments) {
  c10::DeviceIndex asked = -1;
  auto state = [](const c10::IValue& value) -> DeviceState* {
    if (!value.isTensor() || !value.toTensor().defined() || !is_tarry(value.toTensor())) {
      return nullptr;
    }
    TarryStorage* storage = storage_of(value.toTensor().unsafeGetTensorImpl());
    return storage ? storage->state : nullptr;
  };
  for (const c10::IValue& argument : arguments) {
    if (DeviceState* found = state(argument)) {
      return *found;
    }
    if (argument.isList()) {
      for (const c10::IValue& item : argument.toListRef()) {
        if (DeviceState* found = state(item)) {
          return *found;
        }
      }
    }
    if (argument.isDevice() && argument.toDevice().type() == c10::DeviceType::PrivateUse1) {
      asked = argument.toDevice().index();
    }
  }
  return device_state(asked);
}

// Real stand-ins for the arguments, in the order of the tensors met.
struct RealArguments {
  const char* reason;
  c10::Device device;
  std::vector<at::Tensor> originals;
  std::vector<at::Tensor> real;
  std::vector<bool> is_read;
  struct Written {
    TarryStorage* storage;
    at::Tensor data; // the storage's contents, whole
    size_t nbytes;   // of its memory before the call
  };
  std::vector<Written> written;

  at::Tensor convert(const at::Tensor& tensor, bool is_mutable) {
    if (!tensor.defined() || !is_tarry(tensor)) {
      // Zero-dimensional tensors and indices may lie on the host; the real device may be another.
      if (tensor.defined() && !is_mutable && tensor.is_cpu() && !device.is_cpu() &&
          !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        return tensor.to(device);
      }
      return tensor;
    }
    for (size_t i = 0; i < originals.size(); ++i) {
      if (originals[i].is_same(tensor)) {
        is_read[i] = is_read[i] || !is_mutable;
        return real[i];
      }
    }
    // Views of one storage stay views of one buffer, which is made the storage's own once, before any view is taken.
    TarryStorage* storage = storage_of(tensor.unsafeGetTensorImpl());
    const bool seen = std::any_of(written.begin(), written.end(), [&](const Written& other) { return other.storage == storage; });
    const bool owns = is_mutable && !seen;
    const at::Tensor view = owns ? materialise_for_write(tensor, reason) : materialise(tensor, reason);
    originals.push_back(tensor);
    is_read.push_back(!is_mutable);
    real.push_back(tarry::alias(view)); // the kernel may resize it; the storage's own data keep their layout
    if (owns) {
      std::lock_guard<std::mutex> guard(storage->state->mutex);
      written.push_back({storage, storage->data, view.storage().nbytes()});
    }
    return real.back();
  }

  // A kernel that resizes what it has still to read computes with anything. Those that PyTorch generates have a result before.
  bool read_after_resizing(const Operator& op) const {
    for (size_t i = 0; i < real.size(); ++i) {
      if (is_read[i] && real[i].sizes() != originals[i].sizes()) {
        return !op.handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
      }
    }
    return false;
  }

  // What the kernel has done to sizes, strides and memory is done to the arguments and their storages. Also after an error: eager
  // PyTorch leaves an argument resized, too.
  void write_back(DeviceState& state) {
    std::vector<const c10::StorageImpl*> memory;
    for (Written& each : written) {
      memory.push_back(each.data.storage().unsafeGetStorageImpl());
      const size_t nbytes = each.data.storage().nbytes();
      const Layout* home = nbytes == each.nbytes ? each.storage->home : flat_home(each.storage->home->dtype, nbytes);
      // Another tensor than before: what was launched early while the kernel wrote may have read anything, and must not be taken
      // for a reader of the result.
      at::Tensor renewed = home == each.storage->home ? tarry::alias(each.data) : view_as_layout(each.data, home);
      Graveyard graveyard;
      std::lock_guard<std::mutex> guard(each.storage->state->mutex);
      if (each.storage->data.is_same(each.data)) {
        graveyard.tensors.push_back(std::exchange(each.storage->data, std::move(renewed)));
        if (home != each.storage->home) {
          each.storage->become(home);
        }
      }
      graveyard.tensors.push_back(std::move(each.data));
    }
    for (size_t i = 0; i < real.size(); ++i) {
      auto* impl = originals[i].unsafeGetTensorImpl();
      const auto* before = storage_of(impl);
      const auto at = std::find_if(written.begin(), written.end(), [&](const Written& each) { return each.storage == before; });
      if (at == written.end()) {
        continue;
      }
      if (real[i].storage().unsafeGetStorageImpl() != memory[at - written.begin()]) {
        const at::Tensor moved = wrap_real(state, real[i]); // the kernel has set_() it to other memory
        impl->set_storage_keep_dtype(moved.storage());
        impl->set_sizes_and_strides(moved.sizes(), moved.strides(), moved.storage_offset());
      } else if (!layout_of(real[i].unsafeGetTensorImpl())->describes(impl)) {
        impl->set_sizes_and_strides(real[i].sizes(), real[i].strides(), real[i].storage_offset());
      }
    }
  }

  c10::IValue convert(const c10::IValue& value, const Argument& declared) {
    if (value.isTensor()) {
      return convert(value.toTensor(), declared.is_mutable);
    }
    if (declared.kind == ArgKind::TensorList && value.isList()) {
      auto copy = value.toList().copy();
      for (size_t i = 0; i < copy.size(); ++i) {
        const c10::IValue item = copy.get(i);
        if (item.isTensor()) {
          copy.set(i, convert(item.toTensor(), declared.is_mutable));
        }
      }
      return copy;
    }
    return value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1 ? c10::IValue(device) : value;
  }
};

c10::IValue wrap_result(const c10::IValue& value, DeviceState& state, const RealArguments& arguments, const Operator& op) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return value;
    }
    for (size_t i = 0; i < arguments.real.size(); ++i) {
      if (arguments.real[i].is_same(tensor)) {
        return arguments.originals[i];
      }
    }
    TORCH_CHECK(
        tensor.layout() == c10::kStrided, "tarry: ", op.name, " gives a ", tensor.layout(),
        " tensor; tarry supports strided (dense) tensors only. ", "Run this part on the CPU.");
    return wrap_real(state, tensor);
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& item : value.toListRef()) {
      list.push_back(wrap_result(item, state, arguments, op).toTensor());
    }
    return list;
  }
  return value;
}

} // namespace

void set_keeps_frames(bool keeps) {
  keeps_frames = keeps;
}

void set_callbacks(const Callbacks& given) {
  for (PyObject* callback : {given.sync, given.batch, given.failure, given.diagnose, given.fallback, given.read}) {
    Py_XINCREF(callback);
  }
  callbacks = given;
}

namespace {

void call_runtime(c10::DeviceIndex device, const char* reason, bool awaited) {
  check_fork(); // before any lock that the parent may have held
  Gil gil;
  Py_DECREF(call(callbacks.sync, Py_BuildValue("(isN)", static_cast<int>(device), reason, PyBool_FromLong(awaited))));
}

} // namespace

void request_sync(c10::DeviceIndex device, const char* reason) {
  check_fork();
  if (!serve(device_state(device), reason, /*awaited=*/true)) {
    call_runtime(device, reason, /*awaited=*/true);
  }
}

void hand_over(std::shared_ptr<Batch> batch, const char* reason) {
  Gil gil;
  Py_DECREF(call(callbacks.batch, Py_BuildValue("(Ns)", batch_object(std::move(batch)), reason)));
}

void diagnose(std::shared_ptr<Batch> batch, void* diagnose, std::exception_ptr error) {
  Gil gil;
  PyObject* const arguments = Py_BuildValue(
      "(NON)", batch_object(std::move(batch)), static_cast<PyObject*>(diagnose), rethrower(std::move(error)));
  Py_DECREF(call(callbacks.diagnose, arguments));
}

void report_failure(const char* error) {
  Gil gil;
  Py_DECREF(call(callbacks.failure, Py_BuildValue("(s)", error)));
}

void request_cut(c10::DeviceIndex device, const char* reason) {
  if (serve(device_state(device), reason, /*awaited=*/false)) {
    return;
  }
  call_runtime(device, reason, /*awaited=*/false);
}

at::Tensor read_backend_data(const at::Tensor& stand_in) {
  Gil gil;
  THPObjectPtr result(call(callbacks.read, Py_BuildValue("(N)", THPVariable_Wrap(stand_in))));
  return THPVariable_Unpack(result.get()).detach(); // see Batch::inputs
}

namespace {

// Asks whether the operator may run eagerly, before it does; says afterwards what it took, in seconds.
void report_fallback(DeviceState& state, const Operator& op, const char* reason, uint32_t site, double seconds) {
  if (C10_LIKELY(!is_watched())) {
    if (seconds >= 0) {
      std::lock_guard<std::mutex> guard(state.mutex);
      ++state.executor->served.fallbacks[{&op, site}];
      state.executor->served.fallback_seconds += seconds;
    }
    return;
  }
  Gil gil;
  auto [file, line] = site_location(site);
  Py_DECREF(call(callbacks.fallback, Py_BuildValue("(sssid)", op.name.c_str(), reason, file.c_str(), line, seconds)));
}

} // namespace

void run_eagerly(const Operator& op, torch::jit::Stack* stack, const char* reason) {
  const auto start = std::chrono::steady_clock::now();
  const uint32_t site = current_site();
  const size_t count = op.arguments.size();
  const auto arguments = torch::jit::last(*stack, count);
  DeviceState* const state = &device_of(arguments);
  report_fallback(*state, op, reason, site, -1);
  RealArguments real{reason, real_device(state->index), {}, {}, {}, {}};
  std::optional<at::Generator> given;
  torch::jit::Stack call_stack;
  // The written ones first: they may get a new buffer.
  for (const bool writes : {true, false}) {
    for (size_t i = 0; i < count; ++i) {
      if (op.arguments[i].is_mutable == writes) {
        real.convert(arguments[i], op.arguments[i]);
      }
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (op.arguments[i].kind == ArgKind::Generator) {
      if (!arguments[i].isNone()) {
        given = arguments[i].toGenerator();
      }
      call_stack.emplace_back();
    } else {
      call_stack.push_back(real.convert(arguments[i], op.arguments[i]));
    }
  }
  try {
    PlainDispatch plain;
    std::optional<SeededCall> seeded;
    if (draws_on_host(op, arguments)) {
      if (given) {
        call_stack[op.generator_argument] = *given;
      }
    } else if (op.draws(arguments)) {
      seeded.emplace(op, draw_seed(given, state->index), call_stack, real.device);
    }
    op.handle.callBoxed(&call_stack);
  } catch (...) {
    real.write_back(*state);
    throw;
  }
  const bool undefined = real.read_after_resizing(op);
  real.write_back(*state);
  TORCH_CHECK(
      !undefined, op.name,
      ": an out= argument of the wrong shape is an input, too, and was resized before it was read. Its contents "
      "are undefined; give another tensor as out=");
  torch::jit::Stack results;
  for (const c10::IValue& value : call_stack) {
    results.push_back(wrap_result(value, *state, real, op));
  }
  torch::jit::drop(*stack, count);
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
  report_fallback(*state, op, reason, site, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

} // namespace tarry
