# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml golden.yaml --output-dir expected --impl-path golden_kernels.py \
#     --backend-name golden --gen-ts-lowerings
"""The backend `golden`: `register()` makes it known to `tarry.set_backend`."""

from __future__ import annotations

import tarry
from tarry.backends.generated import GeneratedBackend

from .kernels import KERNELS
from .written import AUTOGRAD, WRITTEN


class GoldenBackend(GeneratedBackend):
    """Made of golden.yaml. Subclass it to say where data live and what `builtin` does."""

    name = "golden"
    generated = KERNELS
    written = WRITTEN
    autograd = AUTOGRAD


def register(backend: type[GeneratedBackend] = GoldenBackend) -> None:
    """Make the backend, or a subclass of it, known as `golden`."""
    tarry.register_backend("golden", backend)
