"""PyTorch's operators, through torchgen's model of schemas and the YAML files that ship with it.

All that is taken from torchgen's model passes through this file and `schema.py`; checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import difflib
import functools
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchgen.model import NativeFunction


class Natives:
    """Every native function by its name ("add.Tensor"), and questions about them."""

    def __init__(self, functions: list[NativeFunction], own_keys: frozenset[str]) -> None:
        self.by_name: dict[str, NativeFunction] = {str(function.func.name): function for function in functions}
        self.own_keys = own_keys
        """Dispatch keys for which PyTorch has kernels of its own."""
        self._by_base: dict[str, list[NativeFunction]] = {}
        for function in functions:
            self._by_base.setdefault(function.func.name.name.base, []).append(function)

    def family(self, function: NativeFunction) -> list[NativeFunction]:
        """The variants of one operator: functional, in-place, mutable, out; itself among them.

        They have the same schema up to what they write, hence the same base name.
        """
        siblings = self._by_base[function.func.name.name.base]
        if len(siblings) == 1:
            return siblings
        signature = function.func.signature()
        return [other for other in siblings if other.func.signature() == signature]

    def functional(self, function: NativeFunction) -> NativeFunction | None:
        """The pure variant of an operator that writes; None if there is none, or if it is pure itself."""
        found = [other for other in self.family(function) if str(other.func.kind().name) == "functional"]
        return found[0] if found and found[0] is not function else None

    def grouped(self, function: NativeFunction) -> list[NativeFunction]:
        """As `family`, where torchgen makes a group of it, which takes an out variant; else the function alone."""
        family = self.family(function)
        kinds = {str(other.func.kind().name) for other in family}
        return family if {"functional", "out"} <= kinds else [function]

    def nearest(self, name: str) -> list[str]:
        """Operators with names close to one that does not exist."""
        plain = name.removeprefix("aten::").strip()
        if plain in self.by_name:
            return [plain]
        base, _, overload = plain.partition(".")
        same = [str(function.func.name) for function in self._by_base.get(base.removesuffix("_"), ())]
        if same:
            ranked = sorted(same, key=lambda other: -_likeness(plain, other))
            close = [other for other in ranked if overload and _likeness(plain, other) > 0.8]
            return (close or ranked)[:3]
        lowered = {other.lower(): other for other in self.by_name}
        if plain.lower() in lowered:
            return [lowered[plain.lower()]]
        return difflib.get_close_matches(plain, self.by_name, n=3, cutoff=0.7)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


@functools.cache
def natives() -> Natives:
    """The native functions of the installed torch. Reading them takes most of a second."""
    from torchgen.gen import parse_native_yaml

    folder = native_folder()
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    # torchgen keeps what it parsed, and adds the keys of other backends' YAMLs to it when it reads these.
    own = frozenset(str(key) for key, index in parsed.backend_indices.items() if not index.external)
    return Natives(list(parsed.native_functions), own)


def native_folder() -> Path:
    """Where native_functions.yaml and tags.yaml are."""
    import torchgen

    assert torchgen.__file__ is not None
    return Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"


def dispatch_keys() -> list[str]:
    """The names of all dispatch keys."""
    from torchgen.model import DispatchKey

    return [str(key) for key in DispatchKey]


# Keys that are steps of PyTorch's dispatcher, or stand for several devices.
_NO_DEVICE = re.compile(
    r"Undefined|Dense|Sparse|SparseCsr|NestedTensor|CustomRNGKeyId|Auto.*|Composite.*|Python.*|PreDispatch|FuncTorch.*"
    r"|ZeroTensor|Conjugate|Negative|BackendSelect|Named|Tracer|Batched.*|VmapMode|Functionalize|ADInplaceOrView"
    r"|TESTING_ONLY.*"
)


def is_device_key(key: str) -> bool:
    """Whether a dispatch key is that of a device, so that a backend can have kernels for it."""
    return _NO_DEVICE.fullmatch(key) is None


def torch_version() -> str:
    """The version of the installed torch, without importing it, and without what it was built for (+cpu, +cu130)."""
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return "unknown"
