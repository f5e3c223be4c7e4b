"""What makes frameworks see the device: their lists of devices are closed.

`lightning.py` and `safetensors.py` add a name and change no program, so `import tarry` switches them on.
`huggingface.py` has programs that name no device train on tarry; a program asks for it by importing it, by
`ACCELERATE_TORCH_DEVICE=tarry`, or under `tarry run`. None of them imports a framework: they act when the program has
imported it (`after_import.py`).
"""

from __future__ import annotations

import os


def install() -> None:
    """What `import tarry` switches on."""
    from tarry.integrations import lightning, safetensors

    lightning.install()
    safetensors.install()
    if os.environ.get("ACCELERATE_TORCH_DEVICE", "").partition(":")[0] == "tarry":
        from tarry.integrations import huggingface  # noqa: F401 - importing it switches it on


def take_over() -> None:
    """Programs that leave the choice of the device to a framework get tarry: what `tarry run` switches on."""
    from tarry.integrations import huggingface, lightning  # noqa: F401 - likewise

    lightning.prefer()
