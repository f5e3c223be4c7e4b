"""Raw graphs, as the native recorder hands them over: made by hand, or recorded from a program on CPU tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tarry.ir.layout import contiguous_strides, is_dense
from tarry.ir.operators import HIDDEN_WRITES, operator

RawLayout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
F32 = torch.float32


def layout(*sizes: int, dtype: torch.dtype = F32, strides: tuple[int, ...] | None = None, offset: int = 0) -> RawLayout:
    return (dtype, sizes, contiguous_strides(sizes) if strides is None else strides, offset)


def edge(id_: int, view: RawLayout | None = None) -> tuple[Any, ...]:
    return ("edge", id_, view)


def const(value: Any) -> tuple[Any, ...]:
    return ("const", value)


def raw_node(
    op: str, args: list[Any], outputs: list[Any], mutated: tuple[int, ...] = (), line: int = 1, region: int = 0
) -> dict[str, Any]:
    return {
        "op": op,
        "args": args,
        "outputs": outputs,
        "fresh": len(outputs) - len(mutated),
        "mutated": list(mutated),
        "site": line,
        "file": "train.py",
        "line": line,
        "region": region,
    }


def raw_graph(
    inputs: list[RawLayout],
    nodes: list[dict[str, Any]],
    outputs: list[int],
    replaces: list[int] | None = None,
    numbers: tuple[Any, ...] = (),
) -> dict[str, Any]:
    return {
        "inputs": inputs,
        "nodes": nodes,
        "numbers": list(numbers),
        "outputs": outputs,
        "replaces": [-1] * len(outputs) if replaces is None else replaces,
    }


_NUMBER_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class _Storage:
    """What the recorder keeps per storage: its home layout and the value it holds now. Values are numbered at the end,
    for inputs come first; until then a value is a one-element list, which compares by identity."""

    def __init__(self, tensor: torch.Tensor, value: list[int], is_input: bool) -> None:
        self.tensor = tensor.detach()  # keeps the storage, and so its address, alive
        self.value = value
        self.is_input = is_input
        self.home = _home(tensor)
        self.first_home = self.home
        self.before = self.content().clone() if is_input else None

    def content(self) -> torch.Tensor:
        dtype, sizes, strides, _ = self.home
        flat = torch.empty(0, dtype=dtype).set_(self.tensor.untyped_storage())
        return flat.as_strided(sizes, strides)

    def original(self) -> torch.Tensor:
        assert self.before is not None
        dtype, sizes, strides, _ = self.first_home
        return torch.empty_strided(sizes, strides, dtype=dtype).copy_(self.before)


def _home(tensor: torch.Tensor) -> RawLayout:
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    total = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    if tensor.storage_offset() == 0 and is_dense(sizes, strides) and math.prod(sizes) == total:
        return (tensor.dtype, sizes, strides, 0)
    return (tensor.dtype, (total,), (1,), 0)


class Recorder(TorchDispatchMode):
    """Runs a program on CPU tensors as it is, and writes down the raw graph that the native recorder would make of it.

    Afterwards `raw()` is the graph, `inputs()` what the storages held before, `results()` what the outputs hold now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, _Storage] = {}
        self.nodes: list[dict[str, Any]] = []
        self.numbers: list[Any] = []
        self.input_values: list[list[int]] = []
        self.seed = 100
        self.region = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if _records_nothing(func, name):
            return func(*args, **(kwargs or {}))
        described = operator(name)
        given = dict(zip((argument.name for argument in described.arguments), args, strict=False)) | (kwargs or {})
        raw_args = [self.argument(argument, given) for argument in described.arguments]
        seed = None
        if described.random and not any(arg[0] == "seed" for arg in raw_args):
            self.seed += 1
            seed = self.number("seed", self.seed)
        hidden = HIDDEN_WRITES.get(name) if given.get("training") and given.get("running_mean") is not None else None
        written = [
            (self.storages[tensor.untyped_storage()._cdata], tensor)
            for index in (operator(hidden) if hidden else described).written
            for tensor in _tensors(given.get(described.arguments[index].name))
        ]
        result = self.run(func, described, given, written, seeded=seed is not None)
        parts = result if len(described.returns) > 1 else (result,)
        self.note(name, raw_args, [parts[index] for index in described.fresh], written, seed)
        return result

    def argument(self, argument: Any, given: dict[str, Any]) -> tuple[Any, ...]:
        """One argument as the graph has it; a generator is replaced by one with a seed of its own."""
        value = given.setdefault(argument.name, argument.default)
        if argument.type != "Optional[Generator]":
            return self.arg(value, argument.type)
        self.seed += 1
        given[argument.name] = torch.Generator().manual_seed(self.seed)
        return self.number("seed", self.seed)

    def run(self, func: Any, described: Any, given: dict[str, Any], written: list[Any], *, seeded: bool) -> Any:
        positional = [given[argument.name] for argument in described.arguments if not argument.kwarg_only]
        keyword = {argument.name: given[argument.name] for argument in described.arguments if argument.kwarg_only}
        sizes_before = [tensor.shape for _, tensor in written]
        with torch.random.fork_rng(devices=[], enabled=seeded):
            if seeded:
                torch.manual_seed(self.seed)
            result = func(*positional, **keyword)
        for (storage, tensor), sizes in zip(written, sizes_before, strict=True):
            if tensor.shape != sizes:  # an out= argument that was resized
                storage.home = _home(tensor)
        return result

    def note(self, name: str, raw_args: list[Any], fresh: list[Any], written: list[Any], seed: Any) -> None:
        """Add the node, with new values for its fresh results and for each storage that it wrote."""
        outputs: list[Any] = []
        values: list[Any] = []
        for part in fresh:
            for tensor in part if isinstance(part, list | tuple) else [part]:
                value = [-1]
                values.append(value)
                if tensor is None:
                    outputs.append(None)
                    continue
                storage = _Storage(tensor, value, is_input=False)
                self.storages[tensor.untyped_storage()._cdata] = storage
                outputs.append(storage.home)
        mutated: list[list[int]] = []
        for storage in dict.fromkeys(storage for storage, _ in written):
            mutated.append(storage.value)
            storage.value = [-1]
            values.append(storage.value)
            outputs.append(storage.home)
        self.nodes.append(
            {
                "op": name,
                "args": raw_args,
                "outputs": outputs,
                "fresh": len(outputs) - len(mutated),
                "mutated": mutated,
                "site": 0,
                "file": "program.py",
                "line": len(self.nodes) + 1,
                "region": self.region,
                "seed": seed,
                "values": values,
            }
        )

    def number(self, kind: str, value: Any) -> tuple[Any, ...]:
        self.numbers.append(value)
        index = len(self.numbers) - 1
        return (kind, index, value, _NUMBER_DTYPES[type(value)]) if kind == "wrapped" else (kind, index, value)

    def arg(self, value: Any, type_: str) -> tuple[Any, ...]:
        if isinstance(value, torch.Tensor):
            return self.edge(value)
        if type_ in ("Tensor", "Optional[Tensor]"):
            return ("none",) if value is None else self.number("wrapped", value)
        if type_ in ("number", "float", "Optional[number]", "Optional[float]") and value is not None:
            return self.number("number", value)
        if type_ in ("List[Tensor]", "List[Optional[Tensor]]", "List[number]"):
            return ("list", [self.arg(item, type_[5:-1]) for item in value])
        if isinstance(value, torch.device):
            return ("const", torch.device("privateuseone:0"))
        if isinstance(value, torch.Size):
            value = list(value)
        if type_ == "List[int]" and isinstance(value, int):
            value = [value]
        return ("const", value)

    def edge(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        key = tensor.untyped_storage()._cdata
        if key not in self.storages:
            value = [-1]
            self.input_values.append(value)
            self.storages[key] = _Storage(tensor, value, is_input=True)
        storage = self.storages[key]
        seen = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())
        return ("edge", storage.value, None if seen == storage.home else seen)

    def raw(self) -> dict[str, Any]:
        order = [*self.input_values, *(value for node in self.nodes for value in node["values"])]
        for k, value in enumerate(order):
            value[0] = k
        self.outputs = [
            storage
            for storage in self.storages.values()
            if not any(storage.value is value for value in self.input_values)
        ]
        inputs = [storage for storage in self.storages.values() if storage.is_input]
        return {
            "inputs": [storage.first_home for storage in inputs],
            "nodes": [
                {
                    **{key: item for key, item in node.items() if key != "values"},
                    "args": [_numbered(arg) for arg in node["args"]],
                    "mutated": [value[0] for value in node["mutated"]],
                }
                for node in self.nodes
            ],
            "numbers": self.numbers,
            "outputs": [storage.value[0] for storage in self.outputs],
            "replaces": [inputs.index(storage) if storage.is_input else -1 for storage in self.outputs],
        }

    def inputs(self) -> list[torch.Tensor]:
        return [storage.original() for storage in self.storages.values() if storage.is_input]

    def results(self) -> list[torch.Tensor]:
        return [storage.content() for storage in self.outputs]


def _records_nothing(func: Any, name: str) -> bool:
    """A view, a change of sizes and strides but not of contents, or something that gives no tensor (`.item()`)."""
    if any(returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns):
        return True
    if torch.Tag.inplace_view in func.tags:
        return True
    return any(returned not in ("Tensor", "List[Tensor]") for returned in operator(name).returns)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _numbered(arg: tuple[Any, ...]) -> tuple[Any, ...]:
    if arg[0] == "edge":
        return ("edge", arg[1][0], arg[2])
    if arg[0] == "list":
        return ("list", [_numbered(item) for item in arg[1]])
    return arg


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, sizes and bits: NaN equals itself, 0.0 is not -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).view(tensor.shape).copy_(tensor).flatten().view(torch.uint8)
