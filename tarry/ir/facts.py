"""On what operators can fail while they run: one table, and an operator that is not in it may fail.

What depends on shapes, dtypes and numbers alone is checked when a call is recorded. Left are failures on data: an
index out of range, a matrix that cannot be inverted, an integer division by zero. (Memory can always be wanting, and a
kernel can be missing: the runtime sees to these, see csrc/failure.h.)
"""

from __future__ import annotations

import functools
from enum import StrEnum

import torch

from tarry.ir.layout import VIEW_RULES
from tarry.ir.operators import depends_on_schemas, operator, overload


class Fails(StrEnum):
    """When a call that was recorded can fail."""

    NEVER = "never"
    ON_INTEGERS = "on integers"  # a division by zero, a negative power
    ON_INDEX = "on an index"  # on a CUDA device the kernel checks it: that ends all work there, and is no exception
    ON_DATA = "on data"


# Names without overloads; `NEVER` besides views and the operators that PyTorch tags as pointwise.
_NEVER_NAMES = """
    mm bmm addmm addmv addbmm baddbmm mv dot vdot addr convolution convolution_backward linear_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp native_layer_norm
    native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
    native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_with_update_functional
    _batch_norm_no_update batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward _fused_rms_norm
    _fused_rms_norm_backward sum mean prod amax amin aminmax any all argmax argmin max min var var_mean std std_mean
    norm linalg_vector_norm nansum count_nonzero cumsum cumprod cummax cummin logcumsumexp sort topk msort kthvalue
    median nanmedian cat stack constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d flip roll rot90 repeat tril triu diag_embed trace clone copy _to_copy zeros
    ones full empty empty_strided zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    new_empty_strided scalar_tensor arange linspace logspace eye rand randn rand_like randn_like native_dropout
    native_dropout_backward _fused_dropout avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d upsample_linear1d upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
    upsample_trilinear3d_backward upsample_linear1d_backward _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d im2col col2im pixel_shuffle pixel_unshuffle glu glu_backward _prelu_kernel
    _prelu_kernel_backward gelu gelu_backward silu_backward threshold_backward mse_loss mse_loss_backward
    smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy_with_logits where
    masked_fill lerp addcmul addcdiv clamp clamp_min clamp_max slice_scatter select_scatter diagonal_scatter
    as_strided_scatter slice_backward select_backward diagonal_backward unfold_backward embedding_dense_backward
    _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward nll_loss_backward nll_loss2d_backward
    multi_margin_loss_backward multilabel_margin_loss_backward _foreach_add _foreach_sub _foreach_mul _foreach_div
    _foreach_neg _foreach_sqrt _foreach_rsqrt _foreach_addcmul _foreach_addcdiv _foreach_lerp _foreach_sign
    _foreach_abs _foreach_exp _foreach_log _foreach_maximum _foreach_minimum _foreach_reciprocal _foreach_norm
    _foreach_max _foreach_pow _foreach_copy _foreach_zero _foreach_clamp_min _foreach_clamp_max _fused_adam
    _fused_adamw _fused_sgd _fused_adagrad _amp_update_scale _amp_foreach_non_finite_check_and_unscale _cast_Float
    view_copy strided_view strided_scatter
"""
_NEVER = frozenset(_NEVER_NAMES.split())

# Pointwise operators that check their data or their numbers.
_CHECKED_POINTWISE = frozenset({"celu", "bernoulli", "binary_cross_entropy", "binary_cross_entropy_backward"})

_ON_INTEGERS = frozenset({"div", "floor_divide", "fmod", "pow", "remainder", "_foreach_div", "_foreach_pow"})

_ON_INDEX_NAMES = """
    embedding index _unsafe_index index_put _index_put_impl _unsafe_index_put gather scatter scatter_add
    scatter_reduce index_select index_add index_copy index_fill index_reduce take put nll_loss_forward
    nll_loss2d_forward take_along_dim
"""
_ON_INDEX = frozenset(_ON_INDEX_NAMES.split())

# Operators that check an index, with the arguments that decide, together with the sizes of the first, whether it is
# right. Of two that agree in these, such as `x[i]` and its backward, both fail or neither does.
INDEX_ARGUMENTS: dict[str, tuple[int, ...]] = {
    "index": (1,),
    "_unsafe_index": (1,),
    "index_put": (1,),
    "_index_put_impl": (1,),
    "_unsafe_index_put": (1,),
    "gather": (1, 2),
    "scatter": (1, 2),
    "scatter_add": (1, 2),
    "index_select": (1, 2),
    "index_add": (1, 2),
}


def base_name(op: str) -> str:
    """The name without namespace, overload and the underscore of a writing form."""
    base = op.partition("::")[2].partition(".")[0]
    return base.removesuffix("_") if not base.endswith("__") else base


@depends_on_schemas
@functools.cache
def fails(op: str) -> Fails:
    """When a call of this operator can fail."""
    namespace = op.partition("::")[0]
    base = base_name(op)
    if namespace not in ("aten", "tarry"):
        return Fails.ON_DATA
    if base in _ON_INTEGERS:
        return Fails.ON_INTEGERS
    if base in _ON_INDEX:
        return Fails.ON_INDEX
    if op in VIEW_RULES or base in _NEVER:
        return Fails.NEVER
    pointwise = namespace == "aten" and torch.Tag.pointwise in overload(op).tags and not operator(op).random
    return Fails.NEVER if pointwise and base not in _CHECKED_POINTWISE else Fails.ON_DATA
