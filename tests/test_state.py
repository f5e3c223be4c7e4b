"""State that lives as long as the process is listed in docs/state.md, all of it and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.module_state import of_cpp, of_python

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tarry"


def _listed() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| `([^`]+\.(?:py|cpp|h))` \| ([^|]+)", (ROOT / "docs" / "state.md").read_text(), re.MULTILINE)
    return [(file, name) for file, names in rows for name in re.findall(r"`(\w+)`", names)]


def _found() -> set[tuple[str, str]]:
    finders = {".py": of_python, ".cpp": of_cpp, ".h": of_cpp}
    paths = [path for path in PACKAGE.rglob("*") if path.suffix in finders]
    return {(str(path.relative_to(PACKAGE)), name) for path in paths for name in finders[path.suffix](path)}


def test_all_state_is_listed_once_with_its_reason() -> None:
    listed, found = _listed(), _found()
    assert found - set(listed) == set(), "pass it around in an object, or list it in docs/state.md with its reason"
    assert set(listed) - found == set(), "gone: take it out of docs/state.md"
    assert [row for row, count in Counter(listed).items() if count > 1] == []


def test_python_state_is_found(tmp_path: Path) -> None:
    source = """
import functools, threading
CONSTANT = {"a": 1}
_changed: dict[str, int] = {}
_assigned = 0
_lock = threading.Lock()
class Settings: ...
settings = Settings()
@functools.cache
def cached(): ...
def change():
    global _assigned
    _assigned = 1
    _changed["a"] = 2
    CONSTANT["a"] + 1
"""
    path = tmp_path / "module.py"
    path.write_text(source)
    assert of_python(path) == {"_changed", "_assigned", "_lock", "settings", "cached"}


def test_native_state_is_found(tmp_path: Path) -> None:
    source = """
std::atomic<int64_t> limit{1};
thread_local int32_t region = 0;
constexpr int kMost = 3;
struct Owner {
  std::atomic<bool> field{false};
  static Owner* find(int key);
};
static int helper(int x) {
  static auto* instance = new Owner();
  static const int constant = 1;
  return x;
}
"""
    path = tmp_path / "part.cpp"
    path.write_text(source)
    assert of_cpp(path) == {"limit", "region", "instance"}
