"""Schemas: inferred from a function's annotations, or written by hand and compared with the function's signature."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tarry.custom_ops.types import SchemaType, UnsupportedType, default_text, return_type, schema_type

Schema = torch._C.FunctionSchema
"""PyTorch's schemas: their arguments with types, defaults and alias annotations. Checked on torch 2.11 and 2.13."""


def supported_param(param: inspect.Parameter) -> bool:
    """Whether an operator can have a parameter of that kind."""
    return param.kind in _PLAIN_KINDS


_PLAIN_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Contract:
    """What annotations say and a schema cannot: the strings that are allowed, the lengths of tuples. It is checked
    where the operator's functions are called, and only for operators that have such parameters."""

    qualname: str
    names: tuple[str, ...] = ()
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its arguments checked first."""
        if not self.choices and not self.lengths:
            return function

        positions = {name: position for position, name in enumerate(self.names)}
        choices = [(positions[name], name, frozenset((*given, None))) for name, given in self.choices.items()]
        lengths = [(positions[name], name, length) for name, length in self.lengths.items()]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            count = len(args)
            for position, name, allowed in choices:
                given = args[position] if position < count else kwargs.get(name)
                if given not in allowed:
                    self.refuse_choice(name, given)
            for position, name, length in lengths:
                given = args[position] if position < count else kwargs.get(name)
                if given is not None and len(given) != length:
                    raise ValueError(f"{self.qualname}: {name} takes {length} elements, and got {len(given)}")
            return function(*args, **kwargs)

        return checked

    def refuse_choice(self, name: str, given: Any) -> typing.NoReturn:
        """Raise ValueError for a string that the annotations do not allow."""
        allowed = ", ".join(map(repr, self.choices[name]))
        raise ValueError(f"{self.qualname}: {name}={given!r} is none of {allowed}")


def infer(function: Callable[..., Any], qualname: str, mutates_args: str | Iterable[str] = ()) -> tuple[str, Contract]:
    """The schema of an annotated function, without a name ("(Tensor x) -> Tensor"), and what it cannot say.

    `mutates_args` names the parameters that are written to; "unknown" means every tensor.
    """
    return _Inference(function, qualname, mutates_args).run()


class _Inference:
    def __init__(self, function: Callable[..., Any], qualname: str, mutates_args: str | Iterable[str]) -> None:
        self.function = function
        self.qualname = qualname
        self.signature = inspect.signature(function)
        self.all_written = mutates_args == "unknown"
        if isinstance(mutates_args, str) and not self.all_written:
            raise ValueError(
                f"custom_op({qualname!r}): mutates_args takes the names of parameters, ({mutates_args!r},) say, or "
                "'unknown'"
            )
        self.written = frozenset() if self.all_written else frozenset(mutates_args)

    def run(self) -> tuple[str, Contract]:
        parts: list[str] = []
        contract = Contract(self.qualname, tuple(self.signature.parameters))
        for position, parameter in enumerate(self.signature.parameters.values()):
            if parameter.kind not in _PLAIN_KINDS:
                self.fail(
                    f"parameter {parameter.name!r}: an operator has no positional-only parameters, varargs or varkwargs"
                )
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            declared = self.declared(parameter)
            parts.append(self.parameter(parameter, declared, position))
            if declared.choices is not None:
                contract.choices[parameter.name] = declared.choices
            if declared.length is not None:
                contract.lengths[parameter.name] = declared.length
        missing = self.written - self.signature.parameters.keys()
        if missing:
            self.fail(f"mutates_args names {', '.join(sorted(missing))}, and there is no such parameter")
        return f"({', '.join(parts)}) -> {self.returned()}", contract

    def declared(self, parameter: inspect.Parameter) -> SchemaType:
        if parameter.annotation is inspect.Parameter.empty:
            self.fail(f"parameter {parameter.name!r} must have a type annotation, '{parameter.name}: Tensor' say")
        try:
            return schema_type(self.evaluated(parameter.annotation))
        except UnsupportedType as why:
            self.fail(f"parameter {parameter.name!r} has the unsupported type {_shown(parameter.annotation)}: {why}")

    def parameter(self, parameter: inspect.Parameter, declared: SchemaType, position: int) -> str:
        text = declared.text
        is_tensor = text.startswith("Tensor")
        if parameter.name in self.written and not is_tensor:
            self.fail(
                f"parameter {parameter.name!r} is in mutates_args, but only tensors and lists of them can be mutated"
            )
        if is_tensor and (self.all_written or parameter.name in self.written):
            text = f"Tensor(a{position}!){text.removeprefix('Tensor')}"
        if parameter.default is inspect.Parameter.empty:
            return f"{text} {parameter.name}"
        try:
            return f"{text} {parameter.name}={default_text(parameter.default, declared)}"
        except UnsupportedType as why:
            self.fail(f"parameter {parameter.name!r}: {why}")

    def returned(self) -> str:
        if self.signature.return_annotation is inspect.Signature.empty:
            self.fail("there is no return annotation: add one, '-> Tensor' say, or '-> None'")
        try:
            return return_type(self.evaluated(self.signature.return_annotation))
        except UnsupportedType as why:
            self.fail(f"the return annotation {_shown(self.signature.return_annotation)} is unsupported: {why}")

    def evaluated(self, annotation: Any) -> Any:
        """An annotation with the strings in it looked up where the function was defined."""
        if isinstance(annotation, typing.ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            local = inspect.getclosurevars(self.function).nonlocals
            try:
                return self.evaluated(eval(annotation, self.function.__globals__, dict(local)))
            except Exception as error:
                raise UnsupportedType(
                    f"it is not a type here ({type(error).__name__}: {error}). Names in annotations must be importable "
                    "at module scope"
                ) from error
        args = typing.get_args(annotation)
        if any(isinstance(arg, str | typing.ForwardRef) for arg in args) and typing.get_origin(annotation) is list:
            return list[self.evaluated(args[0])]  # type: ignore[misc]
        return annotation

    def fail(self, what: str) -> typing.NoReturn:
        raise ValueError(
            f"custom_op({self.qualname!r}): {what}. The function's signature is {self.signature}"
        ) from None


def _shown(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None) or str(annotation)


def parse(name: str, schema: str) -> Schema:
    """The schema "(...) -> ..." of an operator of that name. Raises ValueError if it is none."""
    try:
        return torch._C.parse_schema(f"{name}{schema}")
    except RuntimeError as error:
        raise ValueError(f"custom_op: {name}{schema} is not a schema:\n{error}") from error


def parse_strictly(name: str, schema: str) -> Schema:
    """The same for a functional operator, by the rules of PyTorch's own schemas. Raises AssertionError for what is no
    schema by these, and ValueError for an operator that is not functional."""
    from torchgen.model import FunctionSchema

    FunctionSchema.parse(f"{name}{schema}")
    parsed = parse(name, schema)
    validate_schema(parsed)
    return parsed


def without_name(schema: Schema) -> str:
    """A schema as text, without the operator's name: "(Tensor x) -> Tensor"."""
    text = "".join(str(schema).partition("(")[1:])
    # PyTorch reads `Tensor(a!)?[]`, and writes `Tensor?(a!)[]`.
    text = re.sub(r"Tensor\?(\(\w+!?\))\[\]", r"Tensor\1?[]", text)
    # It reads the default of a device in quotes, and writes it without.
    return re.sub(r"(Device\?? \w+=)(?!None\b)([\w:]+)", r'\1"\2"', text)


