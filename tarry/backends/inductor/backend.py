"""Inductor: the whole step as one FX graph, decomposed and compiled by torch's own compiler, on CPU and CUDA."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tarry.backends.base import Backend, Capabilities, Computation, PythonNumber, Run
from tarry.backends.fx import FxProgram, Signature, lower, takes_number
from tarry.backends.fx.opaque import is_masked, is_opaque
from tarry.backends.fx.symbolic import SymbolicFxProgram, lower_symbolic
from tarry.backends.inductor.artifact import Generated
from tarry.backends.inductor.capture import Capture
from tarry.backends.inductor.composed import Raw, compose
from tarry.backends.inductor.guards import Guards
from tarry.backends.inductor.kernels import Kernel, bind, build, uncompiled
from tarry.backends.inductor.launch import Listing, NotUnderstoodError, read_list
from tarry.backends.inductor.lifetimes import short_lifetimes
from tarry.backends.inductor.numerics import as_eager_rounds, decompositions, signed_zeros
from tarry.backends.inductor.phases import has_phases, kept_apart
from tarry.backends.inductor.settings import apply_settings, fingerprint, is_json, settings
from tarry.backends.inductor.symbolic import SymbolicSizes, check_results
from tarry.backends.lowering import with_all_inputs
from tarry.codegen.op_table import facts
from tarry.errors import Unsupported
from tarry.ir.graph import Graph, Node, Number, Value
from tarry.ir.layout import VIEW_RULES
from tarry.ir.sizes import Symbols
from tarry.passes.pieces import Pieces

# Inductor's entry point for graphs that are flat and need no autograd is not public: checked on torch 2.11 and 2.13.
# All uses of it are in this file.


@dataclass(frozen=True)
class Compiled(Computation):
    """With what Inductor has made, where that is at hand."""

    raw: Raw | None = None


@dataclass(frozen=True)
class _Generated:
    """What Inductor has made of a graph, whose kernels may not be compiled yet."""

    graph: Graph
    program: FxProgram
    compiled: Any
    source: Callable[[], str]
    guards: Guards | None = None

    @property
    def function(self) -> Any:
        """The generated code itself."""
        return getattr(self.compiled, "current_callable", None) or self.compiled


_lock = threading.Lock()  # Inductor's configuration is patched process-wide while a graph is compiled


class InductorBackend(Backend):
    """Compiles with Inductor. Parameters and other replaced inputs are updated in place.

    `options` are Inductor's (`torch._inductor.config`), as for torch.compile. On a CUDA device, each compiled step
    becomes one CUDA graph if nothing in it has to run on the host; `cudagraphs=False` turns that off. Random operators
    draw the numbers that the reference path draws for the same seed. With `device_random=True`, dropout draws by
    Inductor's own generator: other numbers, in the kernels around it instead of one of its own.
    """

    name = "inductor"
    capabilities = Capabilities(updates_in_place=True, symbolic_sizes=True, pieces=True)
    compile_policy = "background"

    def __init__(
        self,
        device: str = "cpu",
        *,
        cudagraphs: bool = True,
        device_random: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(device)
        self.cudagraphs = cudagraphs
        self.device_random = device_random
        self.options = dict(options or {})
        self._counts: Counter[str] = Counter()

    def metrics(self) -> Mapping[str, float]:
        """`cuda_graphs`: captures of a step; `not_captured`: steps that cannot be (the logger "tarry" says why)."""
        return dict(self._counts)

    def takes_number(self, node: Node, number: Number, varied: bool) -> bool:
        return takes_number(node, number, varied)

    def runs_ahead(self, graph: Graph) -> bool:
        # Opaque operators are written in Python, and those that are not PyTorch's own may be.
        here = torch.device(self.device)
        if here.type != "cpu" and not self.cudagraphs:
            return False

        def is_native(node: Node) -> bool:
            if not is_opaque(node) or is_masked(node, here):
                return True
            # On a GPU, a random operator is kernels once the program is a graph.
            return here.type == "cuda" and not node.kept and not facts(node.op).numbers_on_host

        return all(not facts(node.op).is_custom and is_native(node) for node in graph.nodes)

    def compile(self, graph: Graph) -> Computation:
        (made,) = self.compile_all([graph])
        return made

    def compile_all(self, graphs: Sequence[Graph]) -> list[Computation]:
        def generated(graph: Graph) -> _Generated:
            program = self._lower(graph)
            fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
            with torch.no_grad(), fake_mode:
                examples = program.example_inputs()
            with self._generating(graph):
                return _Generated(graph, program, *_compile(program, fake_mode, examples))

        return self._built(lambda: [generated(graph) for graph in graphs])

    def load(self, graph: Graph, data: bytes) -> Computation:
        stored = Generated.from_bytes(data)
        guards = stored.guards

        def function() -> tuple[FxProgram, Any]:
            # Lowering defines the operators that the source names.
            program = self._lower(graph) if guards is None else self._lower_symbolic(graph, guards.symbols)
            with _lock, self._configured(graph):
                return program, stored.function()

        native = stored.link() if stored.listing is not None else None
        raw = None
        if native is None:
            raw = Raw(*function())
            run, native = self._runnable(raw, None)
        else:
            run = _on_first_use(lambda: _runner(*function()))
        return Compiled(run, graph, frozenset(stored.in_place), stored.source, native, lambda: data, guards, raw)

    def compose(self, graph: Graph, pieces: Pieces, parts: Sequence[Computation]) -> Computation | None:
        raws = [part.raw for part in parts if isinstance(part, Compiled) and part.raw is not None]
        if not self._captures or len(raws) < len(parts):
            return None
        raw = compose(graph, pieces, raws)
        run, native = self._runnable(raw, None)
        text = functools.partial(pieces.text, [part.backend_text for part in parts])
        return Computation(run, graph, raw.signature.in_place, text, native)

    @property
    def _captures(self) -> bool:
        return torch.device(self.device).type == "cuda" and self.cudagraphs

    def _runnable(self, raw: Raw, native: Any) -> tuple[Run, Any]:
        """How a program is run, by Python and natively."""
        # A CUDA graph has the sizes it was captured with.
        if self._captures and not isinstance(raw.signature, SymbolicFxProgram):
            capture = Capture(raw.signature, raw.function, self._counts)
            return capture.run, capture.program
        return _runner(*raw), native

    def _lower(self, graph: Graph) -> FxProgram:
        return lower(_without_scattered_updates(graph), self.device, inductor_random=self.device_random)

    def _lower_symbolic(self, graph: Graph, symbols: int) -> SymbolicFxProgram:
        # Not by Inductor's own generator: it has no seed of ours.
        return lower_symbolic(_without_scattered_updates(graph), self.device, symbols)

    def fingerprint(self) -> str:
        return fingerprint(self.device, self._arguments())

    def recipe(self) -> Any:
        if type(self) is not InductorBackend:
            return None
        made = {"device": self.device, "arguments": self._arguments(), "settings": settings()}
        return made if is_json(made) else None

    @classmethod
    def from_recipe(cls, recipe: Any) -> InductorBackend:
        apply_settings(recipe["settings"])
        return cls(recipe["device"], **recipe["arguments"])

    def _arguments(self) -> dict[str, Any]:
        return {"cudagraphs": self.cudagraphs, "device_random": self.device_random, "options": self.options}

    def compile_symbolic(self, graph: Graph, symbols: Symbols) -> Computation:
        def generated() -> _Generated:
            program = self._lower_symbolic(graph, len(symbols))
            sizes = SymbolicSizes(symbols)
            fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes.environment)
            with torch.no_grad(), fake_mode:
                examples = program.symbolic_inputs(sizes.symbols)
            with self._generating(graph):
                made = _compile(program, fake_mode, examples, first=len(symbols))
            return _Generated(graph, program, *made, sizes.guards())

        (computation,) = self._built(lambda: [generated()])
        return computation

    def _built(self, generate: Callable[[], list[_Generated]]) -> list[Computation]:
        """The computations of what Inductor generates, with their kernels compiled. Inductor finds libraries again that
        it has built before, also one that was being written when its process was killed: that is removed."""
        with _giving_up(), _lock:
            try:
                return self._built_once(generate())
            except Exception as error:
                if not _remove_torn_library(str(error)):
                    raise
            return self._built_once(generate())

    def _built_once(self, made: Sequence[_Generated]) -> list[Computation]:
        lists = [self._read_list(each) for each in made]
        with self._configured(made[0].graph):
            build(kernel for _, kernels in filter(None, lists) for kernel in kernels)
        return [self._computation(each, found) for each, found in zip(made, lists, strict=True)]

    def _read_list(self, made: _Generated) -> tuple[Listing, list[Kernel]] | None:
        try:
            return read_list(made.function, made.source(), made.program) if self.device == "cpu" else None
        except NotUnderstoodError:
            return None

    def _computation(self, made: _Generated, found: tuple[Listing, list[Kernel]] | None) -> Computation:
        program, native, listing = made.program, None, None
        if found is not None:
            with contextlib.suppress(NotUnderstoodError):
                placed = found[0].placed(found[1])
                native, listing = placed.link(), placed
        if native is None:
            with self._configured(made.graph):
                bind(made.function)
        raw = Raw(program, made.function)
        run, native = self._runnable(raw, native)

        def artifact() -> bytes:
            return Generated.of(made.compiled, program.in_place, listing, made.guards).to_bytes()

        return Compiled(run, made.graph, program.in_place, made.source, native, artifact, made.guards, raw)

    @contextlib.contextmanager
    def _configured(self, graph: Graph) -> Iterator[None]:
        from torch._inductor import config

        options = {
            "size_asserts": False,  # the runtime checks the inputs by the structure of the graph
            "fallback_random": not self.device_random,
            **short_lifetimes(self.device, graph),
            **as_eager_rounds(),
            **self.options,
        }
        with config.patch(options), _known_instructions(self.device), signed_zeros():
            yield

    @contextlib.contextmanager
    def _generating(self, graph: Graph) -> Iterator[None]:
        """Within the block, Inductor generates code, and compiles no kernels for a CPU."""

        @contextlib.contextmanager
        def configured() -> Iterator[None]:
            with _lock, self._configured(graph):
                yield

        later = uncompiled(configured) if self.device == "cpu" else contextlib.nullcontext()
        with self._configured(graph), later:
            yield


@contextlib.contextmanager
def _known_instructions(device: str) -> Iterator[None]:
    """Within the block, vector instructions are used if the processor has them. Inductor would also compile and load a
    library for each set of them, in processes of their own, which takes longer than a small graph does. Every compiler
    that can build tarry's native part knows them, and a kernel that cannot be built sends the step to the reference
    path."""
    from torch._inductor import config, cpu_vec_isa

    asked = torch.device(device).type == "cpu" and getattr(config.cpp, "vec_isa_ok", False) is None
    if not asked or platform.machine() not in ("x86_64", "AMD64"):
        yield
        return
    # Two sets beyond AVX512's first are tried whatever the setting says.
    sets = (("VecAVX512", "_avx512_bf16_code"), ("VecAVX512VNNI", "_avx512_vnni_code"))
    known = {getattr(getattr(cpu_vec_isa, name, None), code, None) for name, code in sets}
    check = cpu_vec_isa.VecISA.check_build
    trusted = mock.patch.object(cpu_vec_isa.VecISA, "check_build", lambda isa, code: code in known or check(isa, code))
    with config.patch({"cpp.vec_isa_ok": True}), trusted:
        yield


@contextlib.contextmanager
def _giving_up() -> Iterator[None]:
    """Whatever goes wrong in there means that the graph cannot be compiled."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        message = str(error).strip().splitlines() or [""]
        raise Unsupported(None, f"Inductor gave up: {type(error).__name__}: {message[0]}") from error


