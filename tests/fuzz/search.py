"""Running programs in both worlds, and making a failing one short."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.aliasing.world import World

#: What the printed script is made of. `{program}` is a list of lines, `{backend}` a name.
SCRIPT = '''\
"""Found by tests.fuzz ({what}): {why}."""
import warnings

import torch

import tarry

PROGRAM = {program}


def play(device):
    variables = dict(
        torch=torch,
        D=device,
        cut=tarry.mark_step if device == "tarry" else lambda: None,
        read=lambda tensor: tensor.detach().cpu(),
        direct=tarry.native.C.force_direct_calls if device == "tarry" else lambda on: None,
    )
    for line in PROGRAM:
        try:
            exec(line, variables)
        except Exception as error:
            print(f"{{device}}: {{line}} raises {{type(error).__name__}}: {{str(error)[:300]}}")
    return variables


warnings.simplefilter("ignore")
tarry.set_backend({backend!r}, compile="wait")
cpu, dev = play("cpu"), play("tarry")
for name, expected in cpu.items():
    if isinstance(expected, torch.Tensor) and name in dev:
        actual = dev[name]
        facts = [(t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad) for t in (expected, actual)]
        if facts[0] != facts[1]:
            print(name, "is", facts[1], "instead of", facts[0])
        try:
            torch.testing.assert_close(actual.detach().cpu(), expected.detach(), equal_nan=True)
        except Exception as error:
            print(name, "differs:", error)
'''


class Deferred(Exception):  # noqa: N818 - the end of a program, not a fault
    """The line fails for what its data are, or for want of a kernel: eager says so at the line, the device when a value
    is read. What a program does after that is not compared."""


#: Which calls run at once (csrc/record/direct.h): all that can; or those of some lines.
DIRECT = ("never", "always", "mixed")


@dataclass
class LoggedWorld(World):
    """Writes each line down before it runs: what is left of a process that crashed."""

    log: Path | None = None
    direct: str = "never"
    _drawn: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        from tarry.native import C

        super().__post_init__()
        self.cpu["direct"] = lambda _: None
        self.dev["direct"] = C.force_direct_calls

    def _choose_direct(self, line: str) -> None:
        """A line of the program, so that it is replayed, and dropped if the program fails without it."""
        if not self.lines:
            self._drawn.seed(line)
        if self.direct == "always" and not self.lines:
            super().run("direct(True)")
        elif self.direct == "mixed" and self._drawn.random() < 0.25:
            super().run(f"direct({self._drawn.random() < 0.6})")

    def run(self, line: str, makes: tuple[str, ...] = ()) -> bool:
        self._choose_direct(line)
        if self.log is not None:
            self.log.write_text("\0".join([*self.lines, line]))
        try:
            ran = super().run(line, makes)
            if self.lines[-1].startswith("# not implemented"):
                raise Deferred  # eager may have changed something before it found out
            return ran
        except AssertionError as error:
            if "the device runs it" in str(error) and self._fails_when_read(str(error)):
                raise Deferred from None
            raise

    @staticmethod
    def _exec(line: str, variables: dict[str, Any]) -> Exception | None:
        try:
            exec(line, variables)
        except Exception as error:  # whatever it is, both sides must raise it
            return error
        return None

    def check_value(self, name: str) -> None:
        if self.log is not None:
            self.log.write_text("\0".join([*self.lines, f"read({name})"]))
        super().check_value(name)

    def _fails_when_read(self, message: str) -> bool:
        import tarry

        try:
            tarry.sync()
            for value in list(self.dev.values()):
                if isinstance(value, Tensor):
                    value.cpu()
        except Exception as error:
            return f"raises {type(error).__name__}" in message
        return False


def fresh_backend(name: str) -> None:
    """Forget all programs: what a program does must not depend on those before it, and should a bug, it shows."""
    import tarry

    tarry.set_backend(name, compile="wait")


LOOSE = {"training", "amp"}  # foreach and fused optimizers add in another order; low precision rounds
#: How many bytes a result's storage has, and how often it was written, is the affair of eager's kernels: it is compared
#: only where programs are about that.
ABOUT_STORAGES = {"views", "gradients-of-views", "out"}


def attempt(
    write: Callable[[LoggedWorld], None], what: str, *, exact: bool, log: Path | None = None, direct: str = "never"
) -> tuple[list[str], str]:
    """Have a program written and run. Gives its lines, and what went wrong, or nothing."""
    ignored = frozenset() if what in ABOUT_STORAGES else frozenset({"bytes", "version", "offset"})
    relative = 0.03 if what == "amp" and not exact else None  # a few roundings to bfloat16
    world = LoggedWorld(exact=exact and what not in LOOSE, ignored=ignored, relative=relative, log=log, direct=direct)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            write(world)
        except Deferred:
            pass
        except Exception as error:
            return world.lines, _kind(error)
        finally:
            _forget(world)
    return world.lines, ""


def replay(lines: list[str], what: str, *, exact: bool, log: Path | None = None) -> str:
    """What goes wrong in a given program, or nothing."""

    def write(world: LoggedWorld) -> None:
        for line in lines:
            world.run(line)
            world.names = [name for name, value in world.cpu.items() if isinstance(value, Tensor) and name in world.dev]
            world.check_facts()
        world.check_all()

    return attempt(write, what, exact=exact, log=log)[1]


def minimise(lines: list[str], fails: Callable[[list[str]], bool], tries: int = 150) -> list[str]:
    """Drop lines, many at first, while the program still fails."""
    size = max(len(lines) // 2, 1)
    while size and tries > 0:
        at, dropped = 0, False
        while at < len(lines) and tries > 0:
            shorter = lines[:at] + lines[at + size :]
            tries -= 1
            if shorter and fails(shorter):
                lines, dropped = shorter, True
            else:
                at += size
        if not dropped:
            size //= 2
    return lines


def script(lines: list[str], backend: str, what: str, why: str) -> str:
    """A program that shows the difference, for itself."""
    program = "[\n" + "".join(f"    {line!r},\n" for line in lines) + "]"
    return SCRIPT.format(program=program, backend=backend, what=what, why=why.replace('"', "'"))


def _kind(error: Exception) -> str:
    said = " ".join(str(error).split("\n")[:4])
    return f"{type(error).__name__}: {said[:200]}"


def _forget(world: World) -> None:
    """Drop the tensors: an error that is kept must not reach the next program."""
    import tarry

    world.dev["direct"](False)
    world.cpu.clear()
    world.dev.clear()
    try:
        tarry.mark_step(wait=True)
    except Exception as error:  # of this program: it was seen, or the value was not read
        del error
    torch.manual_seed(0)
