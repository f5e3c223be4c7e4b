"""The command: read the YAML, check it and what the author wrote, make all files, then write, compare or list them."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tarry.codegen import output
from tarry.codegen.checks import Functions, check_kernels, check_shapes, module_name, not_python
from tarry.codegen.emit.coverage import Coverage, emit_coverage
from tarry.codegen.emit.kernels import KernelSpec, emit_backend, emit_declarations, emit_kernels, emit_written
from tarry.codegen.emit.listing import backend_listing, emit_table, to_json
from tarry.codegen.emit.nodes import NodeOptions, emit_node_base, emit_nodes
from tarry.codegen.emit.python import header
from tarry.codegen.emit.shapes import emit_shape_imports, emit_shapes, has_shape_function
from tarry.codegen.model import Backend, LazySchema, Position, Problem
from tarry.codegen.naming import BUILT_IN_BACKENDS, default_name
from tarry.codegen.natives import natives, torch_version
from tarry.codegen.op_table import OpEntry, operator_rules
from tarry.codegen.plan import Plan, make_plan
from tarry.codegen.reading import read_backend

FILES = (
    "__init__.py",
    "node_base.py",
    "nodes.py",
    "non_native_nodes.py",
    "shape_inference.py",
    "kernels.py",
    "declarations.py",
    "written.py",
    "backend.py",
    "operators.json",
    "COVERAGE.md",
)
"""Every file that may be generated; one that a run does not make, but an earlier run did, is removed."""


@dataclass(frozen=True)
class Options:
    """What the command was asked for."""

    source_yaml: Path
    output_dir: Path | None = None
    impl_path: Path | None = None
    shape_inference_path: Path | None = None
    gen_ts_lowerings: bool = False
    node_base: str = ""
    backend_name: str = ""
    dry_run: bool = False
    check: bool = False
    json: bool = False
    quiet: bool = False

    @property
    def inputs(self) -> list[Path]:
        """The files that are read."""
        given = (self.source_yaml, self.impl_path, self.shape_inference_path)
        return [path for path in given if path is not None]

    @property
    def command(self) -> str:
        """The command that makes the same files again."""
        words = ["python", "-m", "tarry.codegen", "--source-yaml", str(self.source_yaml)]
        words += ["--output-dir", str(self.output_dir)]
        for name, value in (
            ("--impl-path", self.impl_path),
            ("--shape-inference-path", self.shape_inference_path),
            ("--node-base", self.node_base),
            ("--backend-name", self.backend_name),
        ):
            words += [name, str(value)] if value else []
        return shlex.join(words + (["--gen-ts-lowerings"] if self.gen_ts_lowerings else []))


@dataclass
class Result:
    """What a run found. `files` is empty where there are errors."""

    problems: list[Problem] = field(default_factory=list)
    backend: Backend | None = None
    files: dict[Path, str] = field(default_factory=dict)

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if not problem.is_warning]


def generate(options: Options) -> Result:
    """Everything up to the text of the files."""
    backend, problems = read_backend(options.source_yaml)
    result = Result(problems, backend)
    if backend is None:
        return result
    work = _Generation(options, backend)
    result.problems = sorted([*problems, *work.check()], key=lambda problem: problem.position)
    if not result.errors and options.output_dir is not None:
        result.files = {options.output_dir / name: text for name, text in work.files().items()}
        result.problems += [problem for path, text in result.files.items() for problem in not_python(path, text)]
    return result


def run(options: Options) -> int:
    """Run the command; returns its exit code: 0, or 1 if something is wrong or, with --check, stale."""
    out, err = sys.stdout, sys.stderr
    result = generate(options)
    if result.errors or result.backend is None:
        return _report_problems(result.problems, err)
    for warning in result.problems:
        print(warning, file=err)
    if options.json:
        print(to_json(backend_listing(result.backend)), end="", file=out)
        if options.output_dir is None:
            return 0
    if options.output_dir is None:
        print(result.backend, file=out)
        return 0
    leftovers = _leftovers(options.output_dir, result.files)
    if options.check:
        return _report_stale(options, [*output.stale(result.files, whatever_command=True), *leftovers], err)
    in_the_way = output.obstacles([*result.files, *leftovers], options.inputs)
    if in_the_way:
        return _report_problems(in_the_way, err)
    if options.dry_run:
        changed = output.stale(result.files)
    else:
        try:
            changed = output.write(result.files)
            for path in leftovers:
                path.unlink()
        except OSError as error:
            print(f"{error.filename or options.output_dir}: error: cannot be written: {error.strerror}", file=err)
            return 1
    if not options.quiet and not options.json:
        _report(options, result, changed, leftovers, out)
    return 0


def _leftovers(folder: Path, made: dict[Path, str]) -> list[Path]:
    """Files of an earlier run that this one does not make."""
    paths = [folder / name for name in FILES]
    return [path for path in paths if path not in made and path.is_file() and output.is_generated(path)]


def _report_problems(problems: list[Problem], err: TextIO) -> int:
    for problem in problems:
        print(problem, file=err)
    count = sum(not problem.is_warning for problem in problems)
    print(f"{count} error{'s' if count > 1 else ''}; nothing was written", file=err)
    return 1


def _report_stale(options: Options, stale: list[Path], err: TextIO) -> int:
    if not stale:
        return 0
    for path in stale:
        print(f"{path}: error: not what {options.source_yaml} gives", file=err)
    print(f"{len(stale)} of the generated files are stale; run\n    {options.command}", file=err)
    return 1


def _report(options: Options, result: Result, changed: list[Path], removed: list[Path], out: TextIO) -> None:
    verb = "would write" if options.dry_run else "wrote"
    for path in changed:
        print(f"{verb} {path}", file=out)
    for path in removed:
        print(f"{'would remove' if options.dry_run else 'removed'} {path}", file=out)
    same = len(result.files) - len(changed)
    done = "to write" if options.dry_run else "written"
    print(f"{result.backend}; {len(changed)} files {done}, {same} as they were", file=out)


class _Generation:
    """One run over a backend that could be read."""

    def __init__(self, options: Options, backend: Backend) -> None:
        self.options = options
        self.backend = backend
        self.plan: Plan = make_plan(backend)
        self.name = options.backend_name or default_name(backend)
        self.impl = Functions(options.impl_path) if options.impl_path else None
        self.shapes = Functions(options.shape_inference_path) if options.shape_inference_path else None
        self.owed: list[LazySchema] = [function.schema for function in backend.shape_functions]
        self.own = [schema for schema in backend.non_native if has_shape_function(schema)]

    # ---- what the author owes

    def check(self) -> list[Problem]:
        problems: list[Problem] = []
        positions = {operator.name: operator.position for operator in self.backend.operators}
        if self.impl is not None:
            problems += self.impl.problems
            if self.impl.readable:
                problems += check_kernels(self.impl, [*self.plan.written, *self.plan.autograd], positions)
        if self.shapes is not None:
            problems += self.shapes.problems
            if self.shapes.readable:
                problems += check_shapes(self.shapes, self.owed, positions)
                problems += check_shapes(self.shapes, self.own, self.backend.non_native_positions)
        if not re.fullmatch(r"[A-Za-z_][\w-]*", self.name or "_"):
            where = Position("--backend-name")
            problems.append(Problem(where, f"{self.name!r} is not a name", "Use letters, digits, '_' and '-'."))
        if self.name in BUILT_IN_BACKENDS:
            message = f"{self.name!r} is a backend that comes with tarry"
            problems.append(Problem(Position("--backend-name"), message, "Choose another name."))
        return problems

    # ---- the files

    def files(self) -> dict[str, str]:
        command = self.options.command
        made = {
            "__init__.py": header(command, f"The backend {self.name}."),
            "nodes.py": emit_nodes(self.backend.nodes, self._node_options(self.owed), "Nodes of ATen operators."),
        }
        if self.backend.non_native:
            summary = "Nodes that are no ATen operators."
            made["non_native_nodes.py"] = emit_nodes(self.backend.non_native, self._node_options(self.own), summary)
        if self.options.node_base:
            made["node_base.py"] = emit_node_base(self.options.node_base, command)
        if self.owed or self.own:
            made["shape_inference.py"] = self._shape_module()
        generated, written = self._kernels()
        autograd = self.plan.autograd if self.impl is not None else ()
        made["kernels.py"] = emit_kernels(generated, command)
        made["declarations.py"] = emit_declarations([*self.plan.written, *self.plan.autograd], command)
        module = module_name(self.impl.path) if self.impl is not None and (written or autograd) else ""
        made["written.py"] = emit_written(written, autograd, module, command)
        made["backend.py"] = emit_backend(self.name, self._class_name(), self.backend.source.name, command)
        made["operators.json"] = emit_table(self._rows(), torch_version(), command)
        made["COVERAGE.md"] = emit_coverage(self._coverage(written), command)
        return made

    def _node_options(self, shaped: list[LazySchema]) -> NodeOptions:
        names = frozenset(schema.name for schema in shaped)
        return NodeOptions(self.options.command, self.options.gen_ts_lowerings, bool(self.options.node_base), names)

    def _shape_module(self) -> str:
        """The author's shape functions, or stubs of them."""
        command = self.options.command
        if self.shapes is None:
            return emit_shapes(self.owed, self.own, command)
        return emit_shape_imports([*self.owed, *self.own], module_name(self.shapes.path), command)

    def _kernels(self) -> tuple[list[KernelSpec], list[KernelSpec]]:
        """Generated and written kernels: one that is to be generated, but the author has, is the author's."""
        if self.impl is None:
            return list(self.plan.generated), []
        given = [spec for spec in self.plan.generated if spec.function in self.impl.defined]
        generated = [spec for spec in self.plan.generated if spec not in given]
        return generated, sorted([*self.plan.written, *given], key=lambda spec: spec.schema.name)

    def _class_name(self) -> str:
        return "".join(part[:1].upper() + part[1:] for part in re.split(r"[_-]", self.name)) + "Backend"

    def _rows(self) -> list[OpEntry]:
        """The recorder's rows: of the operators that are listed and of their pure forms."""
        names = {operator.name for operator in self.backend.operators}
        names |= {operator.functional for operator in self.backend.operators if operator.functional}
        rules = operator_rules()
        return [rules.entry(natives().by_name[name]) for name in sorted(names)]

    def _coverage(self, written: list[KernelSpec]) -> Coverage:
        known = natives()
        rules = operator_rules()
        kernels = {name for spec in (*self.plan.generated, *written) for name in spec.graph_names}
        functional = {}
        for name, function in known.by_name.items():
            if str(function.func.kind().name) != "functional":
                pure = known.functional(function)
                if pure is not None:
                    functional[name] = str(pure.func.name)
        return Coverage(
            backend=self.backend,
            name=self.name,
            torch_version=torch_version(),
            kernels=frozenset(kernels),
            unwritten=frozenset(name for spec in self.plan.written for name in spec.graph_names) - kernels,
            never_called=self.plan.never_called,
            functional=functional,
            table=sorted((rules.entry(function) for function in known.by_name.values()), key=lambda row: row.name),
        )
