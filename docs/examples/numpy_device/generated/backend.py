# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
#     --backend-name numpy
"""The backend `numpy`: `register()` makes it known to `tarry.set_backend`."""

from __future__ import annotations

import tarry
from tarry.backends.generated import GeneratedBackend

from .kernels import KERNELS
from .written import AUTOGRAD, WRITTEN


class NumpyBackend(GeneratedBackend):
    """Made of device.yaml. Subclass it to say where data live and what `builtin` does."""

    name = "numpy"
    generated = KERNELS
    written = WRITTEN
    autograd = AUTOGRAD


def register(backend: type[GeneratedBackend] = NumpyBackend) -> None:
    """Make the backend, or a subclass of it, known as `numpy`."""
    tarry.register_backend("numpy", backend)
