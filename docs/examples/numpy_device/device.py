"""The device: the generated backend, with NumPy's arrays as data and NumPy's functions for `full_codegen`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from generated.backend import NumpyBackend, register

from tarry.ir.graph import Node
from tarry.ir.layout import TensorType

DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.bool: np.bool_}
NAMES: dict[str, Any] = {
    "abs": np.abs,
    "div.Tensor": np.divide,
    "exp": np.exp,
    "log": np.log,
    "maximum": np.maximum,
    "mm": np.matmul,
    "mul.Tensor": np.multiply,
    "ne.Scalar": np.not_equal,
    "neg": np.negative,
    "permute": np.transpose,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "unsqueeze": np.expand_dims,
    "view": np.reshape,
    "where.self": np.where,
}


class NumpyDevice(NumpyBackend):
    """What the YAML cannot say: where data live, and how an operator without a kernel is carried out."""

    decomposed = ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward")

    def builtin(self, op: str, *args: Any, **kwargs: Any) -> Any:
        return NAMES[op.removeprefix("aten::")](*args, **kwargs)

    def supports(self, node: Node) -> bool:
        known = all(value.type.dtype in DTYPES for value in (*node.operands, *node.results))
        return known and super().supports(node)

    def result(self, data: Any, type_: TensorType) -> Any:
        return np.asarray(data, DTYPES[type_.dtype])

    def to_data(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy() if tensor.dtype in DTYPES else tensor

    def to_tensor(self, data: Any) -> torch.Tensor:
        return torch.from_numpy(data) if isinstance(data, np.ndarray) else data


register(NumpyDevice)
