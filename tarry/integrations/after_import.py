"""Does something to a module once it is imported, without importing it.

A framework takes seconds to import, and most programs use none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]

_actions: dict[str, Action] = {}


def after_import(name: str, action: Action) -> None:
    """Call `action(module)` once the module of that name is imported: now, if it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _actions[name] = action
    _run(name)


def _run(name: str) -> None:
    """Do what is to be done to a module, if it is imported to its end."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return
    action = _actions.pop(name, None)
    if action is not None:
        action(module)


class _Finder:
    """Finds nothing by itself. A module that something is to be done to gets a loader that does it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # A module that was half imported when `after_import` was called: `import torch` in it has loaded tarry.
        for waiting in [known for known in tuple(_actions) if known in sys.modules]:
            _run(waiting)
        if name not in _actions:
            return None
        others = (finder for finder in tuple(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            _wrap(spec.loader)
        return spec


def _wrap(loader: Any) -> None:
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        action = _actions.pop(module.__name__, None)
        if action is not None:
            action(module)

    loader.exec_module = exec_module
