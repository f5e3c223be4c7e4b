// Signatures: looked up by the hash of a call, and inferred for each new combination of argument types and constants. Common calls use
// shape rules. Other small calls run once on the CPU, on zeros: that gives the shapes, and a wrong call raises the very error that
// eager PyTorch raises; many meta kernels let mistakes of dtype, dimension or overlapping memory pass. It is quick, too: a meta
// kernel in Python takes longer than a small call. Large calls use the meta kernel.
//
// What a signature's key leaves out is checked by verify_call() (checks.cpp).
#include <ATen/MemoryOverlap.h>
#include <c10/util/strides.h>

#include <algorithm>

#include "record/probe.h"
#include "record/scan.h"

namespace tarry {
namespace {

std::unique_ptr<Signature> eager_signature() {
  auto signature = std::make_unique<Signature>();
  signature->runs_eagerly = true;
  return signature;
}

// Rules and meta kernels, which large calls rely on, look at little besides sizes. So the real kernel is tried on two elements in each
// dimension, and refuses the call if sizes cannot be the reason: in a pointwise operator, or if common dtypes are accepted.
void check_dtypes(const Operator& op, Arguments arguments) {
  if (!takes_fewer_elements(op)) {
    return;
  }
  const c10::Device cpu(c10::kCPU);
  std::exception_ptr refused, other;
  if (!try_on(cpu, op, arguments, refused, {.most = 2}) &&
      (op.has(kPointwise) || try_on(cpu, op, arguments, other, {.most = 2, .common_dtypes = true}))) {
    std::rethrow_exception(refused);
  }
}

// Whether a convolution has numbers that its meta kernel accepts and real kernels refuse: before they compute anything.
bool is_odd_convolution(const Operator& op, Arguments arguments) {
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
void keep_memory_format(const Operator& op, Arguments arguments, Signature& signature) {
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
bool meta_suffices(const Operator& op, Arguments arguments) {
  c10::SmallVector<at::ScalarType, 4> read;
  bool certain = true;
  for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool is_mutable) { // out= arguments come last
    const bool known = std::find(read.begin(), read.end(), tensor.scalar_type()) != read.end();
    const bool promoted = op.has(kPointwise) && (!is_mutable || tensor.scalar_type() == at::kBool);
    certain = certain && (read.empty() || promoted || (known && (op.has(kPointwise) || read.size() == 1)));
    if (!known && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      read.push_back(tensor.scalar_type());
    }
  });
  return certain;
}

// Whether an argument is written to that overlaps itself, but for those that `call` resizes.
bool writes_to_overlapping(const Operator& op, Arguments arguments, const Signature* call = nullptr) {
  bool found = false;
  size_t k = 0;
  for_each_tensor(op, arguments, [&](const at::Tensor& tensor, bool is_mutable) {
    const bool resized = is_mutable && call && !call->resized.empty() && call->resized[k];
    found = found || (is_mutable && !resized && at::has_internal_overlap(tensor) == at::MemOverlap::Yes);
    k += is_mutable;
  });
  return found;
}

// A call with out= is recorded only if it is certain what becomes of these arguments; otherwise it runs eagerly, where the real
// kernel decides (and raises, and warns) as it always does.
std::unique_ptr<Signature> infer_with_out(const Operator& op, Arguments arguments) {
  // Some kernels do not look whether what they write to overlaps itself, and write beyond its memory.
  const bool overlaps = writes_to_overlapping(op, arguments);
  const bool try_kernel = real_device().is_cpu() && is_small_call(op, arguments) && !op.has(kRandom) && !overlaps;
  const c10::Device device = try_kernel || (op.has(kShapeFromDevice) && !overlaps) ? real_device() : c10::Device(c10::kMeta);
  std::exception_ptr error;
  auto signature = try_on(device, op, arguments, error);
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
  return signature && certain ? std::move(signature) : eager_signature();
}

// For operators whose meta kernel is missing, or refuses the call.
std::unique_ptr<Signature> infer_without_meta(const Operator& op, Arguments arguments, const std::exception_ptr& meta_error) {
  if (!op.has(kListed) && (is_not_implemented(meta_error) || !op.handle.hasKernelForDispatchKey(c10::DispatchKey::Meta))) {
    // A custom operator without a meta (fake) kernel: nothing says that its shapes do not depend on data. A kernel for all devices
    // may stumble over tensors without data.
    return eager_signature();
  }
  if (op.handle.schema().name().rfind("aten::", 0) != 0) {
    std::rethrow_exception(meta_error); // its author's own error; a run on zeros would explain nothing better
  }
  std::exception_ptr cpu_error;
  if (auto signature = try_on(c10::Device(c10::kCPU), op, arguments, cpu_error)) {
    for (const Signature::Item& item : signature->items) {
      signature->runs_eagerly = signature->runs_eagerly || item.kind == Signature::Return::Constant;
    }
    return signature;
  }
  if (!real_device().is_cpu() && is_not_implemented(cpu_error) && !is_not_implemented(meta_error)) {
    std::rethrow_exception(meta_error); // it has no kernel for the CPU, which it will not run on
  }
  if (!is_not_implemented(meta_error) || is_not_implemented(cpu_error)) {
    std::rethrow_exception(cpu_error);
  }
  // No meta kernel, and zeros are not a valid input (a singular matrix, say): only the real data can tell.
  return eager_signature();
}

std::unique_ptr<Signature> infer_signature(const Operator& op, Arguments arguments) {
  if (op.has_out) {
    return infer_with_out(op, arguments);
  }
  if (op.shape_rule) {
    if (auto signature = op.shape_rule(arguments)) {
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
  const bool tried_first = verifies && (is_small_call(op, arguments) || is_odd_convolution(op, arguments));
  if (tried_first) {
    if (auto signature = try_on_cpu(op, arguments, refused)) {
      return signature;
    }
  } else {
    if (verifies) {
      check_dtypes(op, arguments);
    }
    if (auto signature = try_meta_kernel(op, arguments)) {
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
  return infer_without_meta(op, arguments, meta_error);
}

// ---- caches

// The numbers of a custom operator may decide the shapes of its results; only its meta kernel knows. So it runs for every
// new number, and the shapes become part of the call's identity in place of the numbers.
Hash128 hash_with_numbers(Scan& scan, Arguments arguments) {
  const Hash128 call = scan.hash;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const ArgKind kind = scan.op.arguments[i].kind;
    if (kind == ArgKind::Number || kind == ArgKind::NumberList) {
      scan.constant(arguments[i]);
    }
  }
  return std::exchange(scan.hash, call);
}

Hash128 hash_with_shapes(Hash128 hash, const Signature& signature) {
  for (const Layout* layout : signature.fresh) {
    hash = mix(hash, layout->hash);
  }
  for (const Signature::Item& item : signature.items) {
    hash = mix(hash, item.constant.isInt() ? static_cast<uint64_t>(item.constant.toInt()) : static_cast<uint64_t>(item.kind));
    hash = item.view ? mix(hash, item.view->hash) : hash;
  }
  return mix(hash, signature.runs_eagerly ? 2 : 1);
}

const Signature* find_by_numbers(Scan& scan, Arguments arguments, std::unique_lock<std::mutex>& lock) {
  DeviceState& state = *scan.state;
  const Hash128 key = hash_with_numbers(scan, arguments);
  auto it = state.shapes_by_numbers.find(key);
  if (it != state.shapes_by_numbers.end()) {
    scan.hash = it->second;
    return state.signatures[scan.hash].get();
  }
  lock.unlock();
  auto signature = infer_signature(scan.op, arguments);
  lock.lock();
  if (state.shapes_by_numbers.size() >= kMaxNumbers) {
    state.shapes_by_numbers.clear();
  }
  scan.hash = hash_with_shapes(scan.hash, *signature);
  state.shapes_by_numbers[key] = scan.hash;
  return state.signatures.emplace(scan.hash, std::move(signature)).first->second.get();
}

} // namespace

const Signature* find_signature(Scan& scan, Arguments arguments, std::unique_lock<std::mutex>& lock) {
  if (C10_UNLIKELY(scan.op.takes_numbers && !scan.op.has(kListed))) {
    return find_by_numbers(scan, arguments, lock);
  }
  DeviceState& state = *scan.state;
  auto it = state.signatures.find(scan.hash);
  if (C10_LIKELY(it != state.signatures.end())) {
    return it->second.get();
  }
  lock.unlock();
  auto signature = infer_signature(scan.op, arguments);
  lock.lock();
  return state.signatures.emplace(scan.hash, std::move(signature)).first->second.get();
}

} // namespace tarry
