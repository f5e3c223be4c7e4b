"""transformers' Trainer: accumulation, bf16, evaluation, logging, checkpoints, resuming; nothing waits for a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks.support import installed, reads

installed("transformers")
installed("accelerate")
import transformers

import tarry.integrations.huggingface  # noqa: F401 - the documented line

USES_DEVICE = True
STEPS = 8


def _model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    pdrop = {"attn_pdrop": dropout, "embd_pdrop": dropout, "resid_pdrop": dropout}
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, **pdrop, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def _data(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(32, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def _accuracy(outputs: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(outputs.predictions, -1) == outputs.label_ids).mean())}


def _trainer(folder: Path, model: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = transformers.TrainingArguments(str(folder), **settings | options)
    return transformers.Trainer(
        model or _model(), arguments, train_dataset=_data(32, 1), eval_dataset=_data(8, 2), compute_metrics=_accuracy
    )


def _logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_trains_and_evaluates_as_on_the_cpu(precision: str, tmp_path: Path) -> None:
    options = {"bf16": True} if precision == "bf16" else {}
    host = _trainer(tmp_path / "cpu", use_cpu=True, **options)
    host.train()
    assert host.args.device.type == "cpu"
    lazy = _trainer(tmp_path / "tarry", **options)
    assert lazy.args.device == lazy.model.device == torch.device("tarry:0")
    with reads() as seen:
        result = lazy.train()
    logs, evaluations = STEPS // 2, STEPS // 4
    forwards = 2 * STEPS + evaluations  # the model reads whether sequences are packed, in each
    assert seen.count <= forwards + logs + evaluations
    assert seen.fallbacks == 0
    close = {"abs": 0.02} if precision == "bf16" else {"rel": 1e-5}
    for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy"):
        assert _logged(lazy, name) == pytest.approx(_logged(host, name), **close), name
    assert result.training_loss == pytest.approx(np.mean(_logged(host, "loss")), **close)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_resumes_to_the_numbers_of_a_run_without_a_stop(dropout: float, tmp_path: Path) -> None:
    whole = _trainer(tmp_path, _model(dropout))
    whole.train()
    resumed = _trainer(tmp_path, _model(dropout))
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert _logged(resumed, "loss") == _logged(whole, "loss")
    for left, right in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(left.cpu(), right.cpu(), rtol=0, atol=0)


def test_a_saved_model_is_loaded_on_either_device(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, max_steps=2, eval_strategy="no")
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    x = _data(1, 3)[0]["input_ids"][None]
    expected = trainer.model.eval()(x.to("tarry")).logits.cpu()
    for device_map in ("cpu", "tarry", "auto", {"": "tarry:0"}, None):
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model", device_map=device_map)
        assert model.device.type == ("cpu" if device_map in ("cpu", None) else "tarry")
        torch.testing.assert_close(model(x.to(model.device)).logits.cpu(), expected)


@pytest.mark.parametrize("keeps_filter", [True, False])
def test_a_loss_that_is_not_finite_is_logged_as_on_the_cpu(keeps_filter: bool, tmp_path: Path) -> None:
    class Broken(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 1 else loss

    def losses(**options: Any) -> list[float]:
        settings = {"max_steps": 3, "logging_steps": 3, "learning_rate": 0.0, "report_to": [], "disable_tqdm": True}
        arguments = transformers.TrainingArguments(
            str(tmp_path), logging_nan_inf_filter=keeps_filter, max_grad_norm=0.0, **settings, **options
        )
        trainer = Broken(_model(), arguments, train_dataset=_data(32, 1))
        trainer.train()
        assert trainer.args.logging_nan_inf_filter is keeps_filter
        return _logged(trainer, "loss")

    assert losses() == pytest.approx(losses(use_cpu=True), nan_ok=True)


def test_generates_in_evaluation_and_stops_early_as_on_the_cpu(tmp_path: Path) -> None:
    def run(**options: Any) -> Any:
        transformers.set_seed(0)
        sizes = {"vocab_size": 24, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **tokens, dropout_rate=0.0))
        rows = torch.randint(2, 24, (24, 5), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": row.flip(0), "decoder_input_ids": row.roll(1)} for row in rows]
        arguments = transformers.Seq2SeqTrainingArguments(
            str(tmp_path / str(len(options))),
            num_train_epochs=3,
            learning_rate=5e-3,
            optim="adamw_torch_fused",
            label_smoothing_factor=0.1,
            predict_with_generate=True,
            generation_max_length=6,
            generation_num_beams=2,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            report_to=[],
            disable_tqdm=True,
            **options,
        )
        trainer = transformers.Seq2SeqTrainer(
            model,
            arguments,
            train_dataset=data[:16],
            eval_dataset=data[16:],
            compute_metrics=lambda p: {"mean": float(np.mean(p.predictions))},
            callbacks=[transformers.EarlyStoppingCallback(1)],
        )
        trainer.train()
        return trainer, trainer.predict(data[:4]).predictions

    (host, expected), (lazy, actual) = run(use_cpu=True), run()
    assert lazy.args.device.type == "tarry"
    for name in ("eval_loss", "eval_mean"):
        assert _logged(lazy, name) == pytest.approx(_logged(host, name), rel=1e-5), name
    np.testing.assert_array_equal(actual, expected)
