"""The rows of the whole benchmark: what was measured, what is required, if it is met; as JSON, text and Markdown."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROUNDING = 0.005  # a ratio that prints as what is required counts as met


@dataclass(frozen=True)
class Target:
    """What is required of a row: the best of `subjects` divided by `reference` (or less it) is at most `at_most`."""

    subjects: tuple[str, ...]
    reference: str
    at_most: float
    difference: bool = False


@dataclass(frozen=True)
class Verdict:
    """A target and what was found."""

    subject: str
    reference: str
    asked: float
    found: float
    difference: bool

    @property
    def met(self) -> bool:
        return self.found <= self.asked + ROUNDING

    def __str__(self) -> str:
        sign = "-" if self.difference else "/"
        outcome = "met" if self.met else "NOT MET"
        return f"{self.subject} {sign} {self.reference} = {self.found:.2f}, asked at most {self.asked:g}: {outcome}"


@dataclass
class Row:
    """One line of a table: the median of each peer, and the spread (half the distance between quartiles)."""

    section: str
    work: str
    unit: str
    values: dict[str, float]
    spread: dict[str, float] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    def judge(self, targets: Sequence[Target]) -> Row:
        for target in targets:
            measured = [name for name in target.subjects if name in self.values]
            if measured and target.reference in self.values:
                best = min(measured, key=self.values.__getitem__)
                mine, theirs = self.values[best], self.values[target.reference]
                found = mine - theirs if target.difference else mine / theirs
                self.verdicts.append(Verdict(best, target.reference, target.at_most, found, target.difference))
        return self


def row_of(section: str, work: str, unit: str, samples: Mapping[str, Sequence[float]]) -> Row:
    """A row from the samples of each peer; a peer without any is left out."""
    row = Row(section, work, unit, {peer: statistics.median(times) for peer, times in samples.items() if times})
    for peer, times in samples.items():
        if len(times) >= 4:
            low, _, high = statistics.quantiles(times, n=4)
            row.spread[peer] = (high - low) / 2
    return row


@dataclass
class Results:
    """All rows of a run, and where it ran."""

    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def here(cls) -> Results:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        return cls(
            {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cpu": _cpu_name(),
                "gpu": gpu,
            }
        )

    def sections(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.section, []).append(row)
        return found

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        data: dict[str, Any] = json.loads(path.read_text())
        rows = [Row(**{**row, "verdicts": [Verdict(**verdict) for verdict in row["verdicts"]]}) for row in data["rows"]]
        return cls(data["environment"], rows, data["notes"])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def _peers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(peer for row in rows for peer in row.values))


def _cell(row: Row, peer: str) -> str:
    if peer not in row.values:
        return "-"
    value = row.values[peer]
    digits = 2 if value < 100 else 1
    spread = f"±{row.spread[peer]:.{digits}f}" if peer in row.spread else ""
    return f"{value:.{digits}f}{spread}"


def show_section(title: str, rows: Sequence[Row]) -> None:
    """Print the rows of a section, and under them what is required."""
    console = Console(width=220)
    peers = _peers(rows)
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for peer in peers:
        table.add_column(peer, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(f"{row.work}, {row.unit}", *(_cell(row, peer) for peer in peers))
    console.print(table)
    for row in rows:
        for verdict in row.verdicts:
            style = "green" if verdict.met else "red"
            console.print(f"  {row.work}: [{style}]{verdict}[/]", highlight=False)


def markdown(results: Results) -> str:
    """The tables of docs/performance.md."""
    where = ", ".join(f"{key} {value}" for key, value in results.environment.items())
    lines = [f"Measured with {where}."]
    for section, rows in results.sections().items():
        peers = _peers(rows)
        lines += ["", f"### {section}", "", f"| | {' | '.join(peers)} | asked |"]
        lines.append(f"| --- |{' ---: |' * len(peers)} --- |")
        for row in rows:
            cells = " | ".join(_cell(row, peer) for peer in peers)
            lines.append(f"| {row.work}, {row.unit} | {cells} | {'; '.join(map(_short, row.verdicts))} |")
    if results.notes:
        lines += ["", "Notes of the run:", "", *(f"- {note}" for note in results.notes)]
    return "\n".join(lines) + "\n"


def _short(verdict: Verdict) -> str:
    sign = "less" if verdict.difference else "/"
    met = "met" if verdict.met else "**not met**"
    return f"{verdict.subject} {sign} {verdict.reference}: {verdict.found:.2f}, asked {verdict.asked:g}: {met}"
