"""Operators that a backend lacks are replaced by what a table says, and the values stay those of eager PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tarry
from tarry.events import expect, record
from tarry.ir.evaluate import evaluate
from tarry.ir.graph import Graph, Node
from tarry.ir.text import parse, to_text
from tarry.ir.verify import verify
from tarry.passes.decompose import decompose, named
from tests.backends.simple import Walking, using

USES_DEVICE = True

# PyTorch's table down to its core operators, and some of those core operators as well.
_MORE = [
    "addmm", "native_layer_norm", "_softmax", "_log_softmax", "native_dropout", "gelu", "elu", "leaky_relu", "rand",
    "embedding", "_native_batch_norm_legit_functional", "upsample_bilinear2d", "native_group_norm", "addcmul",
]  # fmt: skip
CORE = named(torch._decomp.core_aten_decompositions()) | named(
    torch._decomp.get_decompositions([getattr(torch.ops.aten, name) for name in _MORE])
)


def _none(node: Node) -> bool:
    return False


def _decomposed(text: str, table: dict[Any, Any], supports: Callable[[Node], bool] = _none) -> tuple[Graph, list[str]]:
    graph = parse(text)
    verify(graph, "optimized", thorough=True)
    result = decompose(graph, named(table), supports)
    verify(result, "optimized", thorough=True)
    inputs = [
        torch.empty_strided(value.type.sizes, value.type.strides, dtype=value.type.dtype).copy_(
            torch.linspace(0.1, 1.5, value.type.numel).view(value.type.sizes)
        )
        for value in graph.inputs
    ]
    for mine, wanted in zip(evaluate(result, inputs), evaluate(graph, inputs), strict=True):
        torch.testing.assert_close(mine, wanted)
        assert mine.stride() == wanted.stride()
    return result, [node.op for node in result.nodes]


# ---- single graphs

TANH = """
    graph(%0: f32[2, 3]):
      %1: f32[2, 3] = aten::neg(%0)
      %2: f32[2, 3] = aten::tanh(%1)  # model.py:7
      %3: f32[2, 3] = aten::neg(%2)
      return %3
