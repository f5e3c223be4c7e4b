"""What is generated from a small YAML, to the letter; and that it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tarry.codegen.command import Options, generate
from tarry.ir.graph import GraphBuilder, Node, Number, Value
from tarry.ir.layout import TensorType

USES_DEVICE = True
GOLDEN = Path(__file__).parent / "golden"


def _options(folder: Path | str = "expected") -> Options:
    return Options(
        source_yaml=Path("golden.yaml"),
        output_dir=Path(folder),
        impl_path=Path("golden_kernels.py"),
        backend_name="golden",
        gen_ts_lowerings=True,
    )


def test_the_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    result = generate(_options())
    assert not result.problems
    made = {path: text for path, text in result.files.items() if path.suffix == ".py"}
    assert {path.name for path in made} == {path.name for path in Path("expected").glob("*.py")}
    for path, text in made.items():
        assert text == path.read_text(), f"{path} differs: look at the change, then run\n{_options().command}"


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The generated package."""
    monkeypatch.syspath_prepend(str(GOLDEN))
    before = set(sys.modules)

    def module(name: str) -> ModuleType:
        return import_module(f"expected.{name}")

    yield module
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("expected", "golden_kernels"):
            del sys.modules[name]


FLOATS = TensorType(torch.float32, (2, 3), (3, 1))


def test_a_node_has_fields_identity_and_text(golden: Any) -> None:
    nodes = golden("nodes")
    a, b, c = Value(0, FLOATS), Value(1, FLOATS), Value(2, FLOATS)
    node = nodes.AddTensor(a, b, alpha=2)
    assert (node.self_, node.other, node.alpha) == (a, b, 2)
    assert node.operands == ("self_", "other", "alpha")
    assert str(node) == "aten::add.Tensor(self=%0, other=%1, alpha=2)"
    assert node == nodes.AddTensor(a, b, alpha=2)
    assert hash(node) == hash(nodes.AddTensor(a, b, alpha=2))
    assert node != nodes.AddTensor(a, b, alpha=2.0)  # 2 and 2.0 promote differently
    assert node.can_be_reused(a, b, alpha=2)
    assert not node.can_be_reused(a, c, alpha=2)
    assert node.identity() == nodes.AddTensor(b, c, alpha=3).identity()  # alpha is an operand
    split = nodes.SplitCopyTensor(a, 1, 0)
    assert split.identity() != nodes.SplitCopyTensor(a, 2, 0).identity()
    with pytest.raises(AttributeError, match="nodes do not change"):
        node.alpha = 3


def test_a_node_is_a_view_of_a_plain_one(golden: Any) -> None:
    nodes = golden("nodes")
    a, b = Value(0, FLOATS), Value(1, FLOATS)
    plain = Node("aten::add.Tensor", (a, b, 1), (Value(2, FLOATS),))
    view = nodes.typed(plain)
    assert view.node is plain
    assert list(view.shapes()) == [FLOATS]
    match view:
        case nodes.AddTensor(self_=x, alpha=1):
            assert x is a
        case _:
            pytest.fail("the pattern did not match")
    assert nodes.typed(Node("aten::mm", (a, b), ())) is None


def test_shapes_come_from_meta_kernels(golden: Any) -> None:
    nodes = golden("nodes")
    x = Value(0, FLOATS)
    assert [type_.sizes for type_ in nodes.SplitCopyTensor(x, 2, 1).shapes()] == [(2, 2), (2, 1)]
    values, indices = nodes.MaxDim(x, 1).shapes()
    assert (values.sizes, indices.dtype) == ((2,), torch.int64)
    layer_norm = nodes.NativeLayerNorm(x, (3,), None, None, 1e-5)
    assert [type_.sizes for type_ in layer_norm.shapes()] == [(2, 3), (2, 1), (2, 1)]
    seed = Number(0, "seed", torch.int64, 7)
    assert list(nodes.BernoulliP(x, 0.5, generator=seed).shapes()) == [FLOATS]
    assert list(nodes.Relu(x).shapes()) == [FLOATS]  # relu_: what it writes
    given = TensorType(torch.float32, (9,), (1,))
    assert list(nodes.AddTensor(x, x, shapes=[given]).shapes()) == [given]


def test_a_node_can_be_appended_to_a_graph(golden: Any) -> None:
    nodes = golden("nodes")
    builder = GraphBuilder()
    x = builder.input(FLOATS)
    (total,) = nodes.AddTensor(x, x).append(builder)
    graph = builder.finish([total])
    assert "aten::add.Tensor(%0, %0" in str(graph)


def test_properties_of_non_native_nodes(golden: Any) -> None:
    own = golden("non_native_nodes")
    x = Value(0, FLOATS)
    with pytest.raises(NotImplementedError, match="write compute_shape_scalar"):  # ShapeCompute: when it is made
        own.Scalar(1, torch.float32)
    view = own.NarrowView(x, 0, None)  # ShapeCache: when it is asked for
    with pytest.raises(NotImplementedError, match="write compute_shape_narrow_view"):
        view.shapes()
    first = own.Cast.create(None, x, torch.float64, None)
    assert own.Cast.create(first, x, torch.float64, None) is first
    assert own.Cast.create(first, x, torch.float16, None) is not first
    with pytest.raises(NotImplementedError, match="subclass it and write the lowering"):  # LowerDeclOnly
        view.lower_with(None)


def test_lowerings_lower_to_torchscript(golden: Any) -> None:
    from tarry.backends.torchscript.lowering import TSLoweringContext

    nodes = golden("nodes")
    builder = GraphBuilder()
    x = builder.input(FLOATS)
    (total,) = nodes.AddTensor(x, x, alpha=2).append(builder)
    parts = nodes.SplitCopyTensor(total, 1, 0).append(builder)
    graph = builder.finish(parts)
    context = TSLoweringContext(graph)
    context.add_parameter(0, x)
    for node in graph.nodes:
        view = nodes.typed(node)
        context.begin(node)
        context.emitted.update(zip(node.outputs, view.lower_with(context), strict=True))
    for value in graph.outputs:
        context.add_result(value)
    computation = context.build()
    data = torch.arange(6.0).reshape(2, 3)
    assert [part.tolist() for part in computation.run([data], [])] == [(data * 3)[k : k + 1].tolist() for k in range(2)]


def test_the_backend_computes(golden: Any) -> None:
    import tarry

    golden("backend").register()
    tarry.set_backend("golden")
    try:
        tarry.metrics.reset()
        x = torch.arange(6.0).reshape(2, 3)
        moved = x.to("tarry")
        other = moved + 1
        other.relu_()
        other[0].fill_(2)
        parts = torch.split_copy(other, 2, 1)
        expected = x + 1
        expected[0].fill_(2)
        assert [part.tolist() for part in parts] == [part.tolist() for part in torch.split_copy(expected, 2, 1)]
        assert torch.addmm(moved, torch.eye(2, device="tarry"), moved).tolist() == (x + x).tolist()
        counters = tarry.metrics.counters()
        assert not {f"fallback/aten::{name}" for name in ("add.Tensor", "relu", "addmm", "split_copy.Tensor")} & set(
            counters
        )
    finally:
        tarry.set_backend("eager")
