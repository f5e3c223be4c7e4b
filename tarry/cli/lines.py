"""Places of a program and times, as a terminal shows them: as the log does."""

from __future__ import annotations

from tarry.events.text import duration, place, short

__all__ = ["duration", "place", "short"]
