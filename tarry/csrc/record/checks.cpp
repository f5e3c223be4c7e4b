// What eager PyTorch checks of a call, but the key of its signature leaves out: the values of numbers, and memory that arguments share.
#include <ATen/MemoryOverlap.h>

#include <limits>

#include "record/probe.h"
#include "record/scan.h"

namespace tarry {
namespace {

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
        limit = std::min(limit, std::numeric_limits<double>::max()); // not a complex number, which counts as infinite
        break;
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

// For calls that are too large to be tried: what PyTorch's iterators refuse, as far as that is easy to see.
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
        continue; // PyTorch does not check these either
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

std::vector<c10::IValue> with_ones_for_numbers(const Operator& op, Arguments arguments) {
  std::vector<c10::IValue> result = arguments.vec();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (op.arguments[i].kind == ArgKind::Number && (arguments[i].isDouble() || arguments[i].isInt())) {
      result[i] = arguments[i].isInt() ? c10::IValue(int64_t{1}) : c10::IValue(1.0);
    }
  }
  return result;
}

// Of all that a check depends on.
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

// Raises what is wrong with the call. No lock may be held.
void verify_call(const Scan& scan, Arguments arguments) {
  const Operator& op = scan.op;
  const c10::Device cpu(c10::kCPU);
  if (!real_device().is_cpu() || !op.has(kVerify)) {
    return;
  }
  const bool small = is_small_call(op, arguments);
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
  // Two elements where that is possible: kernels check less of a single one (fill_ of float16).
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

} // namespace

bool needs_check(Scan& scan) {
  scan.shares_written = shares_written_memory(scan);
  const bool divides_integers = scan.op.has(kFailsOnIntegers) && !scan.tensors.empty() &&
      c10::isIntegralType(scan.tensors[0].storage->home->dtype, /*includeBool=*/true);
  return scan.shares_written || ((scan.op.has(kChecksNumbers) || divides_integers) && !scan.constants.empty()) ||
      (scan.largest_number > kTameNumber && scan.largest_number > number_limit(scan.tensors));
}

void check_once(Scan& scan, Arguments arguments, std::unique_lock<std::mutex>& lock) {
  DeviceState& state = *scan.state;
  const Hash128 key = hash_of_check(scan);
  if (state.checked.find(key) != state.checked.end()) {
    return;
  }
  lock.unlock();
  verify_call(scan, arguments);
  lock.lock();
  if (state.checked.size() >= kMaxNumbers) {
    state.checked.clear();
  }
  state.checked.insert(key);
}

} // namespace tarry
