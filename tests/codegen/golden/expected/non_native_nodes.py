# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml golden.yaml --output-dir expected --impl-path golden_kernels.py \
#     --backend-name golden --gen-ts-lowerings
# ruff: noqa: A002
"""Nodes that are no ATen operators."""

from __future__ import annotations

import typing

import torch

from tarry.ir import typed as t

from . import shape_inference


class Scalar(t.TypedNode):
    """scalar(Scalar value, ScalarType type) -> Tensor"""

    op = "golden::scalar"
    opkind = "at::prim::Constant"
    __match_args__ = ("value", "type")
    fields = __slots__ = __match_args__
    operands = ()
    attributes = ("value", "type")
    value: t.Scalar
    type: torch.dtype

    def __init__(self, value: t.Scalar, type: torch.dtype) -> None:
        super().__init__((value, type))
        self.shapes()

    def can_be_reused(self, *args: object, **kwargs: object) -> bool:
        """Only declared by the YAML: subclass this, and say when such a node can be used again."""
        raise NotImplementedError("can_be_reused is only declared: subclass the node and write it")

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_scalar(*types)


class Cast(t.TypedNode):
    """cast(Tensor input, ScalarType dtype, ScalarType? stype) -> Tensor"""

    op = "golden::cast"
    __match_args__ = ("input", "dtype", "stype")
    fields = __slots__ = __match_args__
    operands = ("input",)
    attributes = ("dtype", "stype")
    input: t.Tensor
    dtype: torch.dtype
    stype: torch.dtype | None

    def __init__(
        self, input: t.Tensor, dtype: torch.dtype, stype: torch.dtype | None, *, shapes: t.Shapes | None = None
    ) -> None:
        super().__init__((input, dtype, stype), shapes)

    @classmethod
    def create(
        cls, last: t.TypedNode | None, input: t.Tensor, dtype: torch.dtype, stype: torch.dtype | None
    ) -> typing.Self:
        """The last node if it is the same, else a new one."""
        reusable = isinstance(last, cls) and last.can_be_reused(input, dtype, stype)
        if reusable and isinstance(last, cls):
            return last
        return cls(input, dtype, stype)

    def can_be_reused(self, input: t.Tensor, dtype: torch.dtype, stype: torch.dtype | None) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(input, dtype, stype)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(
            self.op, (context.argument(self.input), context.argument(self.dtype), context.argument(self.stype))
        )


class NarrowView(t.TypedNode):
    """narrow_view(Tensor input, SymInt start, SymInt? end, *, int[2] sizes=[]) -> Tensor"""

    op = "golden::narrow_view"
    __match_args__ = ("input", "start", "end", "sizes")
    fields = __slots__ = __match_args__
    operands = ("input", "start", "end")
    attributes = ("sizes",)
    input: t.Tensor
    start: int
    end: int | None
    sizes: tuple[int, ...]

    def __init__(self, input: t.Tensor, start: int, end: int | None, *, sizes: tuple[int, ...] = ()) -> None:
        super().__init__((input, start, end, sizes))

    def can_be_reused(self, input: t.Tensor, start: int, end: int | None, *, sizes: tuple[int, ...] = ()) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(input, start, end, sizes)

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_narrow_view(*types[:3], sizes=types[3])


CLASSES: dict[str, type[t.TypedNode]] = {
    "golden::scalar": Scalar,
    "golden::cast": Cast,
    "golden::narrow_view": NarrowView,
}
"""The class of each operator."""


def typed(node: t.Node) -> t.TypedNode | None:
    """The typed view of a node; None if there is no class for its operator."""
    found = CLASSES.get(node.op)
    return None if found is None else found.from_node(node)
