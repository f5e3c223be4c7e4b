"""Schemas that torchgen's parser lets pass, and that no code can be written for. PyTorch's own have none of this."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tarry.codegen.emit.python import identifier
from tarry.codegen.model import Base, LazyArgument, LazySchema

_INTEGER = r"-?\d+"
_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# The spellings of a default by type. Where there is none, the only default is None.
_DEFAULTS = {
    Base.INT: rf"{_INTEGER}|Mean|Sum",
    Base.SYMINT: _INTEGER,
    Base.FLOAT: _NUMBER,
    Base.SCALAR: rf"{_NUMBER}|True|False",
    Base.BOOL: "True|False",
    Base.DTYPE: "long",
    Base.MEMORY_FORMAT: "contiguous_format",
}
_EXAMPLES = {
    Base.INT: "0", Base.SYMINT: "0", Base.FLOAT: "0.5", Base.SCALAR: "1", Base.BOOL: "False", Base.STR: '"text"',
    Base.DTYPE: "long", Base.MEMORY_FORMAT: "contiguous_format",
}  # fmt: skip
_ONLY_NONE = "Only None can be the default of such an argument, and only if its type ends in `?`."


def unwritable(schema: LazySchema) -> Iterator[tuple[str, str]]:
    """What is wrong with a schema, and what to write instead."""
    name, dot, overload = schema.name.partition(".")
    if "::" in name:
        yield f"{name!r} has a namespace", f"Write `{name.rpartition('::')[2]}`: nodes are in that of the backend."
    elif not name.isidentifier() or (dot and not overload.isidentifier()):
        yield f"{schema.name!r} is no name", "Use letters, digits and '_', and begin with a letter."
    seen: set[str] = set()
    for argument in schema.arguments:
        if not argument.name.isidentifier():
            yield f"{argument.name!r} is no name of an argument", "Use letters, digits and '_'."
        elif identifier(argument.name) in seen:
            yield f"it has two arguments {identifier(argument.name)!r}", "Give each argument a name of its own."
        elif argument.default is not None and not _is_default(argument, argument.default):
            example = _EXAMPLES.get(argument.type.base)
            hint = f"Write for example `{argument.type} {argument.name}={example}`." if example else _ONLY_NONE
            message = f"{argument.default!r} is no default for {argument.name!r}, which is of type {argument.type}"
            yield message, hint
        seen.add(identifier(argument.name))


def _is_default(argument: LazyArgument, text: str) -> bool:
    if text == "None":
        return argument.type.is_optional
    if argument.type.is_list and text.startswith("[") and text.endswith("]"):
        items = [item.strip() for item in text[1:-1].split(",") if item.strip()]
        return all(_is_element(argument.type.base, item) for item in items)
    return _is_element(argument.type.base, text)


def _is_element(base: Base, text: str) -> bool:
    if base is Base.STR:
        try:
            return isinstance(ast.literal_eval(text), str)
        except (SyntaxError, ValueError):
            return False
    return base in _DEFAULTS and re.fullmatch(_DEFAULTS[base], text) is not None
