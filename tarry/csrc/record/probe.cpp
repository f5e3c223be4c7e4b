#include "record/probe.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <numeric>

#include "core/generator.h"
#include "record/opaque.h"

namespace tarry {

std::optional<std::pair<int64_t, int64_t>> extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return std::nullopt;
  }
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const auto item = static_cast<int64_t>(tensor.itemsize());
  return std::make_pair(tensor.storage_offset() * item, (last + 1) * item - 1);
}

namespace {

// Keeps warnings instead of showing them.
struct Warnings final : c10::WarningHandler {
  std::vector<c10::Warning> kept;
  void process(const c10::Warning& warning) override { kept.push_back(warning); }
};

struct Probe {
  explicit Probe(const Operator& op, c10::Device device, StandIns form = {}) : op(op), device(device), form(form) {
    for (const c10::Argument& result : op.handle.schema().returns()) {
      declares_views = declares_views || (!op.has(kListed) && result.alias_info() && !result.alias_info()->isWrite());
    }
  }

  const Operator& op;
  const c10::Device device;
  const StandIns form;
  struct Memory {
    const c10::StorageImpl* storage;
    int64_t first, last; // byte
    at::Tensor bytes;
  };
  std::vector<Memory> memories;    // of shared stand-ins
  std::vector<at::Tensor> tensors; // stand-ins in the order of the tensor arguments
  std::vector<bool> is_mutable;
  std::vector<size_t> argument_of; // the position of each in the schema
  size_t current_argument = 0;
  bool declares_views = false;
  std::optional<int64_t> ignored; // an index that is right whatever the sizes are (nll_loss)

  at::Tensor stand_in(const at::Tensor& tensor, bool mutable_argument) {
    const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (wrapped) {
      return tensor;
    }
    const at::ScalarType given = tensor.scalar_type();
    const at::ScalarType common = given == at::kBool ? given : at::isIntegralType(given, false) ? at::kLong : at::kFloat;
    const auto options = at::TensorOptions().dtype(form.common_dtypes ? common : given).device(device);
    at::Tensor result;
    if (form.most != 0) {
      c10::DimVector sizes(tensor.sizes());
      std::for_each(sizes.begin(), sizes.end(), [&](int64_t& size) { size = std::min(size, form.most); });
      result = at::empty(sizes, options);
    } else if (form.shared && is_tarry(tensor) && tensor.numel() > 0) {
      result = in_shared_memory(tensor);
    } else {
      result = at::empty_strided(tensor.sizes(), tensor.strides(), options);
    }
    if (!device.is_meta()) {
      fill(result);
    }
    tensors.push_back(result);
    is_mutable.push_back(mutable_argument);
    argument_of.push_back(current_argument);
    return result;
  }

  void share(const at::Tensor& tensor) {
    const auto touched = is_tarry(tensor) ? extent(tensor) : std::nullopt;
    if (!touched) {
      return;
    }
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    auto it = std::find_if(memories.begin(), memories.end(), [&](const Memory& memory) { return memory.storage == storage; });
    if (it == memories.end()) {
      it = memories.insert(it, {storage, touched->first, touched->second, {}});
    }
    it->first = std::min(it->first, touched->first);
    it->last = std::max(it->last, touched->second);
  }

  at::Tensor in_shared_memory(const at::Tensor& tensor) {
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    Memory& memory = *std::find_if(memories.begin(), memories.end(), [&](const Memory& m) { return m.storage == storage; });
    const int64_t first = memory.first / 16 * 16; // aligned for every dtype
    if (!memory.bytes.defined()) {
      memory.bytes = at::zeros({memory.last + 1 - first}, at::TensorOptions().dtype(at::kByte).device(device));
    }
    const auto item = static_cast<int64_t>(tensor.itemsize());
    return at::empty({0}, memory.bytes.options().dtype(tensor.scalar_type()))
        .set_(memory.bytes.storage(), tensor.storage_offset() - first / item, tensor.sizes(), tensor.strides());
  }

