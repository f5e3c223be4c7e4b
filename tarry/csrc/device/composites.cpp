// Composite operators that PyTorch would decompose badly on a custom device: they are decomposed here as they would be on
// the real device, so that its fused kernels are reached.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <limits>

#include "execute/executor.h"
#include "record/record.h"

namespace tarry {
namespace {

// A tensor of the real device with the metadata of `tensor` and no memory: enough to ask which kernel would be chosen. Its storage
// says the size that there would be, since PyTorch may look at it through a view.
at::Tensor stand_in(const at::Tensor& tensor) {
  const c10::Device device = real_device();
  const size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, at::DataPtr(nullptr, device), /*allocator=*/nullptr, /*resizable=*/false);
  const auto key = c10::computeDispatchKey(tensor.scalar_type(), c10::kStrided, device);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(key), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.requires_grad()) {
    result.set_requires_grad(true);
  }
  return result;
}

std::optional<at::Tensor> additive_mask(const std::optional<at::Tensor>& mask, const at::Tensor& query) {
  if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) {
    return mask && mask->defined() ? mask : std::nullopt;
  }
  return at::zeros_like(*mask, query.options().dtype(query.scalar_type()))
      .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
}

enum class Attention : int64_t { Math = 0, Flash = 1, Efficient = 2, Cudnn = 3 }; // PyTorch's SDPBackend

// Which kernel the real device would choose. A compiler that traces with sizes it does not know gets the form for all of them.
Attention choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale, bool grouped) {
  for (const auto* tensor : {&query, &key, &value, mask ? &*mask : &query}) {
    if (tensor->unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
      return Attention::Math;
    }
  }
  // The stand-ins are no tensors of the program: modes, such as a compiler's, must not see them.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  return static_cast<Attention>(at::_fused_sdp_choice(
      stand_in(query), stand_in(key), stand_in(value), mask ? std::make_optional(stand_in(*mask)) : std::nullopt, dropout, causal,
      scale, grouped));
}

at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout,
    bool causal, std::optional<double> scale, bool grouped) {
  TORCH_CHECK(
      query.device() == key.device() && key.device() == value.device(),
      "Expected query, key, and value to have the same device type, but got query.device: ", query.device(),
      " key.device: ", key.device(), " and value.device: ", value.device(), " instead.");
  TORCH_CHECK(
      query.scalar_type() == key.scalar_type() && key.scalar_type() == value.scalar_type(),
      "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(), " key.dtype: ", key.dtype(),
      " and value.dtype: ", value.dtype(), " instead.");
  TORCH_CHECK(
      query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
      "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: ", query.dim(), " key.dim: ", key.dim(),
      " and value.dim: ", value.dim(), " instead.");
  const bool has_mask = mask && mask->defined();
  const Attention choice = choose_attention(query, key, value, has_mask ? mask : std::nullopt, dropout, causal, scale, grouped);
  if (choice != Attention::Math && query.dim() == 3) { // the kernels take four dimensions; from torch 2.15 on, they are added
    auto in_batch = [](at::Tensor t) {
      while (t.dim() < 4) {
        t = t.unsqueeze(0);
      }
      return t;
    };
    const auto batch_mask = has_mask ? std::make_optional(in_batch(*mask)) : std::nullopt;
    return attention(in_batch(query), in_batch(key), in_batch(value), batch_mask, dropout, causal, scale, grouped).squeeze(0);
  }
  const auto bias = additive_mask(mask, query);
  const bool needs_grad = at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad());
  if (real_device().is_cpu()) {
    if (choice == Attention::Flash) {
      return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, bias, scale));
    }
  } else if (choice == Attention::Flash) {
    // The kernel wants the head dimension in multiples of 8; the scale is that of the true one.
    const int64_t head = query.size(-1), missing = (8 - head % 8) % 8;
    const double factor = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(head));
    auto pad = [missing](const at::Tensor& t) { return missing ? at::constant_pad_nd(t, {0, missing}) : t; };
    auto out = std::get<0>(at::_scaled_dot_product_flash_attention(
        pad(query), pad(key), pad(value), dropout, causal, /*return_debug_mask=*/false, factor));
    return missing ? out.narrow(-1, 0, head) : out;
  } else if (choice == Attention::Efficient && (!bias || bias->size(-1) % 16 == 0)) {
    std::optional<at::Tensor> expanded;
    if (bias) {
      expanded = bias->expand({query.size(0), query.size(1), query.size(2), key.size(2)});
    }
    return std::get<0>(
        at::_scaled_dot_product_efficient_attention(query, key, value, expanded, needs_grad, dropout, causal, scale));
  } else if (choice == Attention::Cudnn) {
    return std::get<0>(at::_scaled_dot_product_cudnn_attention(
        query, key, value, bias, needs_grad, dropout, causal, /*return_debug_mask=*/false, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, bias, dropout, causal, /*dropout_mask=*/std::nullopt, scale, grouped));
}

