"""The page: all that was found out about runs, as data in one HTML file that needs nothing else.

Data are compressed and written in base64, so that nothing that comes from a program can be markup or script; the page's
own code puts it into the document as text only. A policy in the page allows no other script, and no network.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from tarry.reports import compare, difference
from tarry.reports.compare import Judged
from tarry.reports.memory import memory
from tarry.reports.nesting import tree
from tarry.reports.reading import GraphRecord, Run, ordered
from tarry.reports.sources import excerpts
from tarry.reports.steps import CATEGORIES, Timeline, where
from tarry.reports.terminal import judge

SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "vendor/dagre.min.js",
    "assets/dom.js",
    "assets/source.js",
    "assets/overview.js",
    "assets/timeline.js",
    "assets/graphs.js",
    "assets/picture.js",
    "assets/lists.js",
    "assets/compare.js",
    "assets/page.js",
)
STYLES = ("vendor/uPlot.min.css", "assets/page.css")
LICENCES = ("vendor/uPlot.LICENSE.txt", "vendor/dagre.LICENSE.txt")
MAX_EVENTS = 50_000
"""Events in the list of them: of more, those that come with each step are left out first."""
MAX_COSTS = 2_000


def page(runs: Sequence[Run]) -> str:
    """One page about one run, two to compare, or the ranks of one."""
    judged = [judge(run) for run in runs]
    data = {
        "mode": compare.mode(runs),
        "categories": CATEGORIES,
        "runs": [_run(name, each) for name, each in zip(compare.names(runs), judged, strict=True)],
        "compare": _together(judged) if len(runs) > 1 else None,
    }
    packed = [_packed("data", data)]
    for k, run in enumerate(runs):
        packed += [_packed(f"graph-{k}-{name}", detail) for name, detail in _details(run)]
    return _document(packed)


def _document(packed: Sequence[str]) -> str:
    scripts = [_asset(name) for name in SCRIPTS]
    code = "\n" + "\n".join(scripts) + "\n"
    allowed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src data: blob:"
    parts = {
        "POLICY": policy,
        "STYLE": "\n".join(_asset(name) for name in STYLES),
        "LICENCES": "\n".join(_asset(name) for name in LICENCES),
        "DATA": "\n".join(packed),
        "CODE": code,
    }
    text = _asset("assets/page.html")
    for name, part in parts.items():
        head, mark, tail = text.partition(f"[[{name}]]")
        assert mark, name
        text = head + part + tail
    return text


def _asset(name: str) -> str:
    text = resources.files("tarry.reports").joinpath(name).read_text(encoding="utf-8")
    assert name.endswith(".html") or "</script" not in text, f"{name} would end the script that it is in"
    # Escapes mean the same in JavaScript's strings, and the page is ASCII: right in whatever encoding it is put into.
    return text.encode("ascii", "backslashreplace").decode() if name.endswith(".js") else text


def _packed(name: str, data: Any) -> str:
    """Data as an element of the page. Numbers that JSON does not have cannot come: the file has none."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    coded = base64.b64encode(gzip.compress(text, 6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{coded}</script>'


def _together(judged: Sequence[Judged]) -> dict[str, Any]:
    runs = [each.run for each in judged]
    return {
        "figures": compare.figures(judged),
        "places": compare.places(judged),
        "graphs": compare.graphs(runs),
        "verdict": compare.verdict_of_two(judged) if len(runs) == 2 else "",
    }


# ---- one run


def _run(title: str, each: Judged) -> dict[str, Any]:
    run = each.run
    previous = _previous(run)
    end = run.end or {}
    return {
        "name": title,
        "path": run.path,
        "header": run.header,
        "end": {key: end.get(key, "") for key in ("backend", "device")},
        "counters": end.get("counters", {}),
        "verdict": asdict(each.verdict),
        "shares": _shares(each.timeline),
        "steps": _steps(each.timeline),
        "spans": _spans(each.timeline),
        "threads": run.threads,
        "costs": [_without_reasons(cost) for cost in map(asdict, each.costs[:MAX_COSTS])],
        "graphs": [_graph(graph, previous.get(name)) for name, graph in run.graphs.items()],
        "events": _events(run),
        "remedies": run.remedies,
        "sources": excerpts(_places(each), run.header["started"] + run.seconds + 1),
    }


def _without_reasons(cost: dict[str, Any]) -> dict[str, Any]:
    reasons = sorted(cost.pop("reasons"))
    return {**cost, "reasons": len(reasons)}


def _shares(timeline: Timeline) -> dict[str, float]:
    """Seconds of all steps, by what was done."""
    names = ("record", "reference", "execute", "compile", "wait", "fallback")
    sums = {name: sum(getattr(step, name) for step in timeline.steps) for name in names}
    total = sum(step.seconds for step in timeline.steps)
    return {**sums, "other": max(0.0, total - sum(sums.values()))}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _steps(timeline: Timeline) -> dict[str, list[Any]]:
    index = range(len(timeline.steps))
    if timeline.left_out:
        middle = (len(index) - timeline.left_out) // 2
        index = [*index[:middle], *index[middle + timeline.left_out :]]  # type: ignore[assignment]
    steps = [timeline.steps[k] for k in index]
    places: dict[str, int] = {}
    names = ("record", "reference", "execute", "compile", "wait", "fallback")
    return {
        "index": list(index),
        "start": [_microseconds(step.start) for step in steps],
        "seconds": [_microseconds(step.seconds) for step in steps],
        "compiled": [int(step.compiled) for step in steps],
        "operations": [step.operations for step in steps],
        "syncs": [step.syncs for step in steps],
        **{name: [_microseconds(getattr(step, name)) for step in steps] for name in names},
        "place": [places.setdefault(step.where, len(places)) for step in steps],
        "places": list(places),
    }


