"""peft: adapters are trained, saved, loaded, switched and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.support import installed, reads

installed("transformers")
installed("peft")
import peft
import transformers

USES_DEVICE = True
CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True),
    "ia3": lambda: peft.IA3Config(
        target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    ),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def _base() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0))


def _model(kind: str, device: str) -> Any:
    base = _base()
    return peft.get_peft_model(base, CONFIGS[kind]()).to(device)


def _batch(device: str) -> torch.Tensor:
    return torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1)).to(device)


def _train(model: Any, steps: int = 4) -> torch.Tensor:
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    ids = _batch(str(next(model.parameters()).device))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_trains_as_on_the_cpu(kind: str) -> None:
    expected = _train(_model(kind, "cpu"))
    model = _model(kind, "tarry")
    with reads() as seen:
        losses = _train(model)
    assert seen.count <= 2 * 4 + 1  # transformers reads whether the mask has padding; the last one is the test's own
    torch.testing.assert_close(losses, expected)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_saved_loaded_and_merged(kind: str, tmp_path: Path) -> None:
    model = _model(kind, "tarry")
    _train(model)
    model.eval()
    expected = model(_batch("tarry")).logits.cpu()
    model.save_pretrained(tmp_path)
    for device in ("tarry", "cpu"):
        loaded = peft.PeftModel.from_pretrained(_base().to(device), tmp_path)
        assert {p.device.type for p in loaded.parameters()} == {device}
        torch.testing.assert_close(loaded.eval()(_batch(device)).logits.cpu(), expected)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(_batch("tarry")).logits.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_adapters_are_switched_off_and_exchanged() -> None:
    model = _model("lora", "tarry").eval()
    plain = _base().eval()(_batch("cpu")).logits
    _train(model)
    model.add_adapter("second", CONFIGS["lora"]())
    trained = model(_batch("tarry")).logits.cpu()
    with model.disable_adapter():
        torch.testing.assert_close(model(_batch("tarry")).logits.cpu(), plain)
    model.set_adapter("second")
    torch.testing.assert_close(model(_batch("tarry")).logits.cpu(), plain)
    model.set_adapter("default")
    torch.testing.assert_close(model(_batch("tarry")).logits.cpu(), trained)
