"""Files of at most 600 lines and functions of at most 60, in Python and C++."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("tarry", "tests", "benchmarks", "scripts", "docs/examples")
SOURCES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".pyi", ".cpp", ".h")
)
MAX_FILE, MAX_FUNCTION = 600, 60


def _python_functions(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def _cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Functions at the level of a namespace: clang-format begins and ends these, and only these, at the margin."""
    first: int | None = None
    for number, line in enumerate(text.splitlines()):
        if first is None and re.match(r"\w.*[({]$", line) and not re.match(r"(namespace|struct|class|enum)\b", line):
            first = number
        elif line == "}" and first is not None:
            yield text.splitlines()[first], number - first + 1
            first = None
        elif re.match(r"\};|\w.*;$", line):
            first = None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE, "cut it by idea"
    functions = _cpp_functions(text) if path.suffix in (".cpp", ".h") else _python_functions(text)
    assert {name: length for name, length in functions if length > MAX_FUNCTION} == {}


def test_long_functions_are_found() -> None:
    body = "  x();\n" * 60
    assert [length for _, length in _cpp_functions(f"void f(\n    int x) {{\n{body}}}\nvoid g() {{\n}}\n")] == [63, 2]
    assert list(_python_functions("def f():\n" + "    x()\n" * 60)) == [("f", 61)]
