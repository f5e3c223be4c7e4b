"""A bar chart of results, as SVG written by hand: no library is needed for rectangles and words."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks._results import Results, Row

WIDTH, LEFT, BAR, GAP = 760, 250, 15, 16
LONGEST = 2.0  # times eager's; longer bars are cut, with their value beside them
COLOURS = {"eager": "#9aa5b1", "LTC": "#c9b458", "compile": "#6f8fb5"}
OURS = "#c2513c"


def plot(results: Results, path: Path) -> None:
    """The times of every row that eager took part in, as parts of eager's time."""
    rows = [row for row in results.rows if row.values.get("eager") and row.unit in ("ms", "MB", "of eager's")]
    path.write_text(svg(rows))


def svg(rows: Sequence[Row]) -> str:
    shapes: list[str] = []
    y = 30
    for row in rows:
        shapes.append(_text(8, y + 11, f"{row.section}: {row.work}", weight="bold"))
        y += BAR + 4
        for peer, value in row.values.items():
            shapes += _bar(y, peer, value / row.values["eager"])
            y += BAR + 2
        y += GAP
    one = LEFT + _scale(1.0)
    line = f'<line x1="{one}" y1="26" x2="{one}" y2="{y - GAP}" stroke="#444" stroke-dasharray="3 3"/>'
    head = _text(8, 16, "time of a step, or peak memory, as a part of eager's (shorter is better)")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" '
        f'font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join([head, *shapes, line]) + "\n</svg>\n"
    )


def _scale(ratio: float) -> int:
    return round(min(ratio, LONGEST) / LONGEST * (WIDTH - LEFT - 60))


def _bar(y: int, peer: str, ratio: float) -> list[str]:
    colour = OURS if peer.startswith("tarry") else COLOURS.get(peer.split(maxsplit=1)[0], "#888888")
    length = _scale(ratio)
    return [
        _text(LEFT - 8, y + 11, peer, anchor="end"),
        f'<rect x="{LEFT}" y="{y}" width="{length}" height="{BAR - 2}" fill="{colour}"/>',
        _text(LEFT + length + 5, y + 11, f"{ratio:.2f}"),
    ]


def _text(x: int, y: int, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
