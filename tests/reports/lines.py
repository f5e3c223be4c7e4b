"""Files of events made by hand: lines as a recorder writes them, with names as hostile as one likes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028'\"`${1}&amp;<!--"
"""What would be markup, script or the end of a line, if it were taken for that."""


def header(**changes: Any) -> dict[str, Any]:
    return {
        "tarry_events": 1,
        "tarry": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "command": ["train.py"],
        "folder": "/home/me",
        "pid": 1,
        "rank": 0,
        "world_size": 1,
        "started": 1.7e9,
        "before": {},
    } | changes


def event(kind: str, t: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t": t, "thread": 0, **fields}


def sync(
    t: float, length: float, path: str = "compiled", reason: str = "optimizer.step", **fields: Any
) -> dict[str, Any]:
    """A step of 10 operators that ended at `t`; half of its time was spent recording."""
    times = {"seconds": length / 2, "record_seconds": length / 2, "execute_seconds": length / 2, "start": t - length}
    return event("sync", t, operations=10, path=path, reason=reason, file="/home/me/train.py", line=9, **times | fields)


def end(t: float, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "end",
        "t": t,
        "counters": {"sync": 1},
        "backend": "torchscript",
        "device": "cpu",
        "dropped": 0,
    } | changes


def graph(name: str, reason: str = "", **changes: Any) -> dict[str, Any]:
    return {
        "kind": "graph",
        "graph": name,
        "key": name.partition("-")[0],
        "backend": "torchscript",
        "reason": reason,
        "operators": 3,
        "lines": ["/home/me/train.py:7", "/home/me/train.py:9"],
        "origin": "compiled",
        "seconds": 0.25,
        "background": False,
        "note": "",
    } | changes


def stage(name: str, nodes: Iterable[tuple[Any, ...]], of: str = "recorded", size: int = 4) -> dict[str, Any]:
    """A stage of nodes given as (operator, operands, module, line): each makes one value of `size` bytes, numbered from
    100. Value 0 is the only input, the last one made the only output."""
    rows = list(nodes)
    sites = {site: k for k, site in enumerate(dict.fromkeys(row[3] for row in rows))}
    modules = {module: k for k, module in enumerate(dict.fromkeys(row[2] for row in rows if row[2]))}
    operands = [list(row[1]) for row in rows]
    made = [100 + k for k in range(len(rows))]
    return {
        "kind": "stage",
        "graph": name,
        "stage": of,
        "inputs": [[0, "f32[1]", size]],
        "text": [
            f"%{value}: f32[1] = {row[0]}({', '.join(f'%{operand}' for operand in row[1])})"
            for value, row in zip(made, rows, strict=True)
        ],
        "op": [row[0] for row in rows],
        "operands": operands,
        "results": [[[value, size]] for value in made],
        "views": [],
        "updates": [],
        "outputs": [[made[-1], None]] if made else [],
        "sites": list(sites),
        "site": [sites[row[3]] for row in rows],
        "modules": list(modules),
        "module": [modules.get(row[2], -1) for row in rows],
    }


def write(path: Path, lines: Iterable[dict[str, Any]], **changes: Any) -> Path:
    """A file of events: a header, the main thread, and these lines."""
    first = [
        header(**changes),
        {"kind": "remedies", "of": {"read": "read less"}},
        {"kind": "thread", "thread": 0, "name": "MainThread"},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*first, *lines]))
    return path


def layers(count: int, per_layer: int = 3) -> list[tuple[Any, ...]]:
    """The nodes of a training step of `count` layers that are alike: forward, loss, backward, update."""
    nodes: list[tuple[Any, ...]] = []

    def add(op: str, module: str, line: str) -> None:
        nodes.append((op, [99 + len(nodes)] if nodes else [0], module, line))

    for k in range(count):
        for j in range(per_layer):
            add(f"aten::op{j}", f"model.blocks.{k}.part{j}", f"/home/me/model.py:{j + 1}")
    add("aten::loss", "", "/home/me/train.py:7")
    add("aten::loss_backward", "", "/home/me/train.py:7")
    for k in reversed(range(count)):
        for j in reversed(range(per_layer)):
            add(f"aten::op{j}_backward", f"model.blocks.{k}.part{j}", f"/home/me/model.py:{j + 1}")
    add("aten::_foreach_add_", "", "/home/me/train.py:9")
    return nodes
