"""SyncBatchNorm on tensors of the device: recorded, with one collective in each direction.

PyTorch's own uses kernels that CPUs do not have, and looks at the data in the middle: it leaves out the statistics of
ranks whose batch is empty. Here they count with the weight zero.

Private name of torch: `nn.modules.batchnorm.sync_batch_norm` (2.11 and 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules import batchnorm


def install() -> None:
    plain: Any = batchnorm.sync_batch_norm  # type: ignore[attr-defined]

    class SyncBatchNorm:
        """PyTorch's function, and the one for the device."""

        @staticmethod
        def apply(x: Tensor, *args: Any) -> Tensor:
            return (_SyncBatchNorm if x.device.type == "tarry" else plain).apply(x, *args)

    batchnorm.sync_batch_norm = SyncBatchNorm  # type: ignore[attr-defined, assignment]


def _along_channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        group: dist.ProcessGroup,
        size: int,
    ) -> Tensor:
        channels, count = x.shape[1], x.numel() // x.shape[1]
        if count == 1 and size < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {count}")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if count:
            var, mean = torch.var_mean(wide, _dims(x), correction=0)
        else:
            var = mean = wide.new_zeros(channels)
        gathered = [wide.new_empty(2 * channels + 1) for _ in range(size)]
        dist.all_gather(gathered, torch.cat([mean, var, wide.new_full((1,), count)]), group)
        means, variances, counts = torch.stack(gathered).split([channels, channels, 1], 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        var = ((variances + (means - mean).square()) * counts).sum(0) / total
        if running_mean is not None and running_var is not None:
            running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
            running_var.mul_(1 - momentum).add_(var * (total / (total - 1)), alpha=momentum)
        scale = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.group = group
        result = (wide - _along_channels(mean, x)) * _along_channels(scale, x)
        if weight is not None:
            result = result * _along_channels(weight, x)
        return (result if bias is None else result + _along_channels(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, scale, total = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        centred = x.to(mean.dtype) - _along_channels(mean, x)
        sums = torch.cat([grad.sum(_dims(x)), (grad * centred).sum(_dims(x))])
        of_bias, of_product = sums.chunk(2)
        # Reductions of the parameters' gradients are DDP's.
        of_weight = of_product * scale if weight is not None and ctx.needs_input_grad[1] else None
        of_x = None
        if ctx.needs_input_grad[0]:
            summed = sums.clone()
            dist.all_reduce(summed, group=ctx.group)
            mean_grad, mean_product = (summed / total).chunk(2)
            of_x = grad - _along_channels(mean_grad, x) - centred * _along_channels(scale.square() * mean_product, x)
            of_x = (of_x * _along_channels(scale if weight is None else scale * weight, x)).to(x.dtype)
        typed = [None if part is None or weight is None else part.to(weight.dtype) for part in (of_weight, of_bias)]
        return of_x, typed[0], typed[1] if ctx.needs_input_grad[2] else None, *[None] * 6


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]
