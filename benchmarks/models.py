"""Models as people train them, made from transformers' configurations with random weights: for a GPU, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs import Program, adamw, token_loss


class Logits(nn.Module):
    """A model of transformers that takes one tensor and gives one."""

    def __init__(self, model: nn.Module, **given: Any) -> None:
        super().__init__()
        self.model = model
        self._given = given

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs, **self._given).logits


class Translation(Logits):
    """An encoder and a decoder, fed with the same tokens."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(input_ids=inputs, decoder_input_ids=inputs).logits


def _resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return Logits(ResNetForImageClassification(ResNetConfig.from_dict({"num_labels": 1000})))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(GPT2LMHeadModel(GPT2Config()), use_cache=False)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return Logits(BertForMaskedLM(BertConfig()))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    return Logits(LlamaForCausalLM(config), use_cache=False)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return Translation(T5ForConditionalGeneration(T5Config(d_model=512, num_layers=6)))


def _tokens(vocabulary: int, batch: int, length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length)))


def _text(name: str, model: Callable[[], nn.Module], vocabulary: int, batch: int, length: int) -> Program:
    return Program(
        f"{name} {batch}x{length} bf16 AdamW",
        model,
        adamw,
        _tokens(vocabulary, batch, length),
        token_loss,
        autocast=True,
    )


MODELS = (
    Program(
        "ResNet-50 b64 bf16 AdamW",
        _resnet50,
        adamw,
        lambda: (torch.randn(64, 3, 224, 224), torch.randint(1000, (64,))),
        F.cross_entropy,
        autocast=True,
    ),
    _text("GPT-2", _gpt2, 50257, 8, 512),
    _text("BERT", _bert, 30522, 16, 256),
    _text("Llama 16 layers", _llama, 32000, 8, 512),
    _text("T5 small", _t5, 32128, 16, 128),
)
