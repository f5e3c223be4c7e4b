// Shape inference, for each new combination of argument types and constants. Common calls use fast rules (usual.h). Other small
// calls run once on the CPU, on zeros: that gives the shapes, and a wrong call raises the very error that eager PyTorch raises;
// many meta kernels let mistakes of dtype, dimension or overlapping memory pass. It is quick, too: a meta kernel in Python takes
// longer than a small call. Large calls use a rule in C++ if there is one (meta_rules.h), and otherwise the meta kernel.
//
// What a signature's key leaves out - the values of numbers, memory that arguments share - is checked by verify_call().
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <numeric>

#include "execute/interpret.h"
#include "record/record.h"
#include "record/scan.h"

namespace tarry {
namespace {

// What the stand-ins for the arguments are like.
struct StandIns {
  bool ones = false;         // instead of zeros
  int64_t most = 0;          // if not 0: elements in each dimension at most
  bool usual_dtypes = false; // float32 for what is floating or complex, int64 for integers
  bool shared = false;       // they share memory as the arguments do
  int64_t chosen = -1;       // if not negative: how many elements masks choose
};

// Keeps warnings instead of showing them.
struct Warnings final : c10::WarningHandler {
  std::vector<c10::Warning> kept;
  void process(const c10::Warning& warning) override { kept.push_back(warning); }
};

// The first and last byte that a tensor touches in its storage; nothing if it is empty.
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

template <typename F>
void for_each_tensor(const Operator& op, c10::ArrayRef<c10::IValue> arguments, const F& act) {
  auto visit = [&](const c10::IValue& value, bool is_mutable) {
    if (value.isTensor() && value.toTensor().defined()) {
      act(value.toTensor(), is_mutable);
    }
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.arguments[i].kind == ArgKind::Tensor) {
      visit(arguments[i], op.arguments[i].is_mutable);
    } else if (op.arguments[i].kind == ArgKind::TensorList && !arguments[i].isNone()) {
      for (const c10::IValue& item : arguments[i].toListRef()) {
        visit(item, op.arguments[i].is_mutable);
      }
    }
  }
}

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
    const at::ScalarType usual = given == at::kBool ? given : at::isIntegralType(given, false) ? at::kLong : at::kFloat;
    const auto options = at::TensorOptions().dtype(form.usual_dtypes ? usual : given).device(device);
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
    } else if (tensor.is_cpu() && !form.shared) {
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

  torch::jit::Stack run(c10::ArrayRef<c10::IValue> arguments, const c10::KernelFunction* rule = nullptr) {
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
void describe_result(const c10::IValue& value, const c10::AliasInfo* alias, const Probe& probe, Signature& signature) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      signature.items.push_back({Signature::Return::Undefined, 0, {}});
      return;
    }
    TORCH_CHECK(
        tensor.layout() == c10::kStrided, "tarry: ", probe.op.name, " gives a ", tensor.layout(),
        " tensor; tarry supports strided (dense) tensors only. ", "Run this part on the CPU.");
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
        !any || (signature->fresh.empty() && !probe.op.mutates), "tarry: ", probe.op.name,
        " gives a view and computes something as well, which cannot be recorded. Make two operators of it.");
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
    c10::Device device, const Operator& op, c10::ArrayRef<c10::IValue> arguments, std::exception_ptr& error, StandIns form = {}) {
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

// What the rule in C++ says, if it can tell.
std::unique_ptr<Signature> try_rule(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (!op.rule) {
    return nullptr;
  }
  Probe probe(op, c10::Device(c10::kMeta));
  try {
    const torch::jit::Stack results = probe.run(arguments, op.rule);
    const bool told = std::all_of(results.begin(), results.end(), [](const c10::IValue& result) {
      return !result.isTensor() || result.toTensor().defined();
    });
    return told ? describe(probe, results, arguments) : nullptr;
  } catch (const c10::Error&) {
    return nullptr;
  }
}

std::atomic<int64_t> small_call{1 << 16}; // elements that a call is given
constexpr int64_t kBearable = 1 << 22;    // elements that it may give, by bounds that are seldom reached
constexpr int64_t kPairs = 1 << 26;       // pairs of elements of two tensors: of an outer product

int64_t saturating_product(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? INT64_MAX : result;
}

int64_t broadcast_numel(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
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

Given given_elements(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
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

// Whether a call may run on stand-ins: a bound on the elements that it gives can be told from tensors and integers.
bool is_small(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
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

// The same once it is known what the call gives: a large integer need not make it large (the stride of a pool).
bool proves_small(const Operator& op, c10::ArrayRef<c10::IValue> arguments, const Signature& signature) {
  const int64_t limit = small_call.load(std::memory_order_relaxed);
  const Given given = given_elements(op, arguments);
  int64_t total = 0;
  for (const Layout* layout : signature.fresh) {
    total += layout->numel;
  }
  return given.total <= limit && total <= limit && saturating_product(given.largest, given.second) <= kPairs;
}

// The smallest of the greatest numbers that the tensors can hold.
double number_limit(c10::ArrayRef<TensorArgument> tensors) {
  double limit = std::numeric_limits<double>::infinity();
  for (const TensorArgument& argument : tensors) {
    const Layout& layout = argument.view ? *argument.view : *argument.storage->home;
    switch (layout.dtype) {
      case at::kByte:
      case at::kChar:
        return 127;
      case at::kShort:
        limit = std::min(limit, 32767.0);
        break;
      case at::kHalf:
      case at::kComplexHalf:
        limit = std::min(limit, 65504.0);
        break;
      case at::kInt:
        limit = std::min(limit, 2147483647.0);
        break;
      case at::kLong:
        limit = std::min(limit, 9.2e18);
        break;
      case at::kFloat:
      case at::kBFloat16:
      case at::kComplexFloat:
        limit = std::min(limit, 3.38e38);
        break;
      case at::kDouble:
      case at::kComplexDouble:
      case at::kBool:
        break;
      default:
        return 0;
    }
  }
  return limit;
}

// Whether some memory that the call writes is reached twice: by a tensor that overlaps itself, or through another argument. Lists are
// taken to be of separate tensors.
bool shares_written_memory(const Scan& scan) {
  if (!scan.op.mutates || scan.tensors.size() > 8) {
    return false;
  }
  for (size_t i = 0; i < scan.tensors.size(); ++i) {
    if (scan.tensors[i].is_mutable && scan.tensors[i].view &&
        at::has_internal_overlap(*scan.tensors[i].tensor) == at::MemOverlap::Yes) {
      return true;
    }
    for (size_t j = 0; j < scan.tensors.size(); ++j) {
      const TensorArgument &written = scan.tensors[i], &other = scan.tensors[j];
      if (i == j || !written.is_mutable || written.storage != other.storage || !written.tensor || !other.tensor) {
        continue;
      }
      const auto a = extent(*written.tensor), b = extent(*other.tensor);
      if (a && b && a->first <= b->second && b->first <= a->second) {
        return true;
      }
    }
  }
  return false;
}

// For calls that are too large to be tried: what PyTorch's iterators refuse, where it is easy to tell.
void check_overlap(const Scan& scan) {
  for (const TensorArgument& written : scan.tensors) {
    if (written.is_mutable && written.tensor) {
      at::assert_no_internal_overlap(*written.tensor);
    }
    for (const TensorArgument& other : scan.tensors) {
      if (!written.is_mutable || !written.tensor || !other.tensor || other.storage != written.storage) {
        continue;
      }
      const at::Tensor &a = *written.tensor, &b = *other.tensor;
      if (!a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense()) {
        continue; // PyTorch finds these too hard to tell, and lets them pass
      }
      const auto x = extent(a), y = extent(b);
      const bool apart = !x || !y || x->first > y->second || y->first > x->second;
      TORCH_CHECK(
          apart || (x == y && a.strides() == b.strides()),
          "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory ",
          "location. Please clone() the tensor before performing the operation.");
    }
  }
}

// Runs the call on stand-ins; on others, if it does not take zeros: a distribution does not, nor does an index that is a mask, which
// has to choose as many elements as are assigned.
std::unique_ptr<Signature> try_on_cpu(
    const Operator& op, c10::ArrayRef<c10::IValue> arguments, std::exception_ptr& error, bool shared = false) {
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

// Whether the operator can be tried on fewer elements. Kernels that relate tensors by broadcasting, or as factors, find these sizes
// consistent. Others trust what their integers say of sizes (the output size of a pool, in its backward pass) and read beyond.
bool takes_fewer_elements(const Operator& op) {
  const auto is_plain = [](const Argument& argument) {
    return argument.kind == ArgKind::Tensor || argument.kind == ArgKind::Number;
  };
  return op.has(kPointwise) || op.has(kOverwrites) ||
      (op.has(kProduct) && std::all_of(op.arguments.begin(), op.arguments.end(), is_plain));
}

// Rules and meta kernels, which large calls rely on, look at little besides sizes. So the real kernel is tried on two elements in each
// dimension, and refuses the call if sizes cannot be the reason: in a pointwise operator, or if usual dtypes are accepted.
void check_dtypes(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (!takes_fewer_elements(op)) {
    return;
  }
  const c10::Device cpu(c10::kCPU);
  std::exception_ptr refused, other;
  if (!try_on(cpu, op, arguments, refused, {.most = 2}) &&
      (op.has(kPointwise) || try_on(cpu, op, arguments, other, {.most = 2, .usual_dtypes = true}))) {
    std::rethrow_exception(refused);
  }
}

// Whether a convolution has numbers that its meta kernel accepts and real kernels refuse: before they compute anything.
bool is_odd_convolution(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.name != "aten::convolution") {
    return false;
  }
  const auto dims = static_cast<size_t>(std::max<int64_t>(arguments[0].toTensor().dim() - 2, 0));
  const auto is_odd = [&](size_t argument, int64_t least) {
    const auto values = arguments[argument].toIntVector();
    return (values.size() != dims && values.size() != 1) ||
        std::any_of(values.begin(), values.end(), [&](int64_t v) { return v < least; });
  };
  const int64_t groups = arguments[8].toInt();
  if (is_odd(3, 1) || is_odd(4, 0) || is_odd(5, 1) || is_odd(7, 0) || groups < 1) { // stride, padding, dilation, output_padding
    return true;
  }
  const auto at_dim = [&](size_t argument, size_t i) {
    const auto values = arguments[argument].toIntVector();
    return values[values.size() == 1 ? 0 : i];
  };
  for (size_t i = 0; i < dims; ++i) {
    if (at_dim(7, i) > 0 && at_dim(7, i) >= std::max(at_dim(3, i), at_dim(5, i))) {
      return true;
    }
  }
  const int64_t channels = arguments[1].toTensor().dim() == 0 ? 0 : arguments[1].toTensor().size(0);
  return arguments[6].toBool() && (channels < groups || channels % groups != 0); // transposed
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
  // Meta kernels also promise other strides for what is resized than the real ones give; not those of factories (arange).
  bool is_factory = true;
  for_each_tensor(op, arguments, [&](const at::Tensor& /*tensor*/, bool is_mutable) { is_factory = is_factory && is_mutable; });
  const bool certain = try_kernel ||
      (signature && (is_factory || (meta_suffices(op, arguments) && (signature->resized.empty() || op.has(kPointwise)))));
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
  const bool verifies = op.has(kVerify) && real_device().is_cpu();
  const bool tried_first = verifies && (is_small(op, arguments) || is_odd_convolution(op, arguments));
  if (tried_first) {
    if (auto signature = try_on_cpu(op, arguments, refused)) {
      return signature;
    }
  } else {
    if (verifies) {
      check_dtypes(op, arguments);
    }
    if (auto signature = try_rule(op, arguments)) {
      return signature;
    }
  }
  if (auto signature = try_on(c10::Device(c10::kMeta), op, arguments, meta_error)) {
    if (verifies && !tried_first && proves_small(op, arguments, *signature)) {
      if (auto tried = try_on_cpu(op, arguments, refused)) {
        return tried;
      }
    }
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
  if (!verifies && is_not_implemented(cpu_error) && !is_not_implemented(meta_error)) {
    std::rethrow_exception(meta_error); // it has no kernel for the CPU, which it will not run on
  }
  if (!is_not_implemented(meta_error) || is_not_implemented(cpu_error)) {
    std::rethrow_exception(cpu_error);
  }
  // No meta kernel, and zeros are not a valid input (a singular matrix, say): only the real data can tell.
  auto signature = std::make_unique<Signature>();
  signature->runs_eagerly = true;
  return signature;
}

static torch::jit::Stack with_ones_for_numbers(const Operator& op, c10::ArrayRef<c10::IValue> arguments) {
  torch::jit::Stack result = arguments.vec();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.arguments[i].kind == ArgKind::Number && (arguments[i].isDouble() || arguments[i].isInt())) {
      result[i] = arguments[i].isInt() ? c10::IValue(int64_t{1}) : c10::IValue(1.0);
    }
  }
  return result;
}

void set_small_call(int64_t elements) {
  small_call = elements;
}

bool needs_check(Scan& scan) {
  scan.shares_written = shares_written_memory(scan);
  const bool divides_integers = scan.op.has(kFailsOnIntegers) && !scan.tensors.empty() &&
      c10::isIntegralType(scan.tensors[0].storage->home->dtype, /*includeBool=*/true);
  return scan.shares_written || ((scan.op.has(kChecksNumbers) || divides_integers) && !scan.constants.empty()) ||
      (scan.largest_number > kTameNumber && scan.largest_number > number_limit(scan.tensors));
}

Hash128 hash_of_check(Scan& scan) {
  const Hash128 call = scan.hash;
  for (size_t i = 0; i < scan.constants.size(); ++i) {
    scan.constant(scan.constants[i]);
  }
  Hash128 hash = std::exchange(scan.hash, call);
  for (size_t i = 0; scan.shares_written && i < scan.tensors.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (scan.tensors[i].storage == scan.tensors[j].storage && scan.tensors[i].tensor && scan.tensors[j].tensor) {
        const int64_t distance = scan.tensors[i].tensor->storage_offset() - scan.tensors[j].tensor->storage_offset();
        hash = mix(mix(hash, i << 8 | j), static_cast<uint64_t>(distance));
      }
    }
  }
  return hash;
}

void verify_call(const Scan& scan, c10::ArrayRef<c10::IValue> arguments) {
  const Operator& op = scan.op;
  const c10::Device cpu(c10::kCPU);
  if (!real_device().is_cpu() || !op.has(kVerify)) {
    return;
  }
  const bool small = is_small(op, arguments);
  std::exception_ptr error;
  if (scan.shares_written && !small) {
    if (op.has(kPointwise) || op.has(kRandom)) {
      check_overlap(scan);
    }
  } else if (scan.shares_written) {
    std::exception_ptr alone;
    if (!try_on_cpu(op, arguments, error, true) && try_on_cpu(op, arguments, alone)) {
      std::rethrow_exception(error);
    }
  }
  // Two elements where that is harmless: kernels check less of a single one (fill_ of float16).
  const int64_t most = takes_fewer_elements(op) ? 2 : 1;
  if (try_on(cpu, op, arguments, error, {.most = most})) {
    return;
  }
  if (small) {
    std::exception_ptr complete;
    if (!try_on_cpu(op, arguments, complete)) {
      std::rethrow_exception(complete);
    }
    return;
  }
  // Either the numbers are wrong, or that was too few elements.
  std::exception_ptr other;
  if (op.has(kPointwise) || op.has(kChecksNumbers) ||
      try_on(cpu, op, with_ones_for_numbers(op, arguments), other, {.most = most})) {
    std::rethrow_exception(error);
  }
}

} // namespace tarry
