"""Two worlds in lock-step: the same lines of Python run on CPU eager and on the device; nothing may tell them apart.

A program is a list of source lines over variables t0, t1, ...; a failing one is its own reproducer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support import DEVICE, step

#: Tensors a program may hold at once; beyond it, new ones replace none and are dropped.
LIMIT = 10


def cells(tensor: Tensor) -> set[int]:
    """The bytes of its storage that the tensor covers."""
    size = tensor.element_size()
    length = tensor.untyped_storage().nbytes() // size
    index = torch.arange(length).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return {i * size + b for i in index.flatten().tolist() for b in range(size)}


def storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def overlaps_itself(tensor: Tensor) -> bool:
    """Two elements share memory: a write through it has no defined result (eager refuses the cases it can see)."""
    return len(cells(tensor)) < tensor.numel() * tensor.element_size()


def overlaps_partly(written: Tensor, read: Tensor) -> bool:
    """Source and destination share memory without being the same view: the result depends on the order of copying."""
    if storage_id(written) != storage_id(read):
        return False
    same = (written.shape, written.stride(), written.storage_offset(), written.dtype)
    if same == (read.shape, read.stride(), read.storage_offset(), read.dtype):
        return False
    return not cells(written).isdisjoint(cells(read))


def _leaf(tensor: Tensor) -> bool | str:
    """Whether it is a leaf; asking may raise, for one of several views whose base was written to."""
    try:
        return tensor.is_leaf
    except RuntimeError as error:
        return type(error).__name__


def _strides(tensor: Tensor) -> list[int]:
    """The strides that lead anywhere: of a dimension of one element, or of an empty tensor, a kernel may set any."""
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1] if tensor.numel() else []


def _facts(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": tuple(tensor.shape),
        "stride": _strides(tensor),
        "offset": tensor.storage_offset() if tensor.numel() else 0,
        "dtype": tensor.dtype,
        "contiguous": tensor.is_contiguous(),
        "conj": tensor.is_conj(),
        "neg": tensor.is_neg(),
        "version": tensor._version,
        "requires_grad": tensor.requires_grad,
        "is_leaf": _leaf(tensor),
        "bytes": tensor.untyped_storage().nbytes(),
    }


@dataclass
class World:
    """The variables on both sides, and the lines that made them."""

    cpu: dict[str, Any] = field(default_factory=dict)
    dev: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    made: int = 0
    ignored: frozenset[str] = frozenset()  # facts that are eager's own affair
    exact: bool = True  # the reference backend runs the kernels of eager; what a compiler makes may round otherwise
    relative: float | None = None  # what counts as rounding, if not what PyTorch's own tests take for the dtype

    def __post_init__(self) -> None:
        self.cpu.update(torch=torch, D="cpu", cut=lambda: None, read=_read)
        self.dev.update(torch=torch, D=DEVICE, cut=step, read=_read)

    def __getitem__(self, name: str) -> Tensor:
        """The CPU side's tensor: what a generator looks at to decide on the next line."""
        tensor = self.cpu[name]
        assert isinstance(tensor, Tensor)
        return tensor

    def program(self) -> str:
        return "\n".join(self.lines)

    def fresh(self) -> str:
        self.made += 1
        return f"t{self.made - 1}"

    def run(self, line: str, makes: tuple[str, ...] = ()) -> bool:
        """Run a line on both sides; True when it ran, False when both refused it."""
        self.lines.append(line)
        cpu_error = self._exec(line, self.cpu)
        if isinstance(cpu_error, NotImplementedError):
            # A kernel that the real device lacks for a dtype: only running it can tell, so the device says so later.
            self.lines[-1] = f"# not implemented in eager: {line}"
            return False
        dev_error = self._exec(line, self.dev)
        if type(cpu_error) is not type(dev_error):
            raise AssertionError(
                f"{line!r}: eager {_say(cpu_error)}, the device {_say(dev_error)}\n{self.program()}"
            ) from dev_error
        if cpu_error is not None:
            self.lines[-1] += "  # raises"
            return False
        for name in makes:
            if len(self.names) < LIMIT:
                self.names.append(name)
            else:
                del self.cpu[name], self.dev[name]
        self.check_facts()
        return True

    def drop(self, name: str) -> None:
        self.names.remove(name)
        self.run(f"del {name}")

    @staticmethod
    def _exec(line: str, variables: dict[str, Any]) -> Exception | None:
        try:
            exec(line, variables)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
            return error
        return None

    def check_facts(self) -> None:
        """Everything but the values: reads nothing, so it cuts no graph."""
        for name in self.names:
            cpu, dev = self._facts(self.cpu[name]), self._facts(self.dev[name])
            assert dev == cpu, (
                f"{name}: "
                + "; ".join(f"{k} {dev[k]} != {cpu[k]}" for k in cpu if dev[k] != cpu[k])
                + f"\n{self.program()}"
            )
        for i, a in enumerate(self.names):
            for b in self.names[i + 1 :]:
                cpu_shares = storage_id(self.cpu[a]) == storage_id(self.cpu[b])
                dev_shares = storage_id(self.dev[a]) == storage_id(self.dev[b])
                assert cpu_shares == dev_shares, f"{a} and {b} share a storage on one side only\n{self.program()}"

    def _facts(self, tensor: Tensor) -> dict[str, Any]:
        return {name: fact for name, fact in _facts(tensor).items() if name not in self.ignored}

    def usable(self, name: str) -> bool:
        """False for one of several views whose base was written to under autograd: PyTorch refuses it from then on."""
        return isinstance(_leaf(self.cpu[name]), bool)

    def check_value(self, name: str) -> None:
        if not self.usable(name):
            return
        self.lines.append(f"read({name})")
        expected, actual = _read(self.cpu[name]), _read(self.dev[name])
        assert self._same(actual, expected), f"{name} is\n{actual}\ninstead of\n{expected}\n{self.program()}"

    def _same(self, actual: Tensor, expected: Tensor) -> bool:
        if self.exact or not (expected.is_floating_point() or expected.is_complex()):
            return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())
        try:
            torch.testing.assert_close(actual, expected, rtol=self.relative, atol=self.relative, equal_nan=True)
        except AssertionError:
            return False
        return True

    def check_all(self) -> None:
        for name in self.names:
            self.check_value(name)

    def check_variable(self, name: str) -> None:
        """A Python value that a line left in a variable; by repr, in which NaN is NaN."""
        assert repr(self.dev[name]) == repr(self.cpu[name]), (
            f"{name} is {self.dev[name]!r} instead of {self.cpu[name]!r}\n{self.program()}"
        )


def _read(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _say(error: Exception | None) -> str:
    return "runs it" if error is None else f"raises {type(error).__name__}: {str(error)[:200]}"
