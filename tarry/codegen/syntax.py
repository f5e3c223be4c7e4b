"""Why a text is not YAML: a look at its lines, since a parser notices most mistakes only further below.

A missing space, quote or colon makes YAML read on, often to the end of the file. The lines of a backend's YAML have few
forms (a key, an entry of a list, a continuation of what is open), so the line that has none of them is the mistake.
This runs only on a text that is known to be wrong: what it says about a line decides where an error is, not whether
there is one.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from tarry.codegen.model import Position, Problem

# A quoted text, where one may begin, or a comment: what is in either says nothing about the form of the line.
_QUOTED_OR_COMMENT = re.compile(r"""(?<![^\s\[{,])(?:'(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|\#.*)""")
_OPEN_QUOTE = re.compile(r"""(?<![^\s\[{,])['"]""")
_OPEN_BRACKET = re.compile(r"(?:- +)*(?:[\w.]+ *: +)?([\[{])")
_BLOCK_TEXT = re.compile(r".*(?:: +|- +)[|>][-+\d]*")
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2022"
_CONTEXTS = ("while scanning a simple key", "while scanning a quoted scalar", "while parsing a flow")
_COLUMNS = "Check the indentation: all entries of a list begin in the same column."
_SPACES = "Use spaces."


def syntax_problems(path: Path, text: str, error: yaml.YAMLError, keys: Sequence[str]) -> list[Problem]:
    """What is wrong with a text that the parser refused, in the order of its lines. `keys` are those that it may have
    at its top."""
    return line_problems(path, text, keys) or [_parsers_problem(path, text, error)]


def line_problems(path: Path, text: str, keys: Sequence[str]) -> list[Problem]:
    """Lines of a text that have none of the forms that lines have, in order."""
    found = [
        Problem(Position(str(path), mistake.line, mistake.column), mistake.message, mistake.hint)
        for mistake in _Lint(text, keys).mistakes()
    ]
    return sorted(found, key=lambda problem: problem.position)


def _parsers_problem(path: Path, text: str, error: yaml.YAMLError) -> Problem:
    """The parser's own words, where the lines look well."""
    mark, context = getattr(error, "problem_mark", None), getattr(error, "context", None) or ""
    if mark is None or context.startswith(_CONTEXTS):  # what is open is wrong, not where it was noticed
        mark = getattr(error, "context_mark", None) or mark
    if mark is None:  # a character that YAML does not allow; the reader gives its place in the text
        offset = getattr(error, "position", 0)
        before = text[:offset] if isinstance(offset, int) else ""
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return Problem(Position(str(path), line, column), f"this is not YAML: {str(error).splitlines()[0]}")
    what = f"{context} {getattr(error, 'problem', None) or ''}".strip() or str(error).splitlines()[0]
    lines = text.splitlines()
    hint = _COLUMNS
    if re.search(r":\s*\S+.*:\s", lines[mark.line] if mark.line < len(lines) else ""):
        hint = "A text with ': ' in it has to be in quotes."
    return Problem(Position(str(path), mark.line + 1, mark.column + 1), f"this is not YAML: {what}", hint)


@dataclass(frozen=True)
class _Line:
    """A line that says something: `text` is without its indentation and comment, quoted texts blotted out."""

    number: int
    indent: int
    text: str
    raw: str

    @property
    def is_entry(self) -> bool:
        return self.text == "-" or self.text.startswith("- ")

    @property
    def is_structure(self) -> bool:
        """Whether no text or list that is open could go on like this: an entry, or a key at the top."""
        return self.is_entry or (self.indent == 0 and re.match(r"\w+ *:( |$)", self.text) is not None)


@dataclass(frozen=True)
class _Mistake:
    line: int
    column: int
    message: str
    hint: str


class _Lint:
    def __init__(self, text: str, keys: Sequence[str]) -> None:
        self.keys = keys
        self.lines = [line for number, raw in enumerate(text.split("\n"), 1) if (line := _line(number, raw)).text]
        self.wrong: set[int] = set()

    def mistakes(self) -> Iterator[_Mistake]:
        """At most one for a line."""
        for look in (self._characters, self._words, self._columns):
            found = [mistake for mistake in look() if mistake.line not in self.wrong]
            self.wrong.update(mistake.line for mistake in found)
            yield from found

    def _block_lines(self) -> Iterator[int]:
        """Indices of the lines that are not inside of a text or list that an earlier line opened and a later closes."""
        index = 0
        while index < len(self.lines):
            yield index
            index = self._end(index)

    def _end(self, index: int) -> int:
        """The index after what a line opens; that of the next line if it opens nothing, or never closes it."""
        line = self.lines[index]
        if _BLOCK_TEXT.fullmatch(line.text):
            end = index + 1
            while end < len(self.lines) and self.lines[end].indent > line.indent:
                end += 1
            return end
        return self._closing(index) or index + 1

    def _closing(self, index: int) -> int | None:
        """The index after the line that closes the quote or bracket that a line leaves open; None if there is none."""
        line = self.lines[index]
        quote = _OPEN_QUOTE.search(line.text)
        bracket = _OPEN_BRACKET.match(line.text)
        depth = _depth(line.text)
        for end, later in enumerate(self.lines[index + 1 :], index + 1):
            if later.is_structure:
                return None
            depth += _depth(later.text)
            if (quote and quote[0] in later.raw) or (not quote and bracket and depth <= 0):
                return end + 1
        return None

    # ---- what is wrong with a line by itself

    def _characters(self) -> Iterator[_Mistake]:
        for index in self._block_lines():
            line = self.lines[index]
            indentation, column = line.raw[: line.indent], line.indent + 1
            strange = next((char for char in indentation if char != " "), None)
            gap = re.match(r"-([^\S ])", line.text)
            if strange == "\t":
                at = indentation.index("\t") + 1
                yield _Mistake(line.number, at, "this line is indented with a tab, which YAML does not allow", _SPACES)
            elif strange is not None:
                at = indentation.index(strange) + 1
                message = f"this line is indented with {_named(strange)}, which is no space to YAML"
                yield _Mistake(line.number, at, message, _SPACES)
            elif line.text[0] in _DASHES:
                rest = line.text[1:].strip()
                message = f"this entry begins with {_named(line.text[0])}, not with '-'"
                yield _Mistake(line.number, column, message, f"Write `- {rest}`.")
            elif gap and gap[1] != "\t":
                message = f"after the dash is {_named(gap[1])}, which is no space to YAML"
                yield _Mistake(line.number, column + 1, message, f"Write `- {line.text[2:].strip()}`.")
            elif re.match(r"-[^\s-]", line.text):
                hint = f"Write `- {line.text[1:]}`."
                yield _Mistake(line.number, column, "there is no space after the dash of this entry", hint)
            else:
                yield from self._unclosed(index)

    def _unclosed(self, index: int) -> Iterator[_Mistake]:
        line = self.lines[index]
        quote, bracket = _OPEN_QUOTE.search(line.text), _OPEN_BRACKET.match(line.text)
        if not quote and not (bracket and _depth(line.text) > 0):
            return
        if self._closing(index) is None:
            opening = quote or bracket
            assert opening is not None
            mark, offset = opening[opening.re.groups], opening.start(opening.re.groups)
            closing = {"[": "]", "{": "}"}.get(mark, mark)
            message = f"the {'quote' if quote else 'bracket'} {mark} that opens here is not closed"
            yield _Mistake(line.number, line.indent + offset + 1, message, f"Write a {closing} after it.")

    # ---- what is wrong with a line among its neighbours

    def _words(self) -> Iterator[_Mistake]:
        """A word alone is a key that lacks its colon, or an entry that lacks its dash."""
        for index in self._block_lines():
            line = self.lines[index]
            word = line.text.partition(" ")[0]
            alone = re.fullmatch(r"[\w.]+", line.text) is not None
            if line.indent == 0 and (word in self.keys or (alone and self._like_a_key(index))):
                message = f"the key {word!r} lacks its colon"
                rest = line.text[len(word) :].strip()
                yield _Mistake(line.number, 1, message, f"Write `{word}:{' ' if rest else ''}{rest}`.")
            elif alone and self._like_an_entry(index):
                yield _Mistake(line.number, line.indent + 1, "this entry lacks its `- `", f"Write `- {line.text}`.")

    def _like_a_key(self, index: int) -> bool:
        near = difflib.get_close_matches(self.lines[index].text.lower().replace("-", "_"), self.keys, n=1)
        beside = self.lines[max(index - 1, 0) : index + 2]
        return bool(near) or not any(line.is_entry and line.indent == 0 for line in beside)

    def _like_an_entry(self, index: int) -> bool:
        before = self.lines[index - 1] if index else None
        after = self.lines[index + 1] if index + 1 < len(self.lines) else None
        if before is None:
            return False
        return before.is_entry or (before.text.endswith(":") and after is not None and after.is_entry)

    def _columns(self) -> Iterator[_Mistake]:
        """The entries of a list of plain words begin in the same column."""
        group: list[_Line] = []
        for index in [*self._block_lines(), len(self.lines)]:
            line = self.lines[index] if index < len(self.lines) else None
            if line is not None and (line.number in self.wrong or re.fullmatch(r"- +[\w.:]+", line.text)):
                group += [line] if line.number not in self.wrong else []
            elif line is None or line.is_structure or line.text.endswith(":"):
                yield from self._misplaced(group)
                group = []

    def _misplaced(self, group: Sequence[_Line]) -> Iterator[_Mistake]:
        """Those that begin in another column than most; of two that differ, the one that is unlike the other lists."""
        here = Counter(line.indent for line in group)
        everywhere = Counter(line.indent for line in self.lines if line.is_entry)
        common = max(here, key=lambda indent: (here[indent], everywhere[indent]), default=0)
        for line in group:
            if line.indent != common:
                message = "this entry is not indented like its neighbours"
                yield _Mistake(line.number, line.indent + 1, message, _COLUMNS)


def _line(number: int, raw: str) -> _Line:
    raw = raw.rstrip("\r")
    plain = _QUOTED_OR_COMMENT.sub(lambda found: "" if found[0][0] == "#" else "q" * len(found[0]), raw)
    return _Line(number, len(raw) - len(raw.lstrip()), plain.strip(), raw)


def _depth(text: str) -> int:
    return sum(text.count(mark) for mark in "[{") - sum(text.count(mark) for mark in "]}")


def _named(char: str) -> str:
    """A character that looks like another, by its name: "a no-break space (U+00A0)"."""
    name = unicodedata.name(char, "a character").lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name} (U+{ord(char):04X})"
