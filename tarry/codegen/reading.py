"""From a backend's YAML to the model, with every mistake that can be seen on the way."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarry.codegen import source
from tarry.codegen.entries import Entry, EntryReader
from tarry.codegen.model import (
    Backend,
    BackendOperator,
    LazySchema,
    Position,
    Problem,
    Section,
    ShapeFunction,
)
from tarry.codegen.naming import with_distinct_names
from tarry.codegen.natives import Natives, dispatch_keys, is_device_key, natives
from tarry.codegen.non_native import read_non_native
from tarry.codegen.op_table import RULES_FILE, Kind, operator_rules
from tarry.codegen.schema import (
    Rejected,
    class_name,
    function_name,
    kernel_name,
    native_schema,
    owes_shape_function,
    shape_function,
)
from tarry.codegen.sections import FORWARD, SectionChecks
from tarry.codegen.source import Document, SourceError
from tarry.codegen.syntax import line_problems

if TYPE_CHECKING:
    from torchgen.model import NativeFunction

_TEXTS = ("backend", "cpp_namespace", "class_name", "extra_headers")
_NAMES = {
    "cpp_namespace": (r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*", "For example: `cpp_namespace: torch::mine`."),
    "class_name": (r"[A-Za-z_]\w*", "For example: `class_name: MyFunctions`."),
}
"""Texts that are names, how these are spelled, and an example."""

_SWITCHES = ("use_out_as_primary", "device_guard")
KEYS = (*_TEXTS, *_SWITCHES, *(str(section) for section in Section), "non_native")
"""Every key of a YAML: those of PyTorch's two generators. Tarry's own file has `operators` besides."""


class BackendYamlError(Exception):
    """A YAML has mistakes: all of them are in `problems`, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def load_backend(path: str | Path) -> Backend:
    """Read and check a backend's YAML against the installed torch. Raises BackendYamlError with all its mistakes."""
    backend, problems = read_backend(Path(path))
    errors = [problem for problem in problems if not problem.is_warning]
    if backend is None or errors:
        raise BackendYamlError(errors)
    return backend


def read_backend(path: Path) -> tuple[Backend | None, list[Problem]]:
    """The model as far as the YAML makes sense, and everything that is wrong with it, in the order of the file."""
    try:
        document = source.read(path, KEYS)
    except SourceError as error:
        return None, error.problems
    reader = _Reader(document, natives())
    backend = reader.read()
    return backend, sorted(reader.problems, key=lambda problem: problem.position)


