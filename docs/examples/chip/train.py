"""Trains on two chips, and on the CPU: a network with a half on each chip, and one with a copy on each."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from chip import Card
from torch import nn

import tarry

torch.manual_seed(0)
CARD = Card(seconds=0.002)
X, Y = torch.randn(64, 20), torch.randint(5, (64,))
NET = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))


def halves(first: str, second: str) -> list[float]:
    """Model parallel: layers on two devices. Activations go one way, gradients the other."""
    net = copy.deepcopy(NET)
    net[:2].to(first), net[2:].to(second)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(net[2:](net[:2](X.to(first)).to(second)), Y.to(second))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def copies(first: str, second: str) -> list[float]:
    """Data parallel: half of the batch on each device. The first one sums the gradients and updates the weights."""
    nets = [copy.deepcopy(NET).to(first), copy.deepcopy(NET).to(second)]
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(8):
        parts = []
        for net, device, x, y in zip(nets, (first, second), X.chunk(2), Y.chunk(2), strict=True):
            net.zero_grad()
            parts.append(F.cross_entropy(net(x.to(device)), y.to(device)) / 2)
            parts[-1].backward()
        for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            ours.grad += theirs.grad.to(first)
        optimizer.step()
        nets[1].load_state_dict(nets[0].state_dict())
        losses.append(sum(part.item() for part in parts))
    return losses


tarry.set_backend(CARD)
for train in (halves, copies):
    expected, actual = train("cpu", "cpu"), train("tarry:0", "tarry:1")
    print(f"{train.__name__}: losses {actual[0]:.4f} ... {actual[-1]:.4f}")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
for chip in CARD.chips:
    print(f"chip {chip.ordinal}: {chip.launched} launches, at most {chip.peak} bytes")
both = sum(
    max(0.0, min(end, other[1]) - max(begin, other[0]))
    for begin, end in CARD.chips[0].busy
    for other in CARD.chips[1].busy
)
print(f"both chips were busy at the same time for {both * 1000:.0f} ms")
