"""YAML with positions: a tree of nodes that know their line and column, and what is wrong with the file as YAML."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tarry.codegen.model import Position, Problem
from tarry.codegen.syntax import syntax_problems

# The C loader is several times quicker; a PyYAML built without it has only the other one.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class SourceError(Exception):
    """A file cannot be read at all."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = list(problems)


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
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def read(path: Path, keys: Sequence[str] = ()) -> Document:
    """Read a file, or say why it is no YAML. `keys` are those that it may have at its top."""
    text = read_text(path, "a YAML file")
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise SourceError(*syntax_problems(path, text, error, keys)) from error
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


def pairs(node: Any, done: set[int] | None = None) -> Iterator[tuple[Any, Any]]:
    """Keys and values of a mapping, after its own those that it merges (`<<: *other`) and does not have itself. What is
    merged again has nothing new: `done` are the mappings that are merged, or being merged."""
    done = set() if done is None else done
    done.add(id(node))
    merges = [(key, value) for key, value in node.value if key.tag.endswith(":merge")]
    own = [pair for pair in node.value if pair not in merges] if merges else node.value
    yield from own
    seen = {key.value for key, _ in own if is_text(key)}
    for key, value in merges:
        others = list(items(value)) if is_list(value) else [value]
        if not all(is_mapping(other) and other is not node for other in others):
            yield key, value  # not a merge: the reader says what it found instead
            continue
        for other in others:
            for merged in pairs(other, done) if id(other) not in done else ():
                if not (is_text(merged[0]) and merged[0].value in seen):
                    yield merged
                    seen |= {merged[0].value} if is_text(merged[0]) else set()


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
