"""The table of operators that the recorder registers, for the torch version at hand.

PyTorch knows over three thousand operators. The recorder wants the *leaves*: those that a backend has to carry out. The
others decompose into leaves by themselves (CompositeImplicit), are views that only touch metadata, or are factories and
conversions that PyTorch writes in terms of `empty` and a leaf. torchgen's model tells which is which.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchgen.model import NativeFunction


class Kind(StrEnum):
    """What happens when an operator is called on a tarry tensor."""

    RECORD = "record"  # the recorder makes a node of it
    DECOMPOSE = "decompose"  # PyTorch's own kernel calls other operators
    VIEW = "view"  # PyTorch's own kernel makes another tensor over the same storage
    KERNEL = "kernel"  # csrc/kernels.cpp has a kernel for it
    UNSUPPORTED = "unsupported"  # of a layout that tarry does not have (sparse, nested, quantized)


@dataclass(frozen=True, slots=True)
class OpEntry:
    """One operator of PyTorch and how the recorder treats it."""

    name: str  # "aten::add.Tensor", or "aten::mm" for the default overload
    kind: Kind
    in_place: bool = False
    out: bool = False
    random: bool = False  # draws random numbers
    dynamic: bool = False  # the output's shape, or a value read on the host, depends on data
    overwrites: bool = False  # writes all of its mutable arguments without reading them
    shape_from_numbers: bool = False
    pointwise: bool = False
    mutable_arguments: tuple[str, ...] = ()

    @property
    def flags(self) -> int:
        """The bits of csrc/operator.h's OperatorFlags."""
        base = self.name.removeprefix("aten::").partition(".")[0]
        bits = (
            self.random,
            self.dynamic,
            self.overwrites,
            self.shape_from_numbers,
            base in MASK_INDICES,
            base in TAKES_HOST_INDICES,
            base in SHAPE_FROM_DEVICE,
            (self.pointwise and not self.random) or base in LENIENT_META,
            self.pointwise,
        )
        return sum(1 << i for i, bit in enumerate(bits) if bit)


# Operators with a hand-written kernel in csrc/kernels.cpp or csrc/composites.cpp.
KERNELS = frozenset(
    [
        "empty.memory_format",
        "empty_strided",
        "_efficientzerotensor",
        "as_strided",
        "view",
        "_reshape_alias",
        "unfold",
        "view_as_real",
        "view_as_complex",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "set_",
        "is_set_to",
        "resize_",
        "_has_compatible_shallow_copy_type",
        "copy_",
        "_copy_from",
        "_copy_from_and_resize",
        "_local_scalar_dense",
        "record_stream",
        "native_batch_norm",
        "_fused_sdp_choice",
        "scaled_dot_product_attention",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell",
        "histc",
    ]
)

# Composite operators that are better left to decompose: they only convert, allocate or make views.
CONVERSIONS = frozenset(
    [
        "_to_copy",
        "lift",
        "lift_fresh",
        "_unsafe_view",
        "detach",
        "alias",
        "_reshape_copy",
        "_foreach_copy_",
        "_pin_memory",
        "is_pinned",
        "_pack_padded_sequence",
        "_lazy_clone",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "resize_as_",
        "_resize_output_",
        "equal",
        "is_same_size",
        "item",
        "is_nonzero",
        "_assert_tensor_metadata",
    ]
)

# They would decompose, but on a real device they have a kernel, and a derivative, of their own.
LEAVES_IN_EAGER = frozenset({"mish_backward"})

# They write every element of what they mutate and read none of it.
OVERWRITING = frozenset(
    [
        "zero_",
        "fill_.Scalar",
        "fill_.Tensor",
        "copy_",
        "normal_",
        "uniform_",
        "bernoulli_.float",
        "bernoulli_.Tensor",
        "random_",
        "random_.from",
        "random_.to",
        "exponential_",
        "cauchy_",
        "log_normal_",
        "geometric_",
    ]
)

# Their output's shape depends on data only if an index is a mask, which the recorder looks for.
MASK_INDICES = frozenset({"index", "_unsafe_index"})

TAKES_HOST_INDICES = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)

# Random operators that torchgen does not tag as such, or that draw without taking a generator.
RANDOM = frozenset({"native_dropout", "_fused_dropout", "rrelu_with_noise", "rrelu_with_noise_"})

# Their numbers decide the shape of the output.
SHAPE_FROM_NUMBERS = frozenset({"arange", "range"})

