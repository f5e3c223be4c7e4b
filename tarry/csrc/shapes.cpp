// Shape inference, for each new combination of argument types and constants. What is usual is told at once (usual.h). Otherwise the
// operator is run once on meta tensors.
// Where there is no meta kernel, or it refuses, the operator is run on zeros on the CPU: that tells the shape too, and if the
// call is wrong it raises the very error that eager PyTorch raises. Small calls of operators whose meta kernels are known to be
// lenient (about dtypes, dimensions, overlapping memory) are run there first, so that a mistake surfaces at its line; and it is
// quick: a meta kernel in Python takes longer than a small call. For others, there may be a rule in C++ (meta_rules.h).
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/strides.h>
#include <torch/csrc/Exceptions.h>

#include "record.h"

namespace tarry {
namespace {

struct Probe {
  explicit Probe(const Operator& op, c10::Device device) : op(op), device(device) {
    for (const c10::Argument& result : op.handle.schema().returns()) {
      declares_views = declares_views || (!op.has(kListed) && result.alias_info() && !result.alias_info()->isWrite());
    }
  }

  const Operator& op;
  const c10::Device device;
  std::vector<at::Tensor> tensors; // stand-ins in the order of the tensor arguments
  std::vector<bool> is_mutable;
  std::vector<size_t> argument_of; // the position of each in the schema
  size_t current_argument = 0;
  bool declares_views = false;

  at::Tensor stand_in(const at::Tensor& tensor, bool mutable_argument) {
    const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (wrapped) {
      return tensor;
    }
    const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(device);
    const at::Tensor result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    if (!device.is_meta()) {
      fill(result);
    }
    tensors.push_back(result);
    is_mutable.push_back(mutable_argument);
    argument_of.push_back(current_argument);
    return result;
  }

  // Zeros are valid indices, ones are valid divisors.
  void fill(const at::Tensor& tensor) const {
    if (op.has(kPointwise) && c10::isIntegralType(tensor.scalar_type(), true)) {
      tensor.fill_(1);
    } else if (tensor.is_cpu()) {
      std::memset(tensor.mutable_data_ptr(), 0, tensor.storage().nbytes());
    } else {
      tensor.zero_();
    }
  }

  c10::IValue stand_in(const c10::IValue& value, bool mutable_argument) {
    if (value.isTensor()) {
      return value.toTensor().defined() ? stand_in(value.toTensor(), mutable_argument) : value;
    }
    return value;
  }

  c10::IValue argument(const c10::IValue& value, const Argument& declared) {
    switch (declared.kind) {
      case ArgKind::Tensor:
        return stand_in(value, declared.is_mutable);
      case ArgKind::TensorList: {
        if (value.isNone()) {
          return value;
        }
        auto copy = value.toList().copy();
        for (size_t i = 0; i < copy.size(); ++i) {
          copy.set(i, stand_in(copy.get(i), declared.is_mutable));
        }
        return copy;
      }
      case ArgKind::Generator:
        return c10::IValue();
      default:
        if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
          return device;
        }
        return value;
    }
  }

  // Which argument a result of a custom operator looks at, if its schema says that it may be a view.
  std::optional<uint32_t> viewed(const at::Tensor& result) const {
    if (!declares_views) {
      return std::nullopt;
    }
    for (uint32_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        TORCH_CHECK(
            tensors[i].scalar_type() == result.scalar_type(),
            "tarry: ", op.name, " gives a view of another dtype than its argument's, which cannot be recorded. Return a copy, and "
            "declare it without an alias annotation.");
        return i;
      }
    }
    return std::nullopt;
  }