def _spans(timeline: Timeline) -> dict[str, list[Any]]:
    labels: dict[str, int] = {}
    spans = sorted(timeline.spans)
    return {
        "start": [_microseconds(span.start) for span in spans],
        "length": [_microseconds(span.seconds) for span in spans],
        "category": [span.category for span in spans],
        "thread": [span.thread for span in spans],
        "step": [span.step for span in spans],
        "label": [labels.setdefault(span.label, len(labels)) for span in spans],
        "labels": list(labels),
    }


def _events(run: Run) -> dict[str, Any]:
    """All events, or those that do not come with each step, as rows of the list."""
    events = list(ordered(run.events))
    left_out = 0
    if len(events) > MAX_EVENTS:
        few = [event for event in events if event["kind"] not in ("sync", "read", "transfer", "replay", "reference")]
        events, left_out = few[:MAX_EVENTS], len(events) - len(few[:MAX_EVENTS])
    rows = [
        [
            _microseconds(e["t"]),
            e["kind"],
            _microseconds(e.get("seconds", 0.0)),
            where(e),
            _said(e),
            e.get("library", ""),
            e.get("remedy", ""),
        ]
        for e in events
    ]
    return {"rows": rows, "left_out": left_out}


_IN_COLUMNS = frozenset(
    {"kind", "t", "thread", "seconds", "file", "line", "library", "reason", "remedy", "start", "key"}
)


def _said(event: Mapping[str, Any]) -> str:
    """The rest of an event in words."""
    said = [str(event["reason"])] if event.get("reason") else []
    for name, value in event.items():
        if name == "lines" and isinstance(value, list):
            said.append(f"recorded from {' to '.join(map(str, value))}")
        elif name.endswith("_seconds"):
            said.append(f"{name.removesuffix('_seconds')} {value * 1e3:.3g} ms")
        elif name not in _IN_COLUMNS:
            said.append(name if value is True else f"{name} {value}")
    return "; ".join(said)


def _places(each: Judged) -> Iterator[str]:
    for cost in each.costs:
        yield from (cost.place, cost.library)
    for graph in each.run.graphs.values():
        yield from graph.facts["lines"] or ()
        for stage in graph.stages.values():
            yield from stage["sites"]
    yield from dict.fromkeys(step.where for step in each.timeline.steps)


# ---- graphs


def _graph(graph: GraphRecord, previous: str | None) -> dict[str, Any]:
    return {
        **{key: value for key, value in graph.facts.items() if key != "kind"},
        "stages": list(graph.stages),
        "nodes": {name: len(stage["op"]) for name, stage in graph.stages.items()},
        "has_program": bool(graph.program),
        "previous": previous,
    }


def _previous(run: Run) -> dict[str, str]:
    """For each graph the earlier one that is most like it, if there is one."""
    known = {name: stage["op"] for name, graph in run.graphs.items() if (stage := _recorded(graph)) is not None}
    names = list(known)
    likest = difference.likest(list(known.values()))
    return {name: names[other] for name, other in zip(names, likest, strict=True) if other is not None}


def _recorded(graph: GraphRecord) -> dict[str, Any] | None:
    return graph.stages.get("recorded") or next(iter(graph.stages.values()), None)


def _details(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the page shows of one graph when it is opened."""
    previous = _previous(run)
    for name, graph in run.graphs.items():
        stages = {stage: _stage(columns) for stage, columns in graph.stages.items() if columns["stage"] == stage}
        same = {stage: columns["stage"] for stage, columns in graph.stages.items()}
        beside = _difference(run, name, previous.get(name))
        yield name, {"stages": stages, "same": same, "program": graph.program, "difference": beside}


def _stage(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: columns[key] for key in ("inputs", "text", "op", "operands", "results", "outputs")},
        **{key: columns[key] for key in ("sites", "site", "modules", "module")},
        "tree": _tree(columns),
        "memory": asdict(memory(columns)),
    }


def _tree(stage: Mapping[str, Any]) -> dict[str, Any]:
    made = tree(stage)
    parts = [[part.name, part.parent, part.alike, part.children] for part in made.parts]
    return {"parts": parts, "part_of": made.part_of}


def _difference(run: Run, name: str, previous: str | None) -> dict[str, Any] | None:
    if previous is None:
        return None
    old, new = _recorded(run.graphs[previous]), _recorded(run.graphs[name])
    assert old is not None
    assert new is not None
    hunks = difference.hunks(difference.keys(old), difference.keys(new))
    inputs = difference.hunks([text for _, text, _ in old["inputs"]], [text for _, text, _ in new["inputs"]])
    return {"previous": previous, "hunks": hunks, "inputs": inputs}
