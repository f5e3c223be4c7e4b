// LSTM layers. On a CPU, PyTorch has oneDNN compute a layer at a time, several times as fast as cell by cell.
//
// PyTorch's operator for a layer looks whether gradients are enabled when its kernel runs, and leaves what its gradient needs only then.
// What is recorded may run at any time, in a block without gradients as well. So what is recorded here are operators of ours, which are
// told, around the kernels of PyTorch's.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "core/graph.h"
#include "device/lstm.h"

namespace tarry {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kLstm = 2; // as PyTorch numbers the kinds of recurrent layers

using Layer = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using MaybeTensor = std::optional<at::Tensor>;

// ---- the operators' kernels

Layer run_layer(
    const at::Tensor& input, const at::Tensor& w0, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3,
    const at::Tensor& hidden, const at::Tensor& cell, bool reverse, bool has_biases, bool train, bool has_gradient) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::AutoGradMode grad(has_gradient);
  auto [output, hidden_after, cell_after, workspace] = at::mkldnn_rnn_layer(
      input, w0, w1, w2, w3, hidden, cell, reverse, /*batch_sizes=*/{}, kLstm, hidden.size(1), /*num_layers=*/1, has_biases,
      /*bidirectional=*/false, /*batch_first=*/false, train);
  if (!workspace.defined()) {
    workspace = at::empty({0}, input.options().dtype(at::kByte));
  }
  return {output, hidden_after, cell_after, workspace};
}

Gradients run_layer_backward(
    const at::Tensor& input, const at::Tensor& w0, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3,
    const at::Tensor& hidden, const at::Tensor& cell, const at::Tensor& output, const at::Tensor& hidden_after,
    const at::Tensor& cell_after, const MaybeTensor& grad_output, const MaybeTensor& grad_hidden, const MaybeTensor& grad_cell,
    bool reverse, bool has_biases, bool train, const at::Tensor& workspace) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::AutoGradMode grad(false);
  return at::mkldnn_rnn_layer_backward(
      input, w0, w1, w2, w3, hidden, cell, output, hidden_after, cell_after, grad_output, grad_hidden, grad_cell, reverse, kLstm,
      hidden.size(1), /*num_layers=*/1, has_biases, train, /*bidirectional=*/false, /*batch_sizes=*/{}, /*batch_first=*/false,
      workspace);
}

TORCH_LIBRARY_FRAGMENT(tarry, m) {
  m.def(
      "lstm_layer(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor hidden, Tensor cell, bool reverse, "
      "bool has_biases, bool train, bool has_gradient) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "lstm_layer_backward(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor w3, Tensor hidden, Tensor cell, "
      "Tensor output, Tensor hidden_after, Tensor cell_after, Tensor? grad_output, Tensor? grad_hidden, Tensor? grad_cell, "
      "bool reverse, bool has_biases, bool train, Tensor workspace) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tarry, CPU, m) {
  m.impl("lstm_layer", TORCH_FN(run_layer));
  m.impl("lstm_layer_backward", TORCH_FN(run_layer_backward));
}

// How large the workspace is, only oneDNN knows: it computes a layer of zeros.
Layer layer_on_meta(
    const at::Tensor& input, const at::Tensor& w0, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3,
    const at::Tensor& hidden, const at::Tensor& cell, bool reverse, bool has_biases, bool train, bool has_gradient) {
  const auto zeros = [](const at::Tensor& like) { return at::zeros(like.sizes(), like.options().device(at::kCPU)); };
  const auto made = run_layer(
      zeros(input), zeros(w0), zeros(w1), zeros(w2), zeros(w3), zeros(hidden), zeros(cell), reverse, has_biases, train,
      has_gradient);
  const auto like = [&](const at::Tensor& each) { return at::empty(each.sizes(), each.options().device(input.device())); };
  return {like(std::get<0>(made)), like(std::get<1>(made)), like(std::get<2>(made)), like(std::get<3>(made))};
}

Gradients layer_backward_on_meta(
    const at::Tensor& input, const at::Tensor& w0, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& w3,
    const at::Tensor& hidden, const at::Tensor& cell, const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&,
    const MaybeTensor&, const MaybeTensor&, bool, bool, bool, const at::Tensor&) {
  const auto like = [](const at::Tensor& each) { return at::empty_symint(each.sym_sizes(), each.options()); };
  return {like(input), like(w0), like(w1), like(w2), like(w3), like(hidden), like(cell)};
}

TORCH_LIBRARY_IMPL(tarry, Meta, m) {
  m.impl("lstm_layer", TORCH_FN(layer_on_meta));
  m.impl("lstm_layer_backward", TORCH_FN(layer_backward_on_meta));
}

// Under no guard: its callers are below autograd.
template <typename Result, typename... Args>
Result call(const char* name, Result (*)(Args...), std::decay_t<Args>... given) {
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  return handle.typed<Result(Args...)>().call(given...);
}

Layer record_layer(const variable_list& in, bool reverse, bool has_biases, bool train, bool has_gradient) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return call(
      "tarry::lstm_layer", &run_layer, in[0], in[1], in[2], in[3], in[4], in[5], in[6], reverse, has_biases, train, has_gradient);
}

// ---- the gradient

// The same layer cell by cell, which can be differentiated any number of times.
variable_list layer_by_cells(const variable_list& in, bool reverse) {
  at::Tensor hidden = in[5], cell = in[6];
  std::vector<at::Tensor> outputs(in[0].size(0));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const size_t t = reverse ? outputs.size() - 1 - i : i;
    const auto gates = (at::linear(in[0][static_cast<int64_t>(t)], in[1], in[3]) + at::linear(hidden, in[2], in[4])).chunk(4, 1);
    cell = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
    outputs[t] = hidden = gates[3].sigmoid() * cell.tanh();
  }
  return {at::stack(outputs), hidden, cell};
}