  torch::jit::Stack run(c10::ArrayRef<c10::IValue> arguments, const c10::KernelFunction* rule = nullptr) {
    torch::jit::Stack stack;
    stack.reserve(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      current_argument = i;
      stack.push_back(argument(arguments[i], op.arguments[i]));
    }
    PlainDispatch plain;
    if (rule) {
      rule->callBoxed(op.handle, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } else {
      op.handle.callBoxed(&stack);
    }
    return stack;
  }
};

const Layout* output_layout(const at::Tensor& tensor) {
  const Layout* layout = intern_layout(tensor.scalar_type(), tensor.sizes(), tensor.strides(), 0);
  if (layout->dense) {
    return layout;
  }
  return intern_layout(tensor.scalar_type(), tensor.sizes(), c10::contiguous_strides(tensor.sizes()), 0);
}

// `alias`: what the schema says of this result, if it is an argument that was written to.
void describe_result(
    const c10::IValue& value, const c10::AliasInfo* alias, const Probe& probe, Signature& signature) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      signature.items.push_back({Signature::Return::Undefined, 0, {}});
      return;
    }
    TORCH_CHECK(
        tensor.layout() == c10::kStrided,
        "tarry: ", probe.op.name, " gives a ", tensor.layout(), " tensor; tarry supports strided (dense) tensors only. ",
        "Run this part on the CPU.");
    if (alias) {
      const auto& declared = probe.op.handle.schema().arguments();
      for (uint32_t i = 0; i < probe.tensors.size(); ++i) {
        // Some meta kernels give a new tensor where the schema says that it is the argument: the schema is right.
        const auto* written = declared[probe.argument_of[i]].alias_info();
        if (probe.is_mutable[i] &&
            (probe.tensors[i].is_same(tensor) ||
             (probe.op.arguments[probe.argument_of[i]].kind == ArgKind::Tensor && written->beforeSets() == alias->beforeSets()))) {
          signature.items.push_back({Signature::Return::Argument, i, {}});
          return;
        }
      }
    }
    if (const auto base = probe.viewed(tensor)) {
      signature.items.push_back({Signature::Return::View, *base, {}, layout_of(tensor.unsafeGetTensorImpl())});
      return;
    }
    signature.items.push_back({Signature::Return::Fresh, static_cast<uint32_t>(signature.fresh.size()), {}});
    signature.fresh.push_back(output_layout(tensor));
  } else if (value.isTensorList()) {
    const auto list = value.toListRef();
    signature.items.push_back({Signature::Return::List, static_cast<uint32_t>(list.size()), {}});
    for (const c10::IValue& item : list) {
      describe_result(item, alias, probe, signature);
    }
  } else {
    signature.items.push_back({Signature::Return::Constant, 0, value});
  }
}

std::unique_ptr<Signature> describe(const Probe& probe, const torch::jit::Stack& results, c10::ArrayRef<c10::IValue> arguments) {
  auto signature = std::make_unique<Signature>();
  const auto& returns = probe.op.handle.schema().returns();
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* alias = returns[i].alias_info();
    describe_result(results[i], alias && alias->isWrite() ? alias : nullptr, probe, *signature);
  }
  if (probe.declares_views) {
    bool any = false;
    for (const Signature::Item& item : signature->items) {
      any = any || item.kind == Signature::Return::View;
    }
    signature->only_views = any;
    TORCH_CHECK(
        !any || (signature->fresh.empty() && !probe.op.mutates),
        "tarry: ", probe.op.name, " gives a view and computes something as well, which cannot be recorded. Make two operators of it.");
  }
  if (!probe.op.mutates) {
    return signature;
  }
  bool any = false;
  size_t k = 0;
  auto compare = [&](const c10::IValue& value, bool is_mutable) {
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
      return;
    }
    const at::Tensor& now = probe.tensors[k++];
    if (!is_mutable) {
      return;
    }
    const at::Tensor& before = value.toTensor();
    const bool changed = now.sizes() != before.sizes() || now.strides() != before.strides();
    const Layout* layout = changed ? layout_of(now.unsafeGetTensorImpl()) : nullptr;
    signature->resized.push_back(layout);
    signature->runs_eagerly = signature->runs_eagerly || (changed && (before.numel() != 0 || !layout->dense));
    any = any || changed;
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Argument& declared = probe.op.arguments[i];
    if (declared.kind == ArgKind::Tensor) {
      compare(arguments[i], declared.is_mutable);
    } else if (declared.kind == ArgKind::TensorList && !arguments[i].isNone()) {
      for (const c10::IValue& item : arguments[i].toListRef()) {
        compare(item, declared.is_mutable);
      }
    }
  }
  if (!any) {
    signature->resized.clear();
  }
  return signature;
}

// Runs the call, or says in `error` why it could not be run.
std::unique_ptr<Signature> try_on(
    c10::Device device, const Operator& op, c10::ArrayRef<c10::IValue> arguments, std::exception_ptr& error) {
  Probe probe(op, device);
  try {
    return describe(probe, probe.run(arguments), arguments);
  } catch (python_error& python) {
    python.persist(); // a Python meta kernel raised; keep the exception with the C++ one
    error = std::current_exception();
  } catch (...) {
    error = std::current_exception();
  }
  return nullptr;
}