def writes(schema: Schema) -> bool:
    """Whether an operator writes to its arguments."""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)


def is_functional(schema: Schema) -> bool:
    """Whether an operator writes to nothing, gives no views, and gives something."""
    return bool(schema.returns) and not writes(schema) and all(ret.alias_info is None for ret in schema.returns)


def written_positions(schema: Schema) -> tuple[int, ...]:
    """Positions of the arguments that an operator writes to."""
    return tuple(k for k, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)


def gives_views_only(schema: Schema) -> bool:
    """Whether all that an operator returns are views, and it writes to nothing."""
    return bool(schema.returns) and not writes(schema) and all(ret.alias_info is not None for ret in schema.returns)


def functional_results(schema: Schema, values: Sequence[Any], result: Any) -> Any:
    """What an operator would return if it left its arguments alone: its results that are not these, then the new
    contents of those that it has written to. One alone is no tuple."""
    results = (result,) if len(schema.returns) == 1 else result or ()
    fresh = [made for made, ret in zip(results, schema.returns, strict=True) if ret.alias_info is None]
    every = (*fresh, *(values[k] for k in written_positions(schema)))
    return every[0] if len(every) == 1 else every


def functional_schema(schema: Schema) -> str:
    """The schema of the operator that does so, without a name."""
    written = {str(argument): argument for argument in (schema.arguments[k] for k in written_positions(schema))}
    arguments = re.sub(r"\(\w+!?( -> \w+)?\)", "", without_name(schema).rpartition(" -> ")[0])
    fresh = [str(ret.type) for ret in schema.returns if ret.alias_info is None]
    kinds = [*fresh, *(str(argument.type) for argument in written.values())]
    spelled = [re.sub(r"List\[(.*)\]", r"\1[]", re.sub(r"Optional\[(.*?)\]", r"\1?", kind)) for kind in kinds]
    return f"{arguments} -> ({', '.join(spelled)})"


