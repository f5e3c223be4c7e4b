"""Operators whose results cannot be compared by value, and why.

tarry promises the same numbers for the same seed on every run of tarry, not the numbers of the CPU generator; and
memory that was never written has no value. For these only shape, dtype and strides are compared with eager.
"""

from __future__ import annotations

from typing import Any

RANDOM = "draws from the device's own generator"
UNINITIALISED = "returns memory that nobody has written"
SEEDED_INSIDE = "draws a random test matrix inside"

#: By the operator's full name in the OpInfo database, for all of its samples.
NONDETERMINISTIC: dict[str, str] = {
    "bernoulli": RANDOM,
    "cauchy": RANDOM,
    "exponential": RANDOM,
    "geometric": RANDOM,
    "log_normal": RANDOM,
    "multinomial": RANDOM,
    "normal": RANDOM,
    "normal.in_place": RANDOM,
    "normal.number_mean": RANDOM,
    "rand_like": RANDOM,
    "randint": RANDOM,
    "randint_like": RANDOM,
    "randn": RANDOM,
    "randn_like": RANDOM,
    "uniform": RANDOM,
    "nn.functional.fractional_max_pool2d": "draws the pooling regions",
    "nn.functional.fractional_max_pool3d": "draws the pooling regions",
    "pca_lowrank": SEEDED_INSIDE,
    "svd_lowrank": SEEDED_INSIDE,
    "empty": UNINITIALISED,
    "empty_like": UNINITIALISED,
    "empty_permuted": UNINITIALISED,
    "empty_strided": UNINITIALISED,
    "new_empty": UNINITIALISED,
    "new_empty_strided": UNINITIALISED,
    "resize_": "elements beyond the old size are memory that nobody has written",
    "resize_as_": "elements beyond the old size are memory that nobody has written",
}

#: Dropout-like operators are random only where the sample asks for it:
#: name -> (keyword of the probability, its default, keyword of training, its default).
_DROPOUT: dict[str, tuple[str, float, str, bool]] = {
    "nn.functional.dropout": ("p", 0.5, "training", True),
    "nn.functional.dropout2d": ("p", 0.5, "training", True),
    "nn.functional.dropout3d": ("p", 0.5, "training", True),
    "nn.functional.alpha_dropout": ("p", 0.5, "training", False),
    "nn.functional.feature_alpha_dropout.with_train": ("p", 0.5, "training", True),
    "nn.functional.feature_alpha_dropout.without_train": ("p", 0.5, "training", False),
    "nn.functional.rrelu": ("p", 0.5, "training", False),
    "nn.functional.scaled_dot_product_attention": ("dropout_p", 0.0, "training", True),
    "nn.functional.multi_head_attention_forward": ("dropout_p", 0.0, "training", True),
}


def why_not_by_value(op_name: str, sample: Any) -> str | None:
    """The reason why this sample's result is compared by metadata only, or None when values must agree."""
    if op_name in NONDETERMINISTIC:
        return NONDETERMINISTIC[op_name]
    if op_name in _DROPOUT:
        p_name, p_default, train_name, train_default = _DROPOUT[op_name]
        p = sample.kwargs.get(p_name, p_default)
        training = sample.kwargs.get(train_name, train_default)
        if op_name.endswith("multi_head_attention_forward"):
            p = sample.args[9]  # dropout_p is positional in that operator's samples
        if training and 0.0 < p < 1.0:
            return f"dropout with {p_name}={p}"
    return None
