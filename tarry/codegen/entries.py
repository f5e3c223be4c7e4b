"""The entries of a list of operators: a name, or a name with details."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tarry.codegen import source
from tarry.codegen.model import Position, Problem, Section
from tarry.codegen.natives import Natives
from tarry.codegen.source import Document

if TYPE_CHECKING:
    from torchgen.model import NativeFunction

DETAILS = ("structured", "define_meta", "device_guard")
"""What a YAML can say about one operator: `- mul.out: {structured: true}`. All are truth values."""


MOST_HINTS = 100
"""Mistakes for which near names are looked up, which takes a while."""


@dataclass(frozen=True)
class Entry:
    """One entry. `function` is None if there is no such operator; `meant` are then the names nearest to it."""

    name: str
    section: Section
    position: Position
    function: NativeFunction | None
    details: Mapping[str, bool] = field(default_factory=dict)
    meant: tuple[str, ...] = ()


class EntryReader:
    """Reads one list of operators."""

    def __init__(self, document: Document, known: Natives, section: Section, problems: list[Problem]) -> None:
        self.document = document
        self.natives = known
        self.section = section
        self.problems = problems
        self._lists: set[int] = set()  # nested ones, which aliases may repeat

    def error(self, position: Position, message: str, hint: str = "") -> None:
        self.problems.append(Problem(position, message, hint))

    def read(self, node: Any) -> Iterator[Entry]:
        waiting = [node]
        while waiting:
            for item in source.items(waiting.pop(0)):
                position = self.document.at(item)
                if source.is_text(item):
                    yield from self._names(item, position)
                elif source.is_mapping(item):
                    yield from self._detailed(item, position)
                elif source.is_null(item):
                    self.error(position, f"an entry of {self.section} is empty", "Write an operator after `- `.")
                elif not source.is_list(item):
                    self.error(position, f"expected an operator, found {source.describe(item)}")
                elif id(item) not in self._lists:
                    self._lists.add(id(item))
                    hint = "Lists are not nested: write one `- ` before each operator."
                    self.error(position, f"an entry of {self.section} is a list", hint)
                    waiting.append(item)

    def _names(self, item: Any, position: Position) -> Iterator[Entry]:
        joined = source.joined(self.document, item)
        if joined is not None:
            self.problems.append(joined.problem)
        for name in [item.value] if joined is None else joined.parts:
            yield self._entry(name, position, silent=joined is not None)

    def _entry(
        self, name: str, position: Position, details: Mapping[str, bool] | None = None, *, silent: bool = False
    ) -> Entry:
        function = self.natives.by_name.get(name)
        if function is not None:
            return Entry(name, self.section, position, function, details or {})
        near = tuple(self.natives.nearest(name)) if len(self.problems) < MOST_HINTS else ()
        if not silent:
            self.error(position, f"there is no operator {name!r} in torch", _did_you_mean(near))
        return Entry(name, self.section, position, None, details or {}, near)

    def _detailed(self, item: Any, position: Position) -> Iterator[Entry]:
        """`- mul.out: {structured: true}`, or the details beside the name instead of below it."""
        beside: dict[str, bool] = {}
        names: list[tuple[str, Position, dict[str, bool]]] = []
        for key, value in source.pairs(item):
            at = self.document.at(key)
            if not source.is_text(key):
                self.error(at, f"expected an operator, found {source.describe(key)}")
            elif key.value in DETAILS:
                self._detail(key.value, value, at, beside)
            elif source.is_mapping(value):
                names.append((key.value, at, self._details(value)))
            elif source.is_null(value):
                names.append((key.value, at, {}))
                if len(item.value) == 1:
                    self.error(at, f"{key.value} ends in a colon, but no details follow", "Remove the colon.")
            else:
                self.error(
                    at,
                    f"expected an operator with details, found {key.value!r} with {source.describe(value)}",
                    f"An operator's details are: {', '.join(DETAILS)}.",
                )
        if len(names) > 1:
            listed = ", ".join(name for name, _, _ in names)
            self.error(position, f"one entry names several operators: {listed}", "Write a `- ` before each.")
        for name, at, below in names:
            yield self._entry(name, at, {**below, **beside})

    def _details(self, node: Any) -> dict[str, bool]:
        details: dict[str, bool] = {}
        for key, value in source.pairs(node):
            at = self.document.at(key)
            if source.is_text(key) and key.value in DETAILS:
                self._detail(key.value, value, at, details)
                continue
            name = key.value if source.is_text(key) else source.describe(key)
            near = difflib.get_close_matches(str(name), DETAILS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"An operator's details are: {', '.join(DETAILS)}."
            self.error(at, f"unknown detail {name!r}", hint)
        return details

    def _detail(self, name: str, value: Any, at: Position, details: dict[str, bool]) -> None:
        switch = source.boolean(value)
        if switch is None:
            self.error(at, f"{name!r} is true or false, not {source.describe(value)}")
        elif name in details:
            self.error(at, f"{name!r} is there twice")
        else:
            details[name] = switch


def _did_you_mean(near: tuple[str, ...]) -> str:
    return f"Did you mean {' or '.join(near)}?" if near else "native_functions.yaml of torch has all names."
