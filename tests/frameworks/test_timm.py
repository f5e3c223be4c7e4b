"""timm: its models, optimizers, schedulers, losses, mixup, EMA and checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks import timm_without_torchvision
from tests.frameworks.support import installed, reads

timm_without_torchvision.install()
installed("timm")
import timm
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, accuracy, dispatch_clip_grad

timm_without_torchvision.remove()
USES_DEVICE = True
CLASSES = 5


def _batches(seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(seed)
    one = lambda: (torch.randn(4, 3, 32, 32, generator=source), torch.randint(CLASSES, (4,), generator=source))
    return [one() for _ in range(count)]


class Training:
    """timm's own training script, without its data loading."""

    def __init__(self, name: str, device: str, optimizer: str = "adamw") -> None:
        torch.manual_seed(0)
        options = {"img_size": 32} if "vit" in name else {}
        self.device = device
        self.model = timm.create_model(name, num_classes=CLASSES, **options).to(device)
        self.ema = ModelEmaV3(self.model, decay=0.9)
        self.optimizer = create_optimizer_v2(self.model, opt=optimizer, lr=1e-3, weight_decay=0.05)
        self.scheduler = CosineLRScheduler(self.optimizer, t_initial=10, warmup_t=2, t_in_epochs=False)
        self.loss = SoftTargetCrossEntropy()
        self.updates = 0

    def train(self, batches: list[Any]) -> list[torch.Tensor]:
        self.model.train()
        losses = []
        for x, y in batches:
            x, y = x.to(self.device), y.to(self.device)
            x, y = Mixup(mixup_alpha=0.2, prob=0.0, num_classes=CLASSES, label_smoothing=0.1)(x, y)
            loss = self.loss(self.model(x), y)
            loss.backward()
            dispatch_clip_grad(self.model.parameters(), 1.0, mode="norm")
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update(self.model, step=self.updates)
            self.updates += 1
            self.scheduler.step_update(self.updates)
            losses.append(loss.detach())
        return losses

    def evaluate(self, batches: list[Any]) -> tuple[float, torch.Tensor]:
        """Top-1 accuracy of the average of the weights, and its logits."""
        meter, logits = AverageMeter(), []
        self.ema.module.eval()
        with torch.no_grad():
            for x, y in batches:
                logits.append(self.ema.module(x.to(self.device)))
                (top,) = accuracy(logits[-1], y.to(self.device), topk=(1,))
                meter.update(top, len(x))
        return float(meter.avg), torch.cat(logits).cpu()

    def state(self) -> dict[str, Any]:
        parts = (self.model, self.ema.module, self.optimizer, self.scheduler)
        return {str(index): copy.deepcopy(part.state_dict()) for index, part in enumerate(parts)} | {"at": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        for index, part in enumerate((self.model, self.ema.module, self.optimizer, self.scheduler)):
            part.load_state_dict(state[str(index)])
        self.updates = state["at"]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("test_resnet", "adamw"), ("test_vit", "lamb"), ("test_convnext", "lion"), ("test_efficientnet", "sgd")],
)
def test_trains_and_evaluates_as_on_the_cpu(name: str, optimizer: str) -> None:
    host, lazy = Training(name, "cpu", optimizer), Training(name, "tarry", optimizer)
    expected = torch.stack(host.train(_batches(0, 4)))
    with reads() as seen:
        losses = torch.stack(lazy.train(_batches(0, 4)))
    assert seen.count == seen.fallbacks == 0
    torch.testing.assert_close(losses.cpu(), expected, rtol=1e-3, atol=1e-4)
    (right, logits), (expected_right, expected_logits) = lazy.evaluate(_batches(1, 2)), host.evaluate(_batches(1, 2))
    assert right == expected_right
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=1e-3)


def test_resumes_to_the_numbers_of_a_run_without_a_stop(tmp_path: Path) -> None:
    first = Training("test_resnet", "tarry")
    first.train(_batches(0, 2))
    torch.save(first.state(), tmp_path / "checkpoint.pth")
    expected = torch.stack(first.train(_batches(1, 2))).cpu()
    again = Training("test_resnet", "tarry")
    again.load(torch.load(tmp_path / "checkpoint.pth", weights_only=False))
    torch.testing.assert_close(torch.stack(again.train(_batches(1, 2))).cpu(), expected, rtol=0, atol=0)
    left, right = again.evaluate(_batches(2, 1)), first.evaluate(_batches(2, 1))
    torch.testing.assert_close(left[1], right[1], rtol=0, atol=0)