def why_not(device: str) -> str:
    """Why Inductor cannot be used here, in one line; empty if it can."""
    try:
        os.getcwd()  # where there is none, importing PyTorch's compiler fails
        if device.startswith("cuda"):
            from torch.utils._triton import has_triton

            return "" if has_triton() else "Inductor needs Triton on CUDA devices, which is not installed"
        if any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
            return ""  # looking closer would import Inductor, which takes a second and may never be needed
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"Inductor does not work here ({first})"
    return ""


def _remove_torn_library(message: str) -> bool:
    """Remove the library of Inductor's cache that could not be loaded, if this is what a message says."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.utils import clear_caches

    found = re.search(
        r"(/[^\s:]+\.so): (file too short|invalid ELF header|cannot read file data|ELF load command)", message
    )
    library = Path(found[1]) if found else None
    if library is None or not library.is_relative_to(cache_dir()):
        return False
    library.unlink(missing_ok=True)
    clear_caches()  # in memory
    return True


def _compile(program: FxProgram, fake_mode: FakeTensorMode, examples: list[Any], first: int = 0) -> tuple[Any, Any]:
    """Have Inductor generate code for an FX graph; the inputs of the IR graph come from position `first` on."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    # What a factory makes of symbolic sizes has to be a fake tensor, too.
    symbolic = fake_mode if isinstance(program, SymbolicFxProgram) else contextlib.nullcontext()
    with torch.no_grad():
        with symbolic:
            traced = _trace(program.module, examples)
        (output,) = [node for node in traced.graph.nodes if node.op == "output"]
        if isinstance(program, SymbolicFxProgram):
            check_results(program, [node.meta["val"] for node in output.args[0]], examples[:first])
        apart = kept_apart() if has_phases(program.module) else contextlib.nullcontext()
        with apart, torch._guards.tracing(torch._guards.TracingContext(fake_mode)), V.set_fake_mode(fake_mode):
            traced = joint_graph_passes(traced)
            (output,) = [node for node in traced.graph.nodes if node.op == "output"]
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
            with config.patch(allow_buffer_reuse=config.allow_buffer_reuse and not _scatters_into_cat(traced)):
                compiled = compile_fx_inner(
                    traced,
                    examples,
                    cudagraphs=BoxedBool(False),  # see capture.py
                    static_input_idxs=[first + k for k in _updated_inputs(program)],
                )
    return compiled, lambda: getattr(compiled, "source_code", "") or ""


