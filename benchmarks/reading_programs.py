"""Programs that read values often, as users write them; and the smallest reads by themselves.

Each is a class whose instances live on one device: `step()` does one step and gives a number that the peers compare.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class ReadingProgram(Protocol):
    def __init__(self, device: str) -> None: ...

    def step(self) -> float: ...


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# ---- single reads


class Vector:
    """A small vector to read from."""

    def __init__(self, device: str) -> None:
        self.x = torch.linspace(-1, 2, 64).to(device)


class ReadThree(Vector):
    """Three operators and a read."""

    def step(self) -> float:
        return (self.x * 2 + 1).sum().item()


class ItemLoop(Vector):
    """Numbers of a vector that is there, one by one."""

    def step(self) -> float:
        return sum(self.x[i].item() for i in range(8))


class Mask(Vector):
    """A boolean mask: the size of the result depends on data."""

    def step(self) -> float:
        return float(self.x[self.x > 0].shape[0])


class Nonzero(Vector):
    """The same for nonzero."""

    def step(self) -> float:
        return float(self.x.nonzero().shape[0])


class ForwardBackward:
    """A small forward and backward pass, whose loss is read."""

    def __init__(self, device: str) -> None:
        self.model = mlp(16, 16, 1).to(device)
        self.x, self.y = torch.randn(8, 16).to(device), torch.randn(8, 1).to(device)

    def step(self) -> float:
        self.model.zero_grad()
        loss = functional.mse_loss(self.model(self.x), self.y)
        loss.backward()
        return loss.item()


# ---- programs


class Trained:
    """A model with an optimizer."""

    def __init__(self, model: nn.Module, device: str, optimizer: type[Any] = torch.optim.Adam) -> None:
        self.device = device
        self.model = model.to(device)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)

    def update(self, loss: Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Hooks(Trained):
    """Training, with a hook on each layer that reads how large its output is."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(32, 64, 64, 64, 8), device)
        self.largest: dict[int, float] = {}
        for k, layer in enumerate(self.model.children()):
            layer.register_forward_hook(self._note(k))
        self.x, self.y = torch.randn(64, 32).to(device), torch.randint(0, 8, (64,)).to(device)

    def _note(self, k: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.largest[k] = output.detach().abs().max().item()

        return hook

    def step(self) -> float:
        return self.update(functional.cross_entropy(self.model(self.x), self.y))


class GraphNetwork(Trained):
    """Two rounds of message passing by index_add and scatter, trained on masked nodes, with the accuracy read."""

    def __init__(self, device: str) -> None:
        layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)])
        super().__init__(layers, device)
        self.layers = layers
        self.x = torch.randn(128, 16).repeat(1, 2).to(device)
        self.source, self.target = torch.randint(0, 128, (2, 512)).to(device)
        self.y, self.mask = torch.randint(0, 4, (128,)).to(device), (torch.rand(128) < 0.7).to(device)
        ones = torch.ones(512, device=device)
        self.degree = torch.zeros(128, device=device).scatter_add_(0, self.target, ones).clamp(min=1)

    def _messages(self, h: Tensor) -> Tensor:
        summed = torch.zeros_like(h).index_add_(0, self.target, h[self.source])
        return summed / self.degree[:, None]

    def step(self) -> float:
        h = self.x
        for layer in list(self.layers)[:2]:
            h = functional.relu(layer(self._messages(h)))
        logits = self.layers[2](h)[self.mask]
        labels = self.y[self.mask]
        loss = self.update(functional.cross_entropy(logits, labels))
        return loss + (logits.argmax(1) == labels).float().mean().item()


