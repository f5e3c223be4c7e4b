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
    "metrics": {"events"},
    "native": {"errors", "config", "trust"},
    "codegen": {"errors", "trust"},
    "generated": {"config", "codegen", "trust"},
    "nodes": {"codegen", "generated", "ir"},
    "ir": {"errors", "codegen"},  # codegen: the table of operators
    "passes": {"errors", "ir", "codegen"},
    "store": {"errors", "events", "ir", "native", "trust"},
    "backends": {"errors", "ir", "passes", "native", "codegen", "generated", "store"},
    "runtime": {"errors", "config", "events", "ir", "passes", "backends", "native", "store"},
    "replay": {"errors", "events", "native", "runtime"},
    "device": {"errors"},
    "custom_ops": {"errors", "native", "ir", "passes", "backends", "_api"},
    "_custom_op": {"custom_ops"},
    "_custom_ops": {"custom_ops"},
    "examples": {"__init__"},  # as anybody's program
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
