"""The table of operators that the recorder registers, for the torch version at hand.

PyTorch knows over three thousand operators. The recorder wants the *leaves*: those that a backend has to carry out. The
others decompose into leaves by themselves (CompositeImplicit), are views that only touch metadata, or are factories and
conversions that PyTorch writes in terms of `empty` and a leaf. torchgen's model tells which is which; what it does not
tell is in `tarry.yaml`, beside this file.
"""

from __future__ import annotations

import functools
import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
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
    KERNEL = "kernel"  # csrc/kernels.cpp has a kernel for it
    UNSUPPORTED = "unsupported"  # of a layout that tarry does not have (sparse, nested, quantized)


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One operator of PyTorch and how the recorder treats it. `flags` are the bits of csrc/operator.h."""

    name: str  # "aten::add.Tensor", or "aten::mm" for the default overload
    kind: Kind
    in_place: bool = False
    out: bool = False
    random: bool = False  # draws random numbers
    dynamic: bool = False  # the output's shape, or a value read on the host, depends on data
    overwrites: bool = False  # writes all of its mutable arguments without reading them
    shape_from_numbers: bool = False
    pointwise: bool = False
    mutable_arguments: tuple[str, ...] = ()
    flags: int = 0


@dataclass(frozen=True)
class RecorderRules:
    """What `tarry.yaml` says. Names of operators are without their overload, except in `kernels`, `leaves` and
    `overwrites`."""

    kernels: frozenset[str]
    outside_graphs: frozenset[str]
    decompose: frozenset[str]
    leaves: frozenset[str]
    unsupported: tuple[str, ...]
    overwrites: frozenset[str]
    mask_indices: frozenset[str]
    takes_host_indices: frozenset[str]
    random: frozenset[str]
    shape_from_numbers: frozenset[str]
    shape_from_device: frozenset[str]
    contents_decide: frozenset[str]
    checks_numbers: frozenset[str]
    products: frozenset[str]
    dynamic: frozenset[str]

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
        if function.has_composite_explicit_autograd_kernel and _is_factory(function, base):
            return Kind.DECOMPOSE
        if base.startswith(self.unsupported):
            return Kind.UNSUPPORTED
        return Kind.RECORD

    def entry(self, function: NativeFunction) -> OpEntry:
        """How the recorder treats one native function."""
        name, base = str(function.func.name), str(function.func.name.name)
        kind = str(function.func.kind().name)
        random = "nondeterministic_seeded" in function.tags or base in self.random
        tagged = bool({"dynamic_output_shape", "data_dependent_output"} & function.tags)
        dynamic = (tagged or base in self.dynamic) and base not in self.mask_indices
        overwrites = name in self.overwrites or kind == "out"
        pointwise = "pointwise" in function.tags
        bits = (  # in the order of csrc/operator.h's OperatorFlags
            random,
            dynamic,
            overwrites,
            base in self.shape_from_numbers,
            base in self.mask_indices,
            base in self.takes_host_indices,
            base in self.shape_from_device,
            base not in self.contents_decide,
            pointwise,
            base in self.checks_numbers,
            base in self.products,
        )
        return OpEntry(
            name=f"aten::{name}",
            kind=self.kind(function),
            in_place=kind == "inplace",
            out=kind == "out",
            random=random,
            dynamic=dynamic,
            overwrites=overwrites,
            shape_from_numbers=base in self.shape_from_numbers,
            pointwise=pointwise,
            mutable_arguments=tuple(
                argument.name
                for argument in function.func.arguments.flat_all
                if argument.annotation is not None and argument.annotation.is_write
            ),
            flags=sum(1 << i for i, bit in enumerate(bits) if bit),
        )


def _is_factory(function: NativeFunction, base: str) -> bool:
    if function.func.is_out_fn():
        return False
    has_tensor = any(argument.type.is_tensor_like() for argument in function.func.arguments.flat_all)
    return not has_tensor or base.endswith("_like") or base.startswith("new_")


@functools.cache
def recorder_rules() -> RecorderRules:
    """tarry's own rules."""
    import yaml

    content: dict[str, Any] = yaml.load(RULES_FILE.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    recorder = content["recorder"]
    return RecorderRules(
        kernels=frozenset(content["supported"]),
        outside_graphs=frozenset(recorder["outside_graphs"]),
        decompose=frozenset(recorder["decompose"]),
        leaves=frozenset(recorder["leaves"]),
        unsupported=tuple(recorder["unsupported"]),
        **{name: frozenset(operators) for name, operators in recorder["flags"].items()},
    )


def make_table() -> list[OpEntry]:
    """The entries of all native functions of the installed torch, by name."""
    from tarry.codegen.natives import natives

    rules = recorder_rules()
    return sorted((rules.entry(function) for function in natives().by_name.values()), key=lambda entry: entry.name)


def load_table(cache: Path) -> list[OpEntry]:
    """As make_table, from a file under `cache` when one of this torch version and these sources is there."""
    import torch

    source = Path(__file__).read_bytes() + RULES_FILE.read_bytes() + torch.__version__.encode()
    path = cache / f"operators-{hashlib.sha256(source).hexdigest()[:16]}.json"
    try:
        with trust.open_file(path) as descriptor, open(descriptor, encoding="utf-8", closefd=False) as file:
            rows = json.load(file)
        return [
            OpEntry(**{**row, "kind": Kind(row["kind"]), "mutable_arguments": tuple(row["mutable_arguments"])})
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent or damaged: made anew
    table = make_table()
    with suppress(OSError):  # the next process makes it again
        trust.make_folder(cache)
        trust.write_file(path, json.dumps([asdict(row) for row in table]).encode())
    return table
