"""What a build shows the user: a bar on a terminal, two plain lines elsewhere, nothing when nothing is built."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import rich.progress

TITLE = "building tarry's native part, once per torch version"
_STATUS = re.compile(r"^\[(\d+)/(\d+)\] (.*)")  # as NINJA_STATUS makes ninja begin the line of a finished edge


class Progress:
    """The view of one build. `output` is given each line that ninja prints."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def waiting(self, holder: str) -> None:
        by = f" (pid {holder})" if holder else ""
        self._say(f"tarry: another process{by} is building the native part; waiting for it")

    def start(self, names: list[str]) -> None:
        if not self._stream.isatty():
            files = "1 file" if len(names) == 1 else f"{len(names)} files"
            self._say(f"tarry: {TITLE} ({files} to compile) ...")
            return
        import rich.console
        import rich.progress

        console = rich.console.Console(file=self._stream)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[file]}"),
            rich.progress.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(TITLE, total=len(names) + 1, file=names[0] if names else "linking")
        self._bar.start()

    def output(self, line: str) -> None:
        match = _STATUS.match(line)
        if match and self._bar is not None and self._task is not None:
            done, total, name = match.groups()
            self._bar.update(self._task, completed=int(done), total=int(total), file=name)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def finished(self, seconds: float) -> None:
        self._say(f"tarry: native part built in {seconds:.0f} s")

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)
