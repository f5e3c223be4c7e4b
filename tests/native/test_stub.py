"""native/_C.pyi declares exactly what the compiled module has: names, parameters, defaults and types."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tarry.native
from tarry.ir.raw import RawGraph, RawNode
from tarry.native import C

STUB = Path(tarry.native.__file__).with_name("_C.pyi")
# What C++ does not say more about: the stub may be narrower.
WIDE = {"object", "list", "dict", "tuple", "list[object]"}


@dataclass(frozen=True)
class Signature:
    """The parameters, each as (name or "" if it has none, kind, type, default), and the result's type."""

    parameters: tuple[tuple[str, str, str, str | None], ...]
    returns: str


def _stub() -> ast.Module:
    return ast.parse(STUB.read_text())


ALIASES = {
    node.target.id: node.value
    for node in _stub().body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
}


class _Expand(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.visit(ALIASES[node.id]) if node.id in ALIASES else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return node if isinstance(node.value, ast.Name) and node.value.id == "torch" else ast.Name(node.attr)


def _type(annotation: ast.expr | None) -> str:
    assert annotation is not None
    return ast.unparse(_Expand().visit(annotation))


def _declared(function: ast.FunctionDef) -> Signature:
    arguments = function.args
    defaults = [None] * (len(arguments.posonlyargs + arguments.args) - len(arguments.defaults)) + [
        ast.unparse(default) for default in arguments.defaults
    ]
    parameters = [
        (
            "" if argument in arguments.posonlyargs else argument.arg,
            "positional",
            "self" if argument.arg == "self" else _type(argument.annotation),
            default,
        )
        for argument, default in zip(arguments.posonlyargs + arguments.args, defaults, strict=True)
    ]
    parameters += [(argument.arg, "keyword", _type(argument.annotation), None) for argument in arguments.kwonlyargs]
    return Signature(
        tuple(("", *each[1:]) if each[2] == "self" else each for each in parameters), _type(function.returns)
    )


def _compiled(doc: str) -> Signature:
    """The signature that pybind11 writes into the first line of a docstring."""
    text = doc.splitlines()[0]
    text = text.replace("tarry::", "").replace(f"{C.__name__}.", "").replace("collections.abc.", "")
    text = text.replace("typing.SupportsInt | typing.SupportsIndex", "int")
    text = text.replace("typing.SupportsFloat | typing.SupportsIndex", "float")
    function = ast.parse(f"def {text if text[0] != '(' else '_' + text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    for argument in function.args.args:
        if argument.arg == "self":
            argument.annotation = None
    declared = _declared(function)
    return Signature(
        tuple(
            ("" if re.fullmatch(r"arg\d+", name) else name, kind, type_, default)
            for name, kind, type_, default in declared.parameters
        ),
        declared.returns,
    )


def _fits(declared: str, compiled: str) -> bool:
    """Whether the stub's type is the one that C++ has, or a narrower one where C++ says little."""
    if compiled in WIDE:
        return compiled in ("object", "list[object]") or declared.startswith(f"{compiled}[") or compiled == "dict"
    return declared in (compiled, f"{compiled} | None" if compiled[0].isupper() else compiled)


def _check(name: str, declared: Signature, compiled: Signature) -> None:
    shape = [(each[0], each[1], each[3]) for each in compiled.parameters]
    assert [(each[0], each[1], each[3]) for each in declared.parameters] == shape, name
    for mine, theirs in zip(declared.parameters, compiled.parameters, strict=True):
        assert _fits(mine[2], theirs[2]), f"{name}: {mine[2]} is {theirs[2]} in C++"
    assert _fits(declared.returns, compiled.returns), f"{name}: gives {compiled.returns} in C++"


def _members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id not in ALIASES:
            found[node.target.id] = node
    return found


def _names(owner: Any) -> set[str]:
    """What C++ has defined on the module or the class."""
    return {
        name
        for name, value in vars(owner).items()
        if not name.startswith("_")
        or (name.startswith("__") and type(value).__name__ == "instancemethod" and name != "__new__")
    }


def _cases() -> Iterator[tuple[str, ast.stmt, Any]]:
    for name, node in _members(_stub().body).items():
        if isinstance(node, ast.ClassDef):
            for member, declared in _members(node.body).items():
                yield f"{name}.{member}", declared, inspect.getattr_static(getattr(C, name, None), member, None)
        elif not name.startswith("__"):
            yield name, node, getattr(C, name, None)


def test_every_name_is_declared() -> None:
    declared = _members(_stub().body)
    assert {name for name in declared if not name.startswith("__")} == _names(C)
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef):
            made = getattr(C, name)
            assert set(_members(node.body)) == _names(made), name
            assert [ast.unparse(base) for base in node.bases] == [
                base.__name__ for base in made.__bases__ if base.__module__ == C.__name__
            ]


@pytest.mark.parametrize(("name", "declared", "value"), list(_cases()), ids=[name for name, _, _ in _cases()])
def test_signature(name: str, declared: ast.stmt, value: Any) -> None:
    if isinstance(declared, ast.AnnAssign):  # an attribute that can be set
        assert value.fset is not None
        assert _fits(_type(declared.annotation), _compiled(value.fget.__doc__).returns)
    elif isinstance(value, property):
        assert isinstance(declared, ast.FunctionDef)
        assert value.fset is None
        assert [ast.unparse(each) for each in declared.decorator_list] == ["property"]
        assert _fits(_type(declared.returns), _compiled(value.fget.__doc__).returns)
    else:
        assert isinstance(declared, ast.FunctionDef)
        _check(name, _declared(declared), _compiled(value.__doc__))


def test_the_comparison_finds_a_difference() -> None:
    compiled = _compiled("f(arg0: typing.SupportsInt | typing.SupportsIndex, on: bool = True) -> tarry::Batch")
    for text in (
        "def f(x: int, on: bool = True) -> Batch: ...",
        "def f(x: int, /, on: bool = False) -> Batch: ...",
        "def f(x: int, /, on: int = True) -> Batch: ...",
        "def f(x: int, /, on: bool = True) -> int: ...",
    ):
        function = ast.parse(text).body[0]
        assert isinstance(function, ast.FunctionDef)
        with pytest.raises(AssertionError):
            _check("f", _declared(function), compiled)


def test_a_raw_graph_has_the_declared_records(device: str) -> None:
    graph = C.peek([torch.nn.functional.dropout(torch.ones(3, device=device), 0.5) + 2.0]).raw()
    assert graph.keys() == RawGraph.__annotations__.keys()
    for node in graph["nodes"]:
        assert RawNode.__required_keys__ <= node.keys() <= RawNode.__annotations__.keys()
    kinds = {arg[0] for node in graph["nodes"] for arg in node["args"]}
    assert {"edge", "wrapped", "const"} <= kinds
