"""Declaring an operator: names, schemas from annotations, schemas by hand, and what is said when they are wrong."""

from __future__ import annotations

import enum
from typing import Any, Literal, Optional

import pytest
import torch
from torch import Tensor

import tarry
from tarry.custom_ops.schema import infer

USES_DEVICE = True


class Mode(enum.StrEnum):
    UP = "up"
    DOWN = "down"


class Colour(enum.Enum):
    RED = 1


def schema_of(function: Any, mutates_args: Any = ()) -> str:
    return infer(function, "optest::f", mutates_args)[0]


def test_every_type_of_the_dispatcher() -> None:
    def f(
        x: Tensor,
        a: Tensor | None,
        b: list[Tensor],
        c: list[Tensor | None],
        d: int,
        e: Optional[int],  # noqa: UP045
        g: list[int] | None,
        h: int | float,
        i: tuple[int, int],
        j: tuple[float, ...],
        k: torch.SymInt,
        m: torch.dtype | None,
        n: torch.device,
        o: torch.layout,
        p: torch.memory_format,
        q: Literal["a", "b"],
        r: Mode,
        s: bool = True,
        *,
        t: torch.dtype = torch.float32,
        u: tuple[int, ...] = (1, 2),
        v: Mode = Mode.UP,
        w: float = 1e-5,
        y: str | None = None,
    ) -> tuple[Tensor, list[Tensor], int, float, bool]: ...

    assert schema_of(f) == (
        "(Tensor x, Tensor? a, Tensor[] b, Tensor?[] c, SymInt d, SymInt? e, SymInt[]? g, Scalar h, SymInt[] i, "
        "float[] j, SymInt k, ScalarType? m, Device n, Layout o, MemoryFormat p, str q, str r, bool s=True, *, "
        "ScalarType t=float32, "
        'SymInt[] u=[1, 2], str v="up", float w=1e-05, str? y=None) -> (Tensor, Tensor[], SymInt, float, bool)'
    )


def test_written_arguments() -> None:
    def f(x: Tensor, y: list[Tensor], n: int) -> None: ...

    assert schema_of(f, ("y",)) == "(Tensor x, Tensor(a1!)[] y, SymInt n) -> ()"
    assert schema_of(f, "unknown") == "(Tensor(a0!) x, Tensor(a1!)[] y, SymInt n) -> ()"
    with pytest.raises(ValueError, match="'n' is in mutates_args, but only tensors"):
        schema_of(f, ("n",))
    with pytest.raises(ValueError, match="mutates_args names z, and there is no such parameter"):
        schema_of(f, ("z",))
    with pytest.raises(ValueError, match=r"takes the names of parameters, \('x',\)"):
        schema_of(f, "x")


def _parameter(annotation: Any, default: Any = ...) -> Any:
    def f(x, wrong): ...

    f.__annotations__ = {"x": Tensor, "wrong": annotation, "return": Tensor}
    f.__defaults__ = None if default is ... else (default,)
    return f


@pytest.mark.parametrize(
    ("annotation", "says"),
    [
        (dict[str, int], "the types that an operator takes are"),
        (Colour, "derive it from enum.StrEnum"),
        (Literal[1, 2], "a Literal of anything but strings"),
        (tuple[int, float], "must be of one type"),
        (list[list[int]], "lists cannot be nested"),
        (int | str, "one type, or one type and None"),
        ("Missing", "it is not a type here"),
        (list[Mode], "use list"),
    ],
)
def test_an_unsupported_type_names_the_parameter(annotation: Any, says: str) -> None:
    with pytest.raises(ValueError, match=r"optest::f.*parameter 'wrong'") as raised:
        schema_of(_parameter(annotation))
    assert says in str(raised.value)


def test_other_faults_of_a_signature() -> None:
    def varargs(*xs: Tensor) -> Tensor: ...
    def bare(x) -> Tensor: ...
    def no_return(x: Tensor): ...
    def bad_return(x: Tensor) -> dict[str, Tensor]: ...
    def open_return(x: Tensor) -> tuple[Tensor, ...]: ...

    for function, says in (
        (varargs, "parameter 'xs'.*varargs"),
        (bare, "parameter 'x' must have a type annotation"),
        (no_return, "no return annotation"),
        (bad_return, "return annotation dict.* is unsupported"),
        (open_return, "fixed number"),
        (_parameter(list[int], {1}), "parameter 'wrong': the default .* is not a list"),
        (_parameter(float, float("inf")), "cannot hold the default inf"),
    ):
        with pytest.raises(ValueError, match=says):
            schema_of(function)