// Of a kernel in Python: it raised NotImplementedError, or called get_ctx(). That makes sizes that depend on data, which only
// fake tensors can have; asked for one on meta tensors, PyTorch raises an error that names it (2.11, 2.13).
bool is_not_implemented(PyObject* type, const char* message) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  const bool matches = PyErr_GivenExceptionMatches(type, PyExc_NotImplementedError) != 0;
  PyGILState_Release(gil);
  return matches || std::string(message).find("get_ctx()") != std::string::npos;
}

bool is_not_implemented(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::NotImplementedError&) {
    return true;
  } catch (const python_error& python) {
    return is_not_implemented(python.type, python.what());
  } catch (const pybind11::error_already_set& python) {
    return is_not_implemented(python.type().ptr(), python.what());
  } catch (...) {
    return false;
  }
}

// What the rule in C++ says, if it can tell.
std::unique_ptr<Signature> try_rule(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (!op.rule) {
    return nullptr;
  }
  Probe probe(op, c10::Device(c10::kMeta));
  try {
    const torch::jit::Stack results = probe.run(arguments, op.rule);
    const bool told = std::all_of(
        results.begin(), results.end(), [](const c10::IValue& result) { return !result.isTensor() || result.toTensor().defined(); });
    return told ? describe(probe, results, arguments) : nullptr;
  } catch (const c10::Error&) {
    return nullptr;
  }
}

std::atomic<int64_t> small_call{1 << 16}; // elements

template <typename Look>
void for_each_tensor(const Operator& op, c10::ArrayRef<c10::IValue> arguments, const Look& look) {
  auto see = [&](const c10::IValue& value, bool is_mutable) {
    if (value.isTensor() && value.toTensor().defined()) {
      look(value.toTensor(), is_mutable);
    }
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.arguments[i].kind == ArgKind::Tensor) {
      see(arguments[i], op.arguments[i].is_mutable);
    } else if (op.arguments[i].kind == ArgKind::TensorList && !arguments[i].isNone()) {
      for (const c10::IValue& item : arguments[i].toListRef()) {
        see(item, op.arguments[i].is_mutable);
      }
    }
  }
}

bool is_small(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  int64_t elements = 0;
  for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool /*is_mutable*/) { elements += tensor.numel(); });
  return elements <= small_call.load(std::memory_order_relaxed);
}

// Convolutions keep channels_last on every real device; their meta kernel does not know of ours.
void keep_memory_format(const Operator& op, c10::ArrayRef<c10::IValue> arguments, Signature& signature) {
  if (op.name != "aten::convolution" || signature.fresh.empty()) {
    return;
  }
  const Layout* layout = signature.fresh[0];
  for (const int i : {0, 1}) {
    const auto format = arguments[i].toTensor().suggest_memory_format();
    if (format == at::MemoryFormat::ChannelsLast && layout->sizes.size() == 4) {
      signature.fresh[0] = intern_layout(layout->dtype, layout->sizes, c10::get_channels_last_strides_2d(layout->sizes));
      return;
    }
    if (format == at::MemoryFormat::ChannelsLast3d && layout->sizes.size() == 5) {
      signature.fresh[0] = intern_layout(layout->dtype, layout->sizes, c10::get_channels_last_strides_3d(layout->sizes));
      return;
    }
  }
}

// Whether a meta kernel may be believed that this call leaves its out= arguments alone and takes their dtypes. Many check less than
// the real kernels do, or something else; those of pointwise operators know about type promotion.
bool meta_suffices(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  c10::SmallVector<at::ScalarType, 4> read;
  bool usual = true;
  for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool is_mutable) { // out= arguments come last
    const bool known = std::find(read.begin(), read.end(), tensor.scalar_type()) != read.end();
    const bool promoted = op.has(kPointwise) && (!is_mutable || tensor.scalar_type() == at::kBool);
    usual = usual && (read.empty() || promoted || (known && (op.has(kPointwise) || read.size() == 1)));
    if (!known && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      read.push_back(tensor.scalar_type());
    }
  });
  return usual;
}

