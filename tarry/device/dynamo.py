"""torch.compile of functions on tarry tensors: Dynamo traces them as ever, and what it hands to Inductor is recorded.

Inductor has no code to generate for this device: its tensors have no memory yet, and what is recorded is compiled
later, together with the rest of the step. So a graph on tarry that reaches `compile_fx` is run as it is, each call at
the line that it was traced from. Graphs without a tensor of ours go to Inductor.

PyTorch's compiler takes seconds to import, and most programs do not need it: what is done to its modules is done when
they are first imported. Private names of PyTorch, checked on 2.11 and 2.13: `torch._dynamo.device_interface`,
`register_backend` of `torch._dynamo.backends.registry`, `compile_fx` and `V.aot_compilation` of
`torch._inductor.compile_fx`, `torch._C._dynamo.eval_frame.set_code_exec_strategy`, `_torchdynamo_disable` of functions,
`stack_trace` and `meta["example_value"]` (or `"val"`) of FX nodes.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from tarry.device import module as device

_log = logging.getLogger("tarry")


class Frame(NamedTuple):
    """A line that a node was traced from."""

    file: str
    line: int
    function: str


class Recorded:
    """What PyTorch's compiler does with graphs on tarry.

    `is_users` says of a file whether it belongs to the program itself; `report` is called with the line of each graph
    and its number of calls.
    """

    def __init__(self, is_users: Callable[[str], bool], report: Callable[[Frame | None, int], None]) -> None:
        self._is_users = is_users
        self._report = report
        self._has_said = False

    def install(self, after_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
        """Change modules of PyTorch's compiler once they are imported: `after_import(name, act)` calls `act` then."""
        after_import("torch._dynamo.device_interface", _register_interface)
        after_import("torch._inductor.compile_fx", self._wrap_inductor)
        after_import("torch._dynamo.backends.registry", self._register_backend)

    def _wrap_inductor(self, module: ModuleType) -> None:
        compile_fx = module.compile_fx

        @functools.wraps(compile_fx)
        def compile_or_record(model_: Any, example_inputs_: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model_, GraphModule) and _is_on_tarry(model_, example_inputs_):
                if module.V.aot_compilation:
                    raise RuntimeError(
                        "AOTInductor generates code for a device's memory, which tensors on 'tarry' have none of. Move "
                        "the exported program first: torch.export.passes.move_to_device_pass(program, 'cpu')"
                    )
                return self.program(model_)
            return compile_fx(model_, example_inputs_, *args, **kwargs)

        module.compile_fx = compile_or_record  # type: ignore[attr-defined]

    def _register_backend(self, module: ModuleType) -> None:
        def tarry(model: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
            """torch.compile(f, backend="tarry"): record what Dynamo has traced."""
            if not _is_on_tarry(model, inputs):
                raise RuntimeError(
                    "torch.compile(backend='tarry') records graphs on device 'tarry', and no tensor of this one is "
                    "there. Move the module and its inputs first: .to('tarry')"
                )
            return self.program(model)

        module.register_backend(tarry, name="tarry")

    def program(self, module: GraphModule) -> Callable[..., Any]:
        """A function that runs a graph, so that its operators are recorded."""
        calls = [node for node in module.graph.nodes if node.op in ("call_function", "call_method")]
        frames = {node: self._frames(node) for node in calls}
        where = next((found[0] for found in frames.values() if found), None) or self._caller()
        self._say(where)
        self._report(where, len(calls))
        return _at_their_lines(module, frames).forward

    def _frames(self, node: Node) -> list[Frame]:
        """The user's line that a node comes from, and the library's between it and torch, if there is one."""
        frames = list(_parsed(node.stack_trace or ""))
        user = next((frame for frame in reversed(frames) if self._is_users(frame.file)), None)
        library = next((frame for frame in reversed(frames) if "/torch/" not in frame.file), None)
        return [frame for frame in dict.fromkeys((user, library)) if frame is not None]

    def _caller(self) -> Frame | None:
        """The user's line that runs right now: for a graph of a module of torch's, that which calls it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame and Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    def _say(self, where: Frame | None) -> None:
        if not self._has_said:
            self._has_said = True
            place = f" ({where.file}:{where.line})" if where else ""
            _log.warning(
                "tarry: torch.compile%s: tensors are on 'tarry', so Inductor is not called; what Dynamo has traced is "
                "recorded, and compiled with the rest of the step. See docs/torch-compile-backends.md",
                place,
            )


def _is_on_tarry(module: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a tensor of ours is given to a graph, or made in it."""
    values = [node.meta.get("example_value", node.meta.get("val")) for node in module.graph.nodes]
    attributes = [*module.parameters(), *module.buffers()]
    return any(tensor.device.type == "tarry" for tensor in _tensors([*inputs, *values, *attributes]))


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def leave_alone(*functions: Callable[..., Any]) -> None:
    """Have Dynamo trace neither these functions nor what they call, as torch.compiler.disable does, which would import
    the compiler: reads and cuts end in Python, which is not the program's. Without these names in PyTorch, Dynamo
    tries, warns and gives up."""
    frames = torch._C._dynamo.eval_frame
    for function in functions:
        plain: Any = getattr(function, "__func__", function)
        plain._torchdynamo_disable = True
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
            frames.set_code_exec_strategy(plain.__code__, skip)


# ---- lines

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


def _parsed(trace: str) -> Iterator[Frame]:
    """The frames of a traceback in text form, from the outside in."""
    for file, line, function in _FRAME.findall(trace):
        yield Frame(file, int(line), function)


def _at_their_lines(module: GraphModule, frames: dict[Node, list[Frame]]) -> GraphModule:
    """The same graph, whose calls are made by functions that seem to stand where each was traced from: the recorder
    takes the line of a node from the frames of Python."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, lambda old: copies[old])
        if not frames.get(node):
            continue
        if copy.op == "call_method":
            copy.op, copy.target = "call_function", _method(str(copy.target))
        for frame in reversed(frames[node]):
            copy.target = _located(copy.target, frame)  # type: ignore[arg-type]
    return GraphModule(module, graph)


def _located(function: Callable[..., Any], frame: Frame) -> Callable[..., Any]:
    """A function that calls another, from the line of a frame."""
    code = _CALL.replace(
        co_filename=frame.file, co_firstlineno=frame.line, co_name=frame.function, co_qualname=frame.function
    )
    located = FunctionType(code, {}, "located", closure=(CellType(function),))
    located.__module__ = __name__
    return located


def _method(name: str) -> Callable[..., Any]:
    return lambda receiver, *args, **kwargs: getattr(receiver, name)(*args, **kwargs)


def _calling(function: Callable[..., Any]) -> CodeType:
    # On one line, which _located gives to it.
    return (lambda *args, **kwargs: function(*args, **kwargs)).__code__  # noqa: PLW0108 - a frame is what is wanted


_CALL = _calling(print)


# ---- the device, for Dynamo and Inductor


def _register_interface(module: ModuleType) -> None:
    class TarryInterface(module.DeviceInterface):  # type: ignore[name-defined]
        """What Dynamo asks of a device; `torch.tarry` has the answers."""

        Event = torch.Event
        Stream = torch.Stream

        class Worker:
            set_device = staticmethod(device.set_device)
            current_device = staticmethod(device.current_device)
            get_device_properties = staticmethod(device.get_device_properties)

        @staticmethod
        def get_raw_stream(device_idx: int) -> int:
            return 0  # there is no native stream

        @staticmethod
        def get_compute_capability(device: Any = None) -> str:
            return ""

    for name in _SAME_NAME.split():
        setattr(TarryInterface, name.lstrip("_"), staticmethod(getattr(device, name)))
    TarryInterface.device = device.device
    module.register_interface_for_device("tarry", TarryInterface)
    for index in range(device.device_count()):
        module.register_interface_for_device(f"tarry:{index}", TarryInterface)


_SAME_NAME = """
    current_device set_device device_count is_available stream current_stream set_stream synchronize _exchange_device
    _maybe_exchange_device get_device_properties is_bf16_supported memory_allocated
"""
