"""accelerate: prepare, accumulate, clip, gather_for_metrics, mixed precision, save_state and load_state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.support import installed, reads

installed("accelerate")
import accelerate
from accelerate.state import AcceleratorState, PartialState

import tarry.integrations.huggingface

USES_DEVICE = True


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def _data(seed: int, count: int = 32) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=source)
    return DataLoader(TensorDataset(x, x.sum(1).gt(0).long()), batch_size=4, shuffle=seed == 0)


class Script:
    """The training script of accelerate's quick tour, with what people add to it."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        AcceleratorState._reset_state(True)
        accelerate.utils.set_seed(0)
        self.accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, **options)
        layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 2))
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        self.model, self.optimizer, self.train, self.test, self.scheduler = self.accelerator.prepare(
            model, optimizer, _data(0), _data(1, 14), scheduler
        )

    def epoch(self) -> list[torch.Tensor]:
        losses = []
        self.model.train()
        for x, y in self.train:
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def evaluate(self) -> float:
        self.model.eval()
        right: list[torch.Tensor] = []
        for x, y in self.test:
            with torch.no_grad():
                predicted = self.model(x).argmax(-1)
            predicted, y = self.accelerator.gather_for_metrics((predicted, y))
            right.append(predicted == y)
        return torch.cat(right).float().mean().item()

    def weights(self) -> torch.Tensor:
        parts = [p.detach().cpu().flatten() for p in self.accelerator.unwrap_model(self.model).parameters()]
        return torch.cat(parts)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_trains_and_evaluates_as_on_the_cpu(precision: str) -> None:
    host, lazy = Script(cpu=True, mixed_precision=precision), None
    expected = torch.stack([*host.epoch(), *host.epoch()])
    accuracy = host.evaluate()
    assert host.accelerator.device.type == "cpu"
    lazy = Script(mixed_precision=precision)
    assert lazy.accelerator.device == torch.device("tarry:0")
    with reads() as seen:
        losses = torch.stack([*lazy.epoch(), *lazy.epoch()])
    assert seen.count == 0
    with reads() as seen:
        assert lazy.evaluate() == pytest.approx(accuracy, abs=0.01)
    assert seen.count == 1
    close = {"rtol": 0.02, "atol": 0.02} if precision == "bf16" else {}  # CUDA's list of operators is not the CPU's
    torch.testing.assert_close(losses.cpu(), expected, **close)


def test_half_precision_scales_and_trains() -> None:
    """accelerate has no fp16 on the CPU to compare with: the scaler is there, the steps are taken, the loss falls."""
    lazy = Script(mixed_precision="fp16")
    losses = [torch.stack(lazy.epoch()).mean().item() for _ in range(6)]
    again = accelerate.Accelerator()  # shares the state of the first
    assert again.mixed_precision == "fp16"
    assert again.scaler is not None
    assert lazy.accelerator.scaler.get_scale() > 1
    assert not lazy.accelerator.optimizer_step_was_skipped
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_loaded_state_goes_on_as_the_one_that_was_saved(dropout: float, tmp_path: Path) -> None:
    """Also with dropout: the state of tarry's generator is saved and loaded."""
    first = Script(dropout)
    first.epoch()
    first.accelerator.save_state(str(tmp_path))
    expected = torch.stack(first.epoch()).cpu()
    again = Script(dropout)
    torch.rand(3, device=again.accelerator.device)
    again.accelerator.load_state(str(tmp_path))
    torch.testing.assert_close(torch.stack(again.epoch()).cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close(again.weights(), first.weights(), rtol=0, atol=0)


def test_the_cpu_is_taken_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "tarry")
    assert PartialState().device == torch.device("tarry:0")
    AcceleratorState._reset_state(True)
    assert accelerate.Accelerator(cpu=True).device.type == "cpu"
    AcceleratorState._reset_state(True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert accelerate.Accelerator().device.type == "cpu"


def test_fsdp_of_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(tarry.errors.TarryError, match="fully_shard"):
        accelerate.Accelerator()


@pytest.mark.parametrize("max_memory", [None, {0: "1GB", "cpu": "1GB"}, {"tarry:0": 600, "cpu": "1GB"}])
def test_a_checkpoint_is_shared_out_among_devices(max_memory: Any, tmp_path: Path) -> None:
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(8))
    accelerate.Accelerator().save_model(model, str(tmp_path))
    expected = model.to("cpu")(torch.ones(2, 8))
    with accelerate.init_empty_weights():
        empty = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.LayerNorm(8))
    loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map="auto", max_memory=max_memory)
    assert loaded[0].weight.device.type == "tarry"
    small = max_memory is not None and "tarry:0" in max_memory
    assert set(loaded.hf_device_map.values()) == ({"tarry:0", "cpu"} if small else {"tarry:0"})
    torch.testing.assert_close(loaded(torch.ones(2, 8, device="tarry")).cpu(), expected)


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="names the device 'tarry:9'"):
        accelerate.infer_auto_device_map(torch.nn.Linear(2, 2), max_memory={9: "1GB"})
