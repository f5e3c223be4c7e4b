"""The one table of what tarry knows about operators, for the torch version at hand.

PyTorch knows over three thousand operators. The recorder wants the *leaves*: those that a backend has to carry out. The
others decompose into leaves by themselves (CompositeImplicit), are views that only touch metadata, or are factories and
conversions that PyTorch writes in terms of `empty` and a leaf. torchgen's model knows which is which; what it does not
know is in `tarry.yaml`, beside this file. The recorder gets a row's facts as bits (csrc/core/operator.h); passes and
backends look rows up by `facts()`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tarry.trust as trust  # "from tarry" would load the whole package

if TYPE_CHECKING:
    from torchgen.model import NativeFunction

RULES_FILE = Path(__file__).parent / "tarry.yaml"


class Kind(StrEnum):
    """What happens when an operator is called on a tarry tensor."""

    RECORD = "record"  # the recorder makes a node of it
    DECOMPOSE = "decompose"  # PyTorch's own kernel calls other operators
    VIEW = "view"  # PyTorch's own kernel makes another tensor over the same storage
    KERNEL = "kernel"  # csrc/device/kernels.cpp has a kernel for it
    OPAQUE = "opaque"  # of sparse and nested tensors: it runs eagerly
    UNSUPPORTED = "unsupported"  # of tensors that tarry does not have (quantized): the call raises
    GRAPH = "graph"  # it exists in graphs only
    UNLISTED = "unlisted"  # not in the table: a custom operator


class Fails(StrEnum):
    """When a call that was recorded can fail, once it runs."""

    NEVER = "never"
    ON_NUMBERS = "on numbers"  # a CPU's are checked when the call is recorded
    ON_INTEGERS = "on integers"  # a division by zero, a negative power
    ON_INDEX = "on an index"  # on a CUDA device the kernel checks it: that ends all work there, and is no exception
    ON_DATA = "on data"


@dataclass(frozen=True, slots=True)
class OpEntry:
    """What tarry knows about one operator. `flags` are the bits of csrc/core/operator.h."""

    name: str  # "aten::add.Tensor", or "aten::mm" for the default overload
    kind: Kind
    fails: Fails = Fails.ON_DATA
    in_place: bool = False
    out: bool = False
    random: bool = False  # draws random numbers
    dynamic: bool = False  # the output's shape, or a value read on the host, depends on data
    overwrites: bool = False  # writes all of its mutable arguments without reading them
    shape_from_numbers: bool = False
    pointwise: bool = False
    scatters: bool = False  # gives a copy of its first argument with some elements replaced
    rounds_numbers: bool = False  # to the tensors' dtype, before it computes with them
    numbers_on_host: bool = False  # a compiler calls its kernel, with Python numbers
    on_lists: bool = False
    element: str | None = None  # of an operator on lists: the operator that it applies to each element, if there is one
    index_arguments: tuple[int, ...] = ()  # those that decide, with the sizes of the first, whether an index is right
    mutable_arguments: tuple[str, ...] = ()
    flags: int = 0

    @property
    def is_custom(self) -> bool:
        """Whether it is neither PyTorch's nor ours: nothing is known about it, and it may fail."""
        return self.kind is Kind.UNLISTED


