"""TARRY_SAVE_GRAPHS: the graph of each step, in files."""

from __future__ import annotations

import os
from pathlib import Path

from tarry.backends.base import Batch, Recording
from tarry.ir.text import to_text

_names: dict[tuple[Path, tuple[int, int]], str] = {}


def save(batch: Batch, reason: str, folder: Path) -> None:
    """Write a step's graph as it was recorded, unless it was written before; and a line to `steps-PID.txt` that says
    why the step was computed, and which graph it was."""
    folder.mkdir(parents=True, exist_ok=True)
    name = _names.get((folder, batch.key))
    if name is None:
        recording = Recording(batch)
        name = f"graph-{os.getpid()}-{len(_names) + 1:04}.txt"
        (folder / name).write_text(f"# {recording.describe()}\n{to_text(recording.recorded)}\n")
        _names[folder, batch.key] = name
    with (folder / f"steps-{os.getpid()}.txt").open("a") as steps:
        steps.write(f"{reason}\t{batch.num_operations} operators\t{name}\n")