int64_t attention_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool, std::optional<double>,
    bool) {
  return static_cast<int64_t>(Attention::Math);
}

// ---- recurrent cells: PyTorch takes the fused kernels for any custom device, and only CUDA has them

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto next_cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next_cell.tanh(), next_cell, at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (from_hidden[0] + from_input[0]).sigmoid();
  const auto update = (from_hidden[1] + from_input[1]).sigmoid();
  const auto candidate = (from_input[2] + from_hidden[2] * reset).tanh();
  return {(hidden - candidate) * update + candidate, at::Tensor()};
}

// The decomposition reads the batch sizes of packed sequences by their address.
void check_batch_sizes(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const auto position = op.schema().argumentIndexWithName("batch_sizes");
  const at::Tensor& sizes = torch::jit::peek(*stack, *position, op.schema().arguments().size()).toTensor();
  TORCH_CHECK(
      sizes.is_cpu(), op.schema().name(), ": 'batch_sizes' should be a 1D CPU int64 tensor, but it is on ", sizes.device(),
      ". Call .cpu() on it.");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); // the decomposition is the same for all devices
}

// ---- operators whose failure shows at the call, if the contents of their arguments are at hand

// The contents of `tensor`, if a look at them waits for nothing; otherwise an undefined tensor.
at::Tensor contents_at_hand(const at::Tensor& tensor) {
  TarryStorage* storage = is_tarry(tensor) ? storage_of(tensor.unsafeGetTensorImpl()) : nullptr;
  if (!storage) {
    return at::Tensor();
  }
  at::Tensor data;
  {
    std::lock_guard<std::mutex> guard(storage->state->mutex);
    if (storage->contents() == Contents::Data && !storage->state->executor->is_busy() && storage->data.is_cpu()) {
      data = storage->data; // on another device, a look at it would wait for that device
    }
  }
  if (data.defined()) {
    PlainDispatch plain;
    const Layout* layout = layout_of(tensor.unsafeGetTensorImpl());
    check_bounds(layout, storage->home);
    return view_as_layout(data, layout);
  }
  return data;
}

// Whether the source of a masked_scatter suffices.
void check_source(const at::Tensor& self, const at::Tensor& mask, const at::Tensor& source) {
  if (mask.scalar_type() != at::kBool || mask.numel() == 0 || !at::are_expandable(self.sizes(), mask.sizes())) {
    return; // it is wrong for another reason
  }
  const int64_t numel = c10::multiply_integers(at::infer_size(self.sizes(), mask.sizes()));
  if (source.numel() >= numel) {
    return;
  }
  if (const at::Tensor data = contents_at_hand(mask); data.defined()) {
    PlainDispatch plain;
    const auto ones = data.sum().item<int64_t>() * (numel / mask.numel());
    TORCH_CHECK(ones <= source.numel(), "Number of elements of source < number of ones in mask");
  }
}

void masked_scatter(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto given = torch::jit::last(*stack, 3);
  check_source(given[0].toTensor(), given[1].toTensor(), given[2].toTensor());
  record_boxed(op, keys, stack);
}

// Integers, too: programs written for accelerators rely on it, and the CPU's kernel has none.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  if (real_device().is_cpu() && c10::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    return at::histc(self.to(at::kDouble), bins, low, high).to(self.scalar_type());
  }
  if (bins > 0 && low.equal(high.to<double>()) && self.numel() > 0) { // the range is that of the contents, and must be finite
    if (const at::Tensor data = contents_at_hand(self); data.defined()) {
      PlainDispatch plain;
      at::histc(data, 1, low, high);
    }
  }
  static const Operator* op = find_operator("aten::histc", "");
  torch::jit::Stack stack{self, bins, low, high};
  record(*op, &stack);
  return stack[0].toTensor();
}

// Composites whose gradients are those of their parts.
void add_composites(torch::Library& m) {
  for (const char* name : {"lstm.data", "gru.data", "rnn_tanh.data", "rnn_relu.data"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&check_batch_sizes>());
  }
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("scaled_dot_product_attention", TORCH_FN(attention));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  add_composites(m);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  add_composites(m);
  m.impl("histc", TORCH_FN(histc));
  m.impl("masked_scatter", torch::CppFunction::makeFromBoxedFunction<&masked_scatter>());
  m.impl("masked_scatter_", torch::CppFunction::makeFromBoxedFunction<&masked_scatter>());
  m.impl("_fused_sdp_choice", TORCH_FN(attention_choice));
}

} // namespace
} // namespace tarry
