"""Simulated accelerators: their data are handles into a memory of their own, which is gone after teardown."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from typing import Any

import torch

from tarry.backends.base import Capabilities, Computation, MemoryInfo, Run
from tarry.ir.graph import Graph
from tests.backends.simple import Walking


class Handle:
    """An address in the accelerator's memory, which is freed with the last handle to it."""

    def __init__(self, owner: Accelerator, address: int) -> None:
        self.address = address
        self.ready = threading.Event()
        self.error: Exception | None = None
        weakref.finalize(self, owner.memory.pop, address, None)


class Accelerator(Walking):
    """Computes on what lies in its memory, and on nothing else."""

    name = "accelerator"
    capabilities = Capabilities(opaque_data=True)

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        super().__init__(device, **options)
        self.memory: dict[int, torch.Tensor] = {}
        self.written = self.read = 0
        self.life: list[str] = []
        self._addresses = itertools.count(1000)

    def setup(self) -> None:
        self.life.append("setup")

    def teardown(self) -> None:
        self.life.append("teardown")
        self.memory.clear()

    def store(self, tensor: torch.Tensor) -> Handle:
        handle = Handle(self, next(self._addresses))
        self.memory[handle.address] = tensor
        handle.ready.set()
        return handle

    def to_data(self, tensor: torch.Tensor) -> Handle:
        assert tensor.device == torch.device(self.device)
        self.written += 1
        return self.store(tensor.clone())

    def to_tensor(self, data: Handle) -> torch.Tensor:
        assert isinstance(data, Handle)
        self.read += 1
        return self.memory[data.address]  # the memory itself: it must not be written to

    def compile(self, graph: Graph) -> Computation | Run:
        super().compile(graph)

        def run(inputs: list[Any], numbers: list[Any]) -> list[Handle]:
            self.runs += 1
            operands = self.operands(inputs)
            before = [None if operand is None else operand.clone() for operand in operands]
            results = [self.store(result.clone()) for result in self.walk(graph, operands, numbers)]
            for operand, content in zip(operands, before, strict=True):
                assert operand is None or torch.equal(operand.nan_to_num(), content.nan_to_num())
            return results

        return run

    def operands(self, inputs: list[Any]) -> list[Any]:
        """What lies at the handles; None where nothing reads it."""
        return [None if handle is None else self.memory[handle.address] for handle in inputs]

    def metrics(self) -> dict[str, float]:
        return {"buffers": len(self.memory), "bytes": sum(t.nbytes for t in self.memory.values())}

    def memory_info(self) -> MemoryInfo:
        total = 1 << 20
        return MemoryInfo(total - int(self.metrics()["bytes"]), total)


class Updating(Accelerator):
    """Overwrites what is replaced, and frees nothing that is still to be read."""

    name = "updating"
    capabilities = Capabilities(opaque_data=True, updates_in_place=True)

    def compile(self, graph: Graph) -> Computation:
        Walking.compile(self, graph)
        in_place = frozenset(k for k, replaced in enumerate(graph.replaces) if replaced is not None)

        def run(inputs: list[Any], numbers: list[Any]) -> list[Handle | None]:
            self.runs += 1
            results = self.walk(graph, self.operands(inputs), numbers)
            results = [result.clone() for result in results]
            outputs: list[Handle | None] = []
            for k, result in enumerate(results):
                replaced = graph.replaces[k]
                if replaced is not None:
                    self.memory[inputs[replaced].address].copy_(result)
                outputs.append(None if k in in_place else self.store(result))
            return outputs

        return Computation(run, graph, in_place)


class Asynchronous(Accelerator):
    """Returns at once; a thread computes, one program after the other, once `go` is set."""

    name = "asynchronous"
    capabilities = Capabilities(opaque_data=True, asynchronous=True)

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        super().__init__(device, **options)
        self.go = threading.Event()
        self.go.set()
        self.waited = 0
        self._jobs: queue.Queue[Any] = queue.Queue()

    def setup(self) -> None:
        super().setup()
        threading.Thread(target=self._work, daemon=True).start()

    def teardown(self) -> None:
        self._jobs.put(None)
        super().teardown()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.go.wait()
            try:
                job()
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def compile(self, graph: Graph) -> Run:
        Walking.compile(self, graph)

        def run(inputs: list[Any], numbers: list[Any]) -> list[Handle]:
            self.runs += 1
            handles = [Handle(self, next(self._addresses)) for _ in graph.outputs]

            def job() -> None:
                try:
                    for handle in inputs:
                        if handle is not None and handle.error is not None:
                            raise handle.error
                    results = self.walk(graph, self.operands(inputs), numbers)
                    for handle, result in zip(handles, results, strict=True):
                        self.memory[handle.address] = result.clone()
                except Exception as error:
                    for handle in handles:
                        handle.error = error
                for handle in handles:
                    handle.ready.set()

            self._jobs.put(job)
            return handles

        return run

    def to_tensor(self, data: Handle) -> torch.Tensor:
        data.ready.wait()
        if data.error is not None:
            raise data.error
        return super().to_tensor(data)

    def synchronize(self) -> None:
        self.waited += 1
        self._jobs.join()
