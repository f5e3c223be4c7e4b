# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
#     --backend-name numpy
"""Nodes of ATen operators."""

from __future__ import annotations

from tarry.ir import typed as t

from . import shape_inference


class Abs(t.TypedNode):
    """abs(Tensor self) -> Tensor"""

    op = "aten::abs"
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
        return shape_inference.compute_shape_abs(*types)


class DivTensor(t.TypedNode):
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""

    op = "aten::div.Tensor"
    __match_args__ = ("self_", "other")
    fields = __slots__ = __match_args__
    operands = ("self_", "other")
    attributes = ()
    self_: t.Tensor
    other: t.Tensor

    def __init__(self, self_: t.Tensor, other: t.Tensor, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, other), shapes)

    def can_be_reused(self, self_: t.Tensor, other: t.Tensor) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, other)


class Exp(t.TypedNode):
    """exp(Tensor self) -> Tensor"""

    op = "aten::exp"
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


class Log(t.TypedNode):
    """log(Tensor self) -> Tensor"""

    op = "aten::log"
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


class Maximum(t.TypedNode):
    """maximum(Tensor self, Tensor other) -> Tensor"""

    op = "aten::maximum"
    __match_args__ = ("self_", "other")
    fields = __slots__ = __match_args__
    operands = ("self_", "other")
    attributes = ()
    self_: t.Tensor
    other: t.Tensor

    def __init__(self, self_: t.Tensor, other: t.Tensor, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, other), shapes)

    def can_be_reused(self, self_: t.Tensor, other: t.Tensor) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, other)


class Mm(t.TypedNode):
    """mm(Tensor self, Tensor mat2) -> Tensor"""

    op = "aten::mm"
    __match_args__ = ("self_", "mat2")
    fields = __slots__ = __match_args__
    operands = ("self_", "mat2")
    attributes = ()
    self_: t.Tensor
    mat2: t.Tensor

    def __init__(self, self_: t.Tensor, mat2: t.Tensor, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, mat2), shapes)

    def can_be_reused(self, self_: t.Tensor, mat2: t.Tensor) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, mat2)


class MulTensor(t.TypedNode):
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""

    op = "aten::mul.Tensor"
    __match_args__ = ("self_", "other")
    fields = __slots__ = __match_args__
    operands = ("self_", "other")
    attributes = ()
    self_: t.Tensor
    other: t.Tensor

    def __init__(self, self_: t.Tensor, other: t.Tensor, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, other), shapes)

    def can_be_reused(self, self_: t.Tensor, other: t.Tensor) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, other)


class NeScalar(t.TypedNode):
    """ne.Scalar(Tensor self, Scalar other) -> Tensor"""

    op = "aten::ne.Scalar"
    __match_args__ = ("self_", "other")
    fields = __slots__ = __match_args__
    operands = ("self_", "other")
    attributes = ()
    self_: t.Tensor
    other: t.Scalar

    def __init__(self, self_: t.Tensor, other: t.Scalar, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, other), shapes)

    def can_be_reused(self, self_: t.Tensor, other: t.Scalar) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, other)


class Neg(t.TypedNode):
    """neg(Tensor self) -> Tensor"""

    op = "aten::neg"
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


class Permute(t.TypedNode):
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""

    op = "aten::permute"
    __match_args__ = ("self_", "dims")
    fields = __slots__ = __match_args__
    operands = ("self_",)
    attributes = ("dims",)
    self_: t.Tensor
    dims: tuple[int, ...]

    def __init__(self, self_: t.Tensor, dims: tuple[int, ...], *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, dims), shapes)

    def can_be_reused(self, self_: t.Tensor, dims: tuple[int, ...]) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, dims)

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_permute(*types)


class Sqrt(t.TypedNode):
    """sqrt(Tensor self) -> Tensor"""

    op = "aten::sqrt"
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


class Tanh(t.TypedNode):
    """tanh(Tensor self) -> Tensor"""

    op = "aten::tanh"
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


class Unsqueeze(t.TypedNode):
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""

    op = "aten::unsqueeze"
    __match_args__ = ("self_", "dim")
    fields = __slots__ = __match_args__
    operands = ("self_",)
    attributes = ("dim",)
    self_: t.Tensor
    dim: int

    def __init__(self, self_: t.Tensor, dim: int, *, shapes: t.Shapes | None = None) -> None:
        super().__init__((self_, dim), shapes)

    def can_be_reused(self, self_: t.Tensor, dim: int) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(self_, dim)

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_unsqueeze(*types)


class View(t.TypedNode):
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)"""

    op = "aten::view"
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

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_view(*types)


class WhereSelf(t.TypedNode):
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""

    op = "aten::where.self"
    __match_args__ = ("condition", "self_", "other")
    fields = __slots__ = __match_args__
    operands = ("condition", "self_", "other")
    attributes = ()
    condition: t.Tensor
    self_: t.Tensor
    other: t.Tensor

    def __init__(
        self, condition: t.Tensor, self_: t.Tensor, other: t.Tensor, *, shapes: t.Shapes | None = None
    ) -> None:
        super().__init__((condition, self_, other), shapes)

    def can_be_reused(self, condition: t.Tensor, self_: t.Tensor, other: t.Tensor) -> bool:
        """Whether this node is what a call with these arguments would make."""
        return self.has_args(condition, self_, other)

    def compute_shapes(self) -> t.Shapes:
        types = self.argument_types()
        return shape_inference.compute_shape_where_self(*types)


CLASSES: dict[str, type[t.TypedNode]] = {
    "aten::abs": Abs,
    "aten::div.Tensor": DivTensor,
    "aten::exp": Exp,
    "aten::log": Log,
    "aten::maximum": Maximum,
    "aten::mm": Mm,
    "aten::mul.Tensor": MulTensor,
    "aten::ne.Scalar": NeScalar,
    "aten::neg": Neg,
    "aten::permute": Permute,
    "aten::sqrt": Sqrt,
    "aten::tanh": Tanh,
    "aten::unsqueeze": Unsqueeze,
    "aten::view": View,
    "aten::where.self": WhereSelf,
}
"""The class of each operator."""


def typed(node: t.Node) -> t.TypedNode | None:
    """The typed view of a node; None if there is no class for its operator."""
    found = CLASSES.get(node.op)
    return None if found is None else found.from_node(node)
