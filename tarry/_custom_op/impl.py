"""The names of `torch._custom_op.impl`, for code that moves here by writing `tarry` for `torch` in an import.

What is declared here is functional, as it is there: no writes, no views. `tarry.custom_op` takes those as well.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.library import get_ctx, infer_schema

from tarry.custom_ops.declare import custom_op_from_existing, find_ophandle
from tarry.custom_ops.declare import custom_op_with_schema as _custom_op_with_schema
from tarry.custom_ops.declare import find_custom_op as _find_custom_op
from tarry.custom_ops.declare import strict_custom_op as custom_op
from tarry.custom_ops.locations import FuncAndLocation
from tarry.custom_ops.names import (
    RESERVED_NS,
    SUPPORTED_DEVICE_TYPE_TO_KEY,
    parse_qualname,
    validate_device_type,
    validate_namespace,
)
from tarry.custom_ops.operator import CustomOp, get_abstract_impl, global_registry, report_error_callback
from tarry.custom_ops.registry import get_op
from tarry.custom_ops.schema import supported_param, validate_function_matches_schema, validate_schema

__all__ = [
    "RESERVED_NS",
    "SUPPORTED_DEVICE_TYPE_TO_KEY",
    "CustomOp",
    "FuncAndLocation",
    "_custom_op_with_schema",
    "_find_custom_op",
    "custom_op",
    "custom_op_from_existing",
    "find_ophandle_or_throw",
    "get_abstract_impl",
    "get_ctx",
    "get_op",
    "global_registry",
    "infer_schema",
    "parse_qualname",
    "report_error_callback",
    "supported_param",
    "validate_device_type",
    "validate_function_matches_schema",
    "validate_namespace",
    "validate_schema",
    "warn_deprecated",
]


def find_ophandle_or_throw(cpp_ns: str, operator_name: Any) -> Any:
    """The dispatcher's handle of an operator, named as torchgen names it. Raises RuntimeError if there is none."""
    return find_ophandle(f"{cpp_ns}::{operator_name.name}", operator_name.overload_name or "")


def warn_deprecated() -> None:
    """Say that there is a newer interface. Nothing here calls it: these names stay."""
    warnings.warn("torch._custom_op is deprecated in PyTorch: tarry.custom_op takes more", DeprecationWarning, 2)
