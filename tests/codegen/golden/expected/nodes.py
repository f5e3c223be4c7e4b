# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml golden.yaml --output-dir expected --impl-path golden_kernels.py \
#     --backend-name golden --gen-ts-lowerings
# ruff: noqa: A002
"""Nodes of ATen operators."""

from __future__ import annotations

from tarry.ir import typed as t

from . import shape_inference


class AddTensor(t.TypedNode):
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""

    op = "aten::add.Tensor"
    __match_args__ = ("self_", "other", "alpha")
    fields = __slots__ = __match_args__
    operands = ("self_", "other", "alpha")
    attributes = ()
    self_: t.Tensor
    other: t.Tensor
    alpha: t.Scalar

    def __init__(
        self, self_: t.Tensor, other: t.Tensor, *, alpha: t.Scalar = 1, shapes: t.Shapes | None = None
    ) -> None:
        super().__init__((self_, other, alpha), shapes)

    def can_be_reused(self, self_: t.Tensor, other: t.Tensor, *, alpha: t.Scalar = 1) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, other, alpha)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(
            self.op, (context.argument(self.self_), context.argument(self.other), context.argument(self.alpha))
        )


class ArangeStartOut(t.TypedNode):
    """arange.start_out(Scalar start, Scalar end, Scalar step=1, *, Tensor(a!) out) -> Tensor(a!)"""

    op = "aten::arange.start_out"
    __match_args__ = ("start", "end", "step", "out")
    fields = __slots__ = __match_args__
    operands = ("start", "end", "step", "out")
    attributes = ()
    start: t.Scalar
    end: t.Scalar
    step: t.Scalar
    out: t.Tensor

    def __init__(
        self, start: t.Scalar, end: t.Scalar, step: t.Scalar = 1, *, out: t.Tensor, shapes: t.Shapes | None = None
    ) -> None:
        super().__init__((start, end, step, out), shapes)

    def can_be_reused(self, start: t.Scalar, end: t.Scalar, step: t.Scalar = 1, *, out: t.Tensor) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(start, end, step, out)

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_arange_start_out(*types[:3], out=types[3])

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        args = (
            context.argument(self.start),
            context.argument(self.end),
            context.argument(self.step),
            context.argument(self.out),
        )
        return context.builtin(self.op, args)


class BernoulliP(t.TypedNode):
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""

    op = "aten::bernoulli.p"
    __match_args__ = ("self_", "p", "generator")
    fields = __slots__ = __match_args__
    operands = ("self_",)
    attributes = ("p", "generator")
    self_: t.Tensor
    p: t.Float
    generator: t.Generator | None

    def __init__(
        self, self_: t.Tensor, p: t.Float, *, generator: t.Generator | None = None, shapes: t.Shapes | None = None
    ) -> None:
        super().__init__((self_, p, generator), shapes)

    def can_be_reused(self, self_: t.Tensor, p: t.Float, *, generator: t.Generator | None = None) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, p, generator)

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_bernoulli_p(*types[:2], generator=types[2])

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(
            self.op, (context.argument(self.self_), context.argument(self.p), context.argument(self.generator))
        )


class Cat(t.TypedNode):
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""

    op = "aten::cat"
    __match_args__ = ("tensors", "dim")
    fields = __slots__ = __match_args__
    operands = ("tensors",)
    attributes = ("dim",)
    tensors: tuple[t.Tensor, ...]
    dim: int

    def __init__(self, tensors: tuple[t.Tensor, ...], dim: int = 0, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((tensors, dim), shapes)

    def can_be_reused(self, tensors: tuple[t.Tensor, ...], dim: int = 0) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(tensors, dim)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(self.op, (context.argument(self.tensors), context.argument(self.dim)))


class Clamp(t.TypedNode):
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""

    op = "aten::clamp"
    __match_args__ = ("self_", "min", "max")
    fields = __slots__ = __match_args__
    operands = ("self_", "min", "max")
    attributes = ()
    self_: t.Tensor
    min: t.Scalar | None
    max: t.Scalar | None

    def __init__(
        self,
        self_: t.Tensor,
        min: t.Scalar | None = None,
        max: t.Scalar | None = None,
        *,
        shapes: t.Shapes | None = None,
    ) -> None:
        super().__init__((self_, min, max), shapes)

    def can_be_reused(self, self_: t.Tensor, min: t.Scalar | None = None, max: t.Scalar | None = None) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, min, max)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(
            self.op, (context.argument(self.self_), context.argument(self.min), context.argument(self.max))
        )


