"""Why a graph was compiled again, and the block in which that is forbidden."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import tarry
from tarry.errors import RecompileError, TarryError
from tarry.events import record
from tarry.runtime import limits
from tarry.runtime.compile import reasons
from tests.backends.simple import Walking
from tests.runtime.portable import using

USES_DEVICE = True


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    reasons.reasons.forget()


def _step(rows: int, columns: int = 3) -> torch.Tensor:
    x = torch.ones(rows, columns).to("tarry")
    return (x.sin() @ torch.ones(columns, 2).to("tarry")).sum()


def test_a_batch_of_another_size_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with using(Walking()), record() as seen:
        _step(8).item()
        assert not caplog.records  # the first of its kind
        _step(8).item()
        _step(4).item()
        report = tarry.metrics.report()
    (line,) = [record_.getMessage() for record_ in caplog.records]
    assert line.startswith("tarry: recompiling: input f32[8, 3] is f32[4, 3] now (")
    assert "test_recompile.py:" in line
    assert caplog.records[0].name == "tarry"
    assert caplog.records[0].levelno == logging.WARNING
    reasons = [event.fields["reason"] if event.fields["again"] else "" for event in seen if event.kind == "compile"]
    assert reasons == ["", line.removeprefix("tarry: recompiling: ")]
    assert "compiled again\n     1  input f32[8, 3] is f32[4, 3] now" in report


def test_in_the_background_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with using(Walking(), "background"):
        for rows in (8, 8, 4):
            _step(rows).item()
        tarry.wait_for_compiles()
        assert not caplog.records
        _step(4).item()
        tarry.wait_for_compiles()
    assert len(caplog.records) == 1


def test_a_graph_like_no_other_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with using(Walking()):
        _step(8).item()
        torch.ones(3).to("tarry").cos().sum().item()
    assert not caplog.records


def test_a_constant_that_changes_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with using(Walking(refuses=lambda node, number, varied: True)):
        x = torch.ones(3).to("tarry")
        (x * 2.0).tolist()
        (x * 3.0).tolist()
    (line,) = [record_.getMessage() for record_ in caplog.records]
    assert "a number of aten::mul.Tensor at " in line
    assert line.endswith("was 2.0 and is 3.0 now")


def test_a_few_lines_of_a_place_and_then_no_more(caplog: pytest.LogCaptureFixture) -> None:
    with using(Walking()):
        for rows in range(2, 16):
            _step(rows).item()
    lines = [record_.getMessage() for record_ in caplog.records if "recompiling" in record_.getMessage()]
    assert len(lines) == limits.MAX_REASONS_PER_SITE + 1
    assert all("is f32[" in line for line in lines[:-1])
    assert "only counted" in lines[-1]


def _small(name: str, rows: int) -> None:
    line = f"x.{name}().tolist()"  # a place of its own
    exec(compile(line, f"<{name}>", "exec"), {"x": torch.ones(rows, 2).to("tarry")})


def test_a_large_step_is_heard_after_many_small_ones(caplog: pytest.LogCaptureFixture) -> None:
    names = ("sin", "cos", "tan", "exp", "abs", "neg", "tanh", "sqrt", "floor", "ceil", "round", "sign")

    def large(rows: int) -> None:
        x = torch.ones(rows, 2).to("tarry")
        for _ in range(20):
            x = x.sin() * 2
        x.tolist()

    with using(Walking()):
        for rows in (3, 4):
            for name in names:
                _small(name, rows)
        small = [record_.getMessage() for record_ in caplog.records]
        caplog.clear()
        large(3)
        large(4)
    assert len(small) == limits.MAX_REASONS + 1
    assert "only counted" in small[-1]
    (line,) = [record_.getMessage() for record_ in caplog.records]
    assert "f32[3, 2] is f32[4, 2] now" in line


# ---- with tarry.no_recompile()


def test_a_new_graph_is_an_error_that_says_why_and_loses_nothing() -> None:
    with using(Walking()):
        _step(8).item()
        with tarry.no_recompile():
            _step(8).item()
            late = _step(4)
            with pytest.raises(RecompileError, match=r"f32\[8, 3\] is f32\[4, 3\] now \(.*test_recompile\.py:\d+\)"):
                late.item()
            with pytest.raises(tarry.RecompileError) as raised:
                late.item()  # and again
            assert isinstance(raised.value, TarryError)
            assert "\n" not in str(raised.value)
        assert late.item() == pytest.approx(_step(4).item())


def test_a_graph_like_no_other_names_its_lines() -> None:
    with using(Walking()), tarry.no_recompile():
        y = torch.ones(3).to("tarry").cos()
        with pytest.raises(RecompileError, match=r"a step of \d+ operators, .* .*test_recompile\.py:\d+ to "):
            y.tolist()
    assert y.tolist()


@pytest.mark.parametrize("policy", ["wait", "background"])
def test_a_changed_constant_is_an_error(policy: str) -> None:
    with using(Walking(refuses=lambda node, number, varied: True), policy):  # type: ignore[arg-type]
        x = torch.ones(3).to("tarry")
        for _ in range(2):
            (x * 2.0).tolist()
        tarry.wait_for_compiles()
        (x * 2.0).tolist()
        with tarry.no_recompile():
            y = x * 3.0
            with pytest.raises(RecompileError, match=r"was 2\.0 and is 3\.0 now"):
                y.tolist()
        assert y.tolist() == [3.0, 3.0, 3.0]


def test_what_is_being_compiled_is_no_error() -> None:
    with using(Walking(), "background"):
        _step(8).item()
        with tarry.no_recompile(), pytest.raises(RecompileError):
            _step(8).item()  # seen once, not compiled
        _step(8).item()
        with tarry.no_recompile():
            _step(8).item()
            tarry.wait_for_compiles()
            _step(8).item()


def test_where_nothing_is_compiled_nothing_is_an_error() -> None:
    with using(Walking(), "never"), tarry.no_recompile():
        assert _step(8).item()


def test_blocks_nest_and_hold_for_all_threads() -> None:
    errors: list[BaseException] = []

    def other() -> None:
        try:
            _step(5).item()
        except BaseException as error:
            errors.append(error)

    with using(Walking()), tarry.no_recompile():
        with tarry.no_recompile():
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert [type(error) for error in errors] == [RecompileError]
    with using(Walking()):
        _step(5).item()
