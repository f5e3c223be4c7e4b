"""Graphs as text and back, exactly: parse(to_text(graph)) == graph.

    graph(%0: f32[8, 8], %1: f32[8]):
      %2: f32[8, 8] = aten::add_.Tensor(%0, %1, alpha=$0=1)  # train.py:12
      return %2 -> %0

One node a line. `%n` is a value; its type stands where it is defined, with strides in braces only where they are not
the contiguous ones: `f32[4, 8]{1, 4}`. `$n` is a number input with its recorded value; `wrapped(2.0)` and `seed(7)`
name the kinds that are not plain numbers. `<s0 + 1 = 12>` is an integer that varies (ir/sizes.py), here 12; a type with
such sizes has its strides written out. `_` is an output that does not exist. `-> %0` after an output says which
input's storage it takes over. Keyword-only arguments are named, and left out where they are None by default. In
brackets after a call: the seed of an operator that takes no generator, `kept`, the region.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch

from tarry.errors import IRError
from tarry.ir.dtypes import DTYPE_NAMES, DTYPES, NUMBER_DTYPES
from tarry.ir.graph import HERE, Graph, Node, Number, NumberKind, Site, Value
from tarry.ir.layout import TensorType, contiguous_strides
from tarry.ir.operators import operator
from tarry.ir.sizes import Polynomial, Size

_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo, "sparse_csr": torch.sparse_csr}
_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}
_WORDS: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "inf": float("inf"),
    "nan": float("nan"),
    "here": HERE,
    **_LAYOUTS,
    **_FORMATS,
    **DTYPES,
}


def type_text(type_: TensorType) -> str:
    """`f32[8, 8]`, with `{strides}` if they are not the contiguous ones."""
    text = f"{DTYPE_NAMES[type_.dtype]}[{', '.join(map(_integer_text, type_.sizes))}]"
    varies = any(isinstance(size, Size) for size in (*type_.sizes, *type_.strides))
    if varies or type_.strides != contiguous_strides(type_.sizes):
        text += f"{{{', '.join(map(_integer_text, type_.strides))}}}"
    return text


def _integer_text(number: int) -> str:
    return f"<{number.polynomial} = {int(number)}>" if isinstance(number, Size) else str(number)


def arg_text(arg: Any) -> str:
    """One argument."""
    if isinstance(arg, Value):
        return f"%{arg.id}"
    if isinstance(arg, Number):
        value = arg_text(arg.value)
        if NUMBER_DTYPES[type(arg.value)] != arg.dtype:
            value += f", {DTYPE_NAMES[arg.dtype]}"
        elif arg.kind == "number":
            return f"${arg.index}={value}"
        return f"${arg.index}={arg.kind}({value})"
    if isinstance(arg, tuple):
        return f"[{', '.join(map(arg_text, arg))}]"
    if isinstance(arg, Size):
        return _integer_text(arg)
    if isinstance(arg, complex):
        return f"complex({arg.real!r}, {arg.imag!r})"
    if isinstance(arg, torch.dtype):
        return DTYPE_NAMES[arg]
    if isinstance(arg, str):
        return json.dumps(arg)
    if isinstance(arg, torch.device):
        return f"device({json.dumps(str(arg))})"
    if isinstance(arg, torch.layout | torch.memory_format):
        return str(arg).removeprefix("torch.")
    return "here" if arg is HERE else repr(arg)


def node_text(node: Node) -> str:
    """One node, without indentation."""
    try:
        arguments = operator(node.op).arguments
    except IRError:  # an illegal graph must still print
        arguments = ()
    args = []
    for k, arg in enumerate(node.args):
        argument = arguments[k] if k < len(arguments) else None
        if argument is None or not argument.kwarg_only:
            args.append(arg_text(arg))
        elif arg is not None or not (argument.has_default and argument.default is None):
            args.append(f"{argument.name}={arg_text(arg)}")
    outputs = ["_" if value is None else f"%{value.id}: {type_text(value.type)}" for value in node.outputs]
    left = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
    marks = [] if node.seed is None else [arg_text(node.seed)]
    if node.kept:
        marks.append("kept")
    if node.region:
        marks.append(f"region={node.region}")
    text = f"{left} = {node.op}({', '.join(args)})"
    if marks:
        text += f" [{', '.join(marks)}]"
    return text if node.site is None else f"{text}  # {node.site}"


def to_text(graph: Graph) -> str:
    """The graph as text, without a final newline."""
    inputs = ", ".join(f"%{value.id}: {type_text(value.type)}" for value in graph.inputs)
    lines = [f"graph({inputs}):"]
    used = {leaf.index for node in graph.nodes for leaf in _numbers_in((*node.args, node.seed))}
    unused = [arg_text(number) for number in graph.numbers if number.index not in used]
    if unused:
        lines.append(f"  unused {', '.join(unused)}")
    lines.extend(f"  {node_text(node)}" for node in graph.nodes)
    outputs = [
        f"%{value.id}" + ("" if replaced is None else f" -> %{graph.inputs[replaced].id}")
        for value, replaced in zip(graph.outputs, graph.replaces, strict=True)
    ]
    lines.append(f"  return {', '.join(outputs)}".rstrip())
    return "\n".join(lines)


def _numbers_in(arg: Any) -> list[Number]:
    if isinstance(arg, tuple):
        return [number for item in arg for number in _numbers_in(item)]
    return [arg] if isinstance(arg, Number) else []


# --- parsing ---------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"\s*(?:(?P<value>%\d+)|(?P<number>\$\d+)|(?P<size><[^>]*>)"
    r"|(?P<float>-?\d+\.\d*(?:e[+-]?\d+)?|-?\d+e[+-]?\d+|-inf)|(?P<int>-?\d+)"
    r'|(?P<string>"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z_][\w:.]*)|(?P<arrow>->)|(?P<sign>[\[\](){}:=,]))'
)
_SITE = re.compile(r"  # (?P<file>.*?):(?P<line>-?\d+)(?: in (?P<module>[\w.-]+))?$")


class _Line:
    """The tokens of one line, with the line for errors."""

    def __init__(self, text: str, number: int) -> None:
        self.text = text
        self.number = number
        self.position = 0
        self.site: Site | None = None

    def fail(self, wanted: str) -> IRError:
        rest = self.text[self.position :].strip()
        return IRError(f"graph text, line {self.number}: expected {wanted} at {rest[:40]!r} in {self.text.strip()!r}")

    def peek(self) -> tuple[str, str]:
        match = _TOKEN.match(self.text, self.position)
        if match is None or match.lastgroup is None:
            return ("end", "")
        return (match.lastgroup, match.group(match.lastgroup))

    def take(self, kind: str | None = None, text: str | None = None) -> str:
        match = _TOKEN.match(self.text, self.position)
        if match is None or match.lastgroup is None or kind not in (None, match.lastgroup):
            raise self.fail(repr(text) if text else kind or "more")
        found = match.group(match.lastgroup)
        if text is not None and found != text:
            raise self.fail(repr(text))
        self.position = match.end()
        return found

    def accept(self, text: str) -> bool:
        if self.peek()[1] == text:
            self.take()
            return True
        return False

    def end(self) -> None:
        """Nothing but a site may follow."""
        match = _SITE.match(self.text, self.position)
        if match is not None:
            self.site = Site(match.group("file"), int(match.group("line")), match.group("module") or "")
        elif self.text[self.position :].strip():
            raise self.fail("the end of the line")

    def items(self, close: str, item: Callable[[], Any]) -> tuple[Any, ...]:
        """Items separated by commas up to `close`, which is consumed."""
        found: list[Any] = []
        while not self.accept(close):
            if found:
                self.take("sign", ",")
            found.append(item())
        return tuple(found)


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = [_Line(line, k + 1) for k, line in enumerate(text.splitlines()) if line.strip()]
        self.values: dict[int, Value] = {}
        self.numbers: dict[int, Number] = {}

    def run(self) -> Graph:
        if len(self.lines) < 2:
            raise IRError("graph text: expected at least 'graph(...):' and 'return ...'")
        header, *body, last = self.lines
        header.take("word", "graph")
        header.take("sign", "(")
        inputs = header.items(")", lambda: self.define(header))
        header.take("sign", ":")
        header.end()
        if body and body[0].peek()[1] == "unused":
            unused = body.pop(0)
            unused.take()
            while True:
                self.arg(unused)
                if not unused.accept(","):
                    break
            unused.end()
        nodes = tuple(self.node(line) for line in body)
        outputs, replaces = self.outputs(last, inputs)
        numbers = tuple(number for _, number in sorted(self.numbers.items()))
        return Graph(inputs, numbers, nodes, outputs, replaces)

    def define(self, line: _Line) -> Value:
        id_ = int(line.take("value")[1:])
        line.take("sign", ":")
        value = Value(id_, self.type(line))
        self.values[id_] = value
        return value

    def type(self, line: _Line) -> TensorType:
        name = line.take("word")
        if name not in DTYPES:
            raise line.fail("a dtype before this")
        line.take("sign", "[")
        sizes = line.items("]", lambda: self.integer(line))
        strides = contiguous_strides(sizes)
        if line.accept("{"):
            strides = line.items("}", lambda: self.integer(line))
        return TensorType(DTYPES[name], sizes, strides)

    def integer(self, line: _Line) -> int:
        return self.size(line) if line.peek()[0] == "size" else int(line.take("int"))

    def size(self, line: _Line) -> Size:
        polynomial, _, value = line.take("size")[1:-1].rpartition(" = ")
        try:
            return Size(int(value), Polynomial.parse(polynomial))
        except ValueError as error:
            raise line.fail(f"a size that makes sense ({error}) before this") from None

    def output(self, line: _Line) -> Value | None:
        return None if line.accept("_") else self.define(line)

    def node(self, line: _Line) -> Node:
        if line.accept("("):
            outputs = line.items(")", lambda: self.output(line))
        else:
            outputs = (self.output(line),)
        line.take("sign", "=")
        op = line.take("word")
        described = operator(op)
        line.take("sign", "(")
        positional: list[Any] = []
        named: dict[str, Any] = {}

        def argument() -> None:
            kind, word = line.peek()
            if kind == "word" and _TOKEN_EQUALS.match(line.text, line.position):
                line.take()
                line.take("sign", "=")
                named[word] = self.arg(line)
            else:
                positional.append(self.arg(line))

        line.items(")", argument)
        rest = described.arguments[len(positional) :]
        positional.extend(named.pop(argument_.name, None) for argument_ in rest)
        if named:
            raise line.fail(f"only arguments of {op} ({', '.join(named)} is none) before the end")
        marks: dict[str, Any] = {}
        if line.accept("["):
            line.items("]", lambda: self.mark(line, marks))
        line.end()
        return Node(op, tuple(positional), outputs, line.site, **marks)

    def mark(self, line: _Line, marks: dict[str, Any]) -> None:
        if line.peek()[0] == "number":
            marks["seed"] = self.arg(line)
        elif line.accept("kept"):
            marks["kept"] = True
        else:
            line.take("word", "region")
            line.take("sign", "=")
            marks["region"] = int(line.take("int"))

    def arg(self, line: _Line) -> Any:
        kind, text = line.peek()
        if kind == "value":
            line.take()
            id_ = int(text[1:])
            if id_ not in self.values:
                raise line.fail(f"a value that is defined above ({text} is not) before this")
            return self.values[id_]
        if kind == "number":
            line.take()
            line.take("sign", "=")
            return self.number(line, int(text[1:]))
        if line.accept("["):
            return line.items("]", lambda: self.arg(line))
        return self.constant(line)

    def number(self, line: _Line, index: int) -> Number:
        kind: NumberKind = "number"
        word = line.peek()[1]
        if word in ("number", "wrapped", "seed"):
            line.take()
            line.take("sign", "(")
            kind = word  # type: ignore[assignment]
            value = self.constant(line)
            dtype = DTYPES[line.take("word")] if line.accept(",") else NUMBER_DTYPES[type(value)]
            line.take("sign", ")")
        else:
            value = self.constant(line)
            dtype = NUMBER_DTYPES[type(value)]
        number = Number(index, kind, dtype, value)
        self.numbers[index] = number
        return number

    def constant(self, line: _Line) -> Any:
        kind, text = line.peek()
        if kind == "size":
            return self.size(line)
        line.take()
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
        if kind == "string":
            return json.loads(text)
        if kind == "word" and text in ("complex", "device"):
            line.take("sign", "(")
            parts = line.items(")", lambda: self.constant(line))
            return complex(*parts) if text == "complex" else torch.device(*parts)
        if kind == "word" and text in _WORDS:
            return _WORDS[text]
        raise line.fail("an argument before this")

    def outputs(self, line: _Line, inputs: tuple[Value, ...]) -> tuple[tuple[Value, ...], tuple[int | None, ...]]:
        line.take("word", "return")
        outputs: list[Value] = []
        replaces: list[int | None] = []
        while line.peek()[0] == "value":
            outputs.append(self.arg(line))
            replaced = None
            if line.accept("->"):
                target = self.arg(line)
                if target not in inputs:
                    raise line.fail("an input after '->', before this")
                replaced = inputs.index(target)
            replaces.append(replaced)
            if not line.accept(","):
                break
        line.end()
        return tuple(outputs), tuple(replaces)


_TOKEN_EQUALS = re.compile(r"\s*\w+=")


def parse(text: str) -> Graph:
    """The graph that a text stands for. Raises IRError with the line where it makes no sense."""
    return _Parser(text).run()


Graph.__str__ = to_text  # type: ignore[method-assign,assignment]  # here: graph.py does not import its own printer
