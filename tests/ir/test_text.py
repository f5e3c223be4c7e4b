"""Text and back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tarry.errors import IRError
from tarry.ir import HERE, Graph, GraphBuilder, Number, Site, TensorType, from_raw, parse, to_text
from tarry.ir.dtypes import DTYPE_NAMES
from tarry.ir.sizes import Polynomial, Size
from tarry.ir.text import type_text
from tarry.passes import run_pipeline
from tests.ir.strategies import draw_program, sizes

EVERYTHING = """\
graph(%0: f32[8, 8], %1: bf16[4, 2]{1, 4}, %2: i64[]):
  unused $4=complex(1.0, -2.0), $5=number(3, f32)
  %3: f32[8, 8] = aten::add_.Tensor(%0, %2, alpha=$0=1)  # train.py:12
  (%4: f32[8], %5: i64[8]) = aten::max.dim(%3, 1, False)  # a dir/with # and: colons.py:13
  (_, %6: f32[3], _) = aten::native_layer_norm_backward(%0, %0, [8], %4, %4, None, None, [True, False, True])
  %7: f32[8] = aten::uniform_(%4, 0.0, $1=0.5, generator=$2=seed(77)) [kept, region=3]  # <string>:1
  (%15: f32[8], %16: b8[8]) = aten::native_dropout(%7, 0.5, True) [$6=seed(78), region=3]
  %8: f32[3] = aten::full([3], $3=wrapped(-inf), dtype=f32, layout=strided, device=here, pin_memory=False)
  %9: f32[8] = aten::index.Tensor(%0, [None, %5]) [region=1]
  %10: f32[8] = aten::gelu(%9, approximate="ta\\"nh # x") [kept]
  %11: f32[8] = aten::clone(%10, memory_format=channels_last)
  %12: f32[2] = aten::mul.Scalar(%6, nan)
  %13: f32[2] = aten::mul.Scalar(%12, -1e-05)
  %14: f32[2] = aten::_to_copy(%13, dtype=c64, device=device("cpu"), non_blocking=True)
  () = aten::_foreach_zero_([])
  return %3 -> %0, %11, %14"""


def test_everything_there_is_to_write() -> None:
    graph = parse(EVERYTHING)
    assert to_text(graph) == EVERYTHING
    assert graph.nodes[1].site == Site("a dir/with # and: colons.py", 13)
    assert graph.nodes[3].kept
    assert graph.nodes[3].region == 3
    filling = Number(3, "wrapped", torch.float64, -math.inf)
    assert graph.nodes[5].args == ((3,), filling, torch.float32, torch.strided, HERE, False)
    assert graph.nodes[7].args[1] == 'ta"nh # x'
    assert graph.nodes[4].seed == graph.numbers[6] == Number(6, "seed", torch.int64, 78)
    assert graph.numbers[4].value == 1 - 2j
    assert graph.replaces == (0, None, None)


SIZED = """\
graph(%0: f32[<s0 = 11>, 8]{8, 1}, %1: f32[2, <-1*s0 + 2*s0*s1 - 3 = 40>]{<s1 = 2>, 1}):
  %2: f32[<s0 + 1 = 12>, 8]{8, 1} = aten::constant_pad_nd(%0, [0, 0, 0, 1], $0=0.0)
  %3: f32[<8*s0 = 88>]{1} = aten::view(%0, [<8*s0 = 88>])
  return %2, %3"""


def test_integers_that_vary() -> None:
    graph = parse(SIZED)
    assert to_text(graph) == SIZED
    size, stride = graph.inputs[1].type.sizes[1], graph.inputs[1].type.strides[0]
    assert isinstance(size, Size)
    assert isinstance(stride, Size)
    assert (int(size), size.polynomial.at((5, 7))) == (40, -5 + 70 - 3)
    assert stride.polynomial == Polynomial.symbol(1)
    (length,) = graph.nodes[1].args[1]  # type: ignore[misc]
    assert isinstance(length, Size)


@pytest.mark.parametrize("wrong", ["<s0>", "<s0 + = 3>", "<8 s0 = 3>", "< = 3>", "<s0 = x>"])
def test_integers_that_make_no_sense(wrong: str) -> None:
    with pytest.raises(IRError, match="a size that makes sense"):
        parse(SIZED.replace("<s0 = 11>", wrong))


terms = st.dictionaries(
    st.lists(st.integers(0, 3), max_size=3).map(lambda product: tuple(sorted(product))),
    st.integers(-9, 9).filter(bool),
    min_size=1,
)


@given(terms)
def test_polynomials_as_text_and_back(terms: dict[tuple[int, ...], int]) -> None:
    polynomial = Polynomial(tuple((factor, product) for product, factor in terms.items()))
    assert Polynomial.parse(str(polynomial)) == polynomial


def test_an_empty_graph() -> None:
    graph = Graph((), (), (), (), ())
    assert to_text(graph) == "graph():\n  return"
    assert parse(to_text(graph)) == graph


def test_strides_show_where_they_are_not_contiguous() -> None:
    assert type_text(TensorType.contiguous(torch.float16, (2, 3))) == "f16[2, 3]"
    assert type_text(TensorType(torch.bool, (2, 3), (1, 2))) == "b8[2, 3]{1, 2}"
    assert type_text(TensorType(torch.complex64, (1, 3), (9, 1))) == "c64[1, 3]{9, 1}"
    assert type_text(TensorType(torch.uint8, (), ())) == "u8[]"


def test_every_dtype_has_a_name_of_its_own() -> None:
    assert len(set(DTYPE_NAMES.values())) == len(DTYPE_NAMES)
    for name in dir(torch):
        if isinstance(getattr(torch, name), torch.dtype):
            assert getattr(torch, name) in DTYPE_NAMES


@given(st.data())
@settings(max_examples=60)
def test_recorded_programs_survive_the_round_trip_at_every_stage(data: st.DataObject) -> None:
    for graph in run_pipeline(from_raw(draw_program(data.draw, 5).raw())).graphs.values():
        back = parse(to_text(graph))
        assert back == graph
        assert to_text(back) == to_text(graph)


numbers = st.booleans() | st.integers() | st.floats() | st.complex_numbers()
constants = st.one_of(
    st.none(),
    numbers,
    st.text(),
    st.sampled_from(sorted(DTYPE_NAMES, key=str)),
    st.sampled_from([torch.strided, torch.contiguous_format, torch.channels_last, torch.preserve_format]),
    st.sampled_from([HERE, torch.device("cpu"), torch.device("cuda:1")]),
)
files = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1)


@given(
    st.lists(st.recursive(constants, lambda inner: st.lists(inner).map(tuple), max_leaves=5), max_size=3),
    st.lists(st.tuples(st.sampled_from(["number", "wrapped"]), numbers), max_size=3),
    st.lists(st.tuples(sizes, sizes), max_size=3),
    st.none() | st.builds(Site, files, st.integers(0, 10**6)),
    st.integers(0, 5),
    st.booleans(),
)
def test_any_graph_survives_the_round_trip(
    args: list[object],
    values: list[tuple[str, complex]],
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]],
    site: Site | None,
    region: int,
    kept: bool,
) -> None:
    """Legal or not: what is printed is what there is."""
    dtypes = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    builder = GraphBuilder()
    for shape, strides in shapes:
        builder.input(TensorType(torch.float32, shape, (*strides, *[3] * len(shape))[: len(shape)]))
    known = [builder.number(kind, dtypes[type(value)], value) for kind, value in values]  # type: ignore[arg-type]
    given_args = (*args, *known[:1], *[None] * 5)[:5]  # as many as the schema has
    outputs = builder.node(
        "aten::linalg_vector_norm",
        given_args,  # type: ignore[arg-type]
        [TensorType.contiguous(torch.float32, (2,)), None],
        site=site,
        region=region,
        kept=kept,
    )
    assert outputs[0] is not None
    graph = builder.finish([outputs[0]])
    back = parse(to_text(graph))
    assert back == graph
    assert [repr(number.value) for number in back.numbers] == [repr(number.value) for number in graph.numbers]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least"),
        ("graph(%0: f32[8])\n  return %0", "line 1: expected ':'"),
        ("graph(%0: f31[8]):\n  return %0", "a dtype"),
        ("graph(%0: f32[8]):\n  %1: f32[8] = aten::neg(%2)\n  return %1", r"line 2: .*%2 is not"),
        ("graph(%0: f32[8]):\n  %1: f32[8] = aten::nag(%0)\n  return %1", "no operator 'aten::nag'"),
        ("graph(%0: f32[8]):\n  %1: f32[8] = aten::neg(%0) and more\n  return %1", "the end of the line at 'and more'"),
        ("graph(%0: f32[8]):\n  %1: f32[8] = aten::neg(%0, up=1)\n  return %1", "up is none"),
        ("graph(%0: f32[8]):\n  %1: f32[8] = aten::neg(soon)\n  return %1", "an argument"),
        ("graph(%0: f32[8]):\n  %1: f32[8] = aten::neg(%0)\n  return %1 -> %1", "an input after '->'"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(IRError, match=message):
        parse(text)
