"""Who may import whom: the layers of the package, checked by walking the imports of every file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tarry"

# For each part: the parts of ours it may import. `native` is the compiled module's loader.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "events": set(),
    "trust": set(),
    "pytree": set(),
    "metrics": {"events", "native"},
    "notebook": {"events"},
    "places": {"events", "native"},
    "modules": {"places", "native"},
    "tracebacks": {"config", "places"},
    "native": {"errors", "config", "trust"},
    "codegen": {"errors", "trust"},
    "generated": {"config", "codegen", "trust"},
    "nodes": {"codegen", "generated", "ir"},
    "ir": {"errors", "codegen"},  # codegen: the table of operators
    "passes": {"errors", "ir", "codegen"},
    "store": {"errors", "events", "ir", "native", "trust"},
    "backends": {"errors", "ir", "passes", "native", "codegen", "generated", "store"},
    "runtime": {"errors", "config", "events", "places", "tracebacks", "ir", "passes", "backends", "native", "store"},
    "replay": {"errors", "events", "places", "ir", "native", "pytree", "runtime"},
    "reports": {"events", "ir"},  # and what reads files needs neither of them: see tests/reports
    "device": {"errors", "native"},
    "distributed": {"errors", "events"},
    "integrations": {"errors"},  # what it needs of the device, PyTorch has as torch.tarry
    "lazy": {"errors", "native", "pytree"},
    "custom_ops": {"errors", "native", "ir", "passes", "backends", "pytree", "_api"},
    "_custom_op": {"custom_ops"},
    "_custom_ops": {"custom_ops"},
    "examples": {"__init__"},  # like a user's program
    "cli": {"*"},
    "_api": {"*"},
    "__init__": {"*"},
    "__main__": {"*"},
}


def _part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "tarry" else [base]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("tarry.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path: Path) -> None:
    part = _part(path)
    assert part in ALLOWED, f"a new part {part!r}: say in ALLOWED what it may import"
    allowed = ALLOWED[part]
    wrong = set() if "*" in allowed else _imports(path) - allowed - {part}
    assert not wrong, f"{part} must not import {', '.join(sorted(wrong))}"


def test_a_backend_does_not_import_another() -> None:
    shared = {"base", "fx", "lowering", "partition"}
    root = PACKAGE / "backends"
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        backend = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        if backend == "registry":  # knows all of them by name
            continue
        names = {
            node.module.split(".")[2]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tarry.backends.")
        }
        assert names <= shared | {backend}, relative


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _edges(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Which module imports which: anywhere in it, also in functions and for types alone."""
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                given = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= given & modules.keys() or {node.module or ""}
        edges[module] = (names & modules.keys()) - {module}
    return edges


def _on_a_cycle(edges: dict[str, set[str]]) -> set[str]:
    """What is left when modules are taken away that import none of the rest, or that none of the rest imports."""
    left = dict(edges)
    while True:
        imported = set().union(*left.values()) if left else set()
        gone = {module for module in left if not left[module] & left.keys() or module not in imported}
        if not gone:
            return set(left)
        left = {module: edges[module] - gone for module in left.keys() - gone}


def test_imports_make_no_cycle() -> None:
    modules = {_module(path): path for path in PACKAGE.rglob("*.py")}
    # `tarry` itself is left out: examples and commands use it as any program does.
    edges = {module: names - {"tarry"} for module, names in _edges(modules).items() if module != "tarry"}
    assert _on_a_cycle(edges) == set()


def test_a_cycle_is_found() -> None:
    assert _on_a_cycle({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


@pytest.mark.parametrize("name", ["torch.utils._pytree"])
def test_a_private_module_of_torch_is_imported_in_one_place(name: str) -> None:
    users = [path for path in PACKAGE.rglob("*.py") if name in path.read_text().replace(" import _pytree", "._pytree")]
    assert [path.name for path in users] == ["pytree.py"]
