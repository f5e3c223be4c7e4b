"""Node classes: one per operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tarry.codegen.emit.python import (
    FIELD_TYPES,
    assigned,
    call,
    docstring,
    header,
    identifier,
    parameters,
    signature,
    spelled,
    strings,
)
from tarry.codegen.model import Base, Extent, LazySchema, Shape

_TYPES = {"Device": Base.DEVICE, "Float": Base.FLOAT, "Generator": Base.GENERATOR, "Scalar": Base.SCALAR}


@dataclass(frozen=True)
class NodeOptions:
    """`base` is "module:Class" of the author's base class, or empty; `shape_module` is where shape functions are, and
    `shaped` are the operators that have one."""

    command: str
    lowerings: bool = False
    base: str = ""
    shape_module: str = ""
    shaped: frozenset[str] = frozenset()


def emit_nodes(schemas: Sequence[LazySchema], options: NodeOptions, summary: str) -> str:
    """The module of some nodes, with a table from operators to classes."""
    classes = "\n\n".join(_class(schema, options) for schema in schemas)
    table = "".join(f'    "{schema.qualified_name}": {schema.class_name},\n' for schema in schemas)
    lines = [
        header(options.command, docstring(summary, ""), ["A002  (arguments have the names of the schema)"]),
        *_imports(schemas, options),
        "",
        "",
        *([classes, "", ""] if schemas else []),
        "CLASSES: dict[str, type[TypedNode]] = {",
        f"{table}}}",
        '"""The class of each operator."""',
        "",
        "",
        "def typed(node: Node) -> TypedNode | None:",
        '    """The typed view of a node; None if there is no class for its operator."""',
        "    found = CLASSES.get(node.op)",
        "    return None if found is None else found.from_node(node)",
        "",
    ]
    return "\n".join(lines)


def _imports(schemas: Sequence[LazySchema], options: NodeOptions) -> list[str]:
    bases = {argument.type.base for schema in schemas for argument in schema.arguments}
    names = {"TypedNode"} | {name for name, base in _TYPES.items() if base in bases}
    if Base.TENSOR in bases:
        names.add("Tensor")
    if schemas:
        names.add("Shapes")
    if options.lowerings:
        names |= {"Lowering"}
    lines = ["from __future__ import annotations", ""]
    standard = []
    if options.lowerings:
        standard += ["from collections.abc import Sequence"]
    if any(schema.properties.create is Extent.FULL for schema in schemas):
        standard += ["from typing import Any, Self"]
    elif options.lowerings:
        standard += ["from typing import Any"]
    lines += [*standard, ""] if standard else []
    needs_torch = bases & {Base.DTYPE, Base.LAYOUT, Base.MEMORY_FORMAT}
    lines += ["import torch", ""] if needs_torch else []
    module, _, name = options.base.partition(":")
    author = [f"from {module} import {name}"] if name else []
    ours = ["from tarry.ir.graph import Node", f"from tarry.ir.typed import {', '.join(sorted(names, key=_isort))}"]
    lines += sorted(author + ours) if author and module.startswith("tarry") else [*author, *ours]
    if any(schema.name in options.shaped for schema in schemas):
        lines += ["", *_shape_import(options.shape_module)]
    return lines


def _isort(name: str) -> tuple[bool, str]:
    return (not name.isupper(), name)


def _shape_import(module: str) -> list[str]:
    if module.startswith("."):
        return [f"from . import {module.removeprefix('.')} as shape_inference"]
    parent, _, name = module.rpartition(".")
    return [f"from {parent} import {name} as shape_inference" if parent else f"import {name} as shape_inference"]


def _class(schema: LazySchema, options: NodeOptions) -> str:
    base = options.base.partition(":")[2] or "TypedNode"
    fields = [identifier(argument.name) for argument in schema.arguments]
    names = strings(fields)
    parts = [
        f"class {schema.class_name}({base}):",
        docstring(schema.text),
        "",
        f'    op = "{schema.qualified_name}"',
        assigned("fields", names, "    "),
        assigned("operands", strings(identifier(argument.name) for argument in schema.operands), "    "),
        assigned("attributes", strings(identifier(argument.name) for argument in schema.attributes), "    "),
        assigned("__slots__", names, "    "),
        assigned("__match_args__", names, "    "),
    ]
    if schema.opkind:
        parts.insert(4, f'    opkind = "{schema.opkind}"')
    parts += [
        f"    {name}: {spelled(argument.type, FIELD_TYPES)}"
        for name, argument in zip(fields, schema.arguments, strict=True)
    ]
    parts += ["", *_init(schema, fields)]
    parts += _create(schema, fields)
    parts += _reuse(schema, fields)
    parts += _shapes(schema, options)
    parts += _lower(schema, options, fields)
    return "\n".join(parts) + "\n"


def _parameters(schema: LazySchema) -> list[str]:
    return parameters(schema.arguments, FIELD_TYPES)


def _init(schema: LazySchema, fields: Sequence[str]) -> list[str]:
    params = ["self", *_parameters(schema)]
    args = _tuple(fields)
    extra = ""
    if schema.properties.shape is Shape.PRECOMPUTE:
        params += ([] if "*" in params else ["*"]) + ["shapes: Shapes | None = None"]
        extra = ", shapes"
    lines = [signature("def __init__", params, "None", "    ")]
    lines.append(call("super().__init__", [f"{args}{extra}"], "        "))
    if schema.properties.shape is Shape.COMPUTE:
        lines.append("        self.shapes()")
    return lines


def _tuple(items: Iterable[str]) -> str:
    listed = list(items)
    return f"({', '.join(listed)}{',' if len(listed) == 1 else ''})"


def _passed(schema: LazySchema, fields: Sequence[str]) -> list[str]:
    return [
        f"{name}={name}" if argument.keyword_only else name
        for name, argument in zip(fields, schema.arguments, strict=True)
    ]


def _create(schema: LazySchema, fields: Sequence[str]) -> list[str]:
    extent = schema.properties.create
    if extent is Extent.NONE:
        return []
    if extent is Extent.DECLARED:
        return ["", *_declared("create", "how such nodes are made")]
    params = ["cls", "last: Any", *_parameters(schema)]
    passed = _passed(schema, fields)
    return [
        "",
        "    @classmethod",
        signature("def create", params, "Self", "    "),
        '        """The last node of this class if it is the same, else a new one."""',
        "        if isinstance(last, cls) and " + f"last.can_be_reused({', '.join(passed)}):",
        "            return last",
        call("return cls", passed, "        "),
    ]


def _reuse(schema: LazySchema, fields: Sequence[str]) -> list[str]:
    extent = schema.properties.reuse
    if extent is Extent.NONE:
        return []
    if extent is Extent.DECLARED:
        return ["", *_declared("can_be_reused", "when such a node can be used again")]
    params = ["self", *_parameters(schema)]
    return [
        "",
        signature("def can_be_reused", params, "bool", "    "),
        '        """Whether this node is what a call with these arguments would make."""',
        call("return self.has_args", fields, "        "),
    ]


def _declared(name: str, what: str) -> list[str]:
    return [
        f"    def {name}(self, *args: object, **kwargs: object) -> bool:",
        f'        """Only declared by the YAML: subclass this, and say {what}."""',
        f'        raise NotImplementedError(f"{{type(self).__name__}}.{name} is only declared")',
    ]


def _shapes(schema: LazySchema, options: NodeOptions) -> list[str]:
    if schema.name not in options.shaped:
        return []
    from tarry.codegen.schema import function_name

    keyword = [f"{identifier(argument.name)}=types[{k}]" for k, argument in enumerate(schema.arguments) if argument.keyword_only]
    count = len(schema.positional)
    positional = ["*types"] if not keyword else [f"*types[:{count}]"]
    return [
        "",
        "    def compute_shapes(self) -> Shapes:",
        "        types = self.argument_types()",
        call(f"return shape_inference.compute_shape_{function_name(schema.name)}", [*positional, *keyword], "        "),
    ]


def _lower(schema: LazySchema, options: NodeOptions, fields: Sequence[str]) -> list[str]:
    if not options.lowerings or schema.properties.lower is not Extent.FULL:
        return []  # TypedNode.lower_with says that it is the author's to write
    args = [f"context.argument(self.{name})" for name in fields]
    body = call("return context.builtin", ["self.op", _tuple(args)], "        ")
    if max(map(len, body.splitlines())) > 120:
        body = "        args = (\n" + "".join(f"            {arg},\n" for arg in args) + "        )\n"
        body += "        return context.builtin(self.op, args)"
    return ["", "    def lower_with(self, context: Lowering) -> Sequence[Any]:", body]
