"""All models by name."""

from __future__ import annotations

from tests.models import huggingface, loops, supervised
from tests.models.program import Builder

ZOO: dict[str, Builder] = {**supervised.ZOO, **loops.ZOO, **huggingface.ZOO}

#: One of each kind of trouble, for the tier that runs while one works.
QUICK = ("mlp", "convnet-batchnorm", "lstm", "nano-gpt", "gan", "batchnorm-item", "gpt2", "t5")
