"""A simulated accelerator: a card with two chips. Each chip has a memory of its own, and a queue of work.

    tarry.set_backend(Card())         # tarry:0 and tarry:1 are its chips

What an accelerator asks of its backend is all here: buffers that the host cannot look into, memory that runs out,
programs that return before they are done, errors that come up later, and copies from chip to chip. What is missing is
the arithmetic: `execute` computes a graph with PyTorch's CPU kernels.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import tarry
from tarry.backends.base import MemoryInfo
from tarry.ir import Graph, Node
from tarry.ir.evaluate import run_node

# ---- the hardware, and what its driver gives the host


class Chip:
    """A memory of so many bytes, and a thread that does one job after the other, each in `seconds` at least."""

    def __init__(self, ordinal: int, memory: int, seconds: float) -> None:
        self.ordinal, self.memory, self.seconds = ordinal, memory, seconds
        self.used = self.peak = self.launched = 0
        self.busy: list[tuple[float, float]] = []  # when each job began, and when it was done
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self) -> None:
        threading.Thread(target=self._work, name=f"chip {self.ordinal}", daemon=True).start()

    def stop(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and with it the buffers that nothing else needs

    def allocate(self, nbytes: int) -> None:
        with self._lock:
            if self.used + nbytes > self.memory:
                raise torch.OutOfMemoryError(
                    f"chip {self.ordinal} is out of memory: {nbytes} bytes are needed, and of {self.memory} bytes "
                    f"{self.memory - self.used} are free"
                )
            self.used += nbytes
            self.peak = max(self.peak, self.used)

    def free(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes

    def launch(self, program: Callable[[list[Any]], list[Any]], reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Have a program run on what will be in the buffers `reads` then, to fill `writes`. Returns at once."""
        self.launched += 1

        def job() -> None:
            operands = [buffer and buffer.wait() for buffer in reads]  # for another chip, perhaps
            began = time.perf_counter()
            try:
                results = program(operands)
            except Exception as error:
                results = [error] * len(writes)
            time.sleep(max(0.0, self.seconds - (time.perf_counter() - began)))
            self.busy.append((began, time.perf_counter()))
            for buffer, result in zip(writes, results, strict=True):
                buffer.fill(result)

        self._jobs.put(job)


class Buffer:
    """Memory of a chip. It is freed when neither the host nor a job in the queue knows it any more."""

    def __init__(self, chip: Chip, nbytes: int) -> None:
        self.nbytes = 0
        chip.allocate(nbytes)
        self.chip, self.nbytes = chip, nbytes
        self._done = threading.Event()
        self._content: torch.Tensor | Exception = torch.empty(0)

    def __del__(self) -> None:
        if self.nbytes:
            self.chip.free(self.nbytes)

    def fill(self, content: torch.Tensor | Exception) -> Buffer:
        """Put something into it, or the error of the program that should have."""
        self._content = content.clone() if isinstance(content, torch.Tensor) else content
        self._done.set()
        return self

    def wait(self) -> torch.Tensor | Exception:
        """What is in it, once it is there."""
        self._done.wait()
        return self._content


def execute(graph: Graph, operands: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
    """What the chip's processor does. Whatever depends on an error is that error, and all else is computed; but a
    tensor that was to be updated keeps what it held, as if the program had not come that far."""
    known = dict(zip(graph.inputs, operands, strict=True))
    for node in graph.nodes:
        failed = [known[value] for value in node.operands if isinstance(known[value], Exception)]
        try:
            if failed:
                raise failed[0]
            run_node(node, known, numbers, torch.device("cpu"))
        except Exception as error:
            known.update((value, error.with_traceback(None)) for value in node.results)
    results = [known[value] for value in graph.outputs]
    for k, replaced in enumerate(graph.replaces):
        if replaced is not None and isinstance(results[k], Exception):
            results[k] = results[k] if operands[replaced] is None else operands[replaced]
    return results


# ---- the backend


class ChipBackend(tarry.Backend):
    """One chip. Its data are buffers of this chip, and its programs run on this chip. Nothing is updated in place, but
    `execute` has to know what would be."""

    name = "chip"
    capabilities = tarry.Capabilities(opaque_data=True, asynchronous=True, updates_in_place=True, device_types=("cpu",))

    def __init__(self, chip: Chip, device: str = "cpu") -> None:
        super().__init__(device)
        self.chip = chip

    def supports(self, node: Node) -> bool:
        return node.seed is None  # such an operator draws from a generator of the host's, which is not this thread's

    def compile(self, graph: Graph) -> Callable[..., Any]:
        def run(inputs: list[Buffer | None], numbers: list[Any]) -> list[Buffer]:
            assert all(buffer is None or buffer.chip is self.chip for buffer in inputs)
            outputs = [Buffer(self.chip, value.type.nbytes) for value in graph.outputs]
            self.chip.launch(lambda operands: execute(graph, operands, numbers), inputs, outputs)
            return outputs

        return run

    def to_data(self, tensor: torch.Tensor) -> Buffer:
        return Buffer(self.chip, tensor.nbytes).fill(tensor)

    def to_tensor(self, buffer: Buffer) -> torch.Tensor:
        content = buffer.wait()
        if isinstance(content, Exception):
            raise content
        return content.clone()

    def receive(self, buffer: Buffer, sender: tarry.Backend) -> Buffer:
        """From chip to chip, when the sender is done: the host does not wait."""
        copy = Buffer(self.chip, buffer.nbytes)
        self.chip.launch(lambda operands: operands, [buffer], [copy])
        return copy

    def synchronize(self) -> None:
        done = Buffer(self.chip, 0)
        self.chip.launch(lambda operands: [torch.empty(0)], [], [done])
        done.wait()

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=self.chip.memory - self.chip.used, total=self.chip.memory)


class Card(tarry.Backend):
    """The chips together: what `tarry.set_backend` takes."""

    name = ChipBackend.name
    capabilities = ChipBackend.capabilities

    def __init__(self, device: str = "cpu", chips: int = 2, memory: int = 64 << 20, seconds: float = 0.0) -> None:
        super().__init__(device)
        self.chips = [Chip(ordinal, memory, seconds) for ordinal in range(chips)]
        self._backends = [ChipBackend(chip, device) for chip in self.chips]

    def devices(self) -> Sequence[tarry.Backend]:
        return self._backends

    def setup(self) -> None:
        for chip in self.chips:
            chip.start()

    def teardown(self) -> None:
        for chip in self.chips:
            chip.stop()

    def metrics(self) -> dict[str, float]:
        return {f"launched on {chip.ordinal}": chip.launched for chip in self.chips}
