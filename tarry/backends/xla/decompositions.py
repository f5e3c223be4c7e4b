"""Operators that are made of others, by PyTorch's own recipes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._decomp

from tarry.backends.xla.draws import DRAWN
from tarry.backends.xla.table import LOWERINGS
from tarry.ir.operators import operator

# torch._decomp is not public: checked on 2.11 and 2.13.

_BEYOND_CORE = (
    *("upsample_bilinear2d", "adaptive_max_pool2d", "grid_sampler_2d"),
    *("native_layer_norm", "native_group_norm", "native_group_norm_backward"),
)
"""Operators that torch counts among the core ones, so that its table for compilers leaves them whole."""


@functools.cache
def recipes() -> Mapping[str, Callable[..., Any]]:
    """The recipes for what has no lowering here. Random operators keep their own kernels: a recipe draws otherwise."""
    aten = torch.ops.aten
    table = {
        **torch._decomp.core_aten_decompositions(),
        **torch._decomp.get_decompositions([getattr(aten, name) for name in _BEYOND_CORE]),
    }
    found = {}
    for overload, recipe in table.items():
        schema = getattr(overload, "_schema", None)
        if schema is None or not schema.name.startswith("aten::") or schema.is_mutable:
            continue
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name in LOWERINGS or name in DRAWN or operator(name).random:
            continue
        found[name] = recipe
    return found