@pytest.mark.parametrize(
    ("qualname", "says"),
    [
        ("f", "no namespace"),
        ("optest::f.out", "overload"),
        ("op.test::f", "without dots"),
        ("aten::f", "reserved namespace"),
        ("optest::g", "expected the function to have name 'g'"),
        ("optest::1", "not a name that Python could call"),
    ],
)
def test_names(qualname: str, says: str) -> None:
    def f(x: Tensor) -> Tensor: ...

    with pytest.raises(ValueError, match=says):
        tarry.custom_op(qualname)(f)


def test_manual_schemas() -> None:
    @tarry.custom_op("optest::f", "(Tensor(a!) x, *, float k=2.0) -> Tensor(a!)")
    def f(x: Tensor, *, k: float = 2.0) -> Tensor: ...

    f.impl("cpu")(lambda x, *, k=2.0: x.mul_(k))
    x = torch.ones(2)
    assert f(x) is x
    assert x.tolist() == [2.0, 2.0]

    def g(y): ...

    with pytest.raises(ValueError, match="signature to match the manual schema"):
        tarry.custom_op("optest::g", "(Tensor x) -> Tensor")(g)
    with pytest.raises(ValueError, match="is not a schema"):
        tarry.custom_op("optest::g", "(Tensor y) -> Nonsense")(g)
    with pytest.raises(ValueError, match="with a manual schema, writes are declared there"):
        tarry.custom_op("optest::g", "(Tensor y) -> Tensor", mutates_args=("y",))(g)
    with pytest.raises(ValueError, match="a decorator for a Python function, and got a str"):
        tarry.custom_op("optest::g")("g")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "tarry"])
def test_literals_enumerations_and_tuples_are_checked_in_calls(device: str) -> None:
    @tarry.custom_op("optest::f")
    def f(x: Tensor, way: Literal["left", "right"], mode: Mode, pair: tuple[int, int]) -> Tensor: ...

    got = []

    @f.impl("cpu")
    def _(x, way, mode, pair):
        got.append((way, mode, pair))
        return x.clone()

    f.impl_abstract()(lambda x, way, mode, pair: torch.empty_like(x))
    x = torch.ones(2, device=device)
    f(x, "left", Mode.DOWN, (1, 2)).cpu()
    assert got == [("left", "down", [1, 2])]
    with pytest.raises(ValueError, match="optest::f: way='up' is none of 'left', 'right'"):
        f(x, "up", Mode.DOWN, (1, 2))
    with pytest.raises(ValueError, match="mode='left' is none of 'up', 'down'"):
        f(x, "left", "left", (1, 2))
    with pytest.raises(ValueError, match="pair takes 2 elements, and got 3"):
        f(x, "left", Mode.UP, (1, 2, 3))


@pytest.mark.parametrize(
    ("annotation", "default", "says"),
    [
        (int, "x", "the default 'x' is a str, and the annotation means SymInt"),
        (int, True, "the default True is a bool"),
        (int, 2**63, "does not fit into 64 bits"),
        (int, None, "the default None needs an annotation '... | None'"),
        (Tensor, None, "the default None needs an annotation '... | None'"),
        (Tensor | None, torch.ones(1), "a schema cannot hold the default"),
        (Literal["a", "b"], "c", "the default 'c' is none of 'a', 'b'"),
        (bool, 1, "the default 1 is a int"),
        (list[int], 3, "the default 3 is not a list"),
        (list[int], [0.5], "the default 0.5 is a float"),
        (tuple[int, int], (1, 2, 3), "does not have 2 elements"),
        (torch.dtype, "float32", "the default 'float32' is a str"),
        (str, 'a"b', "a schema cannot hold the default"),
    ],
)
def test_a_default_that_does_not_fit_names_the_parameter(annotation: Any, default: Any, says: str) -> None:
    with pytest.raises(ValueError, match=r"optest::f.*parameter 'wrong'") as raised:
        schema_of(_parameter(annotation, default))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("annotation", "default"),
    [
        (torch.device, torch.device("cpu")),
        (torch.device | None, torch.device("cuda:1")),
        (torch.device | None, None),
        (float, 1),
        (int | float, 2.5),
        (int, -(2**63) + 1),
        (list[float], [0.5, 1]),
        (list[int], []),
        (Literal["a", "b"] | None, "a"),
        (str, "a b, c=(d)"),
    ],
)
def test_defaults_that_fit(annotation: Any, default: Any) -> None:
    op = tarry.custom_op("optest::f")(_parameter(annotation, default))
    got: list[Any] = []
    op.impl("cpu")(lambda x, wrong=default: got.append(wrong) or x.clone())
    op(torch.ones(1))
    assert got == [default]
    assert op._arguments[1][2] == default