class _Reader:
    def __init__(self, document: Document, known: Natives) -> None:
        self.document = document
        self.natives = known
        self.problems: list[Problem] = []
        self.values: dict[str, Any] = {}
        self.entries: dict[Section, list[Entry]] = {section: [] for section in Section}
        self.non_native: list[LazySchema] = []
        self.non_native_positions: dict[str, Position] = {}
        self._is_own = document.path.resolve() == RULES_FILE.resolve()

    def error(self, position: Position, message: str, hint: str = "") -> None:
        self.problems.append(Problem(position, message, hint))

    def read(self) -> Backend | None:
        start = Position(str(self.document.path))
        root = self.document.root
        if root is None or source.is_null(root):
            self.error(start, "the file is empty", "A backend needs at least `backend:` and `cpp_namespace:`.")
            return None
        if not source.is_mapping(root):
            self.error(
                self.document.at(root),
                f"expected a mapping with the keys of a backend, found {source.describe(root)}",
                "Begin with `backend: PrivateUse1`, `cpp_namespace: mine`, `supported:`.",
            )
            return None
        self._read_keys(root)
        for key in ("backend", "cpp_namespace"):
            if key not in self.values:
                example = "PrivateUse1" if key == "backend" else "my_backend"
                self.error(start, f'the key "{key}" is missing', f"Write for example `{key}: {example}`.")
        self._add_every_leaf()
        self._check_dispatch_keys()
        primary = bool(self.values.get("use_out_as_primary"))
        checks = SectionChecks(self.entries, self.natives, self.problems, out_is_primary=primary)
        checks.run(is_complete="incomplete" not in self.values)
        return self._backend()

    # ---- keys

    def _read_keys(self, root: Any) -> None:
        first: dict[str, Position] = {}
        for key_node, value in source.pairs(root):
            position = self.document.at(key_node)
            if not source.is_text(key_node):
                self.error(position, f"expected a key, found {source.describe(key_node)}", _known_keys())
                continue
            key = self._key(key_node.value, position, first)
            if key is not None:
                first.setdefault(key, position)
                self._read_value(key, key_node, value)

    def _key(self, key: str, position: Position, first: Mapping[str, Position]) -> str | None:
        """The key that is meant: what a mistyped one holds is checked as well."""
        if key in first:
            self.error(position, f'the key "{key}" is there twice; first in line {first[key].line}', "Join the two.")
            return key
        if key in KEYS or (key == "operators" and self._is_own):
            return key
        near = difflib.get_close_matches(key.lower().replace("-", "_"), KEYS, n=1)
        hint = f'Did you mean "{near[0]}"?' if near else _known_keys()
        self.error(position, f'unknown key "{key}"', hint)
        return near[0] if near and near[0] not in first else None

    def _read_value(self, key: str, key_node: Any, value: Any) -> None:
        if key in _TEXTS:
            self._read_text(key, key_node, value)
        elif key in _SWITCHES:
            switch = source.boolean(value)
            if switch is None:
                found = source.describe(value)
                self.error(self._place(key_node, value), f'"{key}" is true or false, not {found}')
            self.values[key] = bool(switch)
        elif key == "operators":
            self.values[key] = value
        elif source.is_null(value):
            pass  # a list whose entries are all commented out
        elif key == Section.FULL_CODEGEN and source.is_text(value) and value.value == "*":
            self.values["every leaf"] = self.document.at(value)
        elif not source.is_list(value):
            self.values["incomplete"] = True
            self._not_a_list(key, key_node, value)
        elif key == "non_native":
            self.non_native += read_non_native(self.document, value, self.problems, self.non_native_positions)
        else:
            section = Section(key)
            reader = EntryReader(self.document, self.natives, section, self.problems)
            self.entries[section] += reader.read(value)

    def _not_a_list(self, key: str, key_node: Any, value: Any) -> None:
        first, last = value.start_mark.line + 1, value.end_mark.line + 1
        found = line_problems(self.document.path, self.document.text, KEYS) if source.is_text(value) else []
        found = [problem for problem in found if first <= problem.position.line <= last]
        if found:  # entries that YAML reads as one text, since the first of them is misspelled
            self.problems += found
            return
        self.error(
            self._place(key_node, value),
            f'"{key}" is a list, found {source.describe(value)}',
            "Write each entry on a line of its own, after `- `.",
        )

    def _place(self, key: Any, value: Any) -> Position:
        """A value's position; that of its key where there is no value to point to."""
        return self.document.at(key if source.is_null(value) else value)

    def _read_text(self, key: str, key_node: Any, value: Any) -> None:
        if source.is_null(value) or (source.is_text(value) and not value.value.strip()):
            if key in ("backend", "cpp_namespace"):
                self.error(self.document.at(key_node), f'"{key}" has no value')
                self.values[key] = ""
        elif not source.is_text(value):
            self.error(self.document.at(value), f'"{key}" is a text, found {source.describe(value)}')
            self.values[key] = ""
        elif key in _NAMES and not re.fullmatch(_NAMES[key][0], value.value):
            self.error(self.document.at(value), f'"{key}" is a name, found {value.value!r}', _NAMES[key][1])
            self.values[key] = ""
        else:
            self.values[key] = value.value
            self.values[f"{key}@"] = self.document.at(value)

    # ---- what the keys say together

    def _add_every_leaf(self) -> None:
        """`full_codegen: "*"`: whatever the recorder makes a node of, and no other list has."""
        position = self.values.get("every leaf")
        if position is None:
            return
        if not self._is_own:
            self.error(position, '"*" under full_codegen is only for the file of tarry itself', "List the operators.")
            return
        listed = {entry.name for entries in self.entries.values() for entry in entries}
        rules = operator_rules()
        for name, function in self.natives.by_name.items():
            if name not in listed and rules.kind(function) is Kind.RECORD and _has_node(function):
                self.entries[Section.FULL_CODEGEN].append(Entry(name, Section.FULL_CODEGEN, position, function))

    def _check_dispatch_keys(self) -> None:
        backend = self.values.get("backend")
        if not backend:
            return
        position = self.values["backend@"]
        keys = dispatch_keys()
        if any(self.entries[section] for section in FORWARD):
            if backend not in keys:
                near = difflib.get_close_matches(backend, keys, n=2, cutoff=0.5)
                hint = f"Did you mean {' or '.join(near)}? " if near else ""
                self.error(position, f"{backend!r} is no dispatch key", f"{hint}A device of one's own has PrivateUse1.")
                return
            if not is_device_key(backend):
                device = backend.removeprefix("Autograd")
                meant = f"Write `backend: {device}`" if device != backend and device in keys else "Use PrivateUse1"
                self.error(position, f"{backend} is a dispatch key, but not that of a device", f"{meant}.")
                return
            if backend in self.natives.own_keys:
                self.error(
                    position,
                    f"PyTorch has kernels of its own for {backend}",
                    "A backend outside PyTorch takes a key that PyTorch leaves free: PrivateUse1, XLA, Lazy.",
                )
                return
        if self.entries[Section.AUTOGRAD] and f"Autograd{backend}" not in keys:
            self.error(
                self.entries[Section.AUTOGRAD][0].position,
                f'there is no dispatch key "Autograd{backend}", so {backend} cannot have autograd kernels',
                "Leave out `autograd:`.",
            )

    # ---- the model

    def _backend(self) -> Backend:
        symint = {entry.name for entry in self.entries[Section.SYMINT]}
        operators = [
            made
            for section in (Section.FULL_CODEGEN, Section.IR_GEN, Section.SUPPORTED, Section.AUTOGRAD)
            for entry in _once(self.entries[section])
            if (made := self._operator(entry, section, symint)) is not None
        ]
        name = self.values.get("backend", "")
        namespace = self.values.get("cpp_namespace", "").rpartition("::")[2]
        return Backend(
            source=self.document.path,
            name=name,
            cpp_namespace=self.values.get("cpp_namespace", ""),
            class_name=self.values.get("class_name") or f"{name}NativeFunctions",
            operators=tuple(operators),
            nodes=with_distinct_names(_nodes(operators)),
            non_native=tuple(replace(schema, namespace=namespace) for schema in self.non_native),
            shape_functions=tuple(self._shape_functions(operators)),
            autograd_key=f"Autograd{name}" if self.entries[Section.AUTOGRAD] else None,
            extra_headers=self.values.get("extra_headers"),
            use_out_as_primary=self.values.get("use_out_as_primary", False),
            device_guard=self.values.get("device_guard", False),
            symint=tuple(entry.name for entry in self.entries[Section.SYMINT]),
            non_native_positions=self.non_native_positions,
        )

    def _operator(self, entry: Entry, section: Section, symint: set[str]) -> BackendOperator | None:
        function = entry.function
        if function is None:
            return None
        # An operator that has only a node (ir_gen) has no kernel, and what takes symbolic sizes is the kernel.
        takes_symints = entry.name in symint and (section is not Section.IR_GEN or self._has_kernel(entry.name))
        try:
            schema = native_schema(function, takes_symints=takes_symints)
        except Rejected as reason:
            if section in (Section.FULL_CODEGEN, Section.IR_GEN):
                hint = "Write its kernel yourself: list it under supported."
                self.error(entry.position, f"{entry.name} cannot have a node: {reason}", hint)
                return None
            schema = _opaque_schema(function)
        functional = self.natives.functional(function)
        return BackendOperator(
            name=entry.name,
            section=section,
            kernel=kernel_name(function, takes_symints),
            function=function_name(entry.name),
            schema=schema,
            position=entry.position,
            functional=None if functional is None else str(functional.func.name),
            details=entry.details,
        )

    def _has_kernel(self, name: str) -> bool:
        return any(entry.name == name for section in FORWARD for entry in self.entries[section])

    def _shape_functions(self, operators: Iterable[BackendOperator]) -> Iterable[ShapeFunction]:
        for operator in _by_name(operators):
            function = self.natives.by_name[operator.name]
            if operator.section is Section.FULL_CODEGEN and owes_shape_function(function):
                yield shape_function(function, operator.schema)


def _once(entries: Iterable[Entry]) -> Iterable[Entry]:
    """Entries without those that are listed a second time."""
    first: dict[str, Entry] = {}
    for entry in entries:
        first.setdefault(entry.name, entry)
    return first.values()


def _known_keys() -> str:
    return f"The keys are: {', '.join(KEYS)}."


def _has_node(function: NativeFunction) -> bool:
    try:
        native_schema(function)
    except Rejected:
        return False
    return True


def _opaque_schema(function: NativeFunction) -> LazySchema:
    """A schema for an operator that has a hand-written kernel only, and arguments that no node could hold."""
    name = str(function.func.name)
    return LazySchema(name, class_name(name), str(function.func), (), ())


def _by_name(operators: Iterable[BackendOperator]) -> list[BackendOperator]:
    unique = {(operator.name, operator.section): operator for operator in operators}
    return sorted(unique.values(), key=lambda operator: operator.name.replace("_.", "."))


def _nodes(operators: Iterable[BackendOperator]) -> list[LazySchema]:
    made: dict[str, LazySchema] = {}
    for operator in _by_name(operators):
        if operator.section in (Section.FULL_CODEGEN, Section.IR_GEN):
            made.setdefault(operator.name, operator.schema)
    return list(made.values())