class QuantizationAware(Trained):
    """Training with fake quantization, whose observers keep the ranges on the host."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(32, 64, 8), device, torch.optim.SGD)
        self.ranges: dict[str, tuple[float, float]] = {}
        self.x, self.y = torch.randn(64, 32).to(device), torch.randn(64, 8).to(device)

    def _quantized(self, name: str, value: Tensor) -> Tensor:
        low, high = value.detach().min().item(), value.detach().max().item()
        before = self.ranges.get(name, (low, high))
        low, high = 0.9 * before[0] + 0.1 * low, 0.9 * before[1] + 0.1 * high
        self.ranges[name] = low, high
        scale = max((high - low) / 255, 1e-8)
        zero = min(max(round(-low / scale), 0), 255)
        return torch.fake_quantize_per_tensor_affine(value, scale, zero, 0, 255)

    def step(self) -> float:
        h = self._quantized("input", self.x)
        for k, layer in enumerate(self.model.children()):
            if isinstance(layer, nn.Linear):
                h = functional.linear(h, self._quantized(f"weight {k}", layer.weight), layer.bias)
            else:
                h = self._quantized(f"output {k}", layer(h))
        return self.update(functional.mse_loss(h, self.y))


class Reinforce(Trained):
    """A policy whose actions are read one by one: ten moves of an episode, then an update."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(4, 32, 2), device)
        self.random = random.Random(0)

    def step(self) -> float:
        state = [self.random.uniform(-1, 1) for _ in range(4)]
        logs, rewards = [], []
        for _ in range(10):
            probabilities = functional.softmax(self.model(torch.tensor(state, device=self.device)), dim=-1)
            action = int((probabilities.cumsum(0) < self.random.random()).sum().item())
            action = min(action, 1)
            logs.append(probabilities[action].log())
            state = [0.9 * s + (0.1 if action else -0.1) for s in state]
            rewards.append(-sum(s * s for s in state))
        returns = torch.tensor([sum(rewards[k:]) for k in range(len(rewards))], device=self.device)
        return self.update(-(torch.stack(logs) * returns).mean())


class SequenceToSequence(Trained):
    """An encoder and a decoder by hand, with teacher forcing, that read each predicted token."""

    def __init__(self, device: str) -> None:
        parts: dict[str, nn.Module] = {
            "embed": nn.Embedding(32, 32), "encode": nn.GRUCell(32, 32), "decode": nn.GRUCell(32, 32),
            "out": nn.Linear(32, 32),
        }  # fmt: skip
        super().__init__(nn.ModuleDict(parts), device)
        self.parts = parts
        self.source, self.target = torch.randint(0, 32, (2, 6)).to(device)

    def step(self) -> float:
        embed, encode, decode, out = self.parts.values()
        h = torch.zeros(1, 32, device=self.device)
        for token in self.source:
            h = encode(embed(token)[None], h)
        loss, token, right = torch.zeros((), device=self.device), self.source[-1], 0
        for expected in self.target:
            h = decode(embed(token)[None], h)
            logits = out(h)
            loss = loss + functional.cross_entropy(logits, expected[None])
            right += int(logits.argmax().item() == expected.item())
            token = expected
        return self.update(loss) + right


class Evaluation:
    """The loss and the accuracy of each of some batches, read as they come."""

    def __init__(self, device: str) -> None:
        self.model = mlp(64, 128, 128, 10).to(device).eval()
        self.batches = [(torch.randn(64, 64).to(device), torch.randint(0, 10, (64,)).to(device)) for _ in range(4)]

    @torch.no_grad()
    def step(self) -> float:
        total = 0.0
        for x, y in self.batches:
            logits = self.model(x)
            total += functional.cross_entropy(logits, y).item()
            total += (logits.argmax(1) == y).sum().item()
        return total


READS: dict[str, type[ReadingProgram]] = {
    "3 operators": ReadThree,
    "8 numbers": ItemLoop,
    "boolean mask": Mask,
    "nonzero": Nonzero,
    "forward and backward": ForwardBackward,
}
PROGRAMS: dict[str, type[ReadingProgram]] = {
    "hooks": Hooks,
    "graph network": GraphNetwork,
    "quantization": QuantizationAware,
    "reinforcement": Reinforce,
    "seq2seq": SequenceToSequence,
    "evaluation": Evaluation,
}