# Their meta kernels promise other shapes or types than the kernels of a real device give.
SHAPE_FROM_DEVICE = frozenset(
    {
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_native_batch_norm_legit_functional",
        "_batch_norm_with_update",
        "_batch_norm_no_update",
        "_embedding_bag",
        "_embedding_bag_forward_only",
        "log_sigmoid_forward",
        "native_group_norm",
        "native_layer_norm",
    }
)

# Besides the pointwise operators: meta kernels that let wrong dtypes or dimensions pass. All of them take zeros.
LENIENT_META = frozenset(
    [
        "copy_",
        "mm",
        "bmm",
        "addmm",
        "addmm_",
        "baddbmm",
        "baddbmm_",
        "mv",
        "addmv",
        "addmv_",
        "addr",
        "addr_",
        "dot",
        "vdot",
        "addbmm",
        "addbmm_",
        "convolution",
        "_softmax",
        "_log_softmax",
        "cat",
        "sum",
        "mean",
        "prod",
        "amax",
        "amin",
        "aminmax",
        "argmax",
        "argmin",
        "cumsum",
        "cumsum_",
        "cumprod",
        "cumprod_",
        "logsumexp",
        "gather",
        "index_select",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_fill",
        "index_fill_",
        "masked_fill",
        "masked_fill_",
        "sort",
        "topk",
        "flip",
        "roll",
        "tril",
        "triu",
        "embedding",
        "native_layer_norm",
    ]
)

# torchgen's tags do not cover these: their output's shape depends on data.
UNTAGGED_DYNAMIC = frozenset(
    {"_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_unique", "masked_select"}
)

_FOREIGN_PREFIXES = (
    "sparse_",
    "_sparse_",
    "quantize",
    "q_",
    "_nested_",
    "mkldnn_",
    "_mkldnn_",
    "to_mkldnn",
    "int_repr",
)


def entry(function: NativeFunction) -> OpEntry:
    """How the recorder treats one native function."""
    from torchgen.model import SchemaKind

    name = str(function.func.name)
    base = str(function.func.name.name)
    kind = function.func.kind()
    is_out = kind == SchemaKind.out
    mutable = tuple(
        argument.name
        for argument in function.func.arguments.flat_all
        if argument.annotation is not None and argument.annotation.is_write
    )
    return OpEntry(
        name=f"aten::{name}",
        kind=_kind(function, name, base),
        in_place=kind == SchemaKind.inplace,
        out=is_out,
        random="nondeterministic_seeded" in function.tags or base in RANDOM,
        dynamic=(bool({"dynamic_output_shape", "data_dependent_output"} & function.tags) or base in UNTAGGED_DYNAMIC)
        and base not in MASK_INDICES,
        overwrites=name in OVERWRITING or is_out,
        shape_from_numbers=base in SHAPE_FROM_NUMBERS,
        pointwise="pointwise" in function.tags,
        mutable_arguments=mutable,
    )


def _kind(function: NativeFunction, name: str, base: str) -> Kind:
    if name in KERNELS:
        return Kind.KERNEL
    if function.has_composite_implicit_autograd_kernel and name not in LEAVES_IN_EAGER:
        return Kind.DECOMPOSE
    if function.is_view_op:
        return Kind.VIEW
    if base in CONVERSIONS:
        return Kind.DECOMPOSE
    if function.has_composite_explicit_autograd_kernel and _is_factory(function, base):
        return Kind.DECOMPOSE
    if base.startswith(_FOREIGN_PREFIXES):
        return Kind.UNSUPPORTED
    return Kind.RECORD


def _is_factory(function: NativeFunction, base: str) -> bool:
    if function.func.is_out_fn():
        return False
    has_tensor = any(argument.type.is_tensor_like() for argument in function.func.arguments.flat_all)
    return not has_tensor or base.endswith("_like") or base.startswith("new_")


def make_table() -> list[OpEntry]:
    """The entries of all native functions of the installed torch, by name."""
    import torchgen
    from torchgen.gen import parse_native_yaml

    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    return sorted((entry(function) for function in parsed.native_functions), key=lambda e: e.name)


def load_table(cache: Path) -> list[OpEntry]:
    """As make_table, from a file under `cache` when one of this torch version and this source is there."""
    import torch

    source = Path(__file__).read_bytes() + torch.__version__.encode()
    path = cache / f"operators-{hashlib.sha256(source).hexdigest()[:16]}.json"
    try:
        rows = json.loads(path.read_text())
        return [
            OpEntry(**{**row, "kind": Kind(row["kind"]), "mutable_arguments": tuple(row["mutable_arguments"])})
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent or damaged: made anew
    table = make_table()
    cache.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps([asdict(row) for row in table]))
    temporary.replace(path)
    return table
