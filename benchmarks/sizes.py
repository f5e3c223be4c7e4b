"""The sizes of tiny language models: of those that benchmarks generate with, and of those that tests train."""

from __future__ import annotations

from typing import Any

VOCABULARY = 64

#: Settings that most architectures of the Hugging Face library share, in one spelling or the other.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: The same for architectures with spellings of their own.
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
OPT: dict[str, Any] = {"ffn_dim": 48, "word_embed_proj_dim": 32}
BLOOM: dict[str, Any] = {"n_layer": 2, "n_head": 4}
