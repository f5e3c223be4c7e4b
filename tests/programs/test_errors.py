"""Mistakes: PyTorch's own message, at the user's line, and the program goes on."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import DEVICE, assert_same, dev, tarry_only

USES_DEVICE = True

# Kernels of the real device that lack a dtype are not here: only a run shows it (see AT_RUN).
BAD: dict[str, Callable[[Tensor], object]] = {
    "add": lambda x: x + torch.ones(7, device=x.device),
    "mm": lambda x: x @ x,
    "mm dtype": lambda x: x @ x.t().double(),
    "view": lambda x: x.view(7),
    "reshape": lambda x: x.reshape(4, 4),
    "cat": lambda x: torch.cat([x, torch.ones(1, 9, device=x.device)]),
    "stack": lambda x: torch.stack([x, x[0]]),
    "dimension": lambda x: x.sum(5),
    "softmax": lambda x: x.softmax(3),
    "transpose": lambda x: x.transpose(0, 4),
    "expand": lambda x: x.expand(5, 5),
    "squeeze": lambda x: x.squeeze(9),
    "split": lambda x: x.split([1, 1], 1),
    "index dtype": lambda x: x.gather(0, x),
    "linear": lambda x: F.linear(x, torch.ones(3, 9, device=x.device)),
    "conv": lambda x: F.conv2d(x, torch.ones(1, 1, 3, 3, device=x.device)),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(5, dtype=torch.long, device=x.device)),
    "layer norm": lambda x: F.layer_norm(x, (99,)),
    "in place": lambda x: x.add_(torch.ones(4, 2, 3, device=x.device)),
    "in place dtype": lambda x: x.long().add_(1.5),
    "inverse": lambda x: torch.linalg.inv(x),
    "einsum": lambda x: torch.einsum("ij,jk", x, x),
    "embedding": lambda x: F.embedding(x, x),
    "as_strided": lambda x: x.as_strided((9, 9), (9, 9)),
    "batch norm": lambda x: F.batch_norm(x[:1, :, None][:, :, :0].sum(2)[:1], None, None, training=True),
    "top-k": lambda x: x.topk(99),
    "out dtype": lambda x: torch.add(x, x, out=torch.empty(2, 3, dtype=torch.long, device=x.device)),
    "bool mask": lambda x: x.masked_fill(x, 1.0),
}


def _message(error: BaseException) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(error)).split("\n")[0]


@pytest.mark.parametrize("name", list(BAD))
def test_at_the_users_line_with_pytorchs_message(name: str) -> None:
    try:
        BAD[name](torch.ones(2, 3))
    except Exception as error:
        expected = error
    else:
        pytest.fail(f"{name} is no mistake in eager: the case tests nothing")
    x = torch.ones(2, 3, device=DEVICE)
    before = x * 2
    with pytest.raises(type(expected)) as caught:
        BAD[name](x)
    assert any(
        frame.filename == __file__ and "lambda" in frame.name
        for frame in traceback.extract_tb(caught.value.__traceback__)
    )
    assert _message(caught.value) == _message(expected)
    # Recording goes on, with what was there before and with what comes after.
    assert_same(before + x, torch.full((2, 3), 3.0))


@tarry_only
@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x + y,
        lambda x, y: y * x,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.add_(y),
        lambda x, y: y.add_(x),
        lambda x, y: x @ y.t(),
        lambda x, y: torch.add(x, x, out=y),
        lambda x, y: F.linear(x, y),
        lambda x, y: torch.where(x > 0, x, y),
    ],
    ids=["add", "mul", "cat", "in place", "in place on host", "matmul", "out", "linear", "where"],
)
def test_mixing_devices_names_both(mix: Callable[[Tensor, Tensor], object]) -> None:
    x, y = torch.ones(2, 3, device=DEVICE), torch.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"(?s)(tarry.*cpu|cpu.*tarry)"):
        mix(x, y)
    assert_same(x + 1, torch.full((2, 3), 2.0))
    assert y.sum() == 6


def test_host_scalars_mix() -> None:
    x = dev(torch.ones(2))
    assert_same(x + torch.tensor(2.0), torch.tensor([3.0, 3.0]))
    assert_same(torch.tensor(2) * x, torch.tensor([2.0, 2.0]))
    x *= torch.tensor(3.0)
    assert_same(x, torch.tensor([3.0, 3.0]))


# Errors that only the values can cause come when the graph runs: they name the line that recorded the operator.

AT_RUN: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda x: F.embedding(torch.full((2,), 99, device=x.device), x),
    "index": lambda x: x[torch.full((1,), 99, dtype=torch.long, device=x.device)],
    "gather": lambda x: x.gather(0, torch.full((1, 3), 99, dtype=torch.long, device=x.device)),
    "cross entropy": lambda x: F.cross_entropy(x, torch.full((2,), 99, device=x.device)),
    "one hot": lambda x: F.one_hot(torch.full((2,), 7, device=x.device), 3),
    "inverse": lambda x: torch.linalg.inv(x[:, :2] * 0),
    "no kernel for the dtype": lambda x: x & 1,
    "cholesky": lambda x: torch.linalg.cholesky(x[:, :2] * -1),
}


@pytest.mark.parametrize("name", list(AT_RUN))
def test_errors_of_values_are_raised_and_leave_the_rest_valid(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        AT_RUN[name](torch.ones(2, 3))
    x = dev(torch.ones(2, 3))
    weight = dev(torch.arange(4.0))
    pending = weight * 2
    weight.add_(1)
    with pytest.raises((RuntimeError, IndexError)):
        AT_RUN[name](x).sum().item()
    assert_same(x, torch.ones(2, 3))
    assert_same(weight, torch.arange(4.0) + 1)
    assert_same(pending, torch.arange(4.0) * 2)
    assert_same(pending + weight, torch.arange(4.0) * 3 + 1)


@tarry_only
def test_an_error_at_run_names_the_users_line() -> None:
    table = dev(torch.ones(3, 2))
    ids = dev(torch.tensor([0, 7]))
    picked = F.embedding(ids, table)  # this line
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# this line"))
    with pytest.raises((RuntimeError, IndexError)) as caught:
        picked.sum().item()
    assert f"test_errors.py:{line}" in str(caught.value)
    assert "index out of range" in str(caught.value)


@tarry_only
def test_what_hangs_on_a_failed_value_fails_too_and_nothing_else() -> None:
    table = dev(torch.ones(3, 2))
    picked = F.embedding(dev(torch.tensor([7])), table)
    dependent = picked * 2
    with pytest.raises((RuntimeError, IndexError)):
        dependent.sum().item()
    assert_same(table * 2, torch.full((3, 2), 2.0))
    del picked, dependent
    assert_same(table + 1, torch.full((3, 2), 2.0))


@tarry_only
def test_a_failed_step_does_not_half_update_the_weights() -> None:
    net = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 2)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    before = {k: v.cpu().clone() for k, v in net.state_dict().items()}

    def bad_step() -> None:
        optimizer.zero_grad()
        net(dev(torch.tensor([9]))).sum().backward()
        optimizer.step()
        next(net.parameters()).sum().item()

    with pytest.raises((RuntimeError, IndexError)):
        bad_step()
    optimizer.zero_grad()
    assert_same(net.state_dict(), before)
    net(dev(torch.tensor([1]))).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert bool(net[1].weight.cpu().isfinite().all())


@tarry_only
def test_fallback_as_an_error() -> None:
    import tarry

    x = dev(torch.ones(3))
    with tarry.config.override(fallback="error"), pytest.raises(RuntimeError, match="nonzero"):
        torch.nonzero(x)
    assert torch.nonzero(x).shape == (3, 1)


def test_unknown_device_index_and_layout() -> None:
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        torch.ones(1, device="no_such_device")
