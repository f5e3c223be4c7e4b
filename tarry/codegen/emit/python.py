"""Python's syntax: names, types, defaults and signatures of what a schema has."""

from __future__ import annotations

import ast
import builtins
import keyword
from collections.abc import Callable, Iterable, Sequence

from tarry.codegen.model import Base, LazyArgument, LazySchema, LazyType

LINE_LENGTH = 120

# Names of tarry.ir.typed.TypedNode, which fields must not hide.
_RESERVED = frozenset(
    [
        *("append", "args", "argument_types", "attributes", "can_be_reused", "compute_shapes", "create", "fields"),
        *("from_node", "has_args", "identity", "lower_with", "node", "op", "operands", "opkind", "self", "shapes"),
        *("backend", "builder", "context", "t"),  # parameters and modules of what is generated around them
    ]
)


def identifier(name: str) -> str:
    """An argument's name as a field's or a parameter's."""
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name


FIELD_TYPES = {
    Base.TENSOR: "t.Tensor",
    Base.SCALAR: "t.Scalar",
    Base.SYMINT: "int",
    Base.INT: "int",
    Base.FLOAT: "t.Float",
    Base.BOOL: "bool",
    Base.STR: "str",
    Base.DTYPE: "torch.dtype",
    Base.LAYOUT: "torch.layout",
    Base.DEVICE: "t.Device",
    Base.MEMORY_FORMAT: "torch.memory_format",
    Base.GENERATOR: "t.Generator",
}
"""What a node's field holds. `t` is tarry.ir.typed: a module's name hides no class, whatever classes there are."""

SHAPE_TYPES = {**FIELD_TYPES, Base.TENSOR: "t.TensorType"}
"""What a shape function is given."""

DATA_TYPES = {
    Base.TENSOR: "Any",
    Base.SCALAR: "Number",
    Base.SYMINT: "int",
    Base.INT: "int",
    Base.FLOAT: "float",
    Base.BOOL: "bool",
    Base.STR: "str",
    Base.DTYPE: "torch.dtype",
    Base.LAYOUT: "torch.layout",
    Base.DEVICE: "torch.device",
    Base.MEMORY_FORMAT: "torch.memory_format",
    Base.GENERATOR: "torch.Generator",
}
"""What a kernel is given: the backend's data, and Python's values for everything else."""

TENSOR_TYPES = {**DATA_TYPES, Base.TENSOR: "torch.Tensor"}
"""What an autograd kernel is given."""


def spelled(type_: LazyType, names: dict[Base, str], container: str = "tuple[{}, ...]") -> str:
    """A type in Python."""
    text = names[type_.base]
    if text == "Any" and not type_.is_list:
        return text
    if type_.is_list:
        text = container.format(f"{text} | None" if type_.has_optional_elements and text != "Any" else text)
    return f"{text} | None" if type_.is_optional else text


def default(argument: LazyArgument, container: str = "({})") -> str | None:
    """The default of an argument as an expression; None where there is none."""
    text = argument.default
    if text is None:
        return None
    words = {"Mean": "1", "Sum": "2", "contiguous_format": "torch.contiguous_format", "long": "torch.int64"}
    if text in words:
        return words[text]
    type_ = argument.type
    if text in ("None", "True", "False"):
        return text
    if type_.base is Base.STR:
        return _quoted(str(ast.literal_eval(text)))
    if type_.is_list:
        # A single number stands for as many of them as the list has.
        items = text.strip("[]").split(",") if text.startswith("[") else [text] * (type_.size or 1)
        items = [item.strip() for item in items if item.strip()]
        return container.format(", ".join(items) + ("," if len(items) == 1 and container == "({})" else ""))
    if type_.base is Base.FLOAT and text.lstrip("-").isdigit():
        return f"{text}.0"
    return text


def _quoted(text: str) -> str:
    """A string in double quotes, unless that takes more escapes than single ones."""
    if text.count('"') > text.count("'"):
        return repr(text)
    escaped = {'"': '\\"', "'": "'"}
    return f'"{"".join(escaped.get(char) or repr(char)[1:-1] for char in text)}"'


def parameters(
    arguments: Sequence[LazyArgument],
    names: dict[Base, str],
    *,
    rename: Callable[[str], str] = identifier,
    container: str = "tuple[{}, ...]",
    defaults: bool = True,
) -> list[str]:
    """The parameters of a function over a schema's arguments, keyword-only ones after a star."""
    made: list[str] = []
    star = False
    for argument in arguments:
        if argument.keyword_only and not star:
            made.append("*")
            star = True
        value = default(argument) if defaults else None
        tail = "" if value is None else f" = {value}"
        made.append(f"{rename(argument.name)}: {spelled(argument.type, names, container)}{tail}")
    return made


def signature(head: str, params: Sequence[str], returns: str, indent: str = "") -> str:
    """`def name(params) -> returns:`, on several lines where one is too short."""
    return _wrapped(head, params, f" -> {returns}:", indent)


def call(head: str, args: Sequence[str], indent: str = "") -> str:
    """`head(args)`, on several lines where one is too short. `head` may begin with `return`."""
    return _wrapped(head, args, "", indent)


