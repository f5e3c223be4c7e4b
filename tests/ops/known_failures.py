"""Operators known to fail on tarry, each with its reason.

Strict: an operator listed here that passes fails the test run, so that the list can only shrink. A key is an operator's
full name in the OpInfo database, or ``name@dtype`` when it fails for that dtype only.
"""

from __future__ import annotations

KNOWN_FAILURES: dict[str, str] = {}


def known_failure(op_name: str, dtype_name: str) -> str | None:
    """The reason why this operator is expected to fail for this dtype, or None."""
    return KNOWN_FAILURES.get(f"{op_name}@{dtype_name}") or KNOWN_FAILURES.get(op_name)
