"""A step fails at every point in turn: every tensor has the contents from before, or those that the step gives, or
raises the injected error. Never garbage, never an update applied twice.

Each model is trained with plain SGD: every tensor is written once per step, so that "before" and "after" are all that
eager PyTorch could have left, wherever the step broke off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import tarry
from tarry.errors import BackendError
from tarry.native import C

USES_DEVICE = True
KINDS = {"kernel": (1, ValueError), "memory": (2, RuntimeError), "interrupt": (3, KeyboardInterrupt)}


class Block(nn.Module):
    """A transformer's block, as small as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
        lambda: torch.randn(5, 6),
    ),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)),
        lambda: torch.randn(4, 2, 5, 5),
    ),
    "gpt": (
        lambda: nn.Sequential(nn.Embedding(7, 8), Block(), nn.Linear(8, 3), nn.Flatten(0, 1)),
        lambda: torch.randint(7, (2, 4)),
    ),
}


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    C.disarm_fault()
    tarry.config.run_ahead = True
    tarry.set_backend("eager")


class Training:
    """A model, trained until its step is compiled, proven and replayed, if it ever is."""

    def __init__(self, model: str, *, way: str) -> None:
        make, self.batch = MODELS[model]
        torch.manual_seed(0)
        self.net = make().to("tarry")
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.way = way
        self.call: Callable[[Tensor, Tensor], Tensor] = (
            tarry.compile(self.train, verify=0) if way == "replayed" else self.train
        )
        for _ in range(6):
            self.step()
        tarry.wait()

    def train(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self) -> Tensor:
        x = self.batch()
        y = torch.randint(3, (x.numel() if x.dtype == torch.int64 else len(x),))
        loss = self.call(x.to("tarry"), y.to("tarry"))
        if self.way == "awaited":
            tarry.sync()
        return loss

    def state(self) -> dict[str, Tensor | BaseException]:
        found: dict[str, Tensor | BaseException] = {}
        for name, value in self.net.state_dict().items():
            try:
                found[name] = value.cpu().clone()
            except BaseException as error:
                found[name] = error
        return found


def _inject(training: Training, kind: str, after: int) -> BaseException | None:
    C.arm_fault(KINDS[kind][0], after)
    try:
        training.step()
        tarry.wait()
        tarry.sync()
    except BaseException as error:
        return error
    finally:
        C.disarm_fault()
    return None


def _points(training: Training) -> int:
    C.arm_fault(0, 1 << 40)
    training.step()
    tarry.wait()
    tarry.sync()
    return int(C.disarm_fault())


def _check(training: Training, kind: str, stride: int) -> int:
    """Fail at every `stride`-th point of a step; the number of steps that did."""
    failed = 0
    for after in range(0, _points(training), stride):
        before = training.state()
        rng = torch.get_rng_state()
        twin = copy.deepcopy(training.net).cpu()
        error = _inject(training, kind, after)
        now = training.state()
        torch.set_rng_state(rng)
        x = training.batch()
        y = torch.randint(3, (x.numel() if x.dtype == torch.int64 else len(x),))
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        nn.functional.cross_entropy(twin(x), y).backward()
        optimizer.step()
        whole = twin.state_dict()
        failed += error is not None
        if error is not None:
            assert isinstance(error, KINDS[kind][1] | BackendError), (after, error)
        for name, value in now.items():
            if isinstance(value, BaseException):
                assert isinstance(value, KINDS[kind][1]), (after, name, value)
                continue
            old = before[name]
            assert isinstance(old, Tensor)
            same = torch.equal(value, old)
            assert same or torch.allclose(value, whole[name], rtol=1e-4, atol=1e-6), (after, name, kind)
            if error is None:
                assert torch.allclose(value, whole[name], rtol=1e-4, atol=1e-6), (after, name, "was not computed")
        lost = [name for name, value in now.items() if isinstance(value, BaseException)]
        if lost:  # as a user would go on: from a checkpoint
            training.net.load_state_dict(before)
    return failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["awaited", "cut", "replayed"])
def test_on_the_reference_path(model: str, kind: str, way: str) -> None:
    assert _check(Training(model, way=way), kind, stride=1 if way == "awaited" else 5) > 3


@pytest.mark.parametrize("kind", ["kernel", "memory"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["awaited", "cut", "replayed"])
@pytest.mark.parametrize("ahead", [True, False], ids=["run ahead", "not ahead"])
def test_torchscript(model: str, kind: str, way: str, ahead: bool) -> None:
    tarry.config.run_ahead = ahead
    tarry.set_backend("torchscript")
    _check(Training(model, way=way), kind, stride=1)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_inductor(model: str) -> None:
    """Its programs run instruction by instruction, natively; handed over, awaited and replayed use the same ones."""
    tarry.set_backend("inductor", compile="wait")
    for way in ("awaited", "cut", "replayed"):
        training = Training(model, way=way)
        for kind in ("kernel", "memory"):
            assert _check(training, kind, stride=1 if way == "awaited" else 4) > 3
