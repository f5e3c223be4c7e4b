"""The graphs of these tests are small so that they compile quickly: here, small graphs get programs, too."""

from __future__ import annotations

from tests.support import programs_for_small_graphs

__all__ = ["programs_for_small_graphs"]