"""


def _tanh(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x + x)
    return (e - 1) / (e + 1)


def test_a_node_becomes_what_the_function_does() -> None:
    graph, ops = _decomposed(TANH, {"aten::tanh": _tanh}, lambda node: node.op != "aten::tanh")
    assert ops == [
        "aten::neg",
        "aten::add.Tensor",
        "aten::exp",
        "aten::sub.Tensor",
        "aten::add.Tensor",
        "aten::div.Tensor",
        "aten::neg",
    ]
    assert {str(node.site) for node in graph.nodes[1:6]} == {"model.py:7"}


def test_what_is_supported_stays() -> None:
    _, ops = _decomposed(TANH, {"aten::tanh": _tanh}, lambda node: True)
    assert ops == ["aten::neg", "aten::tanh", "aten::neg"]


def test_a_decomposition_is_decomposed_in_turn_where_that_is_not_supported() -> None:
    table = {
        "aten::tanh": _tanh,
        "aten::exp": lambda x: torch.pow(torch.e, x),
        "aten::sub.Tensor": lambda x, y, *, alpha=1: x + (-y),
    }
    _, ops = _decomposed(TANH, table, lambda node: node.op not in ("aten::tanh", "aten::exp"))
    assert "aten::pow.Scalar" in ops
    assert "aten::sub.Tensor" in ops  # supported: left alone, though the table has it
    _, ops = _decomposed(TANH, table, lambda node: node.op in ("aten::add.Tensor", "aten::neg", "aten::div.Tensor"))
    assert "aten::sub.Tensor" not in ops
    assert "aten::exp" not in ops


def test_a_decomposition_into_itself_ends() -> None:
    _, ops = _decomposed(TANH, {"aten::tanh": lambda x: torch.tanh(x * 1)}, lambda node: node.op != "aten::tanh")
    assert ops.count("aten::tanh") == 1
    assert "aten::mul.Tensor" in ops


def test_keys_may_be_operators_or_names() -> None:
    assert named({torch.ops.aten.tanh.default: _tanh, "aten::add.Tensor": _tanh}).keys() == {
        "aten::tanh",
        "aten::add.Tensor",
    }
    _, ops = _decomposed(TANH, {torch.ops.aten.tanh.default: _tanh}, lambda node: node.op != "aten::tanh")
    assert "aten::exp" in ops


def test_views_become_those_that_a_graph_may_have() -> None:
    def swapped(x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.t().unbind(0)
        first, _ = torch.stack([c, b, a]).transpose(0, 1).split([1, 1], 0)
        return torch.cat([first.squeeze(0).unsqueeze(0), x.movedim(0, 1).T[1:]]).sin() + x.t().T.flatten().view(2, 3)

    text = TANH.replace("aten::tanh", "aten::sin")
    graph = parse(text)
    result = decompose(graph, {"aten::sin": swapped}, lambda node: node.op != "aten::sin" or node.site is None)
    verify(result, "optimized", thorough=True)
    x = torch.arange(6.0).view(2, 3)
    (mine,) = evaluate(result, [x])
    torch.testing.assert_close(mine, -swapped(-x))


def test_in_place_operators_inside_are_made_pure() -> None:
    def tanh(x: torch.Tensor) -> torch.Tensor:
        e = x.add(x)
        e.exp_()
        below = e.clone()
        below[0].add_(1)
        below[1:] += 1
        return e.sub_(1).div_(below)

    graph, _ = _decomposed(TANH, {"aten::tanh": tanh}, lambda node: node.op != "aten::tanh")
    assert not any(node.kept for node in graph.nodes)


def test_tensors_of_one_number_become_full() -> None:
    def tanh(x: torch.Tensor) -> torch.Tensor:
        one = torch.tensor(1.0)
        two = x.new_tensor(2)
        e = torch.exp(x * two)
        return torch.where(x > torch.tensor(-1e9), (e - one) / (e + one), torch.scalar_tensor(0.0))

    graph, ops = _decomposed(TANH, {"aten::tanh": tanh}, lambda node: node.op != "aten::tanh")
    assert ops.count("aten::full") == 3
    assert parse(to_text(graph)) == graph


def test_an_output_may_be_an_input_or_another_output() -> None:
    text = """
        graph(%0: f32[2, 3]):
          (%1: f32[2, 3], %2: i32[2, 3]) = aten::frexp.Tensor(%0)
          return %1, %2
    """

    def frexp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, torch.zeros_like(x, dtype=torch.int32)

    graph = decompose(parse(text), {"aten::frexp.Tensor": frexp}, _none)
    verify(graph, "optimized", thorough=True)
    x = torch.rand(2, 3)
    mantissa, exponent = evaluate(graph, [x])
    assert torch.equal(mantissa, x)
    assert mantissa.data_ptr() != x.data_ptr()
    assert exponent.tolist() == [[0] * 3] * 2


def test_results_get_the_strides_that_were_recorded() -> None:
    text = """
        graph(%0: f32[2, 3]):
          %1: f32[3, 2]{1, 3} = aten::permute(%0, [1, 0])
          %2: f32[3, 2]{1, 3} = aten::tanh(%1)
          %3: i32[3, 2]{1, 3} = aten::view.dtype(%2, i32)
          %4: i32[3, 2]{1, 3} = aten::neg(%3)
          return %2, %4
    """
    _decomposed(text, {"aten::tanh": lambda x: torch.tanh(x.contiguous())}, lambda node: node.op != "aten::tanh")


UNUSABLE: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (lambda x: x.no_such_method(), "AttributeError"),
    "looks at values": (lambda x: x if x.sum() > 0 else -x, "it raised"),
    "wrong shape": (lambda x: x[0], r"gives f32\[3\] instead of f32\[2, 3\]"),
    "wrong dtype": (lambda x: x.double(), "f64"),
    "wrong count": (lambda x: (x, x), "instead of"),
    "no result": (lambda x: None, "gives nothing instead of"),
    "random": (lambda x: torch.tanh(x) * torch.rand_like(x), "draws random numbers without a seed"),
    "a table": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "only numbers can stand in a graph"),
    "writes to its argument": (lambda x: x.tanh_(), "writes to its arguments"),
}


@pytest.mark.parametrize(("function", "why"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_function_that_cannot_be_used_leaves_the_operator(function: Callable[..., Any], why: str) -> None:
    with pytest.warns(UserWarning, match=f"the decomposition of aten::tanh is not used: .*{why}"):
        _, ops = _decomposed(TANH, {"aten::tanh": function}, lambda node: node.op != "aten::tanh")
    assert ops == ["aten::neg", "aten::tanh", "aten::neg"]


@pytest.mark.filterwarnings("ignore:.*is not used")
def test_a_function_that_conjugates_gives_right_values_used_or_not() -> None:
    """Which it is depends on what of PyTorch is imported: some modules register a form that conjugates at once."""

    def tanh(x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.complex(torch.tanh(x), x).conj())[..., 0]

    _decomposed(TANH, {"aten::tanh": tanh}, lambda node: node.op != "aten::tanh")


# ---- programs


def _backward(function: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    def program(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        result = function(*leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = torch.autograd.grad(result.square().sum(), wanted)
        return [result.detach(), *gradients]

    return program


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    mean, var = torch.zeros_like(weight), torch.ones_like(bias)
    trained = F.batch_norm(x, mean, var, weight, bias, training=True)
    (gradient,) = torch.autograd.grad((trained * trained.detach().sin()).sum(), [x])
    return [trained.detach(), F.batch_norm(x, mean, var, weight, bias).detach(), gradient, mean, var]


_X = torch.linspace(-2, 2, 24).view(4, 6)
_V, _W = torch.linspace(0.5, 1.5, 6), torch.linspace(-0.5, 0.5, 6)

PROGRAMS: dict[str, tuple[Callable[..., list[torch.Tensor]], tuple[torch.Tensor, ...], set[str]]] = {
    "layer norm": (
        _backward(lambda x, w, b: F.layer_norm(x, (6,), w, b)),
        (_X, _V, _W),
        {"aten::native_layer_norm", "aten::native_layer_norm_backward"},
    ),
    "batch norm": (
        _batch_norm,
        (_X, _V, _W),
        {"aten::_native_batch_norm_legit_functional", "aten::native_batch_norm_backward"},
    ),
    "group norm": (
        _backward(lambda x: F.group_norm(x.view(2, 4, 3), 2)),
        (_X,),
        {"aten::native_group_norm", "aten::native_group_norm_backward"},
    ),
    "gelu": (_backward(F.gelu), (_X,), {"aten::gelu", "aten::gelu_backward"}),
    "gelu tanh": (_backward(lambda x: F.gelu(x, approximate="tanh")), (_X,), {"aten::gelu", "aten::gelu_backward"}),
    "softmax": (
        _backward(lambda x: x.softmax(-1)),
        (_X,),
        {"aten::_softmax", "aten::_softmax_backward_data"},
    ),
    "log softmax": (
        _backward(lambda x: x.t().log_softmax(0)),
        (_X,),
        {"aten::_log_softmax", "aten::_log_softmax_backward_data"},
    ),
    "addmm": (
        _backward(lambda x, y, b: torch.addmm(b, x, y.t())),
        (_X, _X.flip(0)[:3], torch.ones(3)),
        {"aten::addmm"},
    ),
    "addmm with numbers": (
        lambda x, b: [torch.addmm(b, x, x.t(), beta=0.5, alpha=2)],
        (_X, torch.ones(4)),
        {"aten::addmm"},
    ),
    "cross entropy": (
        _backward(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=2)),
        (_X, torch.tensor([0, 5, 2, 3])),
        {"aten::_log_softmax", "aten::nll_loss_forward", "aten::nll_loss_backward"},
    ),
    "embedding": (
        _backward(lambda w, i: F.embedding(i, w, padding_idx=1)),
        (_X, torch.tensor([[0, 3], [1, 1]])),
        {"aten::embedding_dense_backward"},
    ),
    "activations": (
        _backward(lambda x: F.silu(x) + F.mish(x) + F.hardswish(x) + F.softplus(x) + F.leaky_relu(x) + F.elu(x)),
        (_X,),
        {
            "aten::silu",
            "aten::mish",
            "aten::hardswish",
            "aten::softplus",
            "aten::leaky_relu",
            "aten::elu",
            "aten::silu_backward",
            "aten::hardswish_backward",
            "aten::softplus_backward",
            "aten::elu_backward",
        },
    ),
    "losses": (
        _backward(
            lambda x, y: (
                F.mse_loss(x, y)
                + F.smooth_l1_loss(x, y)
                + F.huber_loss(x, y)
                + F.binary_cross_entropy_with_logits(x, y.sigmoid())
            )
        ),
        (_X, _X.flip(1)),
        {"aten::mse_loss", "aten::smooth_l1_loss", "aten::huber_loss"},
    ),
    "lerp and addc": (
        lambda x, y: [torch.lerp(x, y, 0.3), torch.addcdiv(x, y, x + 3, value=0.5), torch.addcmul(x, y, y)],
        (_X, _X.flip(0)),
        {"aten::lerp.Scalar", "aten::addcdiv", "aten::addcmul"},
    ),
    "windows": (
        _backward(
            lambda x: torch.stack(
                [x.roll(1, 0), x.flip(1), F.pad(x, (1, -1)), x.tril(), x.rot90()[:4, :].repeat(1, 2)[:, :6]]
            )
        ),
        (_X.view(4, 6)[:4],),
        {"aten::roll", "aten::tril"},
    ),
    "pooling and upsampling": (
        _backward(lambda x: F.interpolate(F.avg_pool2d(x.view(1, 2, 4, 3), 2, 1), scale_factor=2, mode="bilinear")),
        (_X,),
        {"aten::upsample_bilinear2d", "aten::avg_pool2d"},
    ),
    "unsafe": (
        lambda x: [torch.unsafe_split(x, 2)[1] + 1, x.new_zeros(3), torch.full_like(x, 2.5), x.logit(0.1)],
        (_X,),
        {"aten::logit", "aten::new_zeros", "aten::full_like"},
    ),
    "half": (
        _backward(lambda x, w, b: F.layer_norm(x, (6,), w, b).softmax(-1)),
        tuple(t.bfloat16() for t in (_X, _V, _W)),
        {"aten::native_layer_norm", "aten::_softmax"},
    ),
}


@pytest.mark.parametrize(("program", "tensors", "gone"), PROGRAMS.values(), ids=PROGRAMS)
def test_pytorchs_own_table_gives_what_eager_gives(
    program: Callable[..., list[torch.Tensor]], tensors: tuple[torch.Tensor, ...], gone: set[str]
) -> None:
    expected = program(*tensors)
    with using(Walking()) as whole:
        _alive = program(*(t.to("tarry") for t in tensors))
        tarry.mark_step()
        recorded = set(whole.operators)
    lacks = recorded & CORE.keys()
    assert lacks & gone, f"none of {gone} in {recorded}"
    with using(Walking(lacks=CORE.keys(), table=CORE)) as backend, expect(fallbacks=0), warnings.catch_warnings():
        warnings.simplefilter("error")
        results = program(*(t.to("tarry") for t in tensors))
        for mine, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), wanted)
        assert not lacks & set(backend.operators)


def test_dropout_keeps_its_seed() -> None:
    """PyTorch's table has native_dropout. Taken apart, it would draw other numbers, or the same each time."""
    assert "aten::native_dropout" in CORE

    def program() -> torch.Tensor:
        torch.manual_seed(3)
        return F.dropout(torch.ones(50, device="tarry"), 0.5) + torch.rand(50, device="tarry")

    with using("eager"):
        expected = program().cpu()
    with using(Walking(lacks=["aten::native_dropout", "aten::rand", "aten::uniform"], table=CORE)), record() as seen:
        assert torch.equal(program().cpu(), expected)
    assert [event.fields["op"] for event in seen if event.kind == "fallback"] == [
        "aten::native_dropout",
        "aten::uniform",
    ]


