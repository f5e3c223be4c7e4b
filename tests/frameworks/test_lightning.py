"""Lightning: `accelerator="tarry"` in the Trainer and in Fabric, with callbacks, mixed precision and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import tarry
from tests.frameworks.support import installed, reads

installed("lightning")
import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

USES_DEVICE = True


class Classifier(L.LightningModule):
    """As in Lightning's introduction, with a metric, a scheduler and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 2))
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_right", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class Losses(Callback):
    """Keeps the losses without reading them."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        assert batch[0].device == module.device
        self.seen.append(outputs["loss"])


def _loader(seed: int) -> DataLoader[Any]:
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.sum(1).gt(0).long()), batch_size=4)


def _fit(folder: Path, accelerator: str, *, epochs: int = 3, dropout: float = 0.0, **options: Any) -> Any:
    L.seed_everything(0, verbose=False)
    resume = options.pop("ckpt_path", None)
    losses = Losses()
    callbacks = [losses, LearningRateMonitor(), EarlyStopping("val_loss", patience=5)]
    callbacks += [ModelCheckpoint(folder, monitor="val_loss", save_last=True, filename="best")]
    settings: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 6}
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=CSVLogger(folder),
        gradient_clip_val=1.0,
        **settings | options,
    )
    trainer.fit(Classifier(dropout), _loader(0), _loader(1), ckpt_path=resume)
    return trainer, torch.stack(losses.seen)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_trains_validates_and_logs_as_on_the_cpu(precision: str, tmp_path: Path) -> None:
    host, expected = _fit(tmp_path / "cpu", "cpu", precision=precision)
    with reads() as seen:
        lazy, losses = _fit(tmp_path / "tarry", "tarry", precision=precision)
    assert losses.device == lazy.strategy.root_device == torch.device("tarry:0")
    # In each epoch: the logged loss, two metrics that are logged, their use by the two callbacks; checkpoints.
    assert seen.count <= 3 * 10
    assert seen.fallbacks == 0
    close = {"rtol": 0.02, "atol": 0.02} if precision == "bf16-mixed" else {}
    torch.testing.assert_close(losses.cpu(), expected, **close)
    for name, value in host.callback_metrics.items():
        torch.testing.assert_close(lazy.callback_metrics[name].cpu(), value.cpu(), **close)


def test_nothing_is_read_in_steps_that_log_nothing(tmp_path: Path) -> None:
    plain = {"limit_val_batches": 0, "log_every_n_steps": 1000, "num_sanity_val_steps": 0}
    counts = []
    for epochs in (2, 4):
        with reads() as seen:
            trainer = L.Trainer(
                accelerator="tarry",
                max_epochs=epochs,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **plain,
            )
            trainer.fit(Classifier(), _loader(0))
        counts.append(seen.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_resumes_to_the_numbers_of_a_run_without_a_stop(dropout: float, tmp_path: Path) -> None:
    _, whole = _fit(tmp_path / "whole", "tarry", epochs=4, dropout=dropout)
    _fit(tmp_path / "half", "tarry", epochs=2, dropout=dropout)
    state = torch.get_device_module("tarry").get_rng_state()  # Lightning keeps no random state in its checkpoints

    class Restore(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 2:
                torch.get_device_module("tarry").set_rng_state(state)

    losses = Losses()
    L.seed_everything(1, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        accelerator="tarry", max_epochs=4, callbacks=[losses, Restore()], gradient_clip_val=1.0, **quiet,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Classifier(dropout), _loader(0), _loader(1), ckpt_path=str(tmp_path / "half" / "last.ckpt"))
    torch.testing.assert_close(torch.stack(losses.seen).cpu(), whole[12:].cpu(), rtol=0, atol=0)


def test_half_precision_has_a_scaler_of_the_device(tmp_path: Path) -> None:
    trainer, losses = _fit(tmp_path, "tarry", precision="16-mixed")
    assert trainer.precision_plugin.scaler._device == "tarry"
    assert losses[-6:].mean() < losses[:6].mean()


def test_checkpoints_load_on_the_cpu(tmp_path: Path) -> None:
    trainer, _ = _fit(tmp_path, "tarry", epochs=1)
    model = Classifier.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    assert next(model.parameters()).device.type == "cpu"
    result = trainer.validate(model, _loader(1), verbose=False)
    host = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(
        model, _loader(1), verbose=False
    )
    assert result[0]["val_loss"] == pytest.approx(host[0]["val_loss"], rel=1e-5)


def test_fabric() -> None:
    def run(accelerator: str) -> torch.Tensor:
        fabric = L.Fabric(accelerator=accelerator, devices=1, precision="bf16-mixed")
        fabric.launch()
        fabric.seed_everything(0)
        model = torch.nn.Linear(8, 2)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        losses = []
        for x, y in fabric.setup_dataloaders(_loader(0)):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            losses.append(loss.detach())
        assert losses[0].device.type == accelerator
        return torch.stack(losses).cpu()

    torch.testing.assert_close(run("tarry"), run("cpu"), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("options", [{"devices": [3]}, {"devices": "0,1"}])
def test_a_device_that_is_not_there_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(tarry.errors.TarryError, match="devices"):
        L.Trainer(accelerator="tarry", **options)