  // Zeros are valid indices, ones are valid divisors.
  void fill(const at::Tensor& tensor) const {
    const auto dtype = tensor.scalar_type();
    if (form.chosen >= 0 && (dtype == at::kBool || dtype == at::kByte)) {
      const at::Tensor mask = at::zeros({tensor.numel()}, tensor.options());
      mask.narrow(0, 0, std::min(form.chosen, tensor.numel())).fill_(1);
      tensor.copy_(mask.view(tensor.sizes()));
    } else if (ignored && dtype == at::kLong) {
      tensor.fill_(*ignored);
    } else if (form.ones || (op.has(kPointwise) && c10::isIntegralType(tensor.scalar_type(), true))) {
      tensor.fill_(1);
    } else if (tensor.is_cpu() && !form.shared && tensor.numel() != 0) {
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
            tensors[i].scalar_type() == result.scalar_type(), "tarry: ", op.name,
            " gives a view of another dtype than its argument's, which cannot be recorded. Return a copy, and "
            "declare it without an alias annotation.");
        return i;
      }
    }
    return std::nullopt;
  }

  torch::jit::Stack run(Arguments arguments, const c10::KernelFunction* kernel = nullptr) {
    torch::jit::Stack stack;
    stack.reserve(arguments.size());
    PlainDispatch plain;
    if (form.shared) {
      for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool /*is_mutable*/) { share(tensor); });
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].isInt() && op.handle.schema().arguments()[i].name() == "ignore_index") {
        ignored = arguments[i].toInt();
      }
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      current_argument = i;
      stack.push_back(argument(arguments[i], op.arguments[i]));
    }
    std::optional<SeededCall> seeded; // the generators of the user's programs must not notice
    if (op.has(kRandom) && device.is_cpu()) {
      seeded.emplace(op, 0, stack, device);
    }
    if (kernel) {
      kernel->callBoxed(op.handle, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
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
void describe_result(const c10::IValue& value, const c10::AliasInfo* alias, const Probe& probe, Signature& signature) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      signature.items.push_back({Signature::Return::Undefined, 0, {}});
      return;
    }
    if (is_opaque(tensor)) {
      signature.runs_eagerly = true;
      return;
    }
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

std::unique_ptr<Signature> describe(const Probe& probe, const torch::jit::Stack& results, Arguments arguments) {
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
        !any || (signature->fresh.empty() && !probe.op.mutates), "tarry: ", probe.op.name,
        " gives a view and computes something as well, which cannot be recorded. Make two operators of it.");
  }
  if (!probe.op.mutates) {
    return signature;
  }
  bool any = false;
  size_t k = 0;
  for_each_tensor(probe.op, arguments, [&](const at::Tensor& before, bool is_mutable) {
    if (before.unsafeGetTensorImpl()->is_wrapped_number()) {
      return;
    }
    const at::Tensor& now = probe.tensors[k++];
    if (!is_mutable) {
      return;
    }
    const bool changed = now.sizes() != before.sizes() || now.strides() != before.strides();
    const Layout* layout = changed ? layout_of(now.unsafeGetTensorImpl()) : nullptr;
    signature->resized.push_back(layout);
    signature->runs_eagerly = signature->runs_eagerly || (changed && (before.numel() != 0 || !layout->dense));
    any = any || changed;
  });
  if (!any) {
    signature->resized.clear();
  }
  return signature;
}

} // namespace

std::unique_ptr<Signature> try_on(
    c10::Device device, const Operator& op, Arguments arguments, std::exception_ptr& error, StandIns form) {
  Probe probe(op, device, form);
  Warnings warnings;
  try {
    torch::jit::Stack results;
    {
      const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
      results = probe.run(arguments);
    }
    auto signature = describe(probe, results, arguments);
    signature->warnings = std::move(warnings.kept);
    return signature;
  } catch (...) {
    error = caught_exception();
  }
  return nullptr;
}

std::unique_ptr<Signature> try_meta_kernel(const Operator& op, Arguments arguments) {
  if (!op.meta_kernel) {
    return nullptr;
  }
  Probe probe(op, c10::Device(c10::kMeta));
  try {
    const torch::jit::Stack results = probe.run(arguments, op.meta_kernel);
    return describe(probe, results, arguments);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

std::unique_ptr<Signature> try_on_cpu(const Operator& op, Arguments arguments, std::exception_ptr& error, bool shared) {
  const c10::Device cpu(c10::kCPU);
  auto signature = try_on(cpu, op, arguments, error, {.shared = shared});
  if (signature || op.has(kPointwise)) {
    return signature;
  }
  std::exception_ptr again;
  signature = try_on(cpu, op, arguments, again, {.ones = true, .shared = shared});
  if (op.has(kHostIndices)) {
    std::vector<int64_t> counts{1};
    for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool /*is_mutable*/) {
      counts.insert(counts.end(), tensor.sizes().begin(), tensor.sizes().end());
    });
    for (size_t i = 0; !signature && i < counts.size(); ++i) {
      signature = try_on(cpu, op, arguments, again, {.shared = shared, .chosen = counts[i]});
    }
  }
  return signature;
}

