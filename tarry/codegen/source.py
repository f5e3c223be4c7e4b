"""YAML with positions: a tree of nodes that know their line and column, and what is wrong with the file as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tarry.codegen.model import Position, Problem

# The C loader is several times quicker; a PyYAML built without it has only the other one.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class SourceError(Exception):
    """The file cannot be read as YAML at all."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(frozen=True)
class Document:
    """A YAML file, composed but not constructed: `root` is a PyYAML node, None if the file says nothing."""

    path: Path
    text: str
    root: Any

    def at(self, node: Any) -> Position:
        return Position(str(self.path), node.start_mark.line + 1, node.start_mark.column + 1)

    def line(self, number: int) -> str:
        """A line by its number from 1."""
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


def read(path: Path) -> Document:
    """Read a file, or say in one problem why it is no YAML."""
    text = read_text(path, "a YAML file")
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise SourceError(_syntax_problem(path, text, error)) from error
    return Document(path, text, root)


def read_text(path: Path, expected: str) -> str:
    """The text of a file; SourceError if there is none."""
    start = Position(str(path))
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        near = _similar_files(path)
        raise SourceError(Problem(start, "there is no such file", near)) from None
    except IsADirectoryError:
        inside = sorted(str(item) for item in path.glob("*.yaml"))
        hint = f"It has: {', '.join(inside)}" if inside else ""
        raise SourceError(Problem(start, f"this is a directory, expected {expected}", hint)) from None
    except UnicodeDecodeError as error:
        raise SourceError(
            Problem(start, f"this is not text (byte {error.start} is no UTF-8), expected {expected}")
        ) from None
    except OSError as error:
        raise SourceError(Problem(start, f"cannot be read: {error.strerror or error}")) from None


def _similar_files(path: Path) -> str:
    import difflib

    if not path.parent.is_dir():
        return f"There is no directory {path.parent} either."
    near = difflib.get_close_matches(path.name, [item.name for item in path.parent.iterdir()], n=3)
    return f"Did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""


def _syntax_problem(path: Path, text: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = " ".join(str(part) for part in (getattr(error, "context", ""), getattr(error, "problem", "")) if part)
    if mark is None:  # a character that YAML does not allow; the reader gives its place in the text
        offset = getattr(error, "position", 0)
        before = text[:offset] if isinstance(offset, int) else ""
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return Problem(Position(str(path), line, column), f"this is not YAML: {str(error).splitlines()[0]}")
    line, column = mark.line + 1, mark.column + 1
    lines = text.splitlines()
    tab = _tab_in_indentation(lines, line)
    if tab:
        return Problem(
            Position(str(path), *tab), "this line is indented with a tab, which YAML does not allow", "Use spaces."
        )
    hint = "Check the indentation: all entries of a list begin in the same column."
    misplaced = _misplaced_entry(lines, line)
    if misplaced:
        dashed = lines[misplaced[0] - 1].lstrip().startswith("-")
        wrong = "is not indented like its neighbours" if dashed else "lacks its `- `"
        return Problem(Position(str(path), *misplaced), f"this entry {wrong}", hint)
    if re.search(r":\s*\S+.*:\s", lines[line - 1] if line <= len(lines) else ""):
        hint = "A text with ': ' in it has to be in quotes."
    return Problem(Position(str(path), line, column), f"this is not YAML: {what or str(error).splitlines()[0]}", hint)


def _tab_in_indentation(lines: list[str], near: int) -> tuple[int, int] | None:
    for number in (near, near + 1, near - 1):
        if 0 < number <= len(lines):
            indentation = re.match(r"\s*", lines[number - 1])
            if indentation and "\t" in indentation[0]:
                return number, indentation[0].index("\t") + 1
    return None


@dataclass(frozen=True)
class Joined:
    """Several entries of a list that YAML reads as one text, and the mistake that makes it do so."""

    parts: list[str]
    problem: Problem


def joined(document: Document, node: Any) -> Joined | None:
    """Whether a text is several entries: the lines after its first begin further to the right, or without a `- `."""
    first, last = node.start_mark.line + 1, node.end_mark.line + 1
    following = [number for number in range(first + 1, last + 1) if _content(document.line(number))]
    if not following or not re.search(r"\s", node.value):
        return None
    parts = [part for part in re.split(r"\s+(?:-\s+)?", node.value) if part]
    dashed = [number for number in following if _content(document.line(number)).startswith("-")]
    if dashed:
        # Where many lines agree and the first differs, the first is the one that is misplaced.
        line = first if len(dashed) > 1 else dashed[0]
        message = "this entry is not indented like its neighbours, so YAML reads them as one text"
        hint = "Let every `- ` of the list begin in the same column."
    else:
        line = following[0]
        message = f"this line lacks its `- `, so YAML reads it as a part of {parts[0]!r}, the entry before"
        hint = f"Write `- {_content(document.line(line))}`."
    text = document.line(line)
    position = Position(str(document.path), line, len(text) - len(text.lstrip()) + 1)
    return Joined(parts, Problem(position, message, hint))


def _content(line: str) -> str:
    """A line without its indentation and comment."""
    return re.sub(r"(^|\s)#.*", "", line).strip()


def _misplaced_entry(lines: list[str], near: int) -> tuple[int, int] | None:
    """The entry of a list, at or just before a line, that begins in another column than the entries around it, or not
    with a `- `."""
    top = min(near, len(lines))
    while top > 1 and re.match(r" *- ", lines[top - 1]):
        top -= 1
    if top < near and re.fullmatch(r" *[\w.]+", lines[top - 1].partition("#")[0].rstrip()):
        return top, len(lines[top - 1]) - len(lines[top - 1].lstrip()) + 1
    columns = {}
    for number in range(max(1, near - 4), min(len(lines), near + 4) + 1):
        entry = re.match(r"( *)- ", lines[number - 1])
        if entry:
            columns[number] = len(entry[1]) + 1
    if not columns:
        return None
    usual = max(set(columns.values()), key=list(columns.values()).count)
    odd = [number for number, column in columns.items() if column != usual and near - 1 <= number <= near]
    return (odd[0], columns[odd[0]]) if len(odd) == 1 else None


# ---- looking at nodes


def is_mapping(node: Any) -> bool:
    return isinstance(node, yaml.MappingNode)


def is_list(node: Any) -> bool:
    return isinstance(node, yaml.SequenceNode)


def is_null(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and bool(node.tag.endswith(":null"))


def is_text(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and bool(node.tag.endswith(":str"))


def boolean(node: Any) -> bool | None:
    """The value of a node that is a truth value; None if it is none."""
    if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":bool"):
        return node.value.lower() in ("true", "yes", "on")
    return None


def pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values of a mapping."""
    yield from node.value


def items(node: Any) -> Iterator[Any]:
    """Entries of a list."""
    yield from node.value


def describe(node: Any) -> str:
    """What a node is, for a message."""
    if is_mapping(node):
        return "a mapping"
    if is_list(node):
        return "a list"
    if is_null(node):
        return "nothing"
    kind = {"str": "the text", "int": "the number", "float": "the number", "bool": "the truth value"}
    return f"{kind.get(node.tag.rpartition(':')[2], 'the value')} {node.value!r}"