def _wrapped(head: str, items: Sequence[str], tail: str, indent: str) -> str:
    one = f"{indent}{head}({', '.join(items)}){tail}"
    if len(one) <= LINE_LENGTH:
        return one
    inner = f"{indent}    {', '.join(items)}"
    if len(inner) <= LINE_LENGTH:
        return f"{indent}{head}(\n{inner}\n{indent}){tail}"
    listed = "".join(f"{indent}    {item},\n" for item in items)
    return f"{indent}{head}(\n{listed}{indent}){tail}"


def assigned(head: str, items: Iterable[str], indent: str = "") -> str:
    """`head = (items)`, a tuple on as many lines as it takes."""
    listed = list(items)
    text = ", ".join(listed) + ("," if len(listed) == 1 else "")
    one = f"{indent}{head} = ({text})"
    if len(one) <= LINE_LENGTH:
        return one
    body = "".join(f"{indent}    {item},\n" for item in listed)
    return f"{indent}{head} = (\n{body}{indent})"


def docstring(text: str, indent: str = "    ") -> str:
    """A docstring of one paragraph, wrapped between words."""
    text = text.replace("\\", "\\\\").replace('"""', "'''")
    if text.endswith('"'):
        text += " "
    one = f'{indent}"""{text}"""'
    if len(one) <= LINE_LENGTH:
        return one
    lines, current = [], f'{indent}"""'
    for word in text.split(" "):
        if len(current) + len(word) > LINE_LENGTH and current.strip():
            lines.append(current.rstrip())
            current = indent
        current += f"{word} "
    lines.append(current.rstrip())
    if len(lines[-1]) + 3 > LINE_LENGTH:  # the last word goes with the quotes that follow it
        head, _, word = lines[-1].rpartition(" ")
        lines[-1:] = [head, f"{indent}{word}"]
    return "\n".join(lines) + '"""'


def tuple_of(items: Iterable[str]) -> str:
    """A tuple display."""
    listed = list(items)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def returned(head: str, items: Sequence[str], indent: str, first: Sequence[str] = ()) -> str:
    """`return head(*first, (items))`, with the tuple on lines of its own where it is long."""
    return called(f"return {head}", items, indent, first)


def called(head: str, items: Sequence[str], indent: str, first: Sequence[str] = (), last: Sequence[str] = ()) -> str:
    """`head(*first, (items), *last)`, with the tuple on lines of its own where it is long."""
    one = call(head, [*first, tuple_of(items), *last], indent)
    if max(map(len, one.splitlines())) <= LINE_LENGTH:
        return one
    return f"{assigned('args', items, indent)}\n" + call(head, [*first, "args", *last], indent)


def needs_torch(schemas: Iterable[LazySchema], *more: Base) -> bool:
    """Whether types or defaults of some schemas are spelled with `torch.`."""
    bases = {Base.DTYPE, Base.LAYOUT, Base.MEMORY_FORMAT, *more}
    return any(argument.type.base in bases for schema in schemas for argument in schema.arguments)


def table(name: str, type_: str, rows: Iterable[tuple[str, str]], summary: str) -> str:
    """A dictionary from strings to names, with its docstring."""
    lines = []
    for key, value in rows:
        one = f'    "{key}": {value},'
        lines.append(one if len(one) <= LINE_LENGTH else f'    "{key}": (\n        {value}\n    ),')
    body = "\n".join(["{", *lines, "}"]) if lines else "{}"
    return f'{name}: {type_} = {body}\n"""{summary}"""\n'


def strings(names: Iterable[str]) -> list[str]:
    return [f'"{name}"' for name in names]


def header(
    command: str,
    summary: str,
    schemas: Iterable[LazySchema] = (),
    functions: Iterable[str] = (),
    *,
    fields: bool = False,
) -> str:
    """The first lines of a generated module; `fields` says that it has classes with the arguments as fields.

    Arguments have the names of the schema, and functions those of the operator: where these break a rule of the linter
    (a capital letter, the name of a builtin), the module says so.
    """
    names = {identifier(argument.name) for schema in schemas for argument in schema.arguments}
    rules = []
    if any(hasattr(builtins, name) for name in functions):
        rules.append("A001")
    if any(hasattr(builtins, name) for name in names):
        rules.append("A002")
    if any(name != name.lower() for name in names):
        rules.append("N803")
    if fields and any(name != name.lower() and name[0].islower() for name in names):
        rules.append("N815")
    noqa = f"# ruff: noqa: {', '.join(rules)}\n" if rules else ""
    return f"# Generated. Do not edit: change the YAML, then run\n{_comment(command)}\n{noqa}{docstring(summary, '')}\n"


def _comment(command: str) -> str:
    """A command as a comment that a shell could read, in lines that are not too long."""
    lines, current = [], "#  "
    for word in command.split(" "):
        if len(current) + len(word) + 3 > LINE_LENGTH and current != "#  ":
            lines.append(f"{current} \\")
            current = "#    "
        current += f" {word}"
    return "\n".join([*lines, current])