@dataclass(frozen=True)
class OperatorRules:
    """What `tarry.yaml` says. Names of operators are without their overload, except in `kernels`, `outside_graphs`,
    `graph_views`, `leaves` and the column `overwrites`; in `fails`, they may be either."""

    kernels: frozenset[str]
    outside_graphs: frozenset[str]
    graph_views: frozenset[str]
    decompose: frozenset[str]
    leaves: frozenset[str]
    factories: frozenset[str]
    opaque: frozenset[str]
    unsupported: frozenset[str]
    non_native: tuple[str, ...]
    fails: Mapping[str, Fails]
    index_arguments: Mapping[str, tuple[int, ...]]
    elements: Mapping[str, tuple[str | None, ...]]
    columns: Mapping[str, frozenset[str]]

    def kind(self, function: NativeFunction) -> Kind:
        name, base = str(function.func.name), str(function.func.name.name)
        if name in self.kernels:
            return Kind.KERNEL
        if function.has_composite_implicit_autograd_kernel and name not in self.leaves:
            return Kind.DECOMPOSE
        if function.is_view_op:
            return Kind.VIEW
        if base in self.decompose or name in self.decompose:
            return Kind.DECOMPOSE
        if function.has_composite_explicit_autograd_kernel and self._is_factory(function, base):
            return Kind.DECOMPOSE
        if _form(function) in self.opaque:
            return Kind.OPAQUE
        return Kind.UNSUPPORTED if _form(function) in self.unsupported else Kind.RECORD

    def _is_factory(self, function: NativeFunction, base: str) -> bool:
        if function.func.is_out_fn():
            return False
        has_tensor = any(argument.type.is_tensor_like() for argument in function.func.arguments.flat_all)
        return not has_tensor or base in self.factories

    def _fails(self, function: NativeFunction, random: bool) -> Fails:
        """A row's name comes before its form, and both before torchgen's tags."""
        for name in (str(function.func.name), _form(function)):
            if name in self.fails:
                return self.fails[name]
        pointwise = "pointwise" in function.tags and not random
        return Fails.NEVER if pointwise or function.is_view_op else Fails.ON_DATA

    def _element(self, function: NativeFunction) -> str | None:
        forms = self.elements.get(_form(function), (None,))
        arguments = function.func.arguments.flat_positional
        if len(forms) == 1 or not arguments[-1].type.is_tensor_like():
            found = forms[min(1, len(forms) - 1)]
        else:
            found = forms[0 if arguments[0].type.is_tensor_like() else 2]
        return found and f"aten::{found}"

    def entry(self, function: NativeFunction) -> OpEntry:
        """What is known about one native function."""
        name, base, form = str(function.func.name), str(function.func.name.name), _form(function)
        kind = str(function.func.kind().name)
        of = {column: base in names for column, names in self.columns.items()}
        random = "nondeterministic_seeded" in function.tags or of["random"]
        tagged = bool({"dynamic_output_shape", "data_dependent_output"} & function.tags)
        dynamic = (tagged or of["dynamic"] or form in self.opaque) and not of["mask_indices"]
        only_out = kind == "out" and not any(map(_is_written, function.func.arguments.flat_non_out))
        overwrites = name in self.columns["overwrites"] or only_out
        pointwise = "pointwise" in function.tags
        fails = self._fails(function, random)
        bits = (  # in the order of csrc/core/operator.h's OperatorFlags
            random,
            dynamic,
            overwrites,
            of["shape_from_numbers"],
            of["mask_indices"],
            of["takes_host_indices"],
            of["shape_from_device"],
            not of["contents_decide"],
            pointwise,
            of["checks_numbers"],
            of["products"],
            fails is Fails.NEVER,
            fails is Fails.ON_INTEGERS,
            fails is Fails.ON_INDEX,
            fails is Fails.ON_NUMBERS,
        )
        return OpEntry(
            name=f"aten::{name}",
            kind=self.kind(function),
            fails=fails,
            in_place=kind == "inplace",
            out=kind == "out",
            random=random,
            dynamic=dynamic,
            overwrites=overwrites,
            shape_from_numbers=of["shape_from_numbers"],
            pointwise=pointwise,
            scatters=form in self.columns["scatters"],
            rounds_numbers=form in self.columns["rounds_numbers"],
            numbers_on_host=form in self.columns["numbers_on_host"],
            on_lists=form in self.elements,
            element=self._element(function) if kind == "functional" else None,
            index_arguments=self.index_arguments.get(form, ()),
            mutable_arguments=tuple(
                argument.name for argument in function.func.arguments.flat_all if _is_written(argument)
            ),
            flags=sum(1 << i for i, bit in enumerate(bits) if bit),
        )

    def graph_entry(self, name: str) -> OpEntry:
        """What is known about an operator of ours, which no program calls."""
        scatters = name in self.columns["scatters"]
        return OpEntry(f"tarry::{name}", Kind.GRAPH, self.fails.get(name, Fails.ON_DATA), scatters=scatters)


def _is_written(argument: Any) -> bool:
    return argument.annotation is not None and argument.annotation.is_write


def _form(function: NativeFunction) -> str:
    """The name that an operator shares with its writing forms: `add` of add.Tensor, add_.Tensor and add.out."""
    return str(function.func.name.name.base)


@functools.cache
def operator_rules() -> OperatorRules:
    """tarry's own rules."""
    import yaml

    content: dict[str, Any] = yaml.load(RULES_FILE.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    rules = content["operators"]
    lists = ("outside_graphs", "graph_views", "decompose", "leaves", "factories", "opaque", "unsupported")
    return OperatorRules(
        kernels=frozenset(content["supported"]),
        non_native=tuple(entry["func"].partition("(")[0] for entry in content["non_native"]),
        **{name: frozenset(rules[name]) for name in lists},
        fails={name: Fails[column.upper()] for column, names in rules["fails"].items() for name in names},
        index_arguments={name: tuple(positions) for name, positions in rules["index_arguments"].items()},
        elements={name: tuple(forms) for name, forms in rules["elements"].items()},
        columns={column: frozenset(names) for column, names in rules["columns"].items()},
    )


def make_table() -> list[OpEntry]:
    """The entries of all native functions of the installed torch and of our own operators, by name."""
    from tarry.codegen.natives import natives

    rules = operator_rules()
    rows = [rules.entry(function) for function in natives().by_name.values()]
    return sorted([*rows, *map(rules.graph_entry, rules.non_native)], key=lambda entry: entry.name)


def load_table(cache: Path) -> list[OpEntry]:
    """As make_table, from a file under `cache` when one of this torch version and these sources is there."""
    import torch

    source = Path(__file__).read_bytes() + RULES_FILE.read_bytes() + torch.__version__.encode()
    path = cache / f"operators-{hashlib.sha256(source).hexdigest()[:16]}.json"
    try:
        with trust.open_file(path) as descriptor, open(descriptor, encoding="utf-8", closefd=False) as file:
            return _remember([_row(values) for values in json.load(file)])
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent or damaged: made anew
    table = make_table()
    with suppress(OSError):  # the next process makes it again
        trust.make_folder(cache)
        trust.write_file(path, json.dumps([astuple(row) for row in table]).encode())
    return _remember(table)


_KINDS, _FAILS = {str(kind): kind for kind in Kind}, {str(when): when for when in Fails}
_rows: dict[str, OpEntry] = {}  # what facts() looks up; filled once


def _row(values: list[Any]) -> OpEntry:
    name, kind, fails, *rest = values
    columns: list[Any] = [tuple(value) if isinstance(value, list) else value for value in rest]
    return OpEntry(name, _KINDS[kind], _FAILS[fails], *columns)


def _remember(table: list[OpEntry]) -> list[OpEntry]:
    _rows.update((row.name, row) for row in table)
    return table


def facts(name: str) -> OpEntry:
    """The row of an operator. One that is not in the table, a custom operator, may fail."""
    if not _rows:
        _remember(make_table())
    return _rows.get(name) or OpEntry(name, Kind.UNLISTED, numbers_on_host=True)
