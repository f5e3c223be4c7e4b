"""The operators that stand for the rest where running all of them would cost more than it shows.

One or more of every kind: pointwise unary and binary, reductions, views, indexing, scatter, matrix products,
convolution and pooling, normalisation, losses, factories, sorting, linear algebra, and operators that fall back.
"""

from __future__ import annotations

_NAMES = """
    abs add sub mul div.no_rounding_mode div.floor_rounding pow remainder neg exp log sqrt rsqrt sin tanh
    sigmoid erf sign clamp maximum minimum where lerp addcmul addcdiv eq lt logical_and logical_not isnan
    isfinite round floor sum mean prod amax amin argmax argmin any all var std cumsum cumprod logsumexp
    count_nonzero max.reduction_with_dim median norm linalg.vector_norm transpose permute reshape view expand
    squeeze unsqueeze select slice narrow split chunk unbind unfold diagonal as_strided flip roll repeat tile
    movedim T flatten cat stack __getitem__ index_put index_select index_add index_copy index_fill gather
    scatter scatter_add scatter_reduce.sum masked_fill masked_select masked_scatter take_along_dim nonzero
    unique mm bmm addmm matmul einsum dot mv baddbmm outer kron nn.functional.linear nn.functional.conv2d
    nn.functional.conv_transpose2d nn.functional.max_pool2d nn.functional.avg_pool2d
    nn.functional.adaptive_avg_pool2d nn.functional.interpolate.bilinear nn.functional.batch_norm
    nn.functional.layer_norm nn.functional.group_norm nn.functional.gelu nn.functional.relu nn.functional.silu
    nn.functional.embedding nn.functional.cross_entropy nn.functional.mse_loss
    nn.functional.binary_cross_entropy_with_logits nn.functional.scaled_dot_product_attention
    nn.functional.dropout nn.functional.pad.constant softmax log_softmax sort topk argsort searchsorted histc
    arange linspace full ones_like zeros_like new_full eye tril triu clone contiguous to float bool long fft.fft
    linalg.inv linalg.svd linalg.eigh linalg.solve bernoulli normal real view_as_complex conj complex
"""

REPRESENTATIVE: tuple[str, ...] = tuple(_NAMES.split())
