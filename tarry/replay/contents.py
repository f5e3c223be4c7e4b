"""Looking at objects that are no dictionaries of attributes: containers, arrays, generators of random numbers."""

from __future__ import annotations

import contextvars
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy
import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
MAX_BYTES = 1 << 20
"""Of an array: it is looked at before each replay."""
GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState)


class Contents:
    """What is in a container, as text. Objects in it count by identity: whoever looks keeps them alive."""

    def __init__(self, container: Any) -> None:
        self._container = container

    @property
    def text(self) -> str:
        container = self._container
        if isinstance(container, contextvars.ContextVar):
            return _text(container.get(None))
        if hasattr(container, "tobytes"):  # an array
            what = f"{getattr(container, 'dtype', '')}{getattr(container, 'shape', ())}"
            return f"{what} {hashlib.sha256(container.tobytes()).hexdigest()}"
        if isinstance(container, Mapping):
            return str([(_text(key), _text(container[key])) for key in container])
        items = map(_text, container)
        return str(sorted(items) if isinstance(container, Set) else list(items))

    def objects(self) -> Iterator[Any]:
        """What can change without being replaced."""
        container = self._container
        if isinstance(container, contextvars.ContextVar):
            yield container.get(None)
        elif isinstance(container, Mapping):
            for key in container:
                yield container[key]
        elif not hasattr(container, "tobytes"):
            yield from container


def _text(item: Any) -> str:
    return repr(item) if isinstance(item, PLAIN) else f"{type(item).__name__} {id(item)}"


def state_reader(generator: Any) -> Callable[[], str]:
    """How to read the state of a generator of random numbers, as text."""
    if isinstance(generator, numpy.random.Generator):
        return lambda: repr(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return lambda: repr(generator.get_state(legacy=False))
    return lambda: repr(generator.getstate())
