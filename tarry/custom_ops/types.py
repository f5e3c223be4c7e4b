"""Python annotations as types of a schema: everything that PyTorch's dispatcher takes and returns."""

from __future__ import annotations

import collections.abc
import enum
import types
import typing
from dataclasses import dataclass
from typing import Any

import torch

_BASIC: dict[Any, str] = {
    torch.Tensor: "Tensor",
    int: "SymInt",
    torch.SymInt: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    torch.device: "Device",
    torch.layout: "Layout",
    torch.memory_format: "MemoryFormat",
    torch.Generator: "Generator",
}
_NUMBERS = frozenset({int, float, bool, complex})
_SEQUENCES = (list, collections.abc.Sequence)

_OFFERED = (
    "Tensor, int, float, bool, str, Literal['a', 'b'], a StrEnum, int | float (a Scalar), torch.dtype, torch.device, "
    "torch.layout, torch.memory_format, torch.Generator; each with '| None'; and lists and tuples of one of them"
)


class UnsupportedType(ValueError):  # noqa: N818 - turned into an error that names the parameter
    """Why an annotation has no counterpart in a schema."""


@dataclass(frozen=True)
class SchemaType:
    """`text` is the type as a schema spells it. `choices` are the strings that a Literal or a StrEnum allows; `length`
    is that of a tuple. A schema can express neither: see `Contract`."""

    text: str
    choices: tuple[str, ...] | None = None
    length: int | None = None


def schema_type(annotation: Any) -> SchemaType:
    """The type of a parameter. Raises UnsupportedType."""
    if typing.get_origin(annotation) is typing.Annotated:
        return schema_type(typing.get_args(annotation)[0])
    if annotation in _BASIC:
        return SchemaType(_BASIC[annotation])
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _enumeration(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        if not all(isinstance(choice, str) for choice in args):
            raise UnsupportedType("a Literal of anything but strings has no type in a schema; use int or bool")
        return SchemaType("str", choices=args)
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin in _SEQUENCES and len(args) == 1:
        return SchemaType(f"{_element(args[0])}[]")
    if origin is tuple and args:
        return _tuple(args)
    raise UnsupportedType(f"the types that an operator takes are {_OFFERED}")


def _enumeration(annotation: type[enum.Enum]) -> SchemaType:
    if not issubclass(annotation, str):
        raise UnsupportedType(
            f"an operator takes strings and not members of {annotation.__name__}: derive it from enum.StrEnum, so that "
            "its members are strings"
        )
    return SchemaType("str", choices=tuple(str(member.value) for member in annotation))


def _union(args: tuple[Any, ...]) -> SchemaType:
    given = frozenset(args) - {types.NoneType}
    optional = "?" if types.NoneType in args else ""
    if len(given) > 1 and given <= _NUMBERS:
        return SchemaType(f"Scalar{optional}")
    if len(given) != 1:
        raise UnsupportedType(f"a parameter has one type, or one type and None; the types are {_OFFERED}")
    (one,) = given
    inner = schema_type(one)
    if inner.length is not None:
        raise UnsupportedType("a tuple of fixed length cannot be optional; use a list")
    return SchemaType(f"{inner.text}{optional}", inner.choices)


def _element(annotation: Any) -> str:
    inner = schema_type(annotation)
    if inner.text.endswith("]") or inner.text.endswith("]?"):
        raise UnsupportedType("lists cannot be nested")
    if inner.choices is not None:
        raise UnsupportedType("a list of Literals or enumerations has no type in a schema; use list[str]")
    return inner.text


def _tuple(args: tuple[Any, ...]) -> SchemaType:
    if len(args) == 2 and args[1] is Ellipsis:
        return SchemaType(f"{_element(args[0])}[]")
    if len(set(args)) != 1:
        raise UnsupportedType("the elements of a tuple must be of one type: split it into several parameters")
    return SchemaType(f"{_element(args[0])}[]", length=len(args))


_RETURNED: dict[Any, str] = {**{key: value for key, value in _BASIC.items() if key is not torch.Generator}}


def return_type(annotation: Any) -> str:
    """The type of what an operator returns. Raises UnsupportedType."""
    if annotation is None or annotation is types.NoneType:
        return "()"
    if typing.get_origin(annotation) is tuple:
        args = typing.get_args(annotation)
        if Ellipsis in args:
            raise UnsupportedType(
                "an operator returns a fixed number of things: use list[Tensor] for a variable number"
            )
        inner = ", ".join(_one_return(arg) for arg in args)
        return f"(({inner}))" if len(args) == 1 else f"({inner})"
    return _one_return(annotation)


def _one_return(annotation: Any) -> str:
    if annotation in _RETURNED:
        return _RETURNED[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list and args == (torch.Tensor,):
        return "Tensor[]"
    if origin in (typing.Union, types.UnionType) and frozenset(args) <= _NUMBERS:
        return "Scalar"
    raise UnsupportedType("an operator returns Tensor, list[Tensor], int, float, bool, a tuple of these, or None")


def default_text(value: Any, declared: SchemaType) -> str:
    """A default value as a schema spells it. Raises UnsupportedType if it has another type, or cannot be spelled."""
    kind = declared.text
    value = value.value if isinstance(value, enum.Enum) else value
    if value is None:
        if not kind.endswith("?"):
            raise UnsupportedType(f"the default None needs an annotation '... | None': this one means {kind}")
        return "None"
    if declared.choices is not None and value not in declared.choices:
        raise UnsupportedType(f"the default {value!r} is none of {', '.join(map(repr, declared.choices))}")
    if declared.length is not None and isinstance(value, list | tuple) and len(value) != declared.length:
        raise UnsupportedType(f"the default {value!r} does not have {declared.length} elements")
    kind = kind.removesuffix("?")
    if not kind.endswith("[]"):
        return _one_default(value, kind)
    if not isinstance(value, list | tuple):
        raise UnsupportedType(f"the default {value!r} is not a list, and the annotation means {kind}")
    if kind.removesuffix("[]") not in _LISTED:
        raise _cannot_hold(value, kind)
    return f"[{', '.join(_one_default(item, kind.removesuffix('[]')) for item in value)}]"


_LISTED = frozenset({"SymInt", "float", "bool"})
"""Types of lists that a schema can hold as a default."""

_ACCEPTED: dict[str, tuple[type, ...]] = {
    "SymInt": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "Scalar": (int, float, bool),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device, str),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
}
"""Types of the values that a default may have."""


def _one_default(value: Any, kind: str) -> str:
    accepted = _ACCEPTED.get(kind)
    if accepted is None or isinstance(value, torch.Tensor):
        raise _cannot_hold(value, kind)
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        raise UnsupportedType(f"the default {value!r} is a {type(value).__name__}, and the annotation means {kind}")
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) < value < 2**63:
        raise UnsupportedType(f"the default {value!r} does not fit into 64 bits")
    if isinstance(value, float) and value - value != 0:  # infinite or NaN
        raise _cannot_hold(value, kind)
    if isinstance(value, str | torch.device):
        if any(character in str(value) for character in '"\\\n'):
            raise _cannot_hold(value, kind)
        return f'"{value}"'
    if isinstance(value, int) and kind == "float":
        return repr(float(value))
    return str(value).removeprefix("torch.")


def _cannot_hold(value: Any, kind: str) -> UnsupportedType:
    return UnsupportedType(f"a schema cannot hold the default {value!r} of a {kind}; use None, and put it in kernels")
