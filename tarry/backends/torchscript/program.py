"""Running a TorchScript function as a step's program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from tarry.backends.base import PythonNumber
from tarry.backends.torchscript.jit import Executable
from tarry.ir.layout import TensorType

_INTERRUPT = re.compile(r"^RuntimeError: (KeyboardInterrupt|SystemExit): (.*)$", re.MULTILINE)


def _interrupt(error: RuntimeError) -> BaseException | None:
    """The exception that has ended a kernel in Python, if that was no error: TorchScript makes a RuntimeError of it,
    and leaves nothing but its text."""
    found = _INTERRUPT.search(str(error))
    if found is None:
        return None
    kind, text = found.groups()
    return KeyboardInterrupt() if kind == "KeyboardInterrupt" else SystemExit(int(text) if text.isdigit() else text)


class Program:
    """Feeds the inputs of the function, and puts its results where they belong: None for those written in place.

    `feeds` are what the inputs after the tensors get: numbers by index, and generators. `returned` are the outputs that
    the function returns. `borrowed` is a generator that the function seeds and that others draw from.
    """

    def __init__(
        self,
        executable: Executable,
        feeds: Sequence[int | torch.Generator],
        returned: Sequence[int],
        types: Sequence[TensorType],
        device: torch.device,
        borrowed: torch.Generator | None,
    ) -> None:
        self._executable = executable
        self._feeds: Sequence[Any] = feeds
        self._has_generators = not all(isinstance(feed, int) for feed in feeds)
        self._returned = returned
        self._types = types
        self._device = device
        self._borrowed = borrowed
        self._nothing: list[Any] = [None] * len(types)

    def __call__(self, inputs: list[Any], numbers: list[PythonNumber]) -> Sequence[Any]:
        fed: list[Any]
        if self._has_generators:
            fed = [numbers[feed] if isinstance(feed, int) else feed for feed in self._feeds]
        else:
            fed = [numbers[index] for index in self._feeds]
        try:
            if self._borrowed is None:
                made = self._executable.call(*inputs, *fed)
            else:
                made = self._with_borrowed(self._borrowed, inputs, fed)
        except RuntimeError as error:
            raise _interrupt(error) or error from None
        results = self._nothing.copy()
        for k, result in zip(self._returned, made, strict=False):  # the lengths of lists come after the results
            results[k] = self._undefined(k) if result is None else result
        return results

    def _with_borrowed(self, generator: torch.Generator, inputs: list[Any], fed: list[Any]) -> tuple[Any, ...]:
        """Run a program that seeds the device's own generator, and give that its state back."""
        state = generator.get_state()
        try:
            return self._executable.call(*inputs, *fed)
        finally:
            generator.set_state(state)

    def _undefined(self, k: int) -> torch.Tensor:
        """Kernels leave out some results that meta kernels promise; nothing can depend on their contents."""
        type_ = self._types[k]
        return torch.empty_strided(type_.sizes, type_.strides, dtype=type_.dtype, device=self._device)
