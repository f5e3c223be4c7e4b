"""Inductor's programs as bytes and back.

A program is the Python source that Inductor has generated, with the tensors that stand in it. Where that was read as a
list of instructions (launch.py), the list goes along with the libraries of its kernels: it then runs in another process
without Inductor and without a compiler. A program that stays Python is loaded through Inductor's own cache of code,
which compiles kernels again that are no longer in its directories.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tarry.backends.inductor.guards import Guards
from tarry.backends.inductor.launch import Listing
from tarry.errors import Unsupported
from tarry.ir.dtypes import DTYPE_NAMES, DTYPES
from tarry.ir.layout import TensorType, extent
from tarry.store import CorruptError, pack, unpack

# What CompiledFxGraph and PyCodeCache have was read off torch 2.11 and 2.13; all uses of it are in this file.

ALIGNMENT = 16  # bytes, which Triton's kernels load at once
_LEVEL = 1  # of compression: half of a library is padding, more effort gains little


@dataclass(frozen=True)
class Generated:
    """What Inductor has generated for a graph.

    `attributes` are the tensors that the generated module has by name. Inputs in `aligned` are taken for aligned by the
    code, and those in `written` are written by it. `in_place` are the outputs that it does not return. `guards` are
    those of a program with symbolic sizes.
    """

    source: str
    attributes: dict[str, torch.Tensor]
    aligned: list[int]
    written: list[int]
    in_place: list[int]
    listing: Listing | None
    libraries: Sequence[bytes | memoryview] = ()  # those of the list, once it was stored
    guards: Guards | None = None

    @classmethod
    def of(
        cls, compiled: Any, in_place: frozenset[int], listing: Listing | None, guards: Guards | None = None
    ) -> Generated:
        """The program that Inductor has made. Raises Unsupported if there is more to it than can be stored."""
        for name in ("torchbind_constants", "opaque_value_type_classes"):
            if getattr(compiled, name, None):
                raise Unsupported(None, f"Inductor's program has {name}")
        if not getattr(compiled, "source_code", ""):
            raise Unsupported(None, "Inductor's program has no source")
        attributes = dict(compiled.constants or {})
        for name in attributes:
            if name in (getattr(compiled, "frozen_param_names", None) or {}):
                raise Unsupported(None, "Inductor has frozen parameters")
        written = sorted(compiled.mutated_input_idxs)
        aligned = list(compiled.inputs_to_check)
        if getattr(compiled, "_defers_input_alignment", False):
            aligned = [k for k in aligned if k in written]  # the code itself sees to the others
        return cls(compiled.source_code, attributes, aligned, written, sorted(in_place), listing, guards=guards)

    # ---- running it

    def link(self) -> Any:
        """The native program, its libraries loaded from memory."""
        assert self.listing is not None
        # A library that was loaded needs its file no more, and one under a new name is never taken for another.
        with tempfile.TemporaryDirectory(prefix="tarry-") as folder:
            paths = [Path(folder, f"{k}.so") for k in range(len(self.libraries))]
            for path, content in zip(paths, self.libraries, strict=True):
                path.write_bytes(zlib.decompress(content))
            return replace(self.listing, libraries=list(map(str, paths))).link()

    def function(self) -> Callable[[list[Any]], Any]:
        """The generated function, from a list of inputs to the results."""
        from torch._inductor.codecache import PyCodeCache

        key, path = PyCodeCache.write(self.source)
        module = PyCodeCache.load_by_key_path(key, path, attrs=dict(self.attributes))
        return aligning(module.call, self.aligned, self.written) if self.aligned else module.call

    # ---- as bytes

    def to_bytes(self) -> bytes:
        """All of it. Raises Unsupported for an argument that has no form here."""
        blobs: list[bytes] = [zlib.compress(self.source.encode(), _LEVEL)]
        tensors: list[torch.Tensor] = list(self.attributes.values())
        listing = self.listing
        fields: dict[str, Any] | None = None
        if listing is not None:
            tensors += listing.constants
            fields = {
                "registers": listing.registers,
                "vectors": [[DTYPE_NAMES[dtype], indices] for dtype, indices in listing.vectors],
                "instructions": [{key: _encode(value) for key, value in i.items()} for i in listing.instructions],
                "results": listing.results,
                "returned": listing.returned,
                "outputs": listing.outputs,
                "integers": listing.integers,
                "numbers": listing.numbers,
                "libraries": len(listing.libraries),
            }
            blobs += [zlib.compress(Path(path).read_bytes(), _LEVEL) for path in listing.libraries]
        header = {
            "attributes": list(self.attributes),
            "aligned": self.aligned,
            "written": self.written,
            "in_place": self.in_place,
            "listing": fields,
            "guards": None if self.guards is None else [self.guards.symbols, self.guards.conditions],
            "tensors": [_tensor_fields(tensor) for tensor in tensors],
        }
        return pack(header, [*blobs, *map(_tensor_bytes, tensors)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Generated:
        """What was stored. Raises CorruptError if it makes no sense."""
        header, blobs = unpack(data)
        try:
            fields = header["listing"]
            count = 1 + (fields["libraries"] if fields is not None else 0)
            tensors = [_tensor(f, blob) for f, blob in zip(header["tensors"], blobs[count:], strict=True)]
            named = len(header["attributes"])
            return cls(
                source=zlib.decompress(blobs[0]).decode(),
                attributes=dict(zip(header["attributes"], tensors, strict=False)),
                aligned=header["aligned"],
                written=header["written"],
                in_place=header["in_place"],
                listing=None if fields is None else _listing(fields, tensors[named:]),
                libraries=blobs[1:count],
                guards=None if header["guards"] is None else Guards(header["guards"][1], header["guards"][0]),
            )
        except (KeyError, TypeError, IndexError, ValueError, SyntaxError, zlib.error) as error:
            raise CorruptError(f"{type(error).__name__}: {error}") from error


def _listing(fields: dict[str, Any], constants: list[torch.Tensor]) -> Listing:
    return Listing(
        registers=fields["registers"],
        vectors=[(DTYPES[dtype], indices) for dtype, indices in fields["vectors"]],
        instructions=[{key: _decode(value) for key, value in i.items()} for i in fields["instructions"]],
        constants=constants,
        results=fields["results"],
        returned=fields["returned"],
        outputs=fields["outputs"],
        libraries=[],
        integers=[[(factor, product) for factor, product in terms] for terms in fields["integers"]],
        numbers=fields["numbers"],
    )


def aligning(
    function: Callable[[list[Any]], Any], aligned: Sequence[int], written: Sequence[int]
) -> Callable[[list[Any]], Any]:
    """The function, given copies of those of its inputs in `aligned` that are not; writes to them are copied back."""

    def run(inputs: list[Any]) -> Any:
        replaced = []
        for k in aligned:
            tensor = inputs[k]
            if tensor.data_ptr() % ALIGNMENT:
                flat = tensor.as_strided((TensorType.of(tensor).extent,), (1,)).clone()
                inputs[k] = flat.as_strided(tensor.shape, tensor.stride())
                if k in written:
                    replaced.append((tensor, inputs[k]))
        results = function(inputs)
        for tensor, copy in replaced:
            tensor.copy_(copy)
        return results

    return run


# ---- values that are not JSON's own, as {kind: text}

_FORMATS = {
    str(value): value for value in vars(torch).values() if isinstance(value, torch.memory_format | torch.layout)
}


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and value[:1] == ("register",):
        return {"register": value[1]}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, complex):
        return {"complex": repr(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": DTYPE_NAMES[value]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.memory_format | torch.layout):
        return {"format": str(value)}
    raise Unsupported(None, f"a program with {value!r} in it cannot be stored")


_KINDS: dict[str, Callable[[Any], Any]] = {
    "register": lambda number: ("register", number),
    "complex": complex,
    "dtype": DTYPES.__getitem__,
    "device": torch.device,
    "format": _FORMATS.__getitem__,
}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        ((kind, text),) = value.items()
        return _KINDS[kind](text)
    return value


# ---- tensors, with their strides


def _tensor_fields(tensor: torch.Tensor) -> list[Any]:
    return [DTYPE_NAMES[tensor.dtype], list(tensor.shape), list(tensor.stride()), str(tensor.device)]


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().as_strided((TensorType.of(tensor).extent,), (1,)).cpu()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(fields: list[Any], data: memoryview) -> torch.Tensor:
    dtype, sizes, strides, device = fields
    length = extent(tuple(sizes), tuple(strides))
    if length * DTYPES[dtype].itemsize != len(data):
        raise ValueError("a tensor of another size")
    flat = torch.empty(length, dtype=DTYPES[dtype])
    if length:
        flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return flat.to(device).as_strided(sizes, strides)
