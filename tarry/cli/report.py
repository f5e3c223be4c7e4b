"""`tarry report`: the page of a run, from the file of its events; of two runs, or of the ranks of one, side by side."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from tarry.reports.compare import mode
from tarry.reports.page import page
from tarry.reports.reading import SUFFIX, EventsFileError, Run, read
from tarry.reports.terminal import summary


def report(files: Sequence[str], output: str | None, show: bool) -> int:
    """Make a page and print the verdict. The exit status is 1 if a file is none of events."""
    try:
        runs = [read(file) for file in files]
        target = Path(output) if output is not None else _beside(runs)
        if target.suffix == SUFFIX or str(target) in files:
            raise EventsFileError(f"--output {target} is no name for a page: take one that ends in .html")
        text = page(runs)
        print(summary(runs))
        target.write_text(text, encoding="utf-8")
    except EventsFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write the page: {error}", file=sys.stderr)
        return 1
    print(f"page: {target} ({len(text) / 1e6:.1f} MB)")
    if show:
        webbrowser.open(target.resolve().as_uri())
    return 0


def _beside(runs: Sequence[Run]) -> Path:
    """The page's name if none is given: that of the file, or of both, or of the ranks without their numbers."""
    first = Path(runs[0].path)
    match mode(runs):
        case "run":
            return first.with_suffix(".html")
        case "ranks":
            return first.with_name(f"{first.stem.partition('.rank')[0]}.ranks.html")
        case _:
            return first.with_name(f"{first.stem}-and-{Path(runs[1].path).stem}.html")
