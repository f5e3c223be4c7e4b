"""Lazy mode where the device that the program names is there: backends and compilers still reach it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tarry

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _back_to_cpu() -> Iterator[None]:
    yield
    tarry.set_backend("eager", device="cpu")


def _losses() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x, y = torch.randn(8, 16), torch.randint(0, 4, (8,))
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(x.cuda()), y.to("cuda", non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    torch.cuda.synchronize()
    assert next(model.parameters()).device.type == "tarry"
    assert torch.cuda.memory_allocated() > 0
    return found


def test_generators_of_a_program_for_the_cpu() -> None:
    """Samplers and loaders use them on the host, the program with tensors that it makes."""

    def drawn() -> list[object]:
        generator = torch.Generator().manual_seed(3)
        loader = torch.utils.data.DataLoader(range(9), batch_size=3, shuffle=True, generator=generator)
        first, _ = torch.utils.data.random_split(range(10), [4, 6], generator=generator)
        batches = [batch.tolist() for batch in loader]
        return [batches, list(first), torch.randn(3, generator=generator).tolist()]

    expected = drawn()
    tarry.set_backend("eager", device="cuda")
    with tarry.lazy_mode("cpu"):
        assert drawn() == expected
        assert torch.rand(2, generator=torch.Generator()).device.type == "tarry"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_program_for_cuda(backend: str) -> None:
    tarry.set_backend(backend, device="cuda", compile="wait")
    with tarry.lazy_mode("cuda"):
        compiled = _losses()
    tarry.set_backend("eager", device="cuda")
    with tarry.lazy_mode("cuda"):
        expected = _losses()
    assert compiled == pytest.approx(expected, rel=1e-4)
    assert compiled[-1] < compiled[0]
    assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]  # the real one again