// Gradients of a gradient: by those of the cells.
variable_list differentiable_gradients(const variable_list& in, const variable_list& given, bool reverse) {
  const variable_list results = layer_by_cells(in, reverse);
  variable_list of, used, grads;
  for (const at::Tensor& input : in) {
    if (input.requires_grad()) {
      used.push_back(input);
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (given[i].defined() && results[i].requires_grad()) {
      of.push_back(results[i]);
      grads.push_back(given[i]);
    }
  }
  variable_list found(in.size());
  if (of.empty() || used.empty()) {
    return found;
  }
  const variable_list made = torch::autograd::grad(
      of, used, grads, /*retain_graph=*/true, /*create_graph=*/true, /*allow_unused=*/true);
  for (size_t i = 0, k = 0; i < in.size(); ++i) {
    if (in[i].requires_grad()) {
      found[i] = made[k++];
    }
  }
  return found;
}

struct LstmLayer : torch::autograd::Function<LstmLayer> {
  static variable_list forward(
      AutogradContext* context, const at::Tensor& input, const at::Tensor& w0, const at::Tensor& w1, const at::Tensor& w2,
      const at::Tensor& w3, const at::Tensor& hidden, const at::Tensor& cell, bool reverse, bool has_biases, bool train) {
    variable_list saved{input, w0, w1, w2, w3, hidden, cell};
    auto [output, hidden_after, cell_after, workspace] = record_layer(saved, reverse, has_biases, train, /*has_gradient=*/true);
    saved.insert(saved.end(), {output, hidden_after, cell_after, workspace});
    context->save_for_backward(std::move(saved));
    context->saved_data["reverse"] = reverse;
    context->saved_data["has_biases"] = has_biases;
    context->saved_data["train"] = train;
    context->set_materialize_grads(false);
    return {output, hidden_after, cell_after};
  }

  static variable_list backward(AutogradContext* context, const variable_list& given) {
    const variable_list saved = context->get_saved_variables();
    const bool reverse = context->saved_data["reverse"].toBool(), has_biases = context->saved_data["has_biases"].toBool();
    variable_list found(10);
    if (std::none_of(given.begin(), given.end(), [](const at::Tensor& grad) { return grad.defined(); })) {
      return found;
    }
    if (c10::GradMode::is_enabled()) {
      const variable_list made = differentiable_gradients({saved.begin(), saved.begin() + 7}, given, reverse);
      std::copy(made.begin(), made.end(), found.begin());
      return found;
    }
    const auto maybe = [&](size_t i) { return given[i].defined() ? MaybeTensor(given[i]) : std::nullopt; };
    const at::AutoDispatchBelowADInplaceOrView below;
    std::tie(found[0], found[1], found[2], found[3], found[4], found[5], found[6]) = call(
        "tarry::lstm_layer_backward", &run_layer_backward, saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6],
        saved[7], saved[8], saved[9], maybe(0), maybe(1), maybe(2), reverse, has_biases, context->saved_data["train"].toBool(),
        saved[10]);
    return found;
  }
};

// ---- whole networks

