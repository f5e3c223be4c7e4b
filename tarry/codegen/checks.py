"""What the author owes and has not written: kernels in --impl-path, shape functions in --shape-inference-path.

Files are parsed, not imported: they may need things that are not there when code is generated.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tarry.codegen.emit.kernels import KernelSpec, kernel_signature
from tarry.codegen.emit.python import identifier
from tarry.codegen.emit.shapes import shape_name, shape_signature
from tarry.codegen.model import LazySchema, Position, Problem
from tarry.codegen.source import SourceError, read_text


class Functions:
    """The functions that a Python file defines at its top level, or imports by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self.missed = 0
        """How many were looked for in vain: near names are looked up for the first of them only."""
        self.defined: dict[str, ast.FunctionDef | None] = {}
        try:
            tree = ast.parse(read_text(path, "a Python file"), str(path))
        except SourceError as error:
            self.problems += error.problems
        except SyntaxError as error:
            position = Position(str(path), error.lineno or 1, error.offset or 1)
            self.problems.append(Problem(position, f"this is not Python: {error.msg}"))
        except ValueError as error:  # a null byte
            self.problems.append(Problem(Position(str(path)), f"this is not Python: {error}"))
        else:
            for statement in tree.body:
                self._note(statement)

    def _note(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.FunctionDef):
            self.defined[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            self.defined.update((alias.asname or alias.name, None) for alias in statement.names)
        elif isinstance(statement, ast.Assign):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            self.defined.update(dict.fromkeys(names))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            self.defined[statement.target.id] = None
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            for inner in ast.iter_child_nodes(statement):
                if isinstance(inner, ast.stmt):
                    self._note(inner)

    @property
    def readable(self) -> bool:
        return not self.problems


def check_kernels(
    functions: Functions, specs: Iterable[KernelSpec], positions: Mapping[str, Position]
) -> list[Problem]:
    """A problem for each kernel that is missing, or takes other arguments than its operator has."""
    problems: list[Problem] = []
    for spec in specs:
        what = "autograd function" if spec.is_autograd else "kernel"
        owed = f"the {what} of {', '.join(spec.listed)}"
        position = positions[spec.listed[0]]
        problems += _check(functions, spec.function, spec.schema, owed, kernel_signature(spec), position)
    return problems


def check_shapes(
    functions: Functions, schemas: Iterable[LazySchema], positions: Mapping[str, Position]
) -> list[Problem]:
    """A problem for each shape function that is missing, or takes other arguments than its operator has."""
    problems: list[Problem] = []
    for schema in schemas:
        what = f"the shape function of {schema.name}"
        paste = f"from tarry.ir import typed as t\n{shape_signature(schema)}"
        problems += _check(functions, shape_name(schema), schema, what, paste, positions[schema.name])
    return problems


def _check(
    functions: Functions, name: str, schema: LazySchema, what: str, paste: str, position: Position
) -> list[Problem]:
    if name not in functions.defined:
        functions.missed += 1
        near = difflib.get_close_matches(name, functions.defined, n=1, cutoff=0.85) if functions.missed < 100 else []
        meant = f"It has {near[0]!r}; did you mean that?\n" if near else ""
        return [Problem(position, f"{functions.path} lacks {what}", f"{meant}Write there:\n{paste}")]
    found = functions.defined[name]
    wrong = "" if found is None else _mismatch(found.args, schema)
    if not wrong:
        return []
    assert found is not None
    at = Position(str(functions.path), found.lineno, found.col_offset + 1)
    return [Problem(at, f"{name} is {what}, but {wrong}", f"The operator has:\n{paste}")]


def _mismatch(args: ast.arguments, schema: LazySchema) -> str:
    """How a function's parameters differ from an operator's arguments; empty if they fit."""
    taken = len(args.posonlyargs) + len(args.args)
    needed = taken - len(args.defaults)
    given = len(schema.positional)
    if taken < given and args.vararg is None:
        return f"takes {taken} positional arguments where the operator has {given}"
    if needed > given:
        return f"needs {needed} positional arguments where the operator has {given}"
    names = {arg.arg for arg in args.kwonlyargs}
    wanted = {identifier(argument.name) for argument in schema.keyword_only}
    missing = sorted(wanted - names)
    if missing and args.kwarg is None:
        return f"lacks the keyword-only argument {missing[0]!r}"
    needed_names = {arg.arg for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is None}
    extra = sorted(needed_names - wanted)
    return f"needs a keyword-only argument {extra[0]!r} that the operator lacks" if extra else ""


def not_python(path: Path, text: str) -> list[Problem]:
    """That a generated module is no Python, with the class or function where: a mistake of the generator, which must
    not reach the disk."""
    if path.suffix != ".py":
        return []
    try:
        compile(text, str(path), "exec", dont_inherit=True)  # sees more than a parser: two parameters of one name
    except SyntaxError as error:
        lines = text.splitlines()[: error.lineno or 0]
        near = next((line.strip() for line in reversed(lines) if re.match(r"(class|def) ", line)), "its first lines")
        position = Position(str(path), error.lineno or 1, error.offset or 1)
        message = f"internal error of the generator: what it made is no Python ({error.msg}), at `{near}`"
        return [Problem(position, message, "Please report this with the operator's schema.")]
    return []


def module_name(path: Path) -> str:
    """The name by which a Python file is imported: its own, after the packages that it is in."""
    parts = [path.stem]
    folder = path.resolve().parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(part for part in parts if part != "__init__")
