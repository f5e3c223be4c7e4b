"""Small pieces of graph that several passes build."""

from __future__ import annotations

from typing import Any

import torch

from tarry.ir.graph import HERE, GraphBuilder, Node, Number, Value
from tarry.ir.infer import infer
from tarry.ir.layout import VIEW_RULES, TensorType, channels_last_strides, memory_order, same_addresses, view_layout
from tarry.ir.operators import STRIDED_SCATTER


class Emitter:
    """Appends nodes on behalf of a node of the source graph, with types worked out.

    It also keeps where each view starts in the buffer it is a window on: `as_strided` counts from the start of the
    storage, so it may only be applied at offset 0.
    """

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self.like: Node | None = None
        self.starts: dict[Value, int] = {}

    def call(self, op: str, *args: Any) -> Value:
        """A pure operator with one result, in the layout that PyTorch gives it."""
        (type_,) = infer(op, args)
        assert type_ is not None
        return self.builder.one(op, args, type_, self.like)

    def view(self, value: Value, op: str, *args: Any) -> Value:
        """A view operator; the view must exist."""
        layout = view_layout(op, value.type.at(self.starts.get(value, 0)), args)
        assert layout is not None, f"{op}{args} of {value.type} is no view"
        result = self.builder.one(op, (value, *args), layout.type, self.like)
        self.starts[result] = layout.offset
        return result

    def can_view(self, value: Value, op: str, *args: Any) -> bool:
        return view_layout(op, value.type.at(self.starts.get(value, 0)), args) is not None

    def note(self, node: Node, outputs: tuple[Value | None, ...], args: tuple[Any, ...]) -> None:
        """Keep track of a view that was copied from the source graph."""
        if node.op in VIEW_RULES and outputs[0] is not None:
            layout = view_layout(node.op, args[0].type.at(self.starts.get(args[0], 0)), args[1:])
            self.starts[outputs[0]] = 0 if layout is None else layout.offset

    def at_start(self, value: Value) -> Value:
        """The value in a buffer that starts with it."""
        return self.call("aten::clone", value, None) if self.starts.get(value, 0) else value

    def contiguous(self, value: Value) -> Value:
        return self.call("aten::clone", value, torch.contiguous_format)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.type.dtype == dtype:
            return value
        return self.call("aten::_to_copy", value, dtype, None, None, None, False, None)

    def expand(self, value: Value, sizes: tuple[int, ...]) -> Value:
        return value if value.type.sizes == sizes else self.view(value, "aten::expand", sizes, False)

    def full(self, type_: TensorType, number: Any) -> Value:
        """A tensor of one number. Dense types come out in their own strides, others contiguous."""
        if isinstance(number, Number) and number.kind == "seed":
            raise TypeError("full: a seed is no number to fill with")
        order = memory_order(type_.sizes, type_.strides) if type_.is_dense else tuple(range(type_.rank))
        sizes = tuple(type_.sizes[d] for d in order)
        value = self.builder.one(
            "aten::full",
            (sizes, number, type_.dtype, None, HERE, None),
            TensorType.contiguous(type_.dtype, sizes),
            self.like,
        )
        return self.unpermute(value, order)

    def unpermute(self, value: Value, order: tuple[int, ...]) -> Value:
        """Undo a permutation by `order`."""
        if order == tuple(range(len(order))):
            return value
        return self.view(value, "aten::permute", tuple(order.index(d) for d in range(len(order))))

    def relayout(self, value: Value, want: TensorType, base: Value | None = None) -> Value:
        """The value (same dtype and sizes) in the strides wanted. Where those leave gaps or overlap, which nothing but
        an existing buffer can have, the elements are scattered into `base`, a value of that type."""
        assert (value.type.dtype, value.type.sizes) == (want.dtype, want.sizes)
        if value.type == want:
            return value
        if value.type.matches(want):
            result = self.builder.one("aten::view", (value, want.sizes), want, self.like)
            self.starts[result] = self.starts.get(value, 0)
            return result
        if not want.is_dense:
            assert base is not None
            assert base.type == want
            window = (want.dtype, want.sizes, want.strides, 0)
            return self.builder.one(STRIDED_SCATTER, (base, value, *window), want, self.like)
        if want.is_contiguous:
            return self.retype(self.contiguous(value), want)
        channels_last = channels_last_strides(want.sizes)
        if channels_last is not None and same_addresses(want.sizes, channels_last, want.strides):
            layout = torch.channels_last if want.rank == 4 else torch.channels_last_3d
            return self.retype(self.call("aten::clone", value, layout), want)
        order = memory_order(want.sizes, want.strides)
        packed = self.contiguous(self.view(value, "aten::permute", order))
        return self.retype(self.unpermute(packed, order), want)

    def retype(self, value: Value, want: TensorType) -> Value:
        """The same value with other strides in its dimensions of size 1."""
        return value if value.type == want else self.relayout(value, want)