def _trace(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph in the operators that Inductor knows; its nodes keep the marks of those that they come from."""
    from torch.fx.traceback import preserve_node_meta

    table = decompositions()
    if not has_phases(module):
        return make_fx(module, decomposition_table=table)(*examples)
    with preserve_node_meta():
        return make_fx(torch.fx.Interpreter(module).run, decomposition_table=table)(*examples)


def _without_scattered_updates(graph: Graph) -> Graph:
    """The graph with no update in place of an input that a scatter writes into.

    Inductor (2.11, 2.13) lets such a scatter write into the input's buffer at once, whatever comes after it: a value
    that is returned between the scatter and the last write then shows the last write, and a check that fails after the
    scatter finds the input changed.
    """
    scattered = set(graph.inputs)  # an input, a view of one, or what a scatter made of one
    found: dict[Value, Value] = {value: value for value in graph.inputs}
    hit: set[Value] = set()
    for node in graph.nodes:
        base = node.args[0] if node.args and isinstance(node.args[0], Value) else None
        scatters = facts(node.op).scatters
        if base in scattered and (scatters or node.op in VIEW_RULES or node.op == "aten::clone"):
            for value in node.results:
                scattered.add(value)
                found[value] = found[base]
            if scatters:
                hit.add(found[base])
    return replace(
        graph,
        replaces=tuple(None if index is not None and graph.inputs[index] in hit else index for index in graph.replaces),
    )


def _updated_inputs(program: FxProgram) -> list[int]:
    """Inputs whose buffers stay where they are from step to step, since they are updated in place."""
    replaces = program.graph.replaces
    return [index for k, index in enumerate(replaces) if k in program.in_place and index is not None]


def _scatters_into_cat(traced: torch.fx.GraphModule) -> bool:
    """Whether a scatter's result is concatenated. Inductor (2.11, 2.13) lets such a scatter write into a part of the
    concatenation's buffer, and may hand that buffer on to something else while the part is still read: wrong values,
    unless buffers are not handed on at all."""
    return any(
        isinstance(source, torch.fx.Node) and ("scatter" in str(source.target) or "index_put" in str(source.target))
        for node in traced.graph.nodes
        if node.target is torch.ops.aten.cat.default
        for source in node.args[0]
    )


def _on_first_use(make: Callable[[], Run]) -> Run:
    """A program that is made when it is first run: most never are, since there is a native one."""
    made: list[Run] = []

    def run(inputs: list[Any], numbers: list[PythonNumber]) -> Sequence[Any]:
        if not made:
            made.append(make())
        return made[0](inputs, numbers)

    return run


def _runner(program: Signature, function: Any) -> Run:
    count = len(program.graph.numbers)  # what follows them are the values of symbols

    def run(inputs: list[Any], numbers: list[PythonNumber]) -> list[Any]:
        return program.arranged(function([*numbers[count:], *inputs, *program.number_tensors(numbers)]))

    return with_all_inputs(program.graph, program.device, run)
