"""Programs with symbolic sizes leave the process as others do: compiled by another one, stored, loaded by the next."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import tarry
from tarry import _api
from tarry.backends.base import Policy
from tarry.events import record
from tarry.runtime import limits
from tarry.runtime.compile import jobs
from tarry.runtime.compile.process import CompileProcess
from tarry.runtime.sizes import template
from tests.runtime.portable import SizedPortable, using

USES_DEVICE = True


@pytest.fixture(autouse=True, name="programs")
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(type(tarry.config), "cache_dir", property(lambda self: tmp_path))
    with tarry.config.override(store=True):
        yield tmp_path / "programs"
    _api._runtime._compiler._process.close()


def _steps(sizes: range | list[int], *, wait: bool = False) -> None:
    for size in sizes:
        x = torch.ones(size, 3).to("tarry")
        found: list[float] = (x.sum(1) * 2).tolist()
        assert found == [6.0] * size
        if wait:
            tarry.wait_for_compiles()


def _run(sizes: range | list[int], policy: Policy, backend: SizedPortable | None = None) -> Counter[str]:
    with using(backend or SizedPortable(), policy), record() as seen:
        _steps(sizes, wait=policy == "background")
    return Counter(event.kind for event in seen)


def test_another_process_compiles_for_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FAMILY_RUNS", 2)
    monkeypatch.setattr(limits, "FAMILY_SECONDS", 0.0)
    backend = SizedPortable(diary=tmp_path / "diary")
    kinds = _run(range(4, 12), "background", backend)
    assert kinds["compile"] == 1
    assert kinds["compile_here"] == 0
    assert kinds["cache_hit"] >= 3
    (compiler,) = backend.compilers()
    assert compiler != os.getpid()


@pytest.mark.parametrize("policy", ["wait", "background"])
def test_the_next_process_compiles_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """And need not wait until it has seen many sizes: that there is a program is noted."""
    monkeypatch.setattr(limits, "FAMILY_SECONDS", 0.0)
    first = _run([4, 5, *range(6, 45)] if policy == "background" else [4, 5, 6], policy)
    assert first["compile"] == (1 if policy == "background" else 2)
    second = _run([4, *range(8, 20)], policy)
    assert second["compile"] == 0
    assert second["store_hit"] == (1 if policy == "background" else 2)
    assert second["store_miss"] == second["store_corrupt"] == 0
    assert second["reference"] <= 5
    assert second["cache_hit"] >= 8


def test_a_program_is_not_loaded_for_less_than_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FAMILY_SECONDS", 0.0)
    assert _run([4, 5, *range(6, 45)], "background")["compile"] == 1
    monkeypatch.setattr(limits, "FAMILY_SECONDS", 1000.0)
    again = _run(range(4, 20), "background")
    assert (again["store_hit"], again["compile"], again["reference"]) == (0, 0, 16)


def test_a_template_is_looked_for_when_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, sizes that come again are not compiled for themselves either: there may be a program for all."""
    looked: list[int] = []

    def find_template(examples: Sequence[Sequence[int]], ranks: Sequence[int]) -> template.Template | None:
        looked.append(len(examples))
        return original(examples, ranks)

    original = template.find_template
    monkeypatch.setattr(template, "find_template", find_template)
    monkeypatch.setattr(limits, "FAMILY_SECONDS", 1000.0)
    early = _run([4, 5, 4, 5, 6, 5, 4], "background")
    assert (looked, early["reference"], early["compile"]) == ([], 7, 0)
    monkeypatch.setattr(limits, "FAMILY_SECONDS", 0.0)
    monkeypatch.setattr(limits, "FAMILY_RUNS", 2)
    late = _run([4, 5, 4, 5, 6, 5, 4, 7], "background")
    assert looked == [2]
    assert late["compile"] == 1
    assert late["cache_hit"] >= 2


def test_sizes_that_vary_by_no_rule_are_compiled_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FAMILY_SECONDS", 0.0)
    monkeypatch.setattr(template, "find_template", lambda examples, ranks: None)
    kinds = _run([4, 5, 4, 5, 6, 4, 5, 6, 6], "background")
    assert kinds["compile"] == 3


def test_what_was_assumed_of_sizes_is_stored_with_the_program() -> None:
    """A stored program that is not right for a size is not used for it; there may be another one for that."""
    first = _run([4, 5, 100, 101], "wait")  # the first program is right up to 22
    assert first["compile"] == 3
    for sizes in ([4, 5, 100, 7, 150], [4, 90, 5]):
        again = _run(sizes, "wait")
        assert again["compile"] == 0, sizes
        assert again["error"] == 0


def test_without_a_store_nothing_is_noted(programs: Path) -> None:
    with tarry.config.override(store=False):
        _run([4, 5, 6], "wait")
    assert not programs.exists()


# ---- leaving the interpreter to the program


def test_a_job_makes_breaks_unless_somebody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(jobs.time, "sleep", pauses.append)
    queue = jobs.Background(CompileProcess())

    def work() -> int:
        total = sum(k * k for k in range(200_000))
        jobs.yield_to_user()
        return total

    job = queue.submit(work)
    while not job.done:
        pass
    assert len(pauses) == 1
    assert 0 < pauses[0] <= limits.MAX_PAUSE
    assert job.result == sum(k * k for k in range(200_000))


def test_who_waits_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(jobs.time, "sleep", pauses.append)
    monkeypatch.setattr(jobs, "_waiters", 1)
    queue = jobs.Background(CompileProcess())
    queue.submit(jobs.yield_to_user)
    assert queue.wait(60)
    assert not pauses


def test_breathing_is_for_jobs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(jobs.time, "sleep", pauses.append)
    jobs.yield_to_user()
    assert not pauses
