"""Compiles, shown while they run: a status line in a terminal, one line for each in a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.cli.lines import place

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from tarry.events import Event


class CompileProgress:
    """Subscribes to events. A compile that is not worth a line (milliseconds) gets none in a log."""

    WORTH = 0.5  # seconds

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._running = 0

    def __call__(self, event: Event) -> None:
        if event.kind == "compiling":
            self._running += 1
            what = f"a step of {event.fields['operations']} operators ({place(event.fields)})"
            why = event.fields["reason"] or "first time"
            if self._console.is_terminal:
                self._status = self._status or self._console.status("")
                self._status.update(f"tarry compiles {what}: {why}")
                self._status.start()
        elif event.kind == "compile" and event.fields.get("lines"):
            self._running = max(0, self._running - 1)
            if not self._running:
                self.close()
            seconds = event.fields["seconds"]
            if seconds >= self.WORTH:
                why = event.fields["reason"] or "first time"
                what = f"a step of {event.fields['operations']} operators ({place(event.fields)})"
                self._console.print(f"tarry: {what} compiled in {seconds:.1f} s: {why}", markup=False, soft_wrap=True)

    def close(self) -> None:
        """No more is shown."""
        if self._status is not None:
            self._status.stop()
            self._status = None
