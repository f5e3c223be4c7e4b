"""`tarry.report(path)` on real programs: from what they do to the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import tarry
from tarry.reports.format import problems
from tarry.reports.memory import memory
from tarry.reports.reading import Run, read
from tarry.reports.terminal import judge
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """A test that fails must not leave a recording for the next."""
    yield
    tarry.report().close()


def _train(steps: int, rows: int = 8) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2)).to("tarry")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(rows, 4).to("tarry")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def _recorded(path: Path, backend: str = "torchscript") -> Run:
    tarry.set_backend(backend)
    with tarry.report(path) as report:
        _train(4)
        _train(2, rows=9)
    return read(report.events_path)


def test_a_run_with_its_graphs_at_every_stage(tmp_path: Path) -> None:
    run = _recorded(tmp_path / "out.html")
    assert run.skipped == 0
    assert run.end is not None
    assert run.end["backend"] == "torchscript"
    largest = max(run.graphs.values(), key=lambda graph: graph.facts["operators"])
    assert list(largest.stages) == ["recorded", "functional", "views", "cse", "dce", "joined", "owned", "lowered"]
    assert "aten::" in largest.program
    sites = {site for stage in largest.stages.values() for site in stage["sites"]}
    assert all(re.search(r"\.py:\d+$", site) for site in sites)
    assert any(site.startswith(__file__) for site in sites)
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


def test_what_is_written_is_what_the_format_says(tmp_path: Path) -> None:
    run = _recorded(tmp_path / "out.html")
    first, *lines = [json.loads(line) for line in Path(run.path).read_text().splitlines()]
    assert list(problems(first, header=True)) == []
    assert [found for line in lines for found in problems(line)] == []


def test_a_recompile_has_a_reason_and_a_graph_before_it(tmp_path: Path) -> None:
    run = _recorded(tmp_path / "out.html")
    again = [graph.facts["reason"] for graph in run.graphs.values() if graph.facts["reason"]]
    assert any("f32[8, 4] is f32[9, 4] now" in reason for reason in again)
    assert len(judge(run).timeline.steps) >= 6


def test_the_reference_backend_has_graphs_too(tmp_path: Path) -> None:
    run = _recorded(tmp_path / "out.html", "eager")
    assert {graph.facts["origin"] for graph in run.graphs.values()} == {"recorded"}
    assert all(list(graph.stages) == ["recorded"] for graph in run.graphs.values())


def test_a_graph_is_there_while_it_is_compiled_and_the_same_afterwards(tmp_path: Path) -> None:
    tarry.set_backend("torchscript", compile="background")
    with tarry.report(tmp_path / "out.html") as report:
        _train(3)
        assert tarry.wait_for_compiles(60)
    origins = re.findall(r'"graph":"(\w+)".*"origin":"(\w+)"', report.events_path.read_text())
    assert {origin for _, origin in origins} >= {"compiling", "compiled"}
    run = read(report.events_path)
    largest = max(run.graphs.values(), key=lambda graph: graph.facts["operators"])
    assert largest.facts["origin"] == "compiled"
    assert largest.stages.keys() >= {"recorded", "lowered"}


def test_memory_of_a_step_is_about_what_its_tensors_take(tmp_path: Path) -> None:
    with tarry.report(tmp_path / "out.html") as report:
        x = torch.ones(1000, device="tarry")
        y = (x + 1).square()
        z = y.view(10, 100).sum(0)
        z.cpu()
        del x, y
    (graph,) = [g for g in read(report.events_path).graphs.values() if g.facts["operators"] > 2]
    found = memory(graph.stages["recorded"])
    assert 8_000 <= found.peak <= 13_000  # two or three of 4,000 bytes


def test_without_a_report_nothing_is_kept(tmp_path: Path) -> None:
    with tarry.report(tmp_path / "out.html"):
        _train(1)
    size = (tmp_path / "out.json").stat().st_size
    _train(1, rows=11)
    assert (tmp_path / "out.json").stat().st_size == size
    assert not tarry.events.watched()


def test_a_page_of_what_has_happened_so_far(tmp_path: Path) -> None:
    report = tarry.report(tmp_path / "out.html")
    _train(2)
    assert report.write().exists()
    assert "steps in" in str(report)
    assert "srcdoc=" in report._repr_html_()
    assert tarry.report() is report
    report.close()
    report.close()


def test_one_report_at_a_time(tmp_path: Path) -> None:
    report = tarry.report(tmp_path / "out.html")
    assert tarry.report(tmp_path / "out.html") is report
    with pytest.raises(ValueError, match=r"recorded already, in .*out\.html"):
        tarry.report(tmp_path / "other.html")
    report.close()
    tarry.report(tmp_path / "other.html").close()


def test_a_name_that_cannot_be_a_page_s(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.html"):
        tarry.report(tmp_path / "out.json")
    with pytest.raises(FileNotFoundError):
        tarry.report(tmp_path / "nowhere" / "out.html")


def test_a_page_that_cannot_be_written_is_no_error_of_the_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with tarry.report(folder / "out.html"):
        _train(1)
        shutil.rmtree(folder)
    assert "could not be written" in caplog.text


def test_a_program_that_fails_has_a_page(tmp_path: Path) -> None:
    with pytest.raises(TypeError), tarry.report(tmp_path / "out.html"):
        _train("one")  # type: ignore[arg-type]
    assert (tmp_path / "out.html").exists()


def test_what_happened_before_is_said(tmp_path: Path) -> None:
    _train(3)
    with tarry.report(tmp_path / "out.html") as report:
        _train(1)
    assert "recording began late" in str(report)


def test_each_rank_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with tarry.report(tmp_path / "out.html") as report:
        _train(1)
    assert report.path.name == "out.rank2.html"
    run = read(tmp_path / "out.rank2.json")
    assert (run.rank, run.header["world_size"]) == (2, 4)


@pytest.mark.process
def test_the_commands(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\nx = torch.ones(3, device='cuda')\nprint((x + 1).sum().item())\n")
    command = [sys.executable, "tarry_command.py"]  # as the console script: `report` loads no torch
    root = Path(__file__).parents[2]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TARRY_BACKEND": "eager"}
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, cwd=root, check=False, env=environment
        )

    page, events = tmp_path / "out.html", tmp_path / "out.json"
    made = run("run", "--report", str(page), str(script))
    assert made.returncode == 0, made.stderr
    assert made.stdout == "6.0\n"
    assert f"report: {page}" in made.stderr
    page.unlink()
    again = run("report", str(events), str(events), "-o", str(page))
    assert again.returncode == 0, again.stderr
    assert page.exists()
    nowhere = run("run", "--report", str(tmp_path / "nowhere" / "x.html"), str(script))
    assert nowhere.returncode == 2
    assert nowhere.stderr.startswith("error: --report: ")
    wrong = run("report", str(page))
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == f"error: {page} is a page: give the file of events beside it, {events}\n"
