#include "record/scan.h"

#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/neg.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/arguments.h"
#include "device/hooks.h"
#include "core/numbers.h"
#include "record/host_mode.h"

namespace tarry {

at::Tensor without_lazy_bits(const at::Tensor& tensor) {
  at::Tensor result = tensor;
  if (result.is_conj()) {
    result = at::conj_physical(at::_conj(result));
  }
  if (result.is_neg()) {
    result = at::neg(at::_neg_view(result));
  }
  return result;
}

void Scan::tensor(const at::Tensor& tensor, bool is_mutable) {
  if (!tensor.defined()) {
    slots.push_back(kAbsent);
    hash = mix(hash, uint64_t{kAbsent});
    return;
  }
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (C10_UNLIKELY(impl->device_type() != c10::DeviceType::PrivateUse1)) {
    return host_tensor(tensor, is_mutable);
  }
  if (C10_UNLIKELY(impl->key_set().has_any(kLazyBits))) {
    if (is_mutable) {
      writes_through_lazy_bits = true;
    }
    uploaded.push_front(without_lazy_bits(tensor));
    return this->tensor(uploaded.front(), is_mutable);
  }
  TarryStorage* storage = storage_of(impl);
  TORCH_CHECK(
      storage, "tarry: ", op.name, " was given a ", tensor.layout(), " tensor without a storage on the device. ",
      "Call .to_dense() on it first, or keep it on the CPU.");
  if (C10_UNLIKELY(!state)) {
    state = storage->state;
  } else if (C10_UNLIKELY(state != storage->state && in_list)) {
    on_several_devices = true;
  } else {
    TORCH_CHECK(
        state == storage->state,
        "Expected all tensors to be on the same device, but found at least two devices, tarry:", static_cast<int>(state->index),
        " and tarry:", static_cast<int>(storage->state->index), "! (", op.name, ")");
  }
  const Layout* home = storage->home;
  const Layout* view = home->describes(impl) ? nullptr : layout_of(impl);
  if (view) {
    check_bounds(view, home);
  }
  slots.push_back(kEdge);
  hash = mix(hash, (view ? view : home)->type_hash);
  if (op.has(kMaskIndices) && !tensors.empty() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) {
    eager_reason = "a mask used as an index makes the shape depend on data";
  }
  if (C10_UNLIKELY(is_mutable && view && view->may_overlap && !op.has_out)) { // out=: see infer_with_out()
    eager_reason = "it writes through a view that may overlap itself, which the order of its kernel decides about";
  }
  tensors.push_back({&tensor, storage, view, is_mutable});
}

static c10::IValue number_in(const at::Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return *static_cast<const double*>(data);
    case at::kLong:
      return *static_cast<const int64_t*>(data);
    case at::kBool:
      return *static_cast<const bool*>(data);
    case at::kComplexDouble:
      return *static_cast<const c10::complex<double>*>(data);
    default:
      return c10::IValue();
  }
}

static double magnitude(const c10::IValue& value) {
  if (value.isDouble()) {
    const double number = std::abs(value.toDouble());
    return std::isnan(number) ? std::numeric_limits<double>::infinity() : number; // no integer is either
  }
  if (value.isInt()) {
    return std::abs(static_cast<double>(value.toInt()));
  }
  return value.isComplexDouble() ? std::numeric_limits<double>::infinity() : 0; // one with an imaginary part fits no real dtype
}

void Scan::host_tensor(const at::Tensor& tensor, bool is_mutable) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number() && tensor.is_cpu() && !is_mutable) {
    c10::IValue value = number_in(tensor);
    if (!value.isNone()) {
      slots.push_back(kWrappedNumber);
      hash = mix(hash, 0x77ULL << 32 | static_cast<uint64_t>(tensor.scalar_type()));
      largest_number = std::max(largest_number, magnitude(value));
      constants.push_back(std::move(value));
      return;
    }
  }
  // As on any accelerator, a zero-dimensional host tensor mixes with device tensors.
  const bool may_mix = (tensor.dim() == 0 && tensor.is_cpu()) || (op.has(kHostIndices) && !tensors.empty()) ||
      (tensor.is_cpu() && !is_mutable && takes_host_tensors());
  if (in_list && (is_mutable || !takes_host_tensors())) {
    on_several_devices = true;
    return;
  }
  TORCH_CHECK(
      may_mix && !is_mutable, "Expected all tensors to be on the same device, but found at least two devices, tarry:0 and ",
      tensor.device(), "! (", op.name, "). Move the tensor with .to(\"tarry\") first.");
  TORCH_CHECK(
      !tensor.requires_grad() || tensor.dim() == 0 || !c10::GradMode::is_enabled(), op.name,
      " was given a tensor on the CPU that requires a gradient, and tensors that tarry records. Make it inside tarry.lazy_mode, or "
      "move it there first: x = x.detach().to(\"tarry\").requires_grad_()");
  DeviceState& target = state ? *state : device_state(-1);
  uploaded.push_front(upload(target, tensor));
  const at::Tensor& copy = uploaded.front();
  TarryStorage* storage = storage_of(copy.unsafeGetTensorImpl());
  slots.push_back(kEdge);
  hash = mix(hash, storage->home->type_hash);
  if (op.has(kMaskIndices) && (copy.scalar_type() == at::kBool || copy.scalar_type() == at::kByte)) {
    eager_reason = "a mask used as an index makes the shape depend on data";
  }
  tensors.push_back({nullptr, storage, nullptr, false});
}

