"""Results as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Samples = Mapping[str, Mapping[str, Sequence[float]]]  # case -> peer -> one time per round
# What tarry is divided by; every other peer is a way of running tarry.
REFERENCES = ("eager", "LTC", "compile", "define+impl", "torch.library")


def reason(error: BaseException) -> str:
    """What failed, on one line: a compiler's errors begin with whose they are, and say what happened in the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:300]


def medians(samples: Samples) -> dict[str, dict[str, float]]:
    return {
        case: {peer: statistics.median(times) for peer, times in row.items() if times} for case, row in samples.items()
    }


def ratio(row: Mapping[str, float], subject: str, reference: str) -> float | None:
    """The subject's time over the reference's: below 1, the subject is faster."""
    if subject not in row or not row.get(reference):
        return None
    return row[subject] / row[reference]


def ratios(row: Mapping[str, float]) -> dict[str, dict[str, float | None]]:
    """For each way of running tarry, its ratio to every reference that was measured."""
    subjects = [peer for peer in row if peer not in REFERENCES]
    return {one: {other: ratio(row, one, other) for other in REFERENCES if other in row} for one in subjects}


def show(title: str, samples: Samples, peers: Sequence[str], unit: str, notes: Sequence[str] = ()) -> None:
    """Print medians, the spread of each (half the distance between quartiles) and the ratios."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("case", no_wrap=True)
    for peer in peers:
        table.add_column(f"{peer}, {unit}", justify="right", no_wrap=True)
    references = [name for name in REFERENCES if name in peers]
    subjects = [name for name in peers if name not in REFERENCES]
    pairs = [(subject, reference) for subject in subjects for reference in references]
    for subject, reference in pairs:
        table.add_column(f"{subject}/\n{reference}", justify="right", no_wrap=True)
    for case, row in medians(samples).items():
        cells = [_cell(samples[case].get(peer, ())) for peer in peers]
        found = [ratio(row, subject, reference) for subject, reference in pairs]
        table.add_row(case, *cells, *("-" if value is None else f"{value:.2f}" for value in found))
    console = Console()
    console.print(table, soft_wrap=True)
    for note in notes:
        console.print(note, highlight=False)


def _cell(times: Sequence[float]) -> str:
    if not times:
        return "-"
    if len(times) < 4:
        return f"{statistics.median(times):.2f}"
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.2f}±{(high - low) / 2:.2f}"


def write_json(path: Path, benchmark: str, unit: str, samples: Samples, settings: Mapping[str, Any]) -> None:
    """Every sample and the medians, so that another run can be compared with this one."""
    result = {
        "benchmark": benchmark,
        "unit": unit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "settings": dict(settings),
        "medians": medians(samples),
        "ratios": {case: ratios(row) for case, row in medians(samples).items()},
        "samples": {case: {peer: list(times) for peer, times in row.items()} for case, row in samples.items()},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
