"""Types of TorchScript by the names that generated lowerings use: TENSOR, OPTIONAL_TENSOR, INT_LIST, ...

Private parts of torch; checked on torch 2.11 and 2.13. The ones that schemas have are made when first used.
"""

from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C

TENSOR = _C.TensorType.get()
NUMBER = _C.NumberType.get()
INT = _C.IntType.get()
FLOAT = _C.FloatType.get()
BOOL = _C.BoolType.get()
COMPLEX = _C.ComplexType.get()
STRING = _C.StringType.get()
DEVICE = _C.DeviceObjType.get()
GENERATOR = _C._GeneratorType.get()


def __getattr__(name: str) -> Any:
    if name.endswith("_LIST") and not name.startswith("OPTIONAL_"):
        made = _C.ListType(globals()[name.removesuffix("_LIST")])
    elif name == "OPTIONAL_TENSOR_LIST":
        made = _C.ListType(__getattr__("OPTIONAL_TENSOR"))
    elif name.startswith("OPTIONAL_"):
        element = name.removeprefix("OPTIONAL_")
        made = _C.OptionalType(globals().get(element) or __getattr__(element))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made
    return made
