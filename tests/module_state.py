"""Finds state that lives as long as the process: of modules in Python, and of namespaces and functions in C++."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "remove",
    "setdefault", "update",
}  # fmt: skip
STATEFUL = {"Condition", "ContextVar", "Event", "Lock", "local", "Random", "RLock", "WeakKeyDictionary", "WeakSet"}
"""Calls whose result is state even if no function of the module is seen to change it."""
CACHES = {"cache", "lru_cache"}


def of_python(path: Path) -> set[str]:
    """The names of a module that functions assign or change, and its functions that remember their results."""
    tree = ast.parse(path.read_text())
    assigned = {name: value for statement in tree.body for name, value in _assigned(statement)}
    classes = {statement.name for statement in tree.body if isinstance(statement, ast.ClassDef)}
    found = {name for name, value in assigned.items() if not name.isupper() and _is_stateful(value, classes)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= set(_changed(function)) & assigned.keys()
            if any(_name(decorator) in CACHES for decorator in function.decorator_list):
                found.add(function.name)
    return found


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name) and isinstance(statement, ast.Assign | ast.AnnAssign):
            yield target.id, statement.value


def _is_stateful(value: ast.expr | None, classes: set[str]) -> bool:
    """Whether it is an object to be changed: of a class of the module's own, or of one that is there for that."""
    return isinstance(value, ast.Call) and _name(value) in STATEFUL | classes


def _name(node: ast.expr) -> str:
    """What is called, or named, without the module it is in."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _changed(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield _root(node.func.value)
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield _root(node.value)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


# Code of a namespace is not indented (clang-format), so that an indented line is in a function or a class.
_STATIC = re.compile(
    r"^\s*(?:static (?:thread_local )?|thread_local )(?!const\b|constexpr\b)[^()=;]*?[ *&](\w+)(?: =|\{|;)"
)
_GLOBAL = re.compile(r"^(?:inline )?std::(?:atomic|mutex)\b[^()=;]*? (\w+)(?:\{|;)")


def of_cpp(path: Path) -> set[str]:
    """Variables of namespaces and static ones of functions, but for constants."""
    matches = [_STATIC.match(line) or _GLOBAL.match(line) for line in path.read_text().splitlines()]
    return {match[1] for match in matches if match}
