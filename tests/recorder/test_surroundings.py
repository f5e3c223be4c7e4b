"""Around the recorder: thread-wide settings, custom operators that come and go, code that runs inside a step."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch

import tarry
from tarry.errors import TarryError
from tarry.events import expect, subscribe
from tests.support.allocated import allocated

USES_DEVICE = True


@pytest.fixture
def default_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype_decides_as_in_eager(default_double: None) -> None:
    x = torch.ones(3, dtype=torch.int64)
    assert (x.to("tarry") / 2).dtype == (x / 2).dtype == torch.float64
    torch.set_default_dtype(torch.float32)
    assert (x.to("tarry") / 2).dtype == (x / 2).dtype == torch.float32


def test_autocast_of_another_device_does_not_reach_the_step() -> None:
    a = torch.randn(32, 32)
    expected = a @ a
    lazy = a.to("tarry")
    product = lazy @ lazy
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(product.cpu(), expected)


def _library() -> torch.library.Library:
    return torch.library.Library("tarry_test", "FRAGMENT")


def test_an_operator_can_be_defined_anew() -> None:
    x = torch.ones(3)
    for k in (1, 2, 3):
        library = _library()
        library.define("again(Tensor x) -> Tensor")
        library.impl("again", lambda x, k=k: x.new_ones(k), "CPU")
        library.impl("again", lambda x, k=k: x.new_ones(k), "Meta")
        result = torch.ops.tarry_test.again(x.to("tarry"))
        assert result.shape == (k,)
        assert result.cpu().tolist() == [1.0] * k
        library._destroy()
        del library
        gc.collect()


def test_a_custom_operator_without_a_meta_kernel_runs_eagerly() -> None:
    library = _library()
    library.define("positives(Tensor x) -> Tensor")
    library.impl("positives", lambda x: x[x > 0], "CPU")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.impl("twice", torch.empty_like, "Meta")
    x = torch.tensor([1.0, -1.0, 2.0]).to("tarry")
    with expect(fallbacks=1):
        assert torch.ops.tarry_test.positives(x).tolist() == [1.0, 2.0]
    with expect(fallbacks=0):
        assert torch.ops.tarry_test.twice(x).tolist() == [2.0, -2.0, 4.0]
    library._destroy()


@pytest.mark.parametrize("view", [lambda x: x.view(2, 5), lambda x: x[7:], lambda x: x[:0]], ids=["2d", "tail", "0"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_must_be_resized_keeps_other_views_valid(view) -> None:
    def program(device: str) -> list[list[float]]:
        x, a = torch.arange(10.0, device=device), torch.ones(3, device=device)
        other = view(x)
        torch.add(a, a, out=x)
        return [x.flatten().tolist(), other.flatten().tolist()]

    assert program("tarry") == program("cpu")


@pytest.mark.parametrize("make", [lambda d: torch.arange(10.0, device=d)[:0], lambda d: torch.empty(5, device=d)[2:2]])
def test_an_empty_view_as_out(make) -> None:
    def program(device: str) -> tuple[list[float], int]:
        out, a = make(device), torch.ones(3, device=device)
        torch.add(a, a, out=out)
        return out.tolist(), out.storage_offset()

    assert program("tarry") == program("cpu")


def test_asking_for_a_value_inside_a_step_is_refused_and_harmless() -> None:
    x = torch.ones(3, device="tarry") + 1
    y = x * 2

    def meddle(event: object) -> None:
        if getattr(event, "kind", "") == "compile":
            tarry.explain(y)

    with pytest.raises(TarryError, match="in the middle of a step"), subscribe(meddle):
        assert (y + 12345).tolist() == [12349.0] * 3
    assert y.tolist() == [4.0] * 3
    assert x.tolist() == [2.0] * 3


def test_dead_inputs_do_not_stay_in_memory() -> None:
    size = 1 << 18

    def step(k: int, read: bool) -> None:
        x = torch.ones(size + k).to("tarry")
        y = (x + 1).sum()
        if read:
            y.item()

    sizes = []
    for k in range(16):
        step(k, True)
        step(k, True)
        step(k, False)
        tarry.mark_step()
        torch.ones(3, device="tarry").add(k).cpu()
        sizes.append(allocated())
    assert sizes[-1] - sizes[6] < 4 * size, sizes  # a leak would be as much each round


@pytest.mark.process
def test_closures_finish_before_the_process_ends() -> None:
    script = """
        import time, torch, tarry
        def slow(t):
            time.sleep(0.3)
            print("done", t.item(), flush=True)
        tarry.add_step_closure(slow, torch.ones((), device="tarry"), run_async=True)
        tarry.mark_step()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "done 1.0"
