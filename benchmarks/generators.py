"""Tiny language models that generate greedily with a key/value cache that grows by one at each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.sizes import BLOOM, GPT2, OPT, SMALL, VOCABULARY

BATCH, PROMPT = 2, 5
Generate = Callable[[Tensor, int], Tensor]
"""`generate(prompt, new)`: the prompt with `new` more tokens."""


class CachedBlock(nn.Module):
    """A transformer layer for one token, or a few, that attends to all before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


class CachedGPT(nn.Module):
    """A GPT whose caches grow by `torch.cat`, as people write it by hand."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(CachedBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    @torch.no_grad()
    def generate(self, prompt: Tensor, new: int) -> Tensor:
        tokens, fed = prompt, prompt
        caches: list[tuple[Tensor, Tensor] | None] = [None] * len(self.blocks)
        for _ in range(new):
            start = tokens.shape[1] - fed.shape[1]
            x = self.tokens(fed) + self.positions(torch.arange(start, tokens.shape[1], device=fed.device))
            for k, block in enumerate(self.blocks):
                x, caches[k] = block(x, caches[k])
            logits = self.norm(x[:, -1]) @ self.tokens.weight.T
            fed = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, fed], dim=1)
            if (fed == VOCABULARY + 1).all():  # the end of the text, which each loop of this kind looks for
                break
        return tokens


def by_hand(device: str) -> Generate:
    return CachedGPT().to(device).eval().generate


def from_hub(architecture: str, **settings: Any) -> Callable[[str], Generate]:
    """An architecture of the Hugging Face library, with random weights."""

    def build(device: str) -> Generate:
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(architecture, **{**SMALL, **settings})
        model: Any = transformers.AutoModelForCausalLM.from_config(config).to(device).eval()

        def generate(prompt: Tensor, new: int) -> Tensor:
            mask = torch.ones_like(prompt)
            made: Tensor = model.generate(
                prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
            return made

        return generate

    return build


GENERATORS: dict[str, Callable[[str], Generate]] = {
    "GPT by hand": by_hand,
    "gpt2": from_hub("gpt2", **GPT2),
    "llama": from_hub("llama"),
    "mistral": from_hub("mistral", sliding_window=64),
    "qwen2": from_hub("qwen2"),
    "opt": from_hub("opt", **OPT),
    "bloom": from_hub("bloom", **BLOOM),
    "gpt_neox": from_hub("gpt_neox"),
    "phi": from_hub("phi"),
}
