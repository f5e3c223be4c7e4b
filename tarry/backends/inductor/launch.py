"""Inductor's program for a CPU as a list of instructions that runs without Python.

Inductor writes a Python function that allocates buffers, calls compiled kernels with pointers into them, and calls
operators. It is straight-line code of a few forms, so it is read as data: each statement becomes an instruction of the
native `LaunchList` (csrc/execute/program.h). That saves the interpreter's time and, what counts more, needs no GIL. A
statement of any other form means that the program stays Python: nothing is guessed.

A list is data until it is linked: kernels are named by library and symbol, so that it can be stored (artifact.py) and
linked in another process.

The forms are those of torch 2.11 and 2.13, whose generated code is no public interface.
"""

from __future__ import annotations

import ast
import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tarry.backends.fx import FxProgram
from tarry.backends.fx.opaque import called_exactly, keep_mask
from tarry.backends.fx.symbolic import SymbolicFxProgram
from tarry.backends.inductor.kernels import Kernel
from tarry.ir.sizes import Polynomial
from tarry.native import C

_IGNORED = frozenset({"assert_size_stride", "assert_alignment"})
_ALLOCATORS = frozenset({"empty_strided_cpu"})


class NotUnderstoodError(Exception):
    """A statement that has no instruction. The program is run by Python."""


@dataclass(frozen=True)
class _Register:
    """A register among the arguments of an operator."""

    number: int


@dataclass(frozen=True)
class Listing:
    """A program as instructions, with all that `C.launch_list` takes. In a "kernel" instruction, `library` is an index
    into `libraries` (paths) until it is linked."""

    registers: int
    vectors: list[tuple[torch.dtype, list[int]]]
    instructions: list[dict[str, Any]]
    constants: list[torch.Tensor]
    results: list[int]
    returned: list[int]
    outputs: int
    libraries: list[str]
    integers: list[list[tuple[int, list[int]]]]  # polynomials of the symbols, if sizes vary
    numbers: int  # of the graph; the symbols follow them

    def placed(self, kernels: Sequence[Kernel]) -> Listing:
        """With the libraries of its kernels."""
        libraries = list(dict.fromkeys(kernel.library for kernel in kernels))
        instructions = [
            {**made, "library": libraries.index(kernels[made["library"]].library)} if made["kind"] == "kernel" else made
            for made in self.instructions
        ]
        return replace(self, libraries=libraries, instructions=instructions)

    def link(self) -> Any:
        """The native program. Raises NotUnderstoodError if an argument is one that only Python would convert."""
        loaded = [ctypes.CDLL(path) for path in self.libraries]
        instructions = [
            {**made, "address": _address(loaded[made["library"]], made["symbol"])} if made["kind"] == "kernel" else made
            for made in self.instructions
        ]
        try:
            return C.launch_list(
                self.registers,
                self.vectors,
                instructions,
                self.constants,
                self.results,
                self.returned,
                self.outputs,
                self.integers,
                self.numbers,
            )
        except RuntimeError as error:
            raise NotUnderstoodError(str(error)) from None


def read_list(function: Callable[..., Any], source: str, program: FxProgram) -> tuple[Listing, list[Kernel]]:
    """The list of the function that Inductor has generated, and its kernels: the "library" of a "kernel" instruction is
    the number of one of them until the list is `placed`. Raises NotUnderstoodError if the function has statements of
    other forms."""
    scope = getattr(function, "__globals__", None)
    body = _body(source)
    if scope is None or body is None:
        raise NotUnderstoodError("no such function")
    inputs = len(program.graph.inputs)
    symbols = program.symbols if isinstance(program, SymbolicFxProgram) else 0
    reader = _Reader(scope, inputs + len(program.vectors), symbols)
    for statement in body:
        reader.read(statement)
    if reader.results is None:
        raise NotUnderstoodError("nothing is returned")
    constants, instructions, count = reader.finish()
    _mark_overwrites(instructions, inputs, _writable_pointers(source))
    outputs = len(program.graph.outputs)
    listing = Listing(
        registers=count,
        vectors=[(vector.dtype, vector.indices) for vector in program.vectors],
        instructions=instructions,
        constants=constants,
        results=reader.results,
        returned=[k for k in range(outputs) if k not in program.in_place],
        outputs=outputs,
        libraries=[],
        integers=[[(factor, list(product)) for factor, product in each.terms] for each in reader.integers],
        numbers=len(program.graph.numbers),
    )
    return listing, reader.kernels


def _writable_pointers(source: str) -> dict[str, list[bool]]:
    """For each kernel of the module, by name: whether it may write through its pointers. Inductor declares those that
    are only read as pointers to const."""
    found: dict[str, list[bool]] = {}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"), args=[ast.List(elts=types), *_]),
            ):
                found[name] = ["const" not in str(_literal(each)) for each in types]
    return found


