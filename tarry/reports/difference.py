"""Two graphs side by side: which lines of their text are equal, for graphs of any size.

Values are numbered anew in each graph, so lines are compared without these numbers.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

SMALL = 1_000
"""Lines that are compared each with each; of more, first those are matched that occur once."""
LIKE = 0.5
"""What part of the operators two graphs have in common of which one is shown beside the other."""

NEAR = 50
"""How many graphs before it a graph is compared with."""

Hunk = tuple[int, int, int, int]
"""Lines a[0]:a[1] of the old graph are lines b[0]:b[1] of the new one, and differ."""


def keys(stage: Mapping[str, Any]) -> list[str]:
    """The lines of a stage without the numbers of its values, and with their sites."""
    sites = [*stage["sites"], ""]  # -1 is the last
    return [f"{_VALUE.sub('%', text)}#{sites[site]}" for text, site in zip(stage["text"], stage["site"], strict=True)]


_VALUE = re.compile(r"%\d+")


def hunks(old: Sequence[str], new: Sequence[str]) -> list[Hunk]:
    """What differs, in order."""
    found = _hunks(old, new, 0, len(old), 0, len(new))
    merged: list[Hunk] = []
    for hunk in found:
        if merged and merged[-1][1] == hunk[0] and merged[-1][3] == hunk[2]:
            merged[-1] = (merged[-1][0], hunk[1], merged[-1][2], hunk[3])
        else:
            merged.append(hunk)
    return merged


def _hunks(old: Sequence[str], new: Sequence[str], a: int, a_end: int, b: int, b_end: int) -> Iterator[Hunk]:
    while a < a_end and b < b_end and old[a] == new[b]:
        a, b = a + 1, b + 1
    while a < a_end and b < b_end and old[a_end - 1] == new[b_end - 1]:
        a_end, b_end = a_end - 1, b_end - 1
    if a == a_end or b == b_end:
        if (a, b) != (a_end, b_end):
            yield (a, a_end, b, b_end)
        return
    if max(a_end - a, b_end - b) <= SMALL:
        matcher = SequenceMatcher(None, old[a:a_end], new[b:b_end], autojunk=False)
        for tag, i, i_end, j, j_end in matcher.get_opcodes():
            if tag != "equal":
                yield (a + i, a + i_end, b + j, b + j_end)
        return
    anchors = _anchors(old, new, a, a_end, b, b_end)
    if not anchors:
        yield (a, a_end, b, b_end)
        return
    for i, j in [*anchors, (a_end, b_end)]:
        yield from _hunks(old, new, a, i, b, j)
        a, b = i, j


def _anchors(old: Sequence[str], new: Sequence[str], a: int, a_end: int, b: int, b_end: int) -> list[tuple[int, int]]:
    """Lines that occur once in each, in an order that both have: the longest increasing sequence of them."""
    before, after = Counter(old[a:a_end]), Counter(new[b:b_end])
    at = {new[j]: j for j in range(b, b_end) if after[new[j]] == 1}
    pairs = [(i, at[old[i]]) for i in range(a, a_end) if before[old[i]] == 1 and old[i] in at]
    tails: list[int] = []
    ends: list[int] = []  # the pair that ends the sequence of each length
    previous: list[int] = []
    for k, (_, j) in enumerate(pairs):
        length = bisect_left(tails, j)
        previous.append(ends[length - 1] if length else -1)
        tails[length : length + 1] = [j]
        ends[length : length + 1] = [k]
    chain: list[tuple[int, int]] = []
    k = ends[-1] if ends else -1
    while k >= 0:
        chain.append(pairs[k])
        k = previous[k]
    return chain[::-1]


def likest(graphs: Sequence[Sequence[str]]) -> list[int | None]:
    """For each graph, given by its operators, the one before it that is most like it; of several, the latest."""
    counted = [Counter(operators) for operators in graphs]
    found: list[int | None] = []
    for index, mine in enumerate(counted):
        best, at = LIKE, None
        for other in range(max(0, index - NEAR), index):
            size = max(len(graphs[index]), len(graphs[other]), 1)
            share = (mine & counted[other]).total() / size
            if share == 1 and list(graphs[index]) == list(graphs[other]):
                share = 2.0  # in the same order
            if share >= best:
                best, at = share, other
        found.append(at)
    return found
