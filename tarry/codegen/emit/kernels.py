"""Kernels: those that are generated, declarations of those that the author writes, and the backend made of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tarry.codegen.emit.python import (
    DATA_TYPES,
    TENSOR_TYPES,
    call,
    docstring,
    header,
    identifier,
    parameters,
    signature,
    spelled,
    table,
)
from tarry.codegen.forms import FORMS
from tarry.codegen.model import Base, LazySchema
from tarry.codegen.schema import function_name


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of a backend. `schema` is the operator as graphs have it; `listed` is what the YAML says, the same or
    a variant that writes."""

    schema: LazySchema
    listed: tuple[str, ...]
    is_autograd: bool = False
    view: str = ""
    """Of an operator that copies a view: the view, which is what graphs have."""

    @property
    def graph_names(self) -> tuple[str, ...]:
        """The operators whose kernel it is."""
        return (self.schema.name, *([self.view] if self.view else []), *FORMS.get(self.schema.name, ()))

    @property
    def function(self) -> str:
        return function_name(self.schema.name)

    @property
    def summary(self) -> str:
        """The schema, and the variants whose kernel this is."""
        others = [name for name in self.listed if name != self.schema.name]
        return f"{self.schema.text}. Also for {', '.join(others)}." if others else self.schema.text


def _returns(schema: LazySchema, tensor: str) -> str:
    names = {**DATA_TYPES, Base.TENSOR: tensor}
    listed = [spelled(ret, names, "list[{}]") for ret in schema.returns]
    if not listed:
        return "None"
    if len(listed) > 8 and len(set(listed)) == 1:
        return f"tuple[{listed[0]}, ...]"
    return listed[0] if len(listed) == 1 else f"tuple[{', '.join(listed)}]"


def kernel_signature(spec: KernelSpec) -> str:
    """The line to paste for a kernel that the author owes."""
    types = TENSOR_TYPES if spec.is_autograd else DATA_TYPES
    params = parameters(spec.schema.arguments, types, rename=_parameter, container="list[{}]", defaults=False)
    returns = _returns(spec.schema, "torch.Tensor" if spec.is_autograd else "Any")
    return signature(f"def {spec.function}", params, returns)


def _parameter(name: str) -> str:
    return "self" if name == "self" else identifier(name)


def emit_kernels(specs: Sequence[KernelSpec], command: str) -> str:
    """The module of generated kernels."""
    bodies = "\n\n".join(_kernel(spec) for spec in specs)
    rows = _rows(specs, "")
    lines = [
        header(
            command,
            "Kernels of the operators under full_codegen: each hands its operator to the backend's `builtin`.",
            [spec.schema for spec in specs],
            [spec.function for spec in specs],
        ),
        "from __future__ import annotations",
        "",
        *_typing(["Any"] * _any(specs) + ["TypeAlias"] * _uses(specs, Base.SCALAR)),
        *(["import torch", ""] if _needs_torch(specs) else []),
        "from tarry.backends.generated import GeneratedBackend, Kernel",
        *(["", "Number: TypeAlias = int | float | complex"] if _uses(specs, Base.SCALAR) else []),
        "",
        "",
        *([bodies, ""] if specs else []),
        table("KERNELS", "dict[str, Kernel]", rows, "The kernel of each operator."),
    ]
    return "\n".join(lines)


def _typing(names: Sequence[str]) -> list[str]:
    return [f"from typing import {', '.join(names)}", ""] if names else []


def _uses(specs: Sequence[KernelSpec], base: Base) -> bool:
    return any(
        base in {argument.type.base for argument in spec.schema.arguments} | {ret.base for ret in spec.schema.returns}
        for spec in specs
    )


def _any(specs: Sequence[KernelSpec]) -> bool:
    """Whether a kernel has a tensor, whose type is the backend's own."""
    return _uses([spec for spec in specs if not spec.is_autograd], Base.TENSOR)


def _needs_torch(specs: Sequence[KernelSpec]) -> bool:
    bases = (Base.DTYPE, Base.LAYOUT, Base.MEMORY_FORMAT, Base.DEVICE, Base.GENERATOR)
    return any(_uses(specs, base) for base in bases) or any(spec.is_autograd for spec in specs)


