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
REFERENCES = ("eager", "LTC", "compile")  # what tarry is divided by


def medians(samples: Samples) -> dict[str, dict[str, float]]:
    return {
        case: {peer: statistics.median(times) for peer, times in row.items() if times} for case, row in samples.items()
    }


def ratio(row: Mapping[str, float], reference: str) -> float | None:
    """tarry's time over the reference's: below 1, tarry is faster."""
    if "tarry" not in row or not row.get(reference):
        return None
    return row["tarry"] / row[reference]


def show(title: str, samples: Samples, peers: Sequence[str], unit: str, notes: Sequence[str] = ()) -> None:
    """Print medians, the spread of each (half the distance between quartiles) and the ratios."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("case", no_wrap=True)
    for peer in peers:
        table.add_column(f"{peer}, {unit}", justify="right", no_wrap=True)
    references = [name for name in REFERENCES if name in peers and "tarry" in peers]
    for reference in references:
        table.add_column(f"tarry/\n{reference}", justify="right", no_wrap=True)
    for case, row in medians(samples).items():
        cells = [_cell(samples[case].get(peer, ())) for peer in peers]
        ratios = [ratio(row, reference) for reference in references]
        table.add_row(case, *cells, *("-" if value is None else f"{value:.2f}" for value in ratios))
    console = Console()
    console.print(table)
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
        "ratios": {
            case: {reference: ratio(row, reference) for reference in REFERENCES if reference in row}
            for case, row in medians(samples).items()
        },
        "samples": {case: {peer: list(times) for peer, times in row.items()} for case, row in samples.items()},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
