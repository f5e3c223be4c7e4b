"""Why a graph is not the one that was compiled: the first thing that differs between two that are much alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tarry.ir.graph import Graph, Node, Number, Value, leaves, typed, users
from tarry.ir.operators import operator
from tarry.ir.text import arg_text, type_text


def alike(graph: Graph) -> int:
    """A number that graphs of the same operators in the same order have in common."""
    return hash(tuple(node.op for node in graph.nodes))


def difference(old: Graph, new: Graph) -> str | None:
    """In which way `new` is another graph than `old`, in a few words with the line of the program; None if there are
    other operators in it, or if it is the same."""
    if [node.op for node in old.nodes] != [node.op for node in new.nodes]:
        return None
    return next(_differences(old, new), None)


def _differences(old: Graph, new: Graph) -> Iterator[str]:
    yield from _inputs(old, new)
    for before, after in zip(old.nodes, new.nodes, strict=True):
        yield from _arguments(before, after)
    for before, after in zip(old.nodes, new.nodes, strict=True):
        types = [None if value is None else value.type for value in before.outputs]
        for type_, value in zip(types, after.outputs, strict=False):
            if type_ != (None if value is None else value.type):
                yield f"a result of {after.op} has another type now{_at(after)}"
        if before.region != after.region:
            yield f"{after.op} is recomputed in another place now{_at(after)}"
    yield from _outputs(old, new)


def _inputs(old: Graph, new: Graph) -> Iterator[str]:
    readers = users(new)
    for before, after in zip(old.inputs, new.inputs, strict=False):
        if before.type != after.type:
            reader = next(iter(readers[after]), None)
            yield f"input {type_text(before.type)} is {type_text(after.type)} now{_at(reader)}"
    if len(old.inputs) != len(new.inputs):
        yield f"there are {len(new.inputs)} inputs now, not {len(old.inputs)}{_first_site(new)}"


def _arguments(before: Node, after: Node) -> Iterator[str]:
    names = [argument.name for argument in operator(after.op).arguments]
    for k, (was, now) in enumerate(zip(before.args, after.args, strict=False)):
        name = names[k] if k < len(names) else f"argument {k}"
        if _kinds(was) != _kinds(now):
            yield f"{name} of {after.op} was {_short(was)} and is {_short(now)} now{_at(after)}"
        for number, other in zip(_numbers(was), _numbers(now), strict=False):
            if number.dtype != other.dtype:
                yield (
                    f"{name} of {after.op} was {type(number.value).__name__} {number.value} and is "
                    f"{type(other.value).__name__} {other.value} now{_at(after)}"
                )
    if [value.id for value in before.operands] != [value.id for value in after.operands]:
        yield f"{after.op} reads other values now{_at(after)}"


def _outputs(old: Graph, new: Graph) -> Iterator[str]:
    kept, wanted = set(old.outputs), set(new.outputs)
    for node in new.nodes:
        for value in node.results:
            if value in wanted and value not in kept:
                yield f"the result of {node.op} is needed now{_at(node)}"
            if value in kept and value not in wanted:
                yield f"the result of {node.op} is not needed any more{_at(node)}"
    if (old.outputs, old.replaces) != (new.outputs, new.replaces):
        yield f"results go to other tensors now{_first_site(new)}"


def _kinds(arg: Any) -> Any:
    """An argument with its values and numbers left out."""
    if isinstance(arg, tuple):
        return tuple(_kinds(item) for item in arg)
    if isinstance(arg, Value):
        return Value
    return (Number, arg.kind) if isinstance(arg, Number) else typed(arg)


def _numbers(arg: Any) -> list[Number]:
    return [leaf for leaf in leaves(arg) if isinstance(leaf, Number)]


def _short(arg: Any) -> str:
    if isinstance(arg, Value):
        return "a tensor"
    if isinstance(arg, Number):
        return str(arg.value)
    text = arg_text(arg)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _at(node: Node | None) -> str:
    return f" ({node.site})" if node is not None and node.site is not None else ""


def _first_site(graph: Graph) -> str:
    return _at(next((node for node in graph.nodes if node.site is not None), None))
