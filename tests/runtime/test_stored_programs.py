"""Programs from the store: what is compiled once is loaded ever after, whatever has happened to the files."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tarry
from tarry.backends.base import Computation
from tarry.events import record
from tarry.ir.graph import Graph
from tests.runtime.portable import Portable, using

USES_DEVICE = True


@pytest.fixture(autouse=True, name="programs")
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    _place(monkeypatch, tmp_path)
    with tarry.config.override(store=True):
        yield tmp_path / "programs"


def _place(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Have the store elsewhere, but not the native part, which would be built there."""
    monkeypatch.setattr(type(tarry.config), "cache_dir", property(lambda self: place))


def _compute(x: Tensor) -> list[float]:
    """Not in an assert statement, where pytest would keep what is in between alive: another graph."""
    found: list[float] = (x.sin() * 3.0).tolist()
    return found


def _run(backend: Portable, x: Tensor | None = None, times: int = 1) -> Counter[str]:
    x = torch.ones(2).to("tarry") if x is None else x
    with using(backend), record() as seen:
        for _ in range(times):
            assert _compute(x) == pytest.approx(_compute(x.cpu()))
    return Counter(event.kind for event in seen)


def test_a_program_is_compiled_once_for_all(programs: Path) -> None:
    first = _run(Portable(), times=2)
    assert (first["compile"], first["store_miss"], first["store_hit"]) == (1, 1, 0)
    second = _run(Portable(), times=2)
    assert (second["compile"], second["store_miss"], second["store_hit"]) == (0, 0, 1)
    assert second["cache_hit"] == 1
    assert len(list(programs.glob("*.program"))) == 1


def test_other_types_or_another_fingerprint_are_other_programs() -> None:
    class Other(Portable):
        def fingerprint(self) -> str:
            return "another option"

    assert _run(Portable())["compile"] == 1
    assert _run(Portable(), torch.ones(3).to("tarry"))["compile"] == 1
    assert _run(Other())["compile"] == 1
    for backend in (Portable(), Other()):
        assert _run(backend)["compile"] == 0


def test_without_a_store(programs: Path) -> None:
    with tarry.config.override(store=False):
        for _ in range(2):
            counts = _run(Portable())
            assert (counts["compile"], counts["store_miss"]) == (1, 0)
    assert not programs.exists()


def test_a_damaged_program_is_compiled_again(programs: Path) -> None:
    _run(Portable())
    (path,) = programs.glob("*.program")
    path.write_bytes(path.read_bytes()[:-7])
    counts = _run(Portable())
    assert (counts["compile"], counts["store_corrupt"]) == (1, 1)
    assert _run(Portable())["store_hit"] == 1


def test_a_program_that_its_backend_cannot_load_is_compiled_again() -> None:
    class Forgetful(Portable):
        def load(self, graph: Graph, data: bytes) -> Computation:
            raise ValueError("what is that?")

        def fingerprint(self) -> str:
            return Portable().fingerprint()

    _run(Portable())
    counts = _run(Forgetful())
    assert (counts["compile"], counts["store_corrupt"]) == (1, 1)


def test_a_program_without_an_artifact_is_none_for_the_store(programs: Path) -> None:
    for _ in range(2):
        assert _run(Portable(manner="no artifact"))["compile"] == 1
    assert not list(programs.glob("*.program"))


def test_a_program_that_cannot_be_stored_says_why() -> None:
    x = torch.ones(2).to("tarry")
    with using(Portable(manner="cannot be stored")), record() as seen:
        assert _compute(x) == pytest.approx(_compute(x.cpu()))
    (event,) = [event for event in seen if event.kind == "store_skip"]
    assert event.fields["reason"] == "RuntimeError: it has a handle in it"


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no directory")
    _place(monkeypatch, tmp_path / "file")
    with pytest.warns(UserWarning, match="cannot be kept"):
        _run(Portable())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _run(Portable())["compile"] == 1


def test_in_the_background_a_stored_program_is_loaded() -> None:
    _run(Portable())
    x = torch.ones(2).to("tarry")
    with using(Portable(), "background"), record() as seen:
        for _ in range(2):
            _compute(x)
        tarry.wait_for_compiles()
        _compute(x)
    kinds = Counter(event.kind for event in seen)
    assert (kinds["reference"], kinds["store_hit"], kinds["compile"]) == (2, 1, 0)