class MaxDim(t.TypedNode):
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""

    op = "aten::max.dim"
    __match_args__ = ("self_", "dim", "keepdim")
    fields = __slots__ = __match_args__
    operands = ("self_",)
    attributes = ("dim", "keepdim")
    self_: t.Tensor
    dim: int
    keepdim: bool

    def __init__(self, self_: t.Tensor, dim: int, keepdim: bool = False, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, dim, keepdim), shapes)

    def can_be_reused(self, self_: t.Tensor, dim: int, keepdim: bool = False) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, dim, keepdim)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(
            self.op, (context.argument(self.self_), context.argument(self.dim), context.argument(self.keepdim))
        )


class NativeLayerNorm(t.TypedNode):
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor,
    Tensor, Tensor)"""

    op = "aten::native_layer_norm"
    __match_args__ = ("input", "normalized_shape", "weight", "bias", "eps")
    fields = __slots__ = __match_args__
    operands = ("input", "weight", "bias")
    attributes = ("normalized_shape", "eps")
    input: t.Tensor
    normalized_shape: tuple[int, ...]
    weight: t.Tensor | None
    bias: t.Tensor | None
    eps: t.Float

    def __init__(
        self,
        input: t.Tensor,
        normalized_shape: tuple[int, ...],
        weight: t.Tensor | None,
        bias: t.Tensor | None,
        eps: t.Float,
        *,
        shapes: t.Shapes | None = None,
    ) -> None:
        super().__init__((input, normalized_shape, weight, bias, eps), shapes)

    def can_be_reused(
        self,
        input: t.Tensor,
        normalized_shape: tuple[int, ...],
        weight: t.Tensor | None,
        bias: t.Tensor | None,
        eps: t.Float,
    ) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(input, normalized_shape, weight, bias, eps)

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_native_layer_norm(*types)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        args = (
            context.argument(self.input),
            context.argument(self.normalized_shape),
            context.argument(self.weight),
            context.argument(self.bias),
            context.argument(self.eps),
        )
        return context.builtin(self.op, args)


class Relu(t.TypedNode):
    """relu_(Tensor(a!) self) -> Tensor(a!)"""

    op = "aten::relu_"
    __match_args__ = ("self_",)
    fields = __slots__ = __match_args__
    operands = ("self_",)
    attributes = ()
    self_: t.Tensor

    def __init__(self, self_: t.Tensor, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_,), shapes)

    def can_be_reused(self, self_: t.Tensor) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_)

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_relu_(*types)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(self.op, (context.argument(self.self_),))


class SplitCopyTensor(t.TypedNode):
    """split_copy.Tensor(Tensor self, SymInt split_size, int dim=0) -> Tensor[]"""

    op = "aten::split_copy.Tensor"
    __match_args__ = ("self_", "split_size", "dim")
    fields = __slots__ = __match_args__
    operands = ("self_",)
    attributes = ("split_size", "dim")
    self_: t.Tensor
    split_size: int
    dim: int

    def __init__(self, self_: t.Tensor, split_size: int, dim: int = 0, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, split_size, dim), shapes)

    def can_be_reused(self, self_: t.Tensor, split_size: int, dim: int = 0) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, split_size, dim)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(
            self.op, (context.argument(self.self_), context.argument(self.split_size), context.argument(self.dim))
        )


class ViewCopy(t.TypedNode):
    """view_copy(Tensor self, SymInt[] size) -> Tensor"""

    op = "aten::view_copy"
    __match_args__ = ("self_", "size")
    fields = __slots__ = __match_args__
    operands = ("self_",)
    attributes = ("size",)
    self_: t.Tensor
    size: tuple[int, ...]

    def __init__(self, self_: t.Tensor, size: tuple[int, ...], *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, size), shapes)

    def can_be_reused(self, self_: t.Tensor, size: tuple[int, ...]) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, size)

    def lower_with(self, context: t.Lowering) -> t.Lowered:
        return context.builtin(self.op, (context.argument(self.self_), context.argument(self.size)))


CLASSES: dict[str, type[t.TypedNode]] = {
    "aten::add.Tensor": AddTensor,
    "aten::arange.start_out": ArangeStartOut,
    "aten::bernoulli.p": BernoulliP,
    "aten::cat": Cat,
    "aten::clamp": Clamp,
    "aten::max.dim": MaxDim,
    "aten::native_layer_norm": NativeLayerNorm,
    "aten::relu_": Relu,
    "aten::split_copy.Tensor": SplitCopyTensor,
    "aten::view_copy": ViewCopy,
}
"""The class of each operator."""


def typed(node: t.Node) -> t.TypedNode | None:
    """The typed view of a node; None if there is no class for its operator."""
    found = CLASSES.get(node.op)
    return None if found is None else found.from_node(node)