// ---- the size of a call

namespace {

std::atomic<int64_t> small_call{1 << 16}; // elements that a call is given
constexpr int64_t kBearable = 1 << 22;    // elements that it may give, by bounds that are seldom reached
constexpr int64_t kPairs = 1 << 26;       // pairs of elements of two tensors: of an outer product

int64_t saturating_product(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? INT64_MAX : result;
}

int64_t broadcast_numel(const Operator& op, Arguments arguments) {
  c10::DimVector sizes; // from the last dimension on
  for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool /*is_mutable*/) {
    const auto given = tensor.sizes();
    sizes.resize(std::max(sizes.size(), given.size()), 1);
    for (size_t i = 0; i < given.size(); ++i) {
      sizes[i] = std::max(sizes[i], given[given.size() - 1 - i]);
    }
  });
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, saturating_product);
}

struct Given {
  int64_t total = 0, largest = 1, second = 1; // elements
};

Given given_elements(const Operator& op, Arguments arguments) {
  Given given;
  for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool /*is_mutable*/) {
    const int64_t numel = tensor.numel();
    // Its stand-in has the same strides: a column of a large matrix takes as much memory as the matrix.
    given.total += tensor.is_contiguous()
        ? numel
        : static_cast<int64_t>(at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), 1));
    given.second = std::max(given.second, std::min(given.largest, numel));
    given.largest = std::max(given.largest, numel);
  });
  return given;
}

} // namespace

bool is_small_call(const Operator& op, Arguments arguments) {
  const int64_t limit = small_call.load(std::memory_order_relaxed);
  const Given given = given_elements(op, arguments);
  if (op.arguments[0].is_mutable) { // in place: it gives no more than it is given
    return given.total <= limit;
  }
  if (op.has(kPointwise)) {
    return given.total <= limit && broadcast_numel(op, arguments) <= kBearable;
  }
  int64_t factor = 1;
  auto multiply = [&](const c10::IValue& value) {
    if (value.isInt()) {
      factor = saturating_product(factor, std::max<int64_t>(1, std::abs(value.toInt())));
    } else if (value.isDouble() && value.toDouble() != 0) { // of arange: a bound, or a step that may be below 1
      const double number = std::abs(value.toDouble());
      factor = saturating_product(factor, static_cast<int64_t>(std::min(std::max(number, 1 / number) + 1, 1e15)));
    }
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.arguments[i].kind == ArgKind::Constant || op.has(kShapeFromNumbers)) {
      if (arguments[i].isIntList()) {
        for (const int64_t value : arguments[i].toIntVector()) {
          multiply(value);
        }
      } else {
        multiply(arguments[i]);
      }
    }
  }
  return given.total <= limit && saturating_product(std::max<int64_t>(given.total, 1), factor) <= kBearable &&
      saturating_product(given.largest, given.second) <= kPairs;
}

bool proves_small(const Operator& op, Arguments arguments, const Signature& signature) {
  const int64_t limit = small_call.load(std::memory_order_relaxed);
  const Given given = given_elements(op, arguments);
  int64_t total = 0;
  for (const Layout* layout : signature.fresh) {
    total += layout->numel;
  }
  return given.total <= limit && total <= limit && saturating_product(given.largest, given.second) <= kPairs;
}

void set_small_call(int64_t elements) {
  small_call = elements;
}

bool takes_fewer_elements(const Operator& op) {
  const auto is_plain = [](const Argument& argument) {
    return argument.kind == ArgKind::Tensor || argument.kind == ArgKind::Number;
  };
  return op.has(kPointwise) || op.has(kOverwrites) ||
      (op.has(kProduct) && std::all_of(op.arguments.begin(), op.arguments.end(), is_plain));
}

} // namespace tarry
