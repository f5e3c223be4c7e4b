"""The file of events: JSON lines, the first of which is a header. What stands in each line is data here.

docs/report.md shows these tables, and a test compares the two. A line of an event has the fields of its kind
(`tarry/events/kinds.py`), without those that have their default value. A reader takes lines and fields that it does not
know for those of a later version, and leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tarry.events.kinds import FIELDS as EVENT_FIELDS

VERSION = 1
"""Grows when a reader of the last version would misread a file."""


@dataclass(frozen=True)
class Field:
    """What stands under a name: a JSON type, what it means, and whether a line may leave it out."""

    type: type | tuple[type, ...]
    meaning: str
    optional: bool = False


_number = (int, float)

HEADER: dict[str, Field] = {
    "tarry_events": Field(int, "the version of this format"),
    "tarry": Field(str, "the version of tarry"),
    "torch": Field(str, "the version of PyTorch"),
    "python": Field(str, "the version of Python"),
    "command": Field(list, "the words of the command line"),
    "folder": Field(str, "the working folder"),
    "pid": Field(int, "the process"),
    "rank": Field(int, "which of the run's processes this is, from 0"),
    "world_size": Field(int, "how many processes the run has"),
    "started": Field(_number, "when recording began: seconds since 1970"),
    "before": Field(dict, "what `tarry.metrics.counters()` had counted before that"),
}

COMMON: dict[str, Field] = {
    "kind": Field(str, "what happened: a kind of event (docs/events.md), or one of the kinds below"),
    "t": Field(_number, "when it was over: seconds since recording began"),
    "thread": Field(int, "the thread that it happened on"),
}

OWN: dict[str, dict[str, Field]] = {
    "remedies": {
        "of": Field(dict, "for kinds of events: what to do about one that has no better advice of its own"),
    },
    "thread": {
        "thread": Field(int, "a thread, numbered in the order of appearance"),
        "name": Field(str, "its name"),
    },
    "graph": {
        "graph": Field(str, "the name of a graph: its key in hexadecimal, `-2` and so on for its further programs"),
        "key": Field(str, "the hash of its structure, which events of compiles have, too"),
        "backend": Field(str, "what compiled it"),
        "reason": Field(str, "in which way it is another graph than the one before; empty for the first of its kind"),
        "operators": Field(int, "how many operators were recorded"),
        "lines": Field((list, type(None)), "the first and the last line of the program that it was recorded from"),
        "origin": Field(
            str,
            "`compiled`, `stored` (all of it came from disk), `mixed`, `recorded` (the backend takes it as it is), or "
            "`compiling`: a line with the outcome may follow",
        ),
        "seconds": Field(_number, "how long that took"),
        "background": Field(bool, "whether the program went on meanwhile"),
        "note": Field(str, "what was left out of this file, if something was"),
    },
    "stage": {
        "graph": Field(str, "the graph"),
        "stage": Field(str, "`recorded`, the name of a pass, or `lowered`: as the backend was given it"),
        "inputs": Field(list, "`[value, type, bytes]` for each input"),
        "text": Field(list, "the nodes in order of execution, a line of text each"),
        "op": Field(list, "the operator of each node"),
        "operands": Field(list, "the values that each node reads"),
        "results": Field(list, "`[value, bytes]` for each value that a node makes; 0 bytes: it allocates nothing"),
        "views": Field(list, "`[value, owner]`: a value that is a window on the memory of another"),
        "updates": Field(list, "`[value, old]`: a value that a node makes by writing over another"),
        "outputs": Field(list, "`[value, input or null]`: the results, and the input whose memory each takes over"),
        "sites": Field(list, "lines of the program, as `file:line`"),
        "site": Field(list, "for each node an index into `sites`, or -1"),
        "modules": Field(list, "paths of modules, as `model.blocks.3.attn`"),
        "module": Field(list, "for each node an index into `modules`, or -1"),
    },
    "same_stage": {
        "graph": Field(str, "the graph"),
        "stage": Field(str, "a stage that changed nothing"),
        "as": Field(str, "the stage that it is equal to"),
    },
    "program": {
        "graph": Field(str, "the graph"),
        "text": Field(str, "what the backend made of it"),
    },
    "end": {
        "t": Field(_number, "when recording ended"),
        "counters": Field(dict, "`tarry.metrics.counters()`"),
        "backend": Field(str, "the backend in use, or empty"),
        "device": Field(str, "the real device, or empty"),
        "dropped": Field(int, "events that were left out, because there were too many"),
    },
}


def problems(line: Mapping[str, Any], *, header: bool = False) -> Iterator[str]:
    """What is wrong with a line, in words."""
    fields = HEADER if header else OWN.get(str(line.get("kind")), COMMON)
    for name, field in fields.items():
        if name not in line:
            if not field.optional:
                yield f"there is no {name!r}"
        elif not _fits(line[name], field.type):
            yield f"{name!r} is {type(line[name]).__name__}"
    if header:
        return
    if not isinstance(line.get("kind"), str):
        yield "'kind' is no text"
    elif isinstance(line.get("graph"), str) and not line["graph"].replace("-", "").isalnum():
        yield "'graph' is no name"
    elif line["kind"] == "stage" and isinstance(line.get("text"), list):
        columns = ("op", "operands", "results", "site", "module")
        yield from (f"{name!r} is too short" for name in columns if len(line.get(name) or ()) != len(line["text"]))
    elif line["kind"] not in OWN:
        for name in line.keys() & EVENT_FIELDS.keys():
            default = EVENT_FIELDS[name].default
            if default is not None and not _fits(line[name], _number if isinstance(default, int | float) else str):
                yield f"{name!r} is {type(line[name]).__name__}"


def _fits(value: Any, type_: type | tuple[type, ...]) -> bool:
    types = type_ if isinstance(type_, tuple) else (type_,)
    return isinstance(value, types) and (types != (int,) or not isinstance(value, bool))


def hexadecimal(key: tuple[int, int]) -> str:
    """The hash of a structure as text."""
    return "".join(f"{part % 2**64:016x}" for part in key)