// Whether an argument is written to that overlaps itself, but for those that `call` resizes.
bool writes_to_overlapping(const Operator& op, c10::ArrayRef<c10::IValue> arguments, const Signature* call = nullptr) {
  bool found = false;
  size_t k = 0;
  for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool is_mutable) {
    const bool resized = is_mutable && call && !call->resized.empty() && call->resized[k];
    found = found || (is_mutable && !resized && at::has_internal_overlap(tensor) == at::MemOverlap::Yes);
    k += is_mutable;
  });
  return found;
}

struct Silence final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

// A call with out= is recorded only if it is certain what becomes of these arguments; otherwise it runs eagerly, where the real
// kernel decides (and raises, and warns) as it always does.
std::unique_ptr<Signature> infer_with_out(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  // Some kernels do not look whether what they write to overlaps itself, and write beyond its memory.
  const bool overlaps = writes_to_overlapping(op, arguments);
  const bool try_kernel = real_device().is_cpu() && is_small(op, arguments) && !op.has(kRandom) && !overlaps;
  const c10::Device device = try_kernel || (op.has(kShapeFromDevice) && !overlaps) ? real_device() : c10::Device(c10::kMeta);
  std::exception_ptr error;
  std::unique_ptr<Signature> signature;
  {
    Silence silence; // the call itself will warn
    c10::WarningUtils::WarningHandlerGuard guard(&silence);
    signature = try_on(device, op, arguments, error);
  }
  if (overlaps && error && !is_not_implemented(error)) {
    std::rethrow_exception(error);
  }
  TORCH_CHECK(
      !overlaps || (signature && !writes_to_overlapping(op, arguments, signature.get())),
      "unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please clone() ",
      "the tensor before performing the operation.");
  // Meta kernels also promise other strides for what is resized than the real ones give.
  const bool certain = try_kernel || (signature && meta_suffices(op, arguments) && (signature->resized.empty() || op.has(kPointwise)));
  if (!signature || !certain) {
    signature = std::make_unique<Signature>();
    signature->runs_eagerly = true;
  }
  return signature;
}

} // namespace

std::unique_ptr<Signature> infer_signature(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.has_out) {
    return infer_with_out(op, arguments);
  }
  if (op.usual) {
    if (auto signature = op.usual(arguments)) {
      return signature;
    }
  }
  std::exception_ptr meta_error;
  if (op.has(kShapeFromDevice)) {
    if (auto signature = try_on(real_device(), op, arguments, meta_error)) {
      return signature;
    }
  }
  std::exception_ptr refused; // by the CPU
  if (op.has(kVerify) && real_device().is_cpu() && is_small(op, arguments)) {
    if (auto signature = try_on(real_device(), op, arguments, refused)) {
      return signature;
    }
  } else if (auto signature = try_rule(op, arguments)) {
    return signature;
  }
  if (auto signature = try_on(c10::Device(c10::kMeta), op, arguments, meta_error)) {
    if (refused) {
      std::rethrow_exception(refused);
    }
    keep_memory_format(op, arguments, *signature);
    return signature;
  }
  if (!op.has(kListed) && is_not_implemented(meta_error)) {
    // A custom operator without a meta (fake) kernel: nothing says that its shapes do not depend on data.
    auto signature = std::make_unique<Signature>();
    signature->runs_eagerly = true;
    return signature;
  }
  if (op.handle.schema().name().rfind("aten::", 0) != 0) {
    std::rethrow_exception(meta_error); // its author's own error; a run on zeros would tell nothing better
  }
  std::exception_ptr cpu_error;
  if (auto signature = try_on(c10::Device(c10::kCPU), op, arguments, cpu_error)) {
    for (const Signature::Item& item : signature->items) {
      signature->runs_eagerly = signature->runs_eagerly || item.kind == Signature::Return::Constant;
    }
    return signature;
  }
  if (is_not_implemented(cpu_error) && !is_not_implemented(meta_error)) {
    std::rethrow_exception(meta_error);
  }
  if (!is_not_implemented(meta_error) || is_not_implemented(cpu_error)) {
    std::rethrow_exception(cpu_error);
  }
  // No meta kernel, and zeros are not a valid input (a singular matrix, say): only the real data can tell.
  auto signature = std::make_unique<Signature>();
  signature->runs_eagerly = true;
  return signature;
}

void set_small_call(int64_t elements) {
  small_call = elements;
}

} // namespace tarry
