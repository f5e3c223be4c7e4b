"""TARRY_SAVE_GRAPHS: the graph of each step, in files."""

from __future__ import annotations

import os
from pathlib import Path

from tarry.backends.base import Batch, Recording
from tarry.ir.text import to_text


class SavedGraphs:
    """Writes each graph once, as it was recorded; and a line to `steps-PID.txt` for each step, which says why it was
    computed, and which graph it was."""

    def __init__(self) -> None:
        self._names: dict[tuple[Path, tuple[int, int]], str] = {}

    def save(self, batch: Batch, reason: str, folder: Path) -> None:
        """Write down a step that is about to be computed."""
        folder.mkdir(parents=True, exist_ok=True)
        name = self._names.get((folder, batch.key))
        if name is None:
            recording = Recording(batch)
            name = f"graph-{os.getpid()}-{len(self._names) + 1:04}.txt"
            (folder / name).write_text(f"# {recording.describe()}\n{to_text(recording.recorded)}\n")
            self._names[folder, batch.key] = name
        with (folder / f"steps-{os.getpid()}.txt").open("a") as steps:
            steps.write(f"{reason}\t{batch.num_operations} operators\t{name}\n")
