"""The same programs with the real device a GPU. Run where there is one: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tarry
from tarry.events import expect

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_cuda() -> Iterator[None]:
    tarry.set_backend("eager", device="cuda")
    torch.backends.cudnn.allow_tf32 = False  # its rounding would hide other differences
    yield
    torch.backends.cudnn.allow_tf32 = True
    tarry.set_backend("eager", device="cpu")


def test_values_live_on_the_gpu() -> None:
    x = torch.ones(4, device="tarry") + 1
    tarry.sync(x)
    assert tarry.native.C.materialise(x).device.type == "cuda"
    assert x.cpu().tolist() == [2.0] * 4


def test_attention_reaches_the_fused_kernel() -> None:
    q = torch.randn(2, 4, 64, 32, dtype=torch.bfloat16)
    lazy = q.to("tarry")
    out = F.scaled_dot_product_attention(lazy, lazy, lazy, is_causal=True)
    text = tarry.explain(out)
    assert "aten::_scaled_dot_product_" in text
    assert "attention_math" not in text
    cuda = q.to("cuda")
    expected = F.scaled_dot_product_attention(cuda, cuda, cuda, is_causal=True)
    torch.testing.assert_close(out.cpu(), expected.cpu())


def _train(device: str) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).to(
        device
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)  # Adam magnifies rounding
    inputs, targets = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(net(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in net.parameters()]


def test_training_matches_cpu_eager() -> None:
    expected_losses, expected = _train("cpu")
    with expect(fallbacks=0):
        losses, parameters = _train("tarry")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_switching_the_real_device_keeps_values() -> None:
    x = torch.arange(4.0, device="tarry") * 2
    pending = x + 1
    tarry.set_backend("eager", device="cpu")
    assert pending.cpu().tolist() == [1.0, 3.0, 5.0, 7.0]
    assert (x + pending).cpu().tolist() == [1.0, 5.0, 9.0, 13.0]
    tarry.set_backend("eager", device="cuda")
    assert (x * 2).cpu().tolist() == [0.0, 4.0, 8.0, 12.0]


def test_integer_histogram() -> None:
    ids = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    counts = torch.histc(ids.to("tarry"), bins=4, min=0, max=3)
    assert counts.dtype == torch.int32
    assert counts.cpu().tolist() == [1, 2, 0, 1]


def test_random_numbers_repeat() -> None:
    def draw() -> list[float]:
        torch.manual_seed(3)
        return F.dropout(torch.ones(64, device="tarry"), 0.5).cpu().tolist()

    assert draw() == draw()
