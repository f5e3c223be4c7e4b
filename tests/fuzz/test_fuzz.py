"""A short search with a fixed seed, and that the search finds what is there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.aliasing.world import World
from tests.fuzz import topics
from tests.fuzz.__main__ import Search
from tests.fuzz.search import fresh_backend, minimise, script
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

PROGRAMS = 12  # of each topic: a few seconds for a backend. `python -m tests.fuzz` takes as long as it is given.


@pytest.fixture(autouse=True)
def _backend() -> Iterator[None]:
    import tarry

    yield
    tarry.set_backend("eager")


@pytest.mark.parametrize("backend", ["eager", "torchscript"])
@pytest.mark.parametrize("topic", sorted(topics.TOPICS))
def test_random_programs(topic: str, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    fresh_backend(backend)
    search = Search(backend)
    search.chunk(topic, start=1, count=PROGRAMS)
    assert not search.found, capsys.readouterr().out


@pytest.mark.parametrize("direct", ["always", "mixed"])
@pytest.mark.parametrize("topic", sorted(topics.TOPICS))
def test_random_programs_with_direct_calls(topic: str, direct: str, capsys: pytest.CaptureFixture[str]) -> None:
    fresh_backend("eager")
    search = Search("eager", direct=direct)
    search.chunk(topic, start=2, count=PROGRAMS)
    assert not search.found, capsys.readouterr().out


def test_lines_are_dropped_while_the_program_fails() -> None:
    tried: list[list[str]] = []

    def fails(lines: list[str]) -> bool:
        tried.append(lines)
        return "c" in lines and "h" in lines

    assert minimise(list("abcdefghij"), fails) == ["c", "h"]
    assert len(tried) < 60


def test_a_difference_is_found_and_made_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fault that is planted: the device doubles where eager triples."""

    def faulty(world: World, _: object) -> None:
        world.run("x = torch.ones(3, device=D)", ("x",))
        world.run("y = x + 1", ("y",))
        world.run("z = x * (2 if D != 'cpu' else 3)", ("z",))
        world.run("w = y + 1", ("w",))
        world.check_all()

    monkeypatch.setitem(topics.TOPICS, "faulty", faulty)
    search = Search("eager")
    search.chunk("faulty", start=0, count=2)
    assert search.found["faulty"]
    said = capsys.readouterr().out
    assert "z = x * (2 if" in said
    assert "y = x + 1" not in said


def test_the_script_runs_alone() -> None:
    lines = ["x = torch.ones(3, device=D)", "y = x * (2 if D != 'cpu' else 3)", "x.no_such_thing"]
    text = script(lines, "eager", "faulty", "y differs")
    ended = subprocess.run([sys.executable, "-"], input=text, text=True, capture_output=True, check=True)
    assert "y differs" in ended.stdout
    assert "x differs" not in ended.stdout
    assert ended.stdout.count("AttributeError") == 2
