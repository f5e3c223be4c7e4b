"""The entries of `non_native`: nodes that are not ATen operators, with their schema and properties."""

from __future__ import annotations

import difflib
import re
from typing import Any

from tarry.codegen import source
from tarry.codegen.model import (
    NON_NATIVE_PROPERTIES,
    PROPERTY_GROUPS,
    Extent,
    LazySchema,
    NodeProperties,
    Position,
    Problem,
    Shape,
)
from tarry.codegen.schema import Rejected, lazy_schema
from tarry.codegen.schema_checks import unwritable
from tarry.codegen.source import Document

_KEYS = ("func", "opkind", "properties")
_PROPERTIES = tuple(name for group in PROPERTY_GROUPS for name in group)
_EXAMPLE = "For example: `- func: cast(Tensor input, ScalarType dtype) -> Tensor`."


def read_non_native(
    document: Document, node: Any, problems: list[Problem], positions: dict[str, Position]
) -> list[LazySchema]:
    """The schemas of the list; their places, by name, go to `positions`, and what is wrong goes to `problems`."""
    made: dict[str, LazySchema] = {}
    for item in source.items(node):
        schema = _Entry(document, problems).read(item)
        if schema is None:
            continue
        position = document.at(item)
        if schema.class_name in made:
            other = made[schema.class_name].name
            first = f"{other} in line {positions[other].line}"
            problems.append(
                Problem(position, f"{schema.name} makes a second class {schema.class_name}; the first is of {first}")
            )
            continue
        made[schema.class_name] = schema
        positions[schema.name] = position
    return list(made.values())


class _Entry:
    def __init__(self, document: Document, problems: list[Problem]) -> None:
        self.document = document
        self.problems = problems

    def error(self, node: Any, message: str, hint: str = "") -> None:
        self.problems.append(Problem(self.document.at(node), message, hint))

    def read(self, item: Any) -> LazySchema | None:
        if not source.is_mapping(item):
            found = source.describe(item)
            self.error(item, f"an entry of non_native is a mapping with the key `func`, found {found}", _EXAMPLE)
            return None
        fields: dict[str, Any] = {}
        complete = True
        for key, value in source.pairs(item):
            name = key.value if source.is_text(key) else ""
            if name in fields:
                self.error(key, f'the key "{name}" is there twice')
            elif name in _KEYS:
                fields[name] = value
            else:
                near = difflib.get_close_matches(name, _KEYS, n=1)
                meant = near[0] if near and near[0] not in fields else None
                hint = f'Did you mean "{meant}"?' if meant else f"The keys are: {', '.join(_KEYS)}."
                self.error(key, f"unknown key {name or source.describe(key)!r} in an entry of non_native", hint)
                if meant:
                    fields[meant] = value
        if "func" not in fields:
            self.error(item, "an entry of non_native has no `func`", _EXAMPLE)
            complete = False
        properties = self._properties(fields["properties"]) if "properties" in fields else NON_NATIVE_PROPERTIES
        opkind = self._opkind(fields.get("opkind"))
        return self._schema(fields["func"], properties, opkind) if complete else None

    def _opkind(self, node: Any) -> str | None:
        if node is None or source.is_null(node):
            return None
        if not source.is_text(node):
            self.error(node, f"`opkind` is a text, found {source.describe(node)}")
            return None
        if not re.fullmatch(r"[\w.:]+", node.value):
            self.error(node, f"`opkind` is a name, found {node.value!r}", "For example: `opkind: at::prim::Constant`.")
            return None
        return str(node.value)

    def _schema(self, node: Any, properties: NodeProperties, opkind: str | None) -> LazySchema | None:
        if not source.is_text(node):
            self.error(node, f"`func` is a schema, found {source.describe(node)}", _EXAMPLE)
            return None
        from torchgen.model import FunctionSchema

        text = node.value
        try:
            # A non-native node takes symbolic sizes where its schema says so.
            func = FunctionSchema.parse(text)
            schema = lazy_schema(func, properties, takes_symints=True, namespace="lazy", opkind=opkind)
        except Rejected as reason:
            self.error(node, f"{text.partition('(')[0]} cannot have a node: {reason}")
        except Exception as error:  # torchgen raises AssertionError, RuntimeError, ValueError, ... on a bad schema
            self._bad_schema(node, text, str(error))
        else:
            wrong = next(unwritable(schema), None)
            if wrong is None:
                return schema
            self.error(node, f"`func` is not a schema: {text!r}: {wrong[0]}", wrong[1])
        return None

    def _bad_schema(self, node: Any, text: str, error: str) -> None:
        suffix = f" != {text}"
        if error.startswith("Invalid function schema"):
            self.error(node, f"`func` is not a schema: {text!r}", _EXAMPLE)
        elif error.endswith(suffix):  # torchgen could read it, but spells it differently
            spelled = error.removesuffix(suffix)
            self.error(node, f"`func` is not spelled as schemas are: {text!r}", f"Write `{spelled}`.")
        else:
            reason = " ".join(error.split()) or "torchgen cannot read it"
            self.error(node, f"`func` is not a schema: {text!r}: {reason}", _EXAMPLE)

    def _properties(self, node: Any) -> NodeProperties:
        if source.is_null(node):
            return NON_NATIVE_PROPERTIES
        if not source.is_list(node):
            found = source.describe(node)
            self.error(node, f"`properties` is a list, found {found}", "Write `- ShapeCompute` below it.")
            return NON_NATIVE_PROPERTIES
        chosen: dict[tuple[str, ...], str] = {}
        for item in source.items(node):
            joined = source.joined(self.document, item) if source.is_text(item) else None
            if joined is not None:
                self.problems.append(joined.problem)
                continue
            name = item.value if source.is_text(item) else ""
            group = next((group for group in PROPERTY_GROUPS if name in group), None)
            if group is None:
                near = difflib.get_close_matches(name, _PROPERTIES, n=1)
                hint = f"Did you mean {near[0]}?" if near else f"The properties are: {', '.join(_PROPERTIES)}."
                self.error(item, f"unknown property {name or source.describe(item)!r}", hint)
            elif chosen.get(group) == name:
                self.error(item, f"the property {name} is there twice")
            elif group in chosen:
                self.error(item, f"the property {name} contradicts {chosen[group]}", "Keep one of the two.")
            else:
                chosen[group] = name
        return _with(NON_NATIVE_PROPERTIES, set(chosen.values()))


def _with(default: NodeProperties, names: set[str]) -> NodeProperties:
    def extent(stem: str, otherwise: Extent) -> Extent:
        if stem in names:
            return Extent.FULL
        return Extent.DECLARED if f"{stem}DeclOnly" in names else otherwise

    shapes = {"ShapePrecompute": Shape.PRECOMPUTE, "ShapeCompute": Shape.COMPUTE, "ShapeCache": Shape.CACHE}
    return NodeProperties(
        shape=next((shape for name, shape in shapes.items() if name in names), default.shape),
        lower=extent("Lower", default.lower),
        reuse=extent("CanBeReused", default.reuse),
        create=extent("CreateFn", default.create),
        scalars_are_constants="TreatScalarsAsConstants" in names,
    )
