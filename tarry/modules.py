"""The names of modules: `model.blocks.3.attn`, from the variable that holds the model.

A `torch.nn.Module` does not know where it is used. When the recorder meets one for the first time
(csrc/record/modules.h), the model that it is part of is looked for in the calling frames, and all of that model's
modules are named at once; nothing is looked for again until a new module comes.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch

from tarry import places
from tarry.native import C

Frame: TypeAlias = tuple[CodeType, dict[str, Any], dict[str, Any]]
"""Its code, its variables (modules, and the first argument), its globals."""

_FORBIDDEN = re.compile(r"[^\w.-]")
"""What a name in the text of a graph cannot have in it (ir/text.py)."""


class ModuleNames:
    """Names modules, and forgets them when they die: another may get the address."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[torch.nn.Module]] = {}

    def name(self, module: torch.nn.Module) -> None:
        """Name all modules of the model that a module is part of."""
        frames = _frames()
        root, prefix = _model(module, frames)
        found = [(root, prefix), *((child, f"{prefix}.{path}") for path, child in _tree(root))]
        if all(child is not module for child, _ in found):
            found.append((module, type(module).__name__))
        new = [(child, path) for child, path in found if id(child) not in self._alive]
        for child, _ in new:
            self._alive[id(child)] = weakref.ref(child, self._forgetter(id(child)))
        C.name_modules([(id(child), _FORBIDDEN.sub("_", path)) for child, path in new])

    def _forgetter(self, address: int) -> Any:
        def forget(_: object) -> None:
            self._alive.pop(address, None)
            C.forget_module(address)

        return forget


def _frames() -> list[Frame]:
    given = C.frame_variables(torch.nn.Module)
    if given is not None:
        return given
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.append((frame.f_code, dict(frame.f_locals), frame.f_globals))
        frame = frame.f_back
    return frames


def _tree(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules below one, with their paths. Runs no code of the program's: not `named_modules`."""
    seen, stack = {id(root)}, [("", root)]
    while stack:
        prefix, module = stack.pop()
        children = module.__dict__.get("_modules")
        for name, child in list(children.items()) if isinstance(children, dict) else ():
            if isinstance(child, torch.nn.Module) and id(child) not in seen:
                seen.add(id(child))
                path = f"{prefix}{name}"
                yield path, child
                stack.append((f"{path}.", child))


def _path_in(root: torch.nn.Module, module: torch.nn.Module) -> str | None:
    """The path of a module below another, "" if it is that itself, None if it is not there."""
    if root is module:
        return ""
    return next((path for path, child in _tree(root) if child is module), None)


def _model(module: torch.nn.Module, frames: Sequence[Frame]) -> tuple[torch.nn.Module, str]:
    """The outermost module that a module is part of, as the calling frames have it, and its name."""
    root = module
    for code, variables, _ in frames:
        caller = next(iter(variables.values()), None) if code.co_name in ("forward", "_call_impl") else None
        if isinstance(caller, torch.nn.Module) and _path_in(caller, root) is not None:
            root = caller
    for code, variables, outer in frames:
        if places.judge(code.co_filename) == places.INTERNAL:
            continue
        this = variables.get("self")
        if isinstance(this, torch.nn.Module):
            root = this if _path_in(this, root) is not None else root  # a method of the model, which has no name there
            continue
        for name, holder in _holders(this, variables, outer):
            if _path_in(holder, root) is not None:
                return holder, name
    return root, type(root).__name__


def _holders(
    this: object, variables: Mapping[str, Any], outer: Mapping[str, Any]
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules that a frame names: its variables, attributes of its first argument, globals."""
    attributes = getattr(this, "__dict__", {})
    for names in (variables, attributes if isinstance(attributes, dict) else {}, outer):
        for name, value in list(names.items()):
            if isinstance(value, torch.nn.Module):
                yield name, value