def validate_schema(schema: Schema) -> None:
    """Raise ValueError for what the functional interface does not take: writes, views, no results, `self`."""
    if any(argument.name == "self" for argument in schema.arguments):
        raise ValueError(
            f"custom_op does not take arguments named 'self': give it another name. The schema is {schema}"
        )
    if not is_functional(schema):
        raise ValueError(
            "custom_op only supports functional operators here: no writes to arguments, no views of them as results, "
            f"at least one result. tarry.custom_op takes the others. The schema is {schema}"
        )


def validate_function_matches_schema(schema: Schema, func: Callable[..., Any], *, strict: bool = True) -> None:
    """Raise ValueError if a function's parameters are not those of the schema, in order and in kind. `strict` forbids
    annotations and default values as well, which could contradict the schema."""
    signature = inspect.signature(func)
    found = f"The function's signature is {signature}, the schema {schema}"
    parameters = list(signature.parameters.values())
    if any(parameter.kind not in _PLAIN_KINDS for parameter in parameters):
        raise ValueError(f"custom_op: positional-only parameters, varargs and kwargs are not supported. {found}")
    annotated = any(parameter.annotation is not inspect.Parameter.empty for parameter in parameters)
    if strict and (annotated or signature.return_annotation is not inspect.Signature.empty):
        raise ValueError(f"custom_op: a function with a manual schema has no type annotations of its own. {found}")
    mine = [(p.name, p.kind is inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    if mine != [(argument.name, argument.kwarg_only) for argument in schema.arguments]:
        raise ValueError(f"custom_op: expected the function's signature to match the manual schema. {found}")
    if strict:
        defaults = any(p.default is not inspect.Parameter.empty for p in parameters)
        if defaults or any(argument.has_default_value() for argument in schema.arguments):
            raise ValueError(
                f"custom_op: neither the function nor the manual schema may have default arguments. {found}"
            )


def defaults_of(overload: torch._ops.OpOverload) -> list[tuple[str, bool, Any]]:
    """Name, whether it is keyword-only, and default value of each argument of an operator."""
    return [(argument.name, argument.kwarg_only, _default(argument)) for argument in overload._schema.arguments]


def _default(argument: Any) -> Any:
    value = argument.default_value if argument.has_default_value() else None
    return torch.device(value) if isinstance(value, str) and "Device" in str(argument.real_type) else value
