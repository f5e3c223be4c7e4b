"""Operators that graphs have in place of one that a YAML lists, and that take other arguments: the kernel of what is
listed is called for them (`backends/generated.py`). Those that take the same are found by rule (`plan.py`)."""

from __future__ import annotations

from collections.abc import Mapping

FORMS: Mapping[str, tuple[str, ...]] = {
    "native_batch_norm": (
        "_native_batch_norm_legit",
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_no_training",
    ),
    "fill.Scalar": ("full",),
    "convolution_overrideable": ("convolution",),
    "convolution_backward_overrideable": ("convolution_backward",),
    "randperm": ("randperm.generator",),
}