def test_an_operator_that_could_draw_and_does_not_is_decomposed() -> None:
    x = torch.linspace(-1, 1, 48).view(1, 2, 4, 6)
    lazy = x.to("tarry")
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    with using(Walking(lacks=[attention], table=CORE)) as backend, expect(fallbacks=0):
        mine = F.scaled_dot_product_attention(lazy, lazy, lazy, is_causal=True)
        torch.testing.assert_close(mine.cpu(), F.scaled_dot_product_attention(x, x, x, is_causal=True))
        assert attention not in backend.operators
    # PyTorch's decomposition gives no logsumexp, which the backward pass reads.
    lazy.requires_grad_()
    with (
        using(Walking(lacks=[attention], table=CORE)) as backend,
        expect(fallbacks=1),
    ):
        (gradient,) = torch.autograd.grad(F.scaled_dot_product_attention(lazy, lazy, lazy).square().sum(), lazy)
        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(F.scaled_dot_product_attention(leaf, leaf, leaf).square().sum(), leaf)
        torch.testing.assert_close(gradient.cpu(), wanted)


def test_a_decomposed_number_is_a_constant_and_a_new_value_another_program() -> None:
    x = torch.linspace(-1, 1, 5)
    lazy = x.to("tarry")
    with using(Walking(lacks=["aten::elu", "aten::lerp.Scalar"], table=CORE)) as backend:
        for alpha in (0.5, 2.0, 0.5, -1.0):
            torch.testing.assert_close(F.elu(lazy, alpha).cpu(), F.elu(x, alpha))
        assert len(backend.graphs) == 3
        for weight in (0.25, 0.75):  # the decomposition of lerp takes two branches
            torch.testing.assert_close(torch.lerp(lazy, lazy * 2, weight).cpu(), torch.lerp(x, x * 2, weight))


def test_dropouts_probability_is_no_constant_for_being_in_the_table() -> None:
    x = torch.ones(20).to("tarry")
    with using(Walking(lacks=["aten::native_dropout"], table=CORE)), expect(compiles=1):
        for p in (0.5, 0.25, 0.75):
            F.dropout(x, p).cpu()


def test_training_on_core_operators_alone() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Embedding(7, 8),
            torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu"),
            torch.nn.LayerNorm(8),
            torch.nn.Linear(8, 7),
        ).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for k in range(3):
            ids = ((torch.arange(12) * (k + 2)).view(3, 4) % 7).to(device)
            loss = F.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [loss.detach().cpu(), *(p.detach().cpu() for p in net.parameters())]

    expected = train("cpu")
    table = {op: function for op, function in CORE.items() if "flash_attention_for_cpu" not in op}
    with using(Walking(lacks=table.keys(), table=table)) as backend, expect(fallbacks=0):
        for mine, wanted in zip(train("tarry"), expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    assert not table.keys() & set(backend.operators)