// Whether PyTorch would have oneDNN compute it on a CPU. A backend that keeps data of its own gets the cells, which it can compile.
bool suits_onednn(const at::Tensor& input, at::TensorList state, at::TensorList weights) {
  const auto suits = [](const at::Tensor& tensor) {
    return is_tarry(tensor) && tensor.scalar_type() == at::kFloat && !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
        !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !tensor._fw_grad(/*level=*/0).defined();
  };
  if (!suits(input)) {
    return false;
  }
  const c10::DeviceIndex index = input.device().index();
  return real_device(index).is_cpu() && !has_opaque_data(index) && at::globalContext().userEnabledMkldnn() &&
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) && input.dim() == 3 &&
      input.numel() != 0 && state.size() == 2 && std::all_of(state.begin(), state.end(), suits) &&
      std::all_of(weights.begin(), weights.end(), suits) && state[0].dim() == 3 && state[0].sizes() == state[1].sizes();
}

variable_list one_layer(const variable_list& in, bool reverse, bool has_biases, bool train) {
  const bool has_gradient = c10::GradMode::is_enabled() &&
      std::any_of(in.begin(), in.end(), [](const at::Tensor& each) { return each.requires_grad(); });
  if (has_gradient) {
    return LstmLayer::apply(in[0], in[1], in[2], in[3], in[4], in[5], in[6], reverse, has_biases, train);
  }
  auto [output, hidden, cell, workspace] = record_layer(in, reverse, has_biases, train, /*has_gradient=*/false);
  return {output, hidden, cell};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_layers(
    const at::Tensor& given, at::TensorList state, at::TensorList weights, bool has_biases, int64_t layers, double dropout,
    bool train, bool bidirectional, bool batch_first) {
  const int64_t directions = bidirectional ? 2 : 1, width = has_biases ? 4 : 2;
  TORCH_CHECK(
      static_cast<int64_t>(weights.size()) == layers * directions * width && state[0].size(0) == layers * directions,
      "lstm: ", layers, " layers of ", directions, " directions take ", layers * directions * width, " weights and a state of ",
      layers * directions, " layers, but there are ", weights.size(), " and ", state[0].size(0));
  at::Tensor input = (batch_first ? given.transpose(0, 1) : given).contiguous();
  const at::Tensor hidden = state[0].contiguous(), cell = state[1].contiguous();
  std::vector<at::Tensor> last_hidden, last_cell;
  for (int64_t layer = 0; layer < layers; ++layer) {
    std::vector<at::Tensor> outputs;
    for (int64_t direction = 0; direction < directions; ++direction) {
      const int64_t index = layer * directions + direction;
      const at::Tensor* own = &weights[index * width];
      const at::Tensor none = has_biases ? at::Tensor() : at::zeros({own[0].size(0)}, own[0].options());
      const variable_list results = one_layer(
          {input, own[0].contiguous(), own[1].contiguous(), has_biases ? own[2] : none, has_biases ? own[3] : none, hidden[index],
           cell[index]},
          /*reverse=*/direction > 0, has_biases, train);
      outputs.push_back(results[0]);
      last_hidden.push_back(results[1]);
      last_cell.push_back(results[2]);
    }
    input = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout > 0 && train && layer + 1 < layers) {
      input = at::dropout(input, dropout, /*train=*/true);
    }
  }
  return {batch_first ? input.transpose(0, 1) : input, at::stack(last_hidden), at::stack(last_cell)};
}

void lstm(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const auto given = torch::jit::last(*stack, 9);
  const auto state = given[1].toTensorVector(), weights = given[2].toTensorVector();
  if (!suits_onednn(given[0].toTensor(), state, weights)) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); // the decomposition is the same for all devices
    return;
  }
  auto results = lstm_layers(
      given[0].toTensor(), state, weights, given[3].toBool(), given[4].toInt(), given[5].toDouble(), given[6].toBool(),
      given[7].toBool(), given[8].toBool());
  torch::jit::drop(*stack, 9);
  torch::jit::push(*stack, std::get<0>(std::move(results)), std::get<1>(std::move(results)), std::get<2>(std::move(results)));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("lstm.input", torch::CppFunction::makeFromBoxedFunction<&lstm>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("lstm.input", torch::CppFunction::makeFromBoxedFunction<&lstm>());
}

} // namespace

void register_lstm_layers() {
  register_operator("tarry::lstm_layer", kShapeFromDevice, /*has_kernel=*/false);
  register_operator("tarry::lstm_layer_backward", kShapeFromDevice, /*has_kernel=*/false);
}

} // namespace tarry