void Scan::number(const c10::IValue& value) {
  // The kind of number decides result types; its value decides nothing but for a few factories.
  const uint64_t kind = value.isNone() ? 1 : value.isDouble() ? 2 : value.isInt() ? 3 : value.isBool() ? 4 : 5;
  hash = mix(hash, 0x6eULL << 32 | kind);
  largest_number = std::max(largest_number, magnitude(value));
  if (op.has(kShapeFromNumbers)) {
    constant(value);
  }
}

void Scan::constant(const c10::IValue& value) {
  if (value.isInt()) {
    hash = mix(hash, static_cast<uint64_t>(value.toInt()) ^ 0x1000000000000000ULL);
  } else if (value.isNone()) {
    hash = mix(hash, 0x4e4f4e45ULL);
  } else if (value.isBool()) {
    hash = mix(hash, value.toBool() ? 0x74727565ULL : 0x66616c73ULL);
  } else if (value.isDouble()) {
    uint64_t bits = 0;
    const double number = value.toDouble();
    std::memcpy(&bits, &number, sizeof(bits));
    hash = mix(mix(hash, 0x646f75ULL), bits);
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    constant(number.real());
    constant(number.imag());
  } else if (value.isString()) {
    hash = mix(hash, value.toStringView());
  } else if (value.isDevice()) {
    const auto device = value.toDevice();
    if (device.type() == c10::DeviceType::PrivateUse1) {
      if (!state) {
        state = &device_state(checked_device(device.index()));
      }
      hash = mix(hash, 0x74617272ULL);
    } else {
      hash = mix(hash, 0x646576ULL << 32 | static_cast<uint64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index()));
    }
  } else if (value.isList()) {
    const auto items = value.toListRef();
    hash = mix(hash, 0x6c697374ULL << 32 | items.size());
    for (const c10::IValue& item : items) {
      constant(item);
    }
  } else {
    eager_reason = "it takes an argument that cannot be recorded";
  }
}

void Scan::argument(const c10::IValue& value, const Argument& declared) {
  switch (declared.kind) {
    case ArgKind::Tensor:
      if (value.isNone()) {
        slots.push_back(kAbsent);
        hash = mix(hash, uint64_t{kAbsent});
      } else {
        tensor(value.toTensor(), declared.is_mutable);
      }
      return;
    case ArgKind::TensorList: {
      if (value.isNone()) {
        slots.push_back(-1);
        hash = mix(hash, 0x6e6f6c69ULL);
        return;
      }
      const auto items = value.toListRef();
      TORCH_CHECK(items.size() < 32767, "tarry: ", op.name, " was given a list of ", items.size(), " tensors; the most is 32766");
      slots.push_back(static_cast<int16_t>(items.size()));
      hash = mix(hash, 0x746c6973ULL << 32 | items.size());
      in_list = op.takes_lists;
      for (const c10::IValue& item : items) {
        if (item.isNone()) {
          slots.push_back(kAbsent);
          hash = mix(hash, uint64_t{kAbsent});
        } else {
          tensor(item.toTensor(), declared.is_mutable);
        }
      }
      in_list = false;
      return;
    }
    case ArgKind::Number:
      number(value);
      constants.push_back(value);
      return;
    case ArgKind::NumberList:
      if (value.isNone()) {
        hash = mix(hash, 0x6e6f6e6cULL);
      } else {
        const auto items = value.toListRef();
        hash = mix(hash, 0x6e6c6973ULL << 32 | items.size());
        for (const c10::IValue& item : items) {
          number(item);
        }
      }
      constants.push_back(value);
      return;
    case ArgKind::Generator:
      constants.push_back(c10::IValue()); // its seed stands at the end
      return;
    case ArgKind::Constant:
      constant(value);
      constants.push_back(value);
      return;
  }
}

bool same_call(const Node& a, c10::ArrayRef<int16_t> slots, c10::ArrayRef<c10::IValue> constants) {
  if (c10::ArrayRef<int16_t>(a.slots) != slots || a.constants.size() != constants.size()) {
    return false;
  }
  bool same = true;
  visit_arguments(
      *a.op, slots, [](size_t, Operand) {}, [](size_t, bool, c10::ArrayRef<Operand>) {},
      [&](size_t i, size_t at) {
        if (same && (a.op->arguments[i].kind == ArgKind::Constant || a.op->has(kShapeFromNumbers))) {
          same = same_value(a.constants[at], constants[at]);
        }
      });
  return same;
}

} // namespace tarry
