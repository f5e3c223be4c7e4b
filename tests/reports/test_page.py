"""The page as text: it is whole, needs nothing else, and nothing that comes from a program is markup in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from tarry.reports.page import page
from tarry.reports.reading import read
from tests.reports.lines import HOSTILE, end, event, graph, layers, stage, sync, write


def hostile_run(path: Path, **changes: Any) -> Path:
    """A run in which every text is hostile."""
    nodes = [(f"aten::{HOSTILE}", [0], HOSTILE.replace(".", "_"), f"{HOSTILE}:1"), *layers(2)]
    where = {
        "file": HOSTILE,
        "line": 3,
        "library": f"{HOSTILE}:7",
        "module": HOSTILE,
        "reason": HOSTILE,
        "remedy": HOSTILE,
    }
    lines = [
        {"kind": "thread", "thread": 1, "name": HOSTILE},
        event("read", 1.0, seconds=0.5, method=HOSTILE, **where),
        event("read", 1.1, seconds=0.5, method=HOSTILE, **where),
        event("fallback", 1.2, seconds=0.5, op=HOSTILE, **where),
        event("compile", 1.5, seconds=0.5, backend=HOSTILE, **where),
        event("error", 1.5, seconds=0.5, error=HOSTILE, stage=HOSTILE, **where),
        event(HOSTILE, 1.6),
        sync(2.0, 0.5, reason=HOSTILE) | {"file": HOSTILE},
        sync(3.0, 0.5),
        graph("aa", HOSTILE, lines=[f"{HOSTILE}:1", f"{HOSTILE}:2"], note=HOSTILE, backend=HOSTILE, origin=HOSTILE),
        stage("aa", nodes),
        {"kind": "program", "graph": "aa", "text": f"{HOSTILE}\n{HOSTILE}"},
        graph("bb", HOSTILE),
        stage("bb", [*nodes, nodes[0]]),
        stage("bb", nodes, of=HOSTILE),
        end(4.0, counters={HOSTILE: 1}, backend=HOSTILE, device=HOSTILE),
    ]
    return write(path, lines, **{"command": [HOSTILE], "folder": HOSTILE, "tarry": HOSTILE, "torch": HOSTILE} | changes)


def _unpacked(text: str, name: str) -> Any:
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', text)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found.group(1))))


def test_nothing_from_a_program_is_in_the_page_as_it_is(tmp_path: Path) -> None:
    text = page([read(hostile_run(tmp_path / f"{HOSTILE.replace('/', '')}.json"))])
    for part in ("onerror=alert", "<img", "\u2028"):
        assert part not in text
    assert _unpacked(text, "data")["runs"][0]["costs"][0]["reason"] == HOSTILE


def test_names_of_graphs_from_a_damaged_file_are_no_markup(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", [graph(f'x"><img onerror={k}>') for k in range(2)] + [graph("aa")])
    text = page([read(path)])
    assert "<img" not in text
    assert [each["graph"] for each in _unpacked(text, "data")["runs"][0]["graphs"]] == ["aa"]


def test_the_policy_allows_the_page_s_own_script_and_no_network(tmp_path: Path) -> None:
    text = page([read(write(tmp_path / "x.json", [sync(1.0, 0.5)]))])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    (code,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy.group(1)
    assert "default-src 'none'" in policy.group(1)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?https?:""", text)


def test_the_page_is_right_in_any_encoding(tmp_path: Path) -> None:
    assert page([read(hostile_run(tmp_path / "x.json"))]).isascii()


def test_licences_of_the_libraries_are_in_the_page(tmp_path: Path) -> None:
    text = page([read(write(tmp_path / "x.json", []))])
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert "Chris Pettitt" in text


def test_each_graph_is_packed_by_itself(tmp_path: Path) -> None:
    lines = [
        graph("aa"),
        stage("aa", layers(2)),
        {"kind": "same_stage", "graph": "aa", "stage": "cse", "as": "recorded"},
    ]
    text = page([read(write(tmp_path / "x.json", [*lines, graph("bb", "another"), stage("bb", layers(3)), end(1.0)]))])
    detail = _unpacked(text, "graph-0-aa")
    assert detail["same"] == {"recorded": "recorded", "cse": "recorded"}
    assert detail["difference"] is None
    assert _unpacked(text, "graph-0-bb")["difference"]["previous"] == "aa"
    assert _unpacked(text, "data")["runs"][0]["graphs"][0]["stages"] == ["recorded", "cse"]


def test_lines_of_the_program_are_in_the_page(tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_text("".join(f"line {k}\n" for k in range(1, 100)))
    lines = [event("read", 1.0, seconds=0.5, method="item", file=str(source), line=50)]
    text = page([read(write(tmp_path / "x.json", lines))])
    found = _unpacked(text, "data")["runs"][0]["sources"][str(source)]
    assert found["lines"]["50"] == "line 50"
    assert "30" not in found["lines"]
    assert found["changed"]  # it was written after 2023, when the run was


def test_other_files_than_python_s_are_not_looked_at(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret\n")
    lines = [event("read", 1.0, seconds=0.5, method="item", file=str(secret), line=1)]
    assert _unpacked(page([read(write(tmp_path / "x.json", lines))]), "data")["runs"][0]["sources"] == {}
