"""The names of `torch._custom_ops`, for code that moves here by writing `tarry` for `torch` in an import."""

from __future__ import annotations

from tarry.custom_ops import (
    _destroy,
    custom_op,
    get_ctx,
    impl,
    impl_abstract,
    impl_backward,
    impl_save_for_backward,
)

__all__ = [
    "_destroy",
    "custom_op",
    "get_ctx",
    "impl",
    "impl_abstract",
    "impl_backward",
    "impl_save_for_backward",
]
