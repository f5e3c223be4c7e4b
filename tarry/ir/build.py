"""From the recorder's raw graph to a Graph: stage 'recorded'.

The recorder is a hot path and writes down as little as it can: views sit on edges as layouts, and a write through a
view is one node whose output is the whole new storage. Here both become nodes, so that nothing after this file needs to
know about storages:

- an edge with a layout becomes a `tarry::strided_view`, one per value and layout;
- a written argument with a layout becomes view, operator on the view, `tarry::strided_scatter` back into the storage;
- several written views of one storage become a chain of scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tarry.codegen.op_table import facts
from tarry.errors import IRError
from tarry.ir.dtypes import NUMBER_DTYPES
from tarry.ir.graph import HERE, Graph, GraphBuilder, Number, NumberKind, Site, Value
from tarry.ir.layout import Layout, TensorType, disjoint
from tarry.ir.operators import HIDDEN_WRITES, STRIDED_SCATTER, STRIDED_VIEW, Operator, operator
from tarry.ir.raw import RawArgument, RawGraph, RawLayout, RawNode


def from_raw(raw: RawGraph) -> Graph:
    """The graph that a raw graph of the recorder stands for. Raises IRError if it is inconsistent in itself; whether
    the result is legal is for `verify` to say."""
    return _FromRaw(raw).run()


def _layout(raw: RawLayout) -> Layout:
    dtype, sizes, strides, offset = raw
    return Layout(dtype, tuple(sizes), tuple(strides), offset)


def _constant(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_constant(item) for item in value)
    if isinstance(value, torch.device) and value.type in ("tarry", "privateuseone"):
        return HERE
    return value


def _edges(arg: RawArgument) -> list[tuple[int, Layout | None]]:
    """The edges of a raw tensor or tensor-list argument as (raw value id, layout)."""
    if arg[0] == "edge":
        return [(arg[1], None if arg[2] is None else _layout(arg[2]))]
    if arg[0] == "list":
        return [edge for item in arg[1] for edge in _edges(item)]
    return []


class _FromRaw:
    def __init__(self, raw: RawGraph) -> None:
        self.raw = raw
        self.builder = GraphBuilder()
        self.values: list[Value | None] = []  # by raw value id
        self.views: dict[tuple[Value, Layout], Value] = {}
        self.numbers: list[Number] = []

    def run(self) -> Graph:
        for number, (kind, dtype) in zip(self.raw["numbers"], self._number_kinds(), strict=True):
            self.numbers.append(self.builder.number(kind, dtype, number))
        inputs = [self.builder.input(_layout(layout).type) for layout in self.raw["inputs"]]
        self.values.extend(inputs)
        for node in self.raw["nodes"]:
            self._node(node)
        outputs = [self._value(id_, "an output of the graph") for id_ in self.raw["outputs"]]
        # A storage that out= resized no longer fits the buffer it had.
        replaces = [
            index if index >= 0 and inputs[index].type == value.type else None
            for value, index in zip(outputs, self.raw["replaces"], strict=True)
        ]
        return self.builder.finish(outputs, replaces)

    def _number_kinds(self) -> list[tuple[NumberKind, torch.dtype]]:
        """Kind and dtype of every number: they stand where it is used. One that is not used is a plain number."""
        found: list[tuple[NumberKind, torch.dtype]] = [
            ("number", NUMBER_DTYPES[type(value)]) for value in self.raw["numbers"]
        ]

        def visit(arg: RawArgument) -> None:
            if arg[0] == "list":
                for item in arg[1]:
                    visit(item)
            elif arg[0] in ("wrapped", "seed"):
                index = arg[1]
                found[index] = (arg[0], arg[3] if arg[0] == "wrapped" else found[index][1])

        for node in self.raw["nodes"]:
            for arg in (*node["args"], node.get("seed") or ("none",)):
                visit(arg)
        return found

    def _value(self, id_: int, what: str) -> Value:
        value = self.values[id_] if 0 <= id_ < len(self.values) else None
        if value is None:
            raise IRError(f"raw graph: {what} is value {id_}, which no input or earlier node defines")
        return value

    def _arg(self, arg: RawArgument, site: Site | None, region: int) -> Any:
        if arg[0] == "edge":
            value = self._value(arg[1], "an argument")
            return value if arg[2] is None else self._view(value, _layout(arg[2]), site, region)
        if arg[0] == "number" or arg[0] == "wrapped" or arg[0] == "seed":
            return self.numbers[arg[1]]
        if arg[0] == "none":
            return None
        if arg[0] == "list":
            return tuple(self._arg(item, site, region) for item in arg[1])
        if arg[0] == "const":
            return _constant(arg[1])
        raise IRError(f"raw graph: an argument of kind {arg[0]!r}, which RawArgument does not have")

    def _view(self, value: Value, layout: Layout, site: Site | None, region: int) -> Value:
        if layout == value.type.at():
            return value
        key = (value, layout)
        if key not in self.views:
            args = (value, layout.dtype, layout.sizes, layout.strides, layout.offset)
            (view,) = self.builder.node(STRIDED_VIEW, args, (layout.type,), site=site, region=region)
            assert view is not None
            self.views[key] = view
        return self.views[key]

    def _node(self, node: RawNode) -> None:
        op = node["op"]
        described = operator(op)
        if node["mutated"] and not described.is_mutable:
            if op not in HIDDEN_WRITES:
                raise IRError(f"raw graph: {op} writes {len(node['mutated'])} storages, but its schema writes none")
            op = HIDDEN_WRITES[op]
            described = operator(op)
        if len(node["args"]) != len(described.arguments):
            raise IRError(f"raw graph: {op} has {len(node['args'])} arguments, its schema {len(described.arguments)}")
        written = [edge for index in described.written for edge in _edges(node["args"][index])]
        mutated: list[int] = node["mutated"]
        if len(set(mutated)) != len(mutated) or {id_ for id_, _ in written} != set(mutated):
            raise IRError(f"raw graph: {op} writes to values {[id_ for id_, _ in written]}, but lists {mutated}")

        types = [None if layout is None else _layout(layout).type for layout in node["outputs"]]
        fresh_types, home_types = types[: node["fresh"]], types[node["fresh"] :]
        if len(home_types) != len(mutated):
            raise IRError(f"raw graph: {op} has {len(home_types)} outputs for its {len(mutated)} written storages")
        homes = {id_: type_ for id_, type_ in zip(mutated, home_types, strict=True) if type_ is not None}

        if facts(op).on_lists and _overlapping(written):
            fresh, updated = self._one_by_one(op, described, node, written)
        else:
            fresh, updated = self._call(op, described, node, node["args"], written, fresh_types, homes)
        # An absent output has an id only if the raw graph lists it.
        self.values.extend(fresh if len(fresh) == node["fresh"] else [value for value in fresh if value is not None])
        self.values.extend(updated[id_] for id_ in mutated)

    def _call(
        self,
        op: str,
        described: Operator,
        node: RawNode,
        raw_args: Sequence[RawArgument],
        written: list[tuple[int, Layout | None]],
        fresh_types: Sequence[TensorType | None],
        homes: dict[int, TensorType],
    ) -> tuple[list[Value | None], dict[int, Value]]:
        """Append the node, then scatter what it wrote into views. Returns fresh outputs and new homes by raw id."""
        site = Site(node["file"], node["line"], node.get("module", "")) if node.get("file") else None
        region = node.get("region", 0)
        args = [self._arg(arg, site, region) for arg in raw_args]
        fresh_types = _with_holes(described, node.get("returned", ()), fresh_types)
        seed = self._arg(node["seed"], site, region) if node.get("seed") else None
        written_types = []
        for id_, layout in written:
            home = self._value(id_, "a written argument").type
            if layout is None or layout == home.at():
                written_types.append(homes.get(id_, home))  # out= may have resized it
            else:
                written_types.append(layout.type)
        outputs = self.builder.node(op, args, [*fresh_types, *written_types], site=site, region=region, seed=seed)
        fresh = list(outputs[: len(fresh_types)])
        updated: dict[int, Value] = {}
        for (id_, layout), new in zip(written, outputs[len(fresh_types) :], strict=True):
            assert new is not None
            current = updated.get(id_) or self._value(id_, "a written argument")
            if layout is None or layout == current.type.at():
                updated[id_] = new
            else:
                window = (layout.dtype, layout.sizes, layout.strides, layout.offset)
                (updated[id_],) = self.builder.node(  # type: ignore[assignment]
                    STRIDED_SCATTER, (current, new, *window), (current.type,), site=site, region=region
                )
        return fresh, updated

    def _one_by_one(
        self, op: str, described: Operator, node: RawNode, written: list[tuple[int, Layout | None]]
    ) -> tuple[list[Value | None], dict[int, Value]]:
        """A _foreach operator that was given overlapping tensors updates them in turn, each seeing the one before."""
        before = list(self.values)
        current: dict[int, Value] = {}
        for k in range(len(written)):
            args: list[RawArgument] = [
                ("list", [arg[1][k]]) if arg[0] == "list" and _is_per_tensor(argument.type) else arg
                for arg, argument in zip(node["args"], described.arguments, strict=True)
            ]
            _, updated = self._call(op, described, node, args, written[k : k + 1], (), {})
            for id_, value in updated.items():
                current[id_] = self.values[id_] = value
        self.values = before
        return [], current


def _with_holes(
    described: Operator, returned: tuple[bool, ...], types: Sequence[TensorType | None]
) -> Sequence[TensorType | None]:
    """The types of the fresh outputs, with None for those that the operator does not return. A raw graph leaves those
    out. `returned` is what the kernel gives, which is not always what an `output_mask` asks for:
    `convolution_backward` computes the weight's gradient with the bias's."""
    count = described.fresh_count
    if count is None or len(types) >= count:
        return types
    if len(returned) != count or sum(returned) != len(types):
        raise IRError(f"raw graph: {described.name} has {len(types)} fresh outputs, but returns {sum(returned)}")
    rest = iter(types)
    return [next(rest) if there else None for there in returned]


def _is_per_tensor(type_: str) -> bool:
    return type_ in ("List[Tensor]", "List[number]")


def _overlapping(written: list[tuple[int, Layout | None]]) -> bool:
    """Whether two of the written windows may share an element of one storage."""
    by_storage: dict[int, list[Layout | None]] = {}
    for id_, window in written:
        by_storage.setdefault(id_, []).append(window)
    for windows in by_storage.values():
        if len(windows) > 1 and None in windows:
            return True
        known = sorted((window for window in windows if window is not None), key=lambda window: window.byte_range)
        for k, window in enumerate(known):
            for other in known[k + 1 :]:
                if other.byte_range[0] >= window.byte_range[1]:
                    break  # so do all that start later
                if not disjoint(window, other):
                    return True
    return False
