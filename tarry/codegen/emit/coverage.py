"""The coverage report: what becomes of each native function on a backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tarry.codegen.model import Backend, Section
from tarry.codegen.op_table import Kind, OpEntry


@dataclass(frozen=True)
class Coverage:
    """`kernels` are operators as graphs have them; `functional` gives the pure form of each that writes."""

    backend: Backend
    name: str
    torch_version: str
    kernels: frozenset[str]
    unwritten: frozenset[str]
    never_called: Mapping[str, str]
    functional: Mapping[str, str]
    table: Sequence[OpEntry]


_MEANINGS = {
    "native": "the backend has a kernel for it, or for its pure form",
    "declared": "listed under `supported`, but no kernel was given with --impl-path",
    "decomposes": "PyTorch takes it apart before the backend sees it",
    "recorder": "tarry does it: allocation, views, copies",
    "data-dependent": "its shape depends on data: runs eagerly on the real device, and ends the step's graph",
    "falls back": "runs on the real device within the step, unless one of `decompositions()` takes it apart",
    "opaque": "of sparse and nested tensors: runs eagerly on the real device, and ends the step's graph",
    "missing": "of tensors that tarry does not have (quantized): a call of it raises",
}


def emit_coverage(made: Coverage, command: str) -> str:
    """The report in Markdown."""
    groups: dict[str, list[str]] = {status: [] for status in _MEANINGS}
    for entry in made.table:
        groups[_status(entry, made)].append(entry.name.removeprefix("aten::"))
    total = len(made.table)
    lines = [
        f"<!-- Generated. Do not edit: run\n  {command}\n-->",
        f"# What {made.name} covers",
        "",
        f"Of the {total} native functions of torch {made.torch_version}:",
        "",
        "| | operators | what happens |",
        "| --- | ---: | --- |",
        *(f"| {status} | {len(groups[status])} | {meaning} |" for status, meaning in _MEANINGS.items()),
        "",
        *_listed(made),
    ]
    for status in ("native", "declared", "falls back", "data-dependent", "decomposes", "recorder", "opaque", "missing"):
        if groups[status]:
            lines += [f"## {status.capitalize()}", "", _paragraph(groups[status]), ""]
    return "\n".join(lines)


def _status(entry: OpEntry, made: Coverage) -> str:
    name = entry.name.removeprefix("aten::")
    pure = made.functional.get(name, name)
    if pure in made.kernels and not entry.dynamic:
        return "native"
    if entry.kind in (Kind.KERNEL, Kind.VIEW):
        return "recorder"
    if entry.kind is Kind.DECOMPOSE:
        return "decomposes"
    if entry.kind is Kind.OPAQUE:
        return "opaque"
    if entry.kind is Kind.UNSUPPORTED:
        return "missing"
    if entry.dynamic:
        return "data-dependent"
    return "declared" if pure in made.unwritten else "falls back"


def _listed(made: Coverage) -> list[str]:
    backend = made.backend
    lines = [
        f"The YAML, `{backend.source.name}`, lists:",
        "",
        "| | operators |",
        "| --- | ---: |",
        *(
            f"| {section} | {sum(1 for _ in backend.of(section))} |"
            for section in Section
            if section is not Section.SYMINT
        ),
        f"| non_native | {len(backend.non_native)} |",
        "",
    ]
    if made.never_called:
        lines += ["Some of them never reach a backend of tarry:", "", "| operator | why |", "| --- | --- |"]
        lines += [f"| `{name}` | {why} |" for name, why in sorted(made.never_called.items())]
        lines.append("")
    return lines


def _paragraph(names: Iterable[str]) -> str:
    """Names separated by commas, in lines of bearable length."""
    lines, current = [], ""
    for name in names:
        if current and len(current) + len(name) > 110:
            lines.append(current.rstrip())
            current = ""
        current += f"`{name}`, "
    lines.append(current.rstrip().rstrip(","))
    return "\n".join(lines)
