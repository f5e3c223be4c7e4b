"""Node classes: one per operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tarry.codegen.emit.python import (
    FIELD_TYPES,
    assigned,
    call,
    called,
    docstring,
    header,
    identifier,
    needs_torch,
    parameters,
    returned,
    signature,
    spelled,
    strings,
    table,
)
from tarry.codegen.emit.shapes import shape_name
from tarry.codegen.model import Extent, LazySchema, Shape


@dataclass(frozen=True)
class NodeOptions:
    """`own_base`: there is a module `node_base` with the author's base class. `shaped` are the operators that have a
    function in the module `shape_inference`."""

    command: str
    lowerings: bool = False
    own_base: bool = False
    shaped: frozenset[str] = frozenset()


def emit_nodes(schemas: Sequence[LazySchema], options: NodeOptions, summary: str) -> str:
    """The module of some nodes, with a table from operators to classes."""
    classes = "\n\n".join(_class(schema, options) for schema in schemas)
    rows = [(schema.qualified_name, schema.class_name) for schema in schemas]
    lines = [
        header(options.command, summary, schemas, fields=True),
        *_imports(schemas, options),
        "",
        "",
        *([classes, ""] if schemas else []),
        table("CLASSES", "dict[str, type[t.TypedNode]]", rows, "The class of each operator."),
        "",
        "def typed(node: t.Node) -> t.TypedNode | None:",
        '    """The typed view of a node; None if there is no class for its operator."""',
        "    found = CLASSES.get(node.op)",
        "    return None if found is None else found.from_node(node)",
        "",
    ]
    return "\n".join(lines)


def _imports(schemas: Sequence[LazySchema], options: NodeOptions) -> list[str]:
    lines = ["from __future__ import annotations", ""]
    if any(schema.properties.create is Extent.FULL for schema in schemas):
        lines += ["import typing", ""]
    lines += ["import torch", ""] if needs_torch(schemas) else []
    lines.append("from tarry.ir import typed as t")
    relative = ["from . import shape_inference"] if any(schema.name in options.shaped for schema in schemas) else []
    relative += ["from .node_base import NodeBase"] if options.own_base and schemas else []
    return lines + (["", *relative] if relative else [])


def emit_node_base(base: str, command: str) -> str:
    """The module that takes the author's base class, "module:Class", from where it is."""
    module, _, name = base.partition(":")
    return (
        f"{header(command, 'The base class of nodes.')}\n"
        f'from __future__ import annotations\n\nfrom {module} import {name} as NodeBase\n\n__all__ = ["NodeBase"]\n'
    )


def _class(schema: LazySchema, options: NodeOptions) -> str:
    base = "NodeBase" if options.own_base else "t.TypedNode"
    fields = [identifier(argument.name) for argument in schema.arguments]
    parts = [f"class {schema.class_name}({base}):", docstring(schema.text), "", f'    op = "{schema.qualified_name}"']
    if schema.opkind:
        parts.append(f'    opkind = "{schema.opkind}"')
    parts += [
        assigned("__match_args__", strings(fields), "    "),
        "    fields = __slots__ = __match_args__",
        assigned("operands", strings(identifier(argument.name) for argument in schema.operands), "    "),
        assigned("attributes", strings(identifier(argument.name) for argument in schema.attributes), "    "),
        *(
            f"    {name}: {spelled(argument.type, FIELD_TYPES)}"
            for name, argument in zip(fields, schema.arguments, strict=True)
        ),
        "",
        *_init(schema, fields),
        *_create(schema, fields),
        *_reuse(schema, fields),
        *_shapes(schema, options),
        *_lower(schema, options, fields),
    ]
    return "\n".join(parts) + "\n"


def _parameters(schema: LazySchema) -> list[str]:
    return parameters(schema.arguments, FIELD_TYPES)


def _init(schema: LazySchema, fields: Sequence[str]) -> list[str]:
    params = ["self", *_parameters(schema)]
    last = []
    if schema.properties.shape is Shape.PRECOMPUTE:
        params += ([] if "*" in params else ["*"]) + ["shapes: t.Shapes | None = None"]
        last = ["shapes"]
    lines = [signature("def __init__", params, "None", "    ")]
    lines.append(called("super().__init__", fields, "        ", last=last))
    if schema.properties.shape is Shape.COMPUTE:
        lines.append("        self.shapes()")
    return lines


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
        return ["", "    @classmethod", *_declared("create", "cls", "typing.Self", "how such nodes are made")]
    passed = _passed(schema, fields)
    params = ["cls", "last: t.TypedNode | None", *_parameters(schema)]
    lines = ["", "    @classmethod", signature("def create", params, "typing.Self", "    ")]
    lines.append('        """The last node if it is the same, else a new one."""')
    if schema.properties.reuse is Extent.FULL:
        lines.append(call("reusable = isinstance(last, cls) and last.can_be_reused", passed, "        "))
        lines.append("        if reusable and isinstance(last, cls):")
        lines.append("            return last")
    return [*lines, call("return cls", passed, "        ")]


def _reuse(schema: LazySchema, fields: Sequence[str]) -> list[str]:
    extent = schema.properties.reuse
    if extent is Extent.NONE:
        return []
    if extent is Extent.DECLARED:
        return ["", *_declared("can_be_reused", "self", "bool", "when such a node can be used again")]
    return [
        "",
        signature("def can_be_reused", ["self", *_parameters(schema)], "bool", "    "),
        '        """Whether this node is what a call with these arguments would make."""',
        call("return self.has_args", fields, "        "),
    ]


def _declared(name: str, first: str, returns: str, what: str) -> list[str]:
    return [
        f"    def {name}({first}, *args: object, **kwargs: object) -> {returns}:",
        f'        """Only declared by the YAML: subclass this, and say {what}."""',
        f'        raise NotImplementedError("{name} is only declared: subclass the node and write it")',
    ]


def _shapes(schema: LazySchema, options: NodeOptions) -> list[str]:
    if schema.name not in options.shaped:
        return []
    count = len(schema.positional)
    keyword = [f"{identifier(argument.name)}=types[{count + k}]" for k, argument in enumerate(schema.keyword_only)]
    positional = [f"*types[:{count}]" if keyword else "*types"] if count else []
    return [
        "",
        "    def compute_shapes(self) -> t.Shapes:",
        "        types = self.argument_types()",
        call(f"return shape_inference.{shape_name(schema)}", [*positional, *keyword], "        "),
    ]


def _lower(schema: LazySchema, options: NodeOptions, fields: Sequence[str]) -> list[str]:
    if not options.lowerings or schema.properties.lower is not Extent.FULL:
        return []  # TypedNode.lower_with says that it is the author's to write
    args = [f"context.argument(self.{name})" for name in fields]
    body = returned("context.builtin", args, "        ", first=["self.op"])
    return ["", "    def lower_with(self, context: t.Lowering) -> t.Lowered:", body]
