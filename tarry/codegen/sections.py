"""What the lists of operators in a YAML say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tarry.codegen.entries import Entry
from tarry.codegen.model import Position, Problem, Section
from tarry.codegen.natives import Natives

FORWARD = (Section.FULL_CODEGEN, Section.SUPPORTED)
"""The lists whose operators have kernels for the backend's own key."""


class SectionChecks:
    """Looks for what contradicts itself; what is wrong goes to `problems`."""

    def __init__(
        self,
        entries: Mapping[Section, Sequence[Entry]],
        known: Natives,
        problems: list[Problem],
        *,
        out_is_primary: bool,
    ) -> None:
        self.entries = entries
        self.natives = known
        self.problems = problems
        self.out_is_primary = out_is_primary

    def error(self, position: Position, message: str, hint: str = "") -> None:
        self.problems.append(Problem(position, message, hint))

    def run(self, *, is_complete: bool) -> None:
        """`is_complete`: all lists could be read, so that what is in none of them is known."""
        self._check_twice()
        self._check_autograd()
        if is_complete:
            self._check_symint()
        self._check_details()

    def _check_twice(self) -> None:
        """An operator is once in a list; and what is generated in full is in no other."""
        for section, entries in self.entries.items():
            first: dict[str, Entry] = {}
            for entry in entries:
                if entry.function is not None and entry.name in first:
                    line = first[entry.name].position.line
                    message = f"{entry.name} is listed twice under {section}; first in line {line}"
                    self.problems.append(Problem(entry.position, message, is_warning=True))  # as torchgen has it
                first.setdefault(entry.name, entry)
        full = {entry.name: entry for entry in self.entries[Section.FULL_CODEGEN]}
        for section, why in (
            (Section.SUPPORTED, "either its kernel is generated, or you write it"),
            (Section.IR_GEN, "full_codegen makes the node already"),
        ):
            for entry in self.entries[section]:
                if entry.name in full:
                    self.error(
                        entry.position,
                        f"{entry.name} is under {section} and, in line {full[entry.name].position.line}, under "
                        f"{Section.FULL_CODEGEN}: {why}",
                        "Remove one of them.",
                    )

    def _check_autograd(self) -> None:
        """All variants of an operator have kernels for the backend's key, or all for its autograd key."""
        forward = {entry.name: entry for section in FORWARD for entry in self.entries[section]}
        for entry in self.entries[Section.AUTOGRAD]:
            if entry.function is None:
                continue
            group = [str(other.func.name) for other in self.natives.grouped(entry.function)]
            mixed = [name for name in (entry.name, *group) if name in forward]
            if mixed:
                other = forward[mixed[0]]
                same = "is" if other.name == entry.name else f"is a variant of {other.name}, which is"
                self.error(
                    entry.position,
                    f"{entry.name} is under autograd, and {same} under {other.section} in line "
                    f"{other.position.line}: the variants of an operator have a forward kernel or an autograd kernel, "
                    "not both",
                    "Remove one of them.",
                )

    def _check_symint(self) -> None:
        listed = {entry.name for section in Section if section != Section.SYMINT for entry in self.entries[section]}
        # What a mistyped entry was meant to be is not missing: the one mistake has been reported.
        meant = {name for entries in self.entries.values() for entry in entries for name in entry.meant}
        for entry in self.entries[Section.SYMINT]:
            if entry.function is not None and entry.name not in listed | meant:
                self.error(
                    entry.position,
                    f"{entry.name} is under symint, and in no other list",
                    "symint says how the kernels of listed operators take sizes: list it, or remove it here.",
                )

    def _check_details(self) -> None:
        for section in Section:
            for entry in self.entries[section]:
                function, details = entry.function, entry.details
                if details.get("define_meta") and not details.get("structured"):
                    self.error(entry.position, f"{entry.name} has `define_meta: true` without `structured: true`")
                if not details.get("structured") or function is None:
                    continue
                if not function.structured and function.structured_delegate is None:
                    self.error(entry.position, f"{entry.name} is not structured in PyTorch")
                elif not self.out_is_primary:
                    self.error(
                        entry.position,
                        f"{entry.name} has `structured: true`, which needs `use_out_as_primary: true`",
                        "A structured kernel is an out kernel, of which the other variants are made.",
                    )
