"""Compiles, shown while they run: a status line in a terminal, one line for each in a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.live import Live
from rich.spinner import Spinner

from tarry.events.text import place

if TYPE_CHECKING:
    from rich.console import Console

    from tarry.events import Event


class CompileProgress:
    """Subscribes to events."""

    WORTH = 0.5  # seconds: a compile that takes less gets no line

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._running = 0

    def __call__(self, event: Event) -> None:
        if event.kind not in ("compiling", "compile"):
            return
        why = event.fields["reason"]
        what = f"a step of {event.fields['operations']} operators ({place(event.fields)})"
        if event.kind == "compiling":
            self._running += 1
            if self._console.is_terminal:
                self._show(f"tarry compiles {what}: {why}")
        elif event.fields.get("lines"):  # not by the reference backend
            self._running = max(0, self._running - 1)
            if not self._running:
                self.close()
            if event.fields["seconds"] >= self.WORTH:
                text = f"tarry: {what} compiled in {event.fields['seconds']:.1f} s: {why}"
                self._console.print(text, markup=False, soft_wrap=True)

    def _show(self, text: str) -> None:
        if self._live is None:
            # Not console.status(): that would take over the script's stdout, which may go elsewhere.
            self._live = Live(
                console=self._console,
                transient=True,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(Spinner("dots", text))

    def close(self) -> None:
        """No more is shown."""
        if self._live is not None:
            self._live.stop()
            self._live = None
