"""What a backend gives back, and how it lives: no tensor of the user's shares memory with another, faults are named."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tarry
from tarry.backends.base import Backend, Computation, MemoryInfo, Run
from tarry.errors import BackendError
from tarry.events import expect, record
from tarry.ir.graph import Graph
from tarry.native import C
from tests.backends.simple import Walking, using
from tests.backends.simulated import Accelerator, Updating

USES_DEVICE = True


# ---- results


class Returning(Walking):
    """Changes its results before it gives them back; `change` knows the inputs."""

    def __init__(self, change: Callable[[list[Any], list[torch.Tensor]], list[Any]]) -> None:
        super().__init__()
        self.change = change

    def compile(self, graph: Graph) -> Run:
        super().compile(graph)
        return lambda inputs, numbers: self.change(self.walk(graph, inputs, numbers), inputs)


def _memory(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    real = [C.materialise(tensor) for tensor in tensors]
    starts = [tensor.untyped_storage().data_ptr() for tensor in real]
    return [(start, start + tensor.untyped_storage().nbytes()) for start, tensor in zip(starts, real, strict=True)]


def _apart(*tensors: torch.Tensor) -> bool:
    ranges = sorted(_memory(*tensors))
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_an_input_given_back_is_copied() -> None:
    with using(Returning(lambda results, inputs: [inputs[0]])):
        x = torch.arange(3.0).to("tarry")
        y = x.clone()
        assert y.tolist() == [0.0, 1.0, 2.0]
        assert _apart(x, y)
        y.add_(1)
        assert x.tolist() == [0.0, 1.0, 2.0]


def test_the_same_array_for_two_outputs_is_copied() -> None:
    with using(Returning(lambda results, inputs: [results[0]] * len(results))):
        x = torch.arange(3.0).to("tarry")
        y, z = x + 1, 1 + x
        tarry.mark_step()
        assert _apart(x, y, z)
        assert y.tolist() == z.tolist() == [1.0, 2.0, 3.0]


OVERLAPS: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor]], list[Any]]] = {
    "views of inputs": lambda results, inputs: [inputs[0].view(-1)[: r.numel()].view(r.shape) for r in results],
    "windows on one buffer": lambda results, inputs: _packed(results),
    "one inside the other": lambda results, inputs: [results[0], results[0][1], *results[2:]],
    "other strides": lambda results, inputs: [r.t().contiguous().t() if r.dim() == 2 else r for r in results],
    "gaps": lambda results, inputs: [torch.stack([r, r], -1)[..., 0] for r in results],
    "an offset": lambda results, inputs: [torch.cat([torch.zeros(1), r.flatten()])[1:].view(r.shape) for r in results],
    "overlapping": lambda results, inputs: [r.flatten()[:1].expand(r.numel()).view(r.shape) for r in results],
    "negated": lambda results, inputs: [torch._neg_view(-r) for r in results],
    "requires grad": lambda results, inputs: [r.clone().requires_grad_() for r in results],
    "parameters": lambda results, inputs: [nn.Parameter(r.clone()) for r in results],
    "a tuple": lambda results, inputs: tuple(results),  # type: ignore[dict-item, return-value]
}


def _packed(results: list[torch.Tensor]) -> list[torch.Tensor]:
    whole = torch.cat([r.flatten() for r in results])
    return [part.view(r.shape) for part, r in zip(whole.split([r.numel() for r in results]), results, strict=True)]


@pytest.mark.parametrize("change", OVERLAPS.values(), ids=OVERLAPS)
def test_results_become_what_was_recorded(change: Any) -> None:
    seen: list[list[list[Any]]] = []

    def remembered(results: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[Any]:
        changed = change(results, inputs)
        seen.append([r.tolist() for r in changed])
        return changed

    with using(Returning(remembered)):
        x = torch.arange(12.0).view(3, 4).to("tarry")
        tarry.mark_step()
        y, z = x + 1, x.sum(0) * 2
        tarry.mark_step()
        assert [y.tolist(), z.tolist()] == seen[-1]
        assert _apart(x, y, z)
        assert (y.stride(), z.stride()) == ((4, 1), (1,))
        real = C.materialise(y)
        assert (real.stride(), real.storage_offset(), real.requires_grad) == ((4, 1), 0, False)
        assert type(real) is torch.Tensor
        assert x.tolist() == torch.arange(12.0).view(3, 4).tolist()


def test_conjugated_results() -> None:
    with using(Returning(lambda results, inputs: [r.conj().resolve_conj().conj() for r in results])):
        x = torch.tensor([1 + 2j, 3 - 1j]).to("tarry")
        y = x * 1j
        tarry.mark_step()
        assert y.tolist() == [-2 + 1j, 1 + 3j]
        assert not C.materialise(y).is_conj()


def test_a_result_that_the_backend_keeps_is_not_overwritten() -> None:
    """A compiler may fold what depends on no input, and give the same array at every run."""
    kept = torch.full((3,), 2.0)
    with using(Returning(lambda results, inputs: [kept for _ in results])):
        x = torch.full((3,), 2.0, device="tarry")
        tarry.mark_step()
        tarry.set_backend("eager")
        x.add_(1)
        assert x.tolist() == [3.0] * 3
        assert kept.tolist() == [2.0] * 3


class Arrays(Walking):
    """Computes with NumPy arrays, which share memory with tensors."""

    name = "arrays"

    def to_data(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return tensor.numpy()

    def to_tensor(self, data: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(data)

    def compile(self, graph: Graph) -> Run:
        super().compile(graph)

        def run(inputs: list[Any], numbers: list[Any]) -> list[Any]:
            self.runs += 1
            assert all(array is None or isinstance(array, np.ndarray) for array in inputs)
            tensors: list[Any] = [None if array is None else torch.from_numpy(array) for array in inputs]
            return [r.numpy() for r in self.walk(graph, tensors, numbers)]

        return run


def test_arrays_are_no_aliases() -> None:
    class Same(Arrays):
        def compile(self, graph: Graph) -> Run:
            super().compile(graph)
            return lambda inputs, numbers: [inputs[0][::-1][::-1] for _ in graph.outputs]

    with using(Same()):
        x = torch.arange(3.0).to("tarry")
        y, z = x.clone(), x.clone()
        tarry.mark_step()
        assert _apart(x, y, z)
    y.add_(1)
    z.add_(2)
    assert (x.tolist(), y.tolist(), z.tolist()) == ([0, 1, 2], [1, 2, 3], [2, 3, 4])


def test_training_on_arrays() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 3).to(device)).square().sum().backward()
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    expected = train("cpu")
    for lacks in ([], ["aten::addmm"], ["aten::relu", "aten::mm"]):
        with using(Arrays(lacks=lacks)):
            for mine, wanted in zip(train("tarry"), expected, strict=True):
                torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("kind", [Walking, Arrays, Accelerator])
def test_inputs_that_nobody_reads_may_be_missing(kind: type[Walking]) -> None:
    """Another thread records on one result of an operator while the step with that operator is in flight. Its other
    results are gone when the next step comes."""
    seen: list[torch.Tensor] = []
    inputs_seen: list[list[Any]] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def walk(self, graph: Graph, inputs: list[Any], numbers: list[Any]) -> Any:
            inputs_seen.append(inputs)
            if not seen:
                thread = threading.Thread(target=lambda: seen.append(values * 10))  # noqa: F821 - deleted after the step
                thread.start()
                thread.join()
            return super().walk(graph, inputs, numbers)

    with using(Watched()):
        x = torch.tensor([3.0, 1.0, 2.0]).to("tarry")
        values, indices = x.sort()
        del indices
        tarry.mark_step()
        del values
        assert seen[0].tolist() == [10.0, 20.0, 30.0]
    assert len(inputs_seen) == 2


@pytest.mark.parametrize("kind", [Walking, Arrays, Accelerator, Updating])
def test_an_input_that_no_node_reads_is_none_and_stays_where_it_is(kind: type[Walking]) -> None:
    given: list[list[Any]] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def compile(self, graph: Graph) -> Any:
            made = super().compile(graph)
            program = made.run if isinstance(made, Computation) else made

            def run(inputs: list[Any], numbers: list[Any]) -> Any:
                given.append(list(inputs))
                return program(inputs, numbers)

            return replace(made, run=run) if isinstance(made, Computation) else run

    with using(Watched()) as backend:
        x, y = torch.zeros(1000).to("tarry"), torch.ones(3).to("tarry")
        tarry.mark_step()
        with record() as seen:
            x.fill_(3)
            z = y + 1
            tarry.mark_step()
        moved = [event.fields["bytes"] for event in seen if event.kind == "transfer"]
        assert (x[0].item(), z.tolist()) == (3.0, [2.0] * 3)
    if not backend.capabilities.updates_in_place:  # it is given what it overwrites
        assert sum(value is None for value in given[0]) == 1
        assert len(given[0]) == 2
        assert 4000 not in moved


@pytest.mark.parametrize("name", ["torchscript", "inductor", "dynamo:eager"])
def test_compilers_that_want_all_inputs_get_them(name: str) -> None:
    with using(name), tarry.config.override(compile="wait"):
        x, y = torch.zeros(10).to("tarry"), torch.ones(3).to("tarry")
        tarry.mark_step()
        x.bernoulli_(0.0)  # a generator: TorchScript and Inductor run it through Python
        x.fill_(3)
        z = y + 1
        tarry.mark_step()
        assert (x.tolist(), z.tolist()) == ([3.0] * 10, [2.0] * 3)


def test_memory_that_was_never_written_can_be_read() -> None:
    for backend in (Walking(), Arrays(), Accelerator()):
        with using(backend):
            x = torch.empty(3, device="tarry")
            y = x * 0
            assert y.nan_to_num().tolist() == [0.0] * 3
            x.fill_(2)
            assert (x + 1).tolist() == [3.0] * 3


NONSENSE: dict[str, tuple[Callable[[torch.Tensor], list[Any]], str]] = {
    "too few": (lambda r: [], "it gave 0 results for 1 outputs"),
    "too many": (lambda r: [r, r], "it gave 2 results for 1 outputs"),
    "nothing": (lambda r: [None], "result 0 is a NoneType, not a tensor, by .*aten::add_?.Tensor"),
    "a list": (lambda r: [r.tolist()], "result 0 is a list, not a tensor, by .*aten::add_?.Tensor"),
    "a number": (lambda r: 3, "it gave a int, not a list of results"),  # type: ignore[dict-item, return-value]
    "a tensor": (lambda r: r[None], "it gave a Tensor, not a list of results"),  # type: ignore[dict-item, return-value]
    "shape": (lambda r: [r[:2]], r"result 0 is torch.float32 of shape \(2,\), but .*\(3,\) was recorded, by .*add"),
    "rank": (lambda r: [r[None]], r"shape \(1, 3\)"),
    "dtype": (lambda r: [r.half()], "result 0 is torch.float16"),
    "no memory": (lambda r: [torch.empty(3, device="meta", dtype=torch.float64)], "result 0 is torch.float64"),
}


@pytest.mark.parametrize("update", [False, True], ids=["fresh", "update"])
@pytest.mark.parametrize(("wrong", "message"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_named_and_nothing_is_lost(wrong: Any, message: str, update: bool) -> None:
    """`update`: the output replaces an input, where None could be taken for 'written in place'."""
    with using(Returning(lambda results, inputs: wrong(results[0]))):
        x = torch.arange(3.0).to("tarry")
        tarry.mark_step()
        y = x.add_(1) if update else x + 1
        with pytest.raises(BackendError, match=rf"'walking' failed to run a step of 1 [\s\S]*{message}") as caught:
            y.cpu()
        assert "test_contract.py:" in str(caught.value)
        with expect(syncs=0):
            assert y.tolist() == [1.0, 2.0, 3.0]


# ---- its life


class Living(Walking):
    """Writes down what is done to it."""

    def __init__(self, name: str, diary: list[str], fails: str = "") -> None:
        super().__init__()
        self.name = name
        self.diary = diary
        self.fails = fails

    def _note(self, what: str) -> None:
        self.diary.append(f"{self.name} {what}")
        if self.fails == what:
            raise RuntimeError(f"no {what} today")

    def setup(self) -> None:
        self._note("setup")

    def teardown(self) -> None:
        self._note("teardown")

    def compile(self, graph: Graph) -> Run:
        self._note("compile")
        run = super().compile(graph)

        def noted(inputs: list[Any], numbers: list[Any]) -> Any:
            self._note("run")
            return run(inputs, numbers)

        return noted

    def seed(self, value: int) -> None:
        self._note(f"seed {value}")


def test_the_old_backend_finishes_and_goes_before_the_new_one_comes() -> None:
    diary: list[str] = []
    with using(Living("first", diary)):
        x = torch.ones(2).to("tarry") + 1
        second = Living("second", diary)
        tarry.set_backend(second)
        assert x.tolist() == [2.0, 2.0]
        (x + 1).cpu()
        tarry.set_backend(second)  # again: it begins anew
        (x + 1).cpu()
    assert diary == [
        *("first setup", "first compile", "first run", "first teardown"),
        *("second setup", "second compile", "second run", "second teardown"),
        *("second setup", "second compile", "second run", "second teardown"),
    ]


def test_a_backend_that_cannot_be_set_up_leaves_the_old_one_at_work() -> None:
    diary: list[str] = []
    old = Living("old", diary)
    with using(old):
        x = torch.ones(2).to("tarry")
        y = x + 1
        with pytest.raises(RuntimeError, match="no setup today"):
            tarry.set_backend(Living("new", diary, fails="setup"))
        assert tarry.get_backend() is old
        assert (y + 1).tolist() == [3.0, 3.0]
    assert diary[-4:] == ["old setup", "old compile", "old run", "old teardown"]


def test_opaque_data_survive_a_failed_change() -> None:
    with using(Accelerator()) as backend:
        x = torch.ones(2).to("tarry") + 1
        tarry.mark_step()
        with pytest.raises(RuntimeError, match="no setup today"):
            tarry.set_backend(Living("new", [], fails="setup"))
        assert tarry.get_backend() is backend
        assert x.tolist() == [2.0, 2.0]
        assert (x * 2).tolist() == [4.0, 4.0]


def test_a_failing_teardown_is_reported_and_in_nobodys_way() -> None:
    with using(Living("stubborn", [], fails="teardown")):
        with (
            pytest.warns(UserWarning, match="teardown of backend 'stubborn' failed: no teardown today"),
            record() as seen,
        ):
            tarry.set_backend("eager")
        assert tarry.get_backend().name == "eager"
        assert [event.fields["stage"] for event in seen if event.kind == "error"] == ["teardown"]


def test_a_device_that_cannot_be_leaves_the_backend_where_it_was() -> None:
    backend = Walking()
    with using(backend):
        with pytest.raises(BackendError, match="does not run on 'xpu'"):
            tarry.set_backend(backend, device="xpu")
        assert backend.device == "cpu"
        assert tarry.get_backend() is backend
        assert (torch.ones(2).to("tarry") + 1).tolist() == [2.0, 2.0]


def test_what_the_old_backend_cannot_compute_the_new_one_does() -> None:
    with using(Living("old", [], fails="compile")):
        x = torch.ones(2).to("tarry") + 1
        with record() as seen:
            tarry.set_backend("eager")
        assert [event.fields["stage"] for event in seen if event.kind == "error"] == ["compile", "set_backend"]
        assert x.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "seed",
    [lambda: torch.manual_seed(5), lambda: torch.tarry.manual_seed_all(5), lambda: torch.tarry.manual_seed(5)],
    ids=["torch", "all", "one"],
)
def test_seeds_are_passed_on(seed: Callable[[], Any]) -> None:
    diary: list[str] = []
    with using(Living("seeded", diary)):
        seed()
    assert diary == ["seeded setup", "seeded seed 5", "seeded teardown"]


# ---- looking inside


def test_metrics_of_the_backend_are_shown() -> None:
    class Counting(Walking):
        name = "counting"

        def metrics(self) -> dict[str, float]:
            return {"runs": self.runs, "seconds": 0.25}

    with using(Counting()):
        assert tarry.metrics.counters()["counting/runs"] == 0
        (torch.ones(2).to("tarry") + 1).cpu()
        counters = tarry.metrics.counters()
        assert (counters["counting/runs"], counters["counting/seconds"]) == (1, 0.25)
        lines = [line.split() for line in tarry.metrics.report().splitlines()]
        assert ["counting/runs", "1"] in lines
        assert ["counting/seconds", "0.25"] in lines
        assert ["compile", "1"] in [line[:2] for line in lines]
    assert "counting/runs" not in tarry.metrics.counters()


def test_memory_of_the_backend_is_told() -> None:
    with using(Accelerator()) as backend:
        (x := torch.ones(1024).to("tarry") + 1).cpu()
        free, total = torch.tarry.mem_get_info()
        assert total == 1 << 20
        assert free == total - 4 * 1024 * len(backend.memory)
        assert torch.tarry.mem_get_info("tarry:0") == (free, total)
        assert torch.tarry.get_device_properties().total_memory == total
        del x
    free, total = torch.tarry.mem_get_info(0)
    assert 0 < free < total
    assert Backend().memory_info() != MemoryInfo()
    with pytest.raises(ValueError, match="there is no device 'tarry:7'"):
        torch.tarry.mem_get_info(7)


def test_explain_gives_the_text_of_the_compiler() -> None:
    class Talking(Walking):
        def compile(self, graph: Graph) -> Computation:
            run = super().compile(graph)
            assert not isinstance(run, Computation)
            self.made = Computation(run, graph, text=lambda: f"program of {len(graph.nodes)} operators")
            return self.made

    with using(Talking()) as backend:
        x = torch.ones(2, 3).to("tarry")
        assert tarry.explain((x + 1).sin(), stage="compiled") == "program of 2 operators"
        assert backend.runs == 0
        made = backend.made
        assert made.parameter_names == ("%0",)
        assert [type_.sizes for type_ in (*made.parameter_types, *made.result_types)] == [(2, 3), (2, 3)]
    with using(Walking()):
        assert "aten::sin(" in tarry.explain(x.sin(), stage="compiled")
    with using("eager"):
        assert "runs this graph as it was recorded" in tarry.explain(x.sin(), stage="compiled")