def _mark_overwrites(instructions: list[dict[str, Any]], inputs: int, writable: dict[str, list[bool]]) -> None:
    """Note which registers an instruction writes to that lie in the memory of an input."""
    owner = {register: register for register in range(inputs)}  # the input whose memory a register looks at
    for made in instructions:
        written: list[int] = []
        if made["kind"] in ("view", "move") and made["sources"][0] in owner:
            owner[made["targets"][0]] = owner[made["sources"][0]]
        elif made["kind"] == "kernel":
            may_write = writable.get(made["name"])
            written = [
                register
                for k, register in enumerate(made["sources"])
                if may_write is None or k >= len(may_write) or may_write[k]
            ]
        elif made["kind"] == "call":
            schema = torch._C._get_schema(made["op"], made["overload"])
            for argument, value in zip(schema.arguments, made["arguments"], strict=True):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written += [
                        each[1] for each in (value if isinstance(value, list) else [value]) if _is_register(each)
                    ]
        made["overwrites"] = [register for register in written if register in owner]


def _is_register(argument: Any) -> bool:
    return isinstance(argument, tuple) and len(argument) == 2 and argument[0] == "register"


def _body(source: str) -> list[ast.stmt] | None:
    """The statements of `call(args)`, a function or a method of the class Runner."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "call" and node.args.args[-1].arg == "args":
            return node.body
    return None


class _Reader:
    """Turns statements into instructions. Names are registers; those of the inputs come first. Names of symbols are
    none: integers that depend on them are listed (`integers`), and instructions have their positions in that list."""

    def __init__(self, scope: dict[str, Any], parameters: int, symbols: int) -> None:
        self._scope = scope
        self._parameters = parameters
        self._symbols = symbols
        self._polynomials: dict[str, Polynomial] = {}  # by name
        self.integers: dict[Polynomial, int] = {}
        self._constants: list[torch.Tensor] = []
        self._names: dict[str, int] = {}
        self._tuples: dict[str, list[int]] = {}
        self._passing: list[int] = []  # views that a statement has made for its arguments alone
        self._count = parameters
        self._instructions: list[dict[str, Any]] = []
        self.kernels: list[Kernel] = []
        self.results: list[int] | None = None

    def finish(self) -> tuple[list[torch.Tensor], list[dict[str, Any]], int]:
        """Constants lie behind the parameters, so that all other registers move up by their number."""
        shift = len(self._constants)

        def moved(register: int) -> int:
            if register == NOWHERE:
                return register
            if register < 0:  # a constant: see _constant
                return self._parameters - 1 - register
            return register if register < self._parameters else register + shift

        for made in self._instructions:
            for key in ("targets", "sources", "drops"):
                made[key] = [moved(register) for register in made[key]]
            if "arguments" in made:
                made["arguments"] = [_moved(argument, moved) for argument in made["arguments"]]
        assert self.results is not None
        self.results = [moved(register) for register in self.results]
        return self._constants, self._instructions, self._count + shift

    # ---- statements

    def read(self, statement: ast.stmt) -> None:
        if self.results is not None:
            raise NotUnderstoodError("a statement after the return")
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=names) | ast.List(elts=names)], value=ast.Name(id="args")):
                self._bind_parameters(names)
            case ast.Assign(targets=[ast.Name(id="args")]):
                raise NotUnderstoodError("args is assigned")
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._assign(name, value)
            case ast.Delete(targets=targets):
                for target in targets:
                    if not isinstance(target, ast.Name):
                        raise NotUnderstoodError("del of something")
                    self._delete(target.id)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="args"), attr="clear"))):
                pass
            case ast.Expr(value=ast.Call(func=ast.Name(id=called))) if called in _IGNORED:
                pass
            case ast.Expr(value=ast.Call() as call):
                self._call(call, ())
            case ast.Return(value=ast.Tuple(elts=values)):
                self.results = [self._register(value) for value in values]
                self._passing.clear()
            case _:
                raise NotUnderstoodError(ast.dump(statement)[:200])
        if self._passing:  # a view that outlives its statement would keep the buffer that it looks at
            self._instructions[-1]["drops"].extend(self._passing)
            self._passing.clear()

    def _bind_parameters(self, names: Sequence[ast.expr]) -> None:
        if len(names) != self._symbols + self._parameters or self._names:
            raise NotUnderstoodError("other parameters")
        for k, name in enumerate(names):
            if not isinstance(name, ast.Name):
                raise NotUnderstoodError("a parameter that is no name")
            if k < self._symbols:
                self._polynomials[name.id] = Polynomial.symbol(k)
            else:
                self._names[name.id] = k - self._symbols

    def _assign(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Name(id=source) if source in self._polynomials:
                self._polynomials[name] = self._polynomials[source]
            case ast.Name(id=source) if source in self._names:
                self._names[name] = self._new()
                self._emit("move", [self._names[name]], [self._names[source]])
            case ast.Subscript(value=ast.Name(id=source), slice=ast.Constant(value=int(index))) if (
                source in self._tuples
            ):
                self._names[name] = self._new()
                self._emit("move", [self._names[name]], [self._tuples[source][index]])
            case ast.Call(func=ast.Name(id=called), args=[sizes, strides, dtype], keywords=[]) if called in _ALLOCATORS:
                self._names[name] = self._new()
                self._emit(
                    "allocate",
                    [self._names[name]],
                    [],
                    **self._layout(sizes, strides),
                    dtype=self._object(dtype),
                )
            case ast.Call(func=ast.Name(id="reinterpret_tensor")):
                self._names[name] = self._register(value)
                self._passing.remove(self._names[name])
            case ast.Call() as call:
                self._call(call, (name,))
            case _:
                raise NotUnderstoodError(ast.dump(value)[:200])

    def _delete(self, name: str) -> None:
        registers = [self._names.pop(name)] if name in self._names else self._tuples.pop(name, None)
        if registers is None or not self._instructions:
            raise NotUnderstoodError(f"del {name}")
        self._instructions[-1]["drops"].extend(registers)

    # ---- calls

    def _call(self, call: ast.Call, targets: tuple[str, ...]) -> None:
        function = self._object(call.func)
        if isinstance(function, Kernel):
            if targets or call.keywords:
                raise NotUnderstoodError("a kernel with a result")
            if len(call.args) > MAX_POINTERS:
                raise NotUnderstoodError(f"a kernel of {len(call.args)} pointers")
            pointers = [argument for argument in call.args if not self._is_integer(argument)]
            numbers = call.args[len(pointers) :]
            if not all(self._is_integer(argument) for argument in numbers):
                raise NotUnderstoodError("integers among a kernel's pointers")
            self._emit(
                "kernel",
                [],
                [self._register(each) for each in pointers],
                library=self._kernel(function),
                symbol=function.symbol,
                name=call.func.id if isinstance(call.func, ast.Name) else "",
                integers=[self._index_of(self._integer(argument)) for argument in numbers],
            )
            return
        if function is keep_mask():
            self._draw(call, targets)
            return
        overload = self._overload(call, function)
        schema = overload._schema
        given: dict[str, Any] = {
            argument.name: self._argument(value) for argument, value in zip(schema.arguments, call.args, strict=False)
        }
        given |= {keyword.arg: self._argument(keyword.value) for keyword in call.keywords if keyword.arg}
        arguments = []
        for argument in schema.arguments:
            if argument.name not in given and not argument.has_default_value():
                raise NotUnderstoodError(f"{schema.name} without {argument.name}")
            arguments.append(given.pop(argument.name, argument.default_value))
            if isinstance(arguments[-1], list) and "Optional[Tensor]" in str(argument.real_type):
                raise NotUnderstoodError(f"{schema.name} with a list of tensors that may be absent")
        if given or any(str(ret.real_type) != "Tensor" for ret in schema.returns):
            raise NotUnderstoodError(f"a call of {schema.name}")
        returns = [NOWHERE] * len(schema.returns)
        if targets and len(schema.returns) == 1:
            returns = [self._new()]
            self._names[targets[0]] = returns[0]
        elif targets:
            returns = [self._new() for _ in schema.returns]
            self._tuples[targets[0]] = returns
        self._emit("call", returns, [], op=schema.name, overload=schema.overload_name, arguments=arguments)

    def _draw(self, call: ast.Call, targets: tuple[str, ...]) -> None:
        """A mask for dropout: a buffer, filled by the operator that fills it in eager PyTorch."""
        match call.args, targets:
            case [sizes, keep, seed], (name,):
                shape = _literal(sizes)
                strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
                self._names[name] = self._new()
                buffer = self._names[name]
                self._emit("allocate", [buffer], [], sizes=shape, strides=strides, varies=False, dtype=torch.bool)
                self._emit(
                    "call",
                    [NOWHERE],
                    [self._register(seed)],
                    op="aten::bernoulli_",
                    overload="float",
                    arguments=[_Register(buffer), _literal(keep), None],
                    generator=2,
                )
            case _:
                raise NotUnderstoodError("a mask of another form")

    def _overload(self, call: ast.Call, function: Any) -> Any:
        """The operator that is called: torch.ops' own, or one that Inductor names by `extern_kernels`."""
        found = called_exactly(function)
        match call.func:
            case ast.Attribute(value=ast.Name(id="extern_kernels"), attr=name):
                packet = getattr(torch.ops.aten, "addmm" if name == "bias_addmm" else name, None)
                out = any(keyword.arg == "out" for keyword in call.keywords)
                found = getattr(packet, "out" if out else "default", None)
        # Others may be written in Python, which has no business on a thread of ours.
        if not isinstance(found, torch._ops.OpOverload) or found.namespace != "aten":
            raise NotUnderstoodError(f"a call of {function}")
        return found

    def _argument(self, value: ast.expr) -> Any:
        match value:
            case ast.Name(id=name) if name in self._names:
                return _Register(self._names[name])
            case ast.Call(func=ast.Name(id="reinterpret_tensor")):
                return _Register(self._register(value))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._argument(item) for item in items]
        try:
            return _literal(value)
        except NotUnderstoodError:
            found = self._object(value)
            return _Register(self._constant(found)) if isinstance(found, torch.Tensor) else found

    # ---- values

    def _register(self, value: ast.expr) -> int:
        match value:
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[source, sizes, strides, offset], keywords=[]):
                made = self._new()
                self._emit("view", [made], [self._register(source)], **self._layout(sizes, strides, offset))
                self._passing.append(made)
                return made
        found = self._object(value)
        if isinstance(found, torch.Tensor):
            return self._constant(found)
        raise NotUnderstoodError(f"{found!r} where a tensor is expected")

    # ---- integers that depend on symbols

    def _layout(self, sizes: ast.expr, strides: ast.expr, offset: ast.expr | None = None) -> dict[str, Any]:
        """The fields of an instruction that say how a buffer is looked at."""
        given = [sizes, strides] if offset is None else [sizes, strides, offset]
        if not self._symbols:
            literals = [_literal(each) for each in given]
            return dict(zip(("sizes", "strides", "offset"), literals, strict=False)) | {"varies": False}
        fields: dict[str, Any] = {"varies": True}
        for name, each in (("sizes", sizes), ("strides", strides)):
            if not isinstance(each, ast.Tuple):
                raise NotUnderstoodError(f"{name} that are no tuple")
            fields[name] = [self._index_of(self._integer(item)) for item in each.elts]
        if offset is not None:
            fields["offset"] = self._index_of(self._integer(offset))
        return fields

    def _index_of(self, polynomial: Polynomial) -> int:
        return self.integers.setdefault(polynomial, len(self.integers))

    def _is_integer(self, value: ast.expr) -> bool:
        return isinstance(value, ast.BinOp) or (isinstance(value, ast.Name) and value.id in self._polynomials)

    def _integer(self, value: ast.expr) -> Polynomial:
        match value:
            case ast.Constant(value=int(number)):
                return Polynomial.constant(number)
            case ast.Name(id=name) if name in self._polynomials:
                return self._polynomials[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Polynomial.constant(-1) * self._integer(operand)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._integer(left) + self._integer(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return self._integer(left) + Polynomial.constant(-1) * self._integer(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return self._integer(left) * self._integer(right)
        raise NotUnderstoodError(ast.dump(value)[:200])

    def _constant(self, tensor: torch.Tensor) -> int:
        """A tensor that the program carries with it; numbered from -1 downwards until all are known."""
        if tensor.device.type != "cpu":
            raise NotUnderstoodError("a constant elsewhere")
        for k, known in enumerate(self._constants):
            if known is tensor:
                return -1 - k
        self._constants.append(tensor)
        return -len(self._constants)

    def _object(self, value: ast.expr) -> Any:
        """What a dotted name stands for in the generated module."""
        match value:
            case ast.Name(id=name) if name in self._scope and name not in self._names and name not in self._tuples:
                return self._scope[name]
            case ast.Attribute(value=base, attr=attribute):
                return getattr(self._object(base), attribute)
            case ast.Call(func=ast.Name(id="device"), args=[ast.Constant(value=str(where))], keywords=[]):
                return torch.device(where)
        raise NotUnderstoodError(ast.dump(value)[:200])

    def _kernel(self, kernel: Kernel) -> int:
        if kernel not in self.kernels:
            self.kernels.append(kernel)
        return self.kernels.index(kernel)

    def _new(self) -> int:
        self._count += 1
        return self._count - 1

    def _emit(self, kind: str, targets: list[int], sources: list[int], **fields: Any) -> None:
        self._instructions.append({"kind": kind, "targets": targets, "sources": sources, "drops": [], **fields})


NOWHERE = 2**32 - 1  # as in csrc/execute/program.h
MAX_POINTERS = 2048


def _moved(argument: Any, moved: Callable[[int], int]) -> Any:
    if isinstance(argument, _Register):
        return ("register", moved(argument.number))
    if isinstance(argument, list):
        return [_moved(item, moved) for item in argument]
    return argument


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError as error:
        raise NotUnderstoodError(str(error)) from None


def _address(library: ctypes.CDLL, symbol: str) -> int:
    address = ctypes.cast(library[symbol], ctypes.c_void_p).value
    assert address is not None
    return address