def _kernel(spec: KernelSpec) -> str:
    params = parameters(spec.schema.arguments, DATA_TYPES, container="list[{}]", defaults=False)
    head = signature(f"def {spec.function}", ["backend: GeneratedBackend", *params], _returns(spec.schema, "Any"))
    passed = [
        f"{argument.name}={identifier(argument.name)}" if argument.keyword_only else identifier(argument.name)
        for argument in spec.schema.arguments
        if argument.name.isidentifier()
    ]
    head_of_call = "return backend.builtin" if spec.schema.returns else "backend.builtin"
    body = call(head_of_call, [f'"{spec.schema.qualified_name}"', *passed], "    ")
    return f"{head}\n{docstring(spec.summary)}\n{body}\n"


def emit_declarations(specs: Sequence[KernelSpec], command: str) -> str:
    """What the author writes, as a protocol that the type checker holds the author's module against."""
    methods = "\n".join(_declaration(spec) for spec in specs)
    lines = [
        header(
            command,
            "Functions that you write: a type checker compares your module with this.",
            [spec.schema for spec in specs],
        ),
        "from __future__ import annotations",
        "",
        "from collections.abc import Callable",
        "from typing import Any, Protocol, TypeAlias",
        "",
        *(["import torch", ""] if _needs_torch(specs) else []),
        "Kernel: TypeAlias = Callable[..., Any]",
        *(["Number: TypeAlias = int | float | complex"] if _uses(specs, Base.SCALAR) else []),
        "",
        "",
        "class HandWritten(Protocol):",
        '    """Kernels take and return the backend\'s data, autograd functions take and return tensors."""',
        "",
        methods if specs else "    # Nothing is owed.\n",
    ]
    return "\n".join(lines)


def _declaration(spec: KernelSpec) -> str:
    types = TENSOR_TYPES if spec.is_autograd else DATA_TYPES
    params = parameters(spec.schema.arguments, types, container="list[{}]", defaults=False)
    positional = len(spec.schema.positional)
    if positional:
        params.insert(positional, "/")
    returns = _returns(spec.schema, "torch.Tensor" if spec.is_autograd else "Any")
    head = signature(f"def {spec.function}", ["self", *params], returns, "    ")
    return f"{head}\n{docstring(spec.summary, '        ')}\n        ...\n"


def emit_written(written: Sequence[KernelSpec], autograd: Sequence[KernelSpec], module: str, command: str) -> str:
    """The module that takes the author's functions from where they are; without a module there are none."""
    lines = [
        header(command, "Functions that you wrote, by operator."),
        "from __future__ import annotations",
        "",
        *([*_impl_import(module), "", "from .declarations import HandWritten, Kernel", ""] if module else []),
        *(["_: HandWritten = kernels  # the type checker compares them", ""] if module else []),
        *([] if module else ["from .declarations import Kernel", ""]),
        _table("WRITTEN", written, "Kernels, from data to data."),
        _table("AUTOGRAD", autograd, "Autograd functions, from tensors to tensors."),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def emit_backend(name: str, class_name: str, yaml_name: str, command: str) -> str:
    """The module with the backend's class and `register()`."""
    return f'''\
{header(command, f"The backend `{name}`: `register()` makes it known to `tarry.set_backend`.")}
from __future__ import annotations

import tarry
from tarry.backends.generated import GeneratedBackend

from .kernels import KERNELS
from .written import AUTOGRAD, WRITTEN


class {class_name}(GeneratedBackend):
    """Made of {yaml_name}. Subclass it to say where data live and what `builtin` does."""

    name = "{name}"
    generated = KERNELS
    written = WRITTEN
    autograd = AUTOGRAD


def register(backend: type[GeneratedBackend] = {class_name}) -> None:
    """Make the backend, or a subclass of it, known as `{name}`."""
    tarry.register_backend("{name}", backend)
'''


def _impl_import(module: str) -> list[str]:
    parent, _, name = module.rpartition(".")
    alias = "" if name == "kernels" else " as kernels"
    return [f"from {parent} import {name}{alias}" if parent else f"import {name}{alias}"]


def _table(name: str, specs: Sequence[KernelSpec], summary: str) -> str:
    return table(name, "dict[str, Kernel]", _rows(specs, "kernels."), summary)


def _rows(specs: Sequence[KernelSpec], prefix: str) -> list[tuple[str, str]]:
    """Each operator with its kernel. A view that is listed itself has its own."""
    made = {f"aten::{spec.view}": f"{prefix}{spec.function}" for spec in specs if spec.view}
    made |= {spec.schema.qualified_name: f"{prefix}{spec.function}" for spec in specs}
    return sorted(made.items())
