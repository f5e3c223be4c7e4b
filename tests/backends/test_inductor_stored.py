"""Inductor's programs in the background and across processes: compiled once, by a process of its own, and the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.first_step import copy_installation
from tarry.backends.base import Computation, Recording
from tarry.backends.inductor import InductorBackend, why_not
from tarry.backends.inductor.artifact import ALIGNMENT, Generated, aligning
from tarry.backends.inductor.settings import settings
from tarry.native import C
from tarry.passes.specialize import specialize
from tarry.store import CorruptError, unpack

USES_DEVICE = True
needs_inductor = pytest.mark.skipif(bool(why_not("cpu")), reason="Inductor does not work here")

TRAIN = """
import json, sys
import torch
from torch import nn
import tarry
from tarry.runtime import limits

limits.SMALL_OPERATIONS = 0  # small graphs get programs, too
torch.set_num_threads(1)
tarry.set_backend("inductor", compile=sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(float(sys.argv[2])), nn.Linear(8, 3)).to("tarry")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(5, 6).to("tarry"), torch.randint(3, (5,)).to("tarry")
losses = []
for step in range(9):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step == 4:
        assert tarry.wait_for_compiles()
print(json.dumps({
    "losses": losses,
    "counts": tarry.metrics.counters(),
    "inductor": "torch._inductor.compile_fx" in sys.modules,
}))
"""


GENERATE = """
import json, sys
import torch
import tarry
from tarry.runtime import limits
from tests.support.sized import generate

limits.SMALL_OPERATIONS, limits.FAMILY_SECONDS = 0, 0.0  # a tiny model, which would not be worth it
torch.set_num_threads(1)
tarry.set_backend("inductor", compile="background")
tokens = []
for _ in range(3):
    tokens.append(generate("tarry", 24))
    assert tarry.wait_for_compiles()
compiles = tarry.metrics.counters().get("compile", 0)
tarry.metrics.reset()
tokens.append(generate("tarry", 30))
warm = tarry.metrics.counters()
print(json.dumps({
    "tokens": tokens,
    "expected": [generate("cpu", n) for n in (24, 24, 24, 30)],
    "compiles": compiles + warm.get("compile", 0),
    "warm": warm,
    "inductor": "torch._inductor.compile_fx" in sys.modules,
}))
"""


def _train(cache: Path, policy: str, dropout: float = 0.0) -> Any:
    """A training run in a process of its own."""
    return _run(cache, TRAIN, policy, str(dropout))


def _run(cache: Path, script: str, *arguments: str) -> Any:
    """A script in a process of its own, with the native part of ours."""
    cache.mkdir(exist_ok=True)
    copy_installation(cache)
    environment = {**os.environ, "TARRY_CACHE_DIR": str(cache), "TARRY_STORE": "1"}
    environment.pop("TARRY_COMPILE", None)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    return json.loads(done.stdout)


@needs_inductor
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.25], ids=["plain", "dropout"])
def test_a_second_process_compiles_nothing(tmp_path: Path, dropout: float) -> None:
    first = _train(tmp_path / "cache", "background", dropout)
    assert first["counts"]["compile"] == 1
    assert first["counts"]["reference"] > 2
    assert first["counts"]["cache_hit"] > 2
    assert "compile_here" not in first["counts"]
    second = _train(tmp_path / "cache", "background", dropout)
    assert "compile" not in second["counts"]
    assert second["counts"]["store_hit"] == first["counts"]["store_miss"]
    assert "store_miss" not in second["counts"]
    assert second["counts"]["cache_hit"] > 2
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
    never = _train(tmp_path / "cache", "never", dropout)
    assert never["losses"] == pytest.approx(first["losses"], rel=1e-4)
    if not dropout:
        assert not first["inductor"]  # the other process has it
        assert not second["inductor"]


@needs_inductor
@pytest.mark.slow
def test_a_second_process_generates_with_what_the_first_has_compiled(tmp_path: Path) -> None:
    first, second = (_run(tmp_path / "cache", GENERATE) for _ in range(2))
    for each in (first, second):
        assert each["tokens"] == each["expected"]
        assert each["warm"]["cache_hit"] >= 28  # all but the prompt, and the first token after it
    assert not first["inductor"]  # the other process has it
    assert not second["inductor"]
    assert first["compiles"] >= 1
    assert second["compiles"] == 0


def _compiled(y: torch.Tensor) -> tuple[Computation, Any, Any]:
    batch = C.peek([y])
    graph = specialize(Recording(batch).graph("optimized"), dict(enumerate(batch.numbers())))
    return InductorBackend().compile(graph), graph, batch


@needs_inductor
@pytest.mark.slow
def test_a_program_as_bytes_and_back() -> None:
    x = torch.linspace(-1, 1, 32).to("tarry")
    held = torch.arange(8.0).to("tarry")
    y = (x.view(4, 8) @ x.view(8, 4)).softmax(-1).sum() + held.sort().values + 0.5
    computation, graph, batch = _compiled(y)
    assert computation.artifact is not None
    data = computation.artifact()
    again = InductorBackend().load(graph, data)
    assert again.native is not None
    assert again.backend_text == computation.backend_text
    assert again.artifact is not None
    assert again.artifact() == data
    (by_first,) = computation.run(batch.inputs(), batch.numbers())
    (by_python,) = again.run(batch.inputs(), batch.numbers())
    assert torch.equal(by_first, by_python)
    batch = C.collect(0)
    batch.run(again.native, [], [], False, None)
    assert torch.equal(y.cpu(), by_first)
    header, blobs = unpack(data)
    assert header["listing"]["libraries"] >= 1
    assert bytes(blobs[1]) != b""


def test_bytes_that_make_no_sense() -> None:
    from tarry.store import pack

    for data in (b"", pack({}), pack({"listing": None, "tensors": [], "attributes": []}, [b"no zlib"])):
        with pytest.raises(CorruptError):
            Generated.from_bytes(data)


def test_constants_keep_their_strides() -> None:
    held = {
        "a": torch.arange(6.0).view(2, 3).t(),
        "b": torch.ones(1).expand(3),
        "c": torch.empty(0, 2),
        "d": torch.tensor(7),
        "e": torch.arange(4, dtype=torch.bfloat16)[1:],
    }
    stored = Generated("source", held, [], [], [], None).to_bytes()
    found = Generated.from_bytes(stored)
    assert found.source == "source"
    for name, tensor in held.items():
        assert torch.equal(found.attributes[name], tensor)
        assert found.attributes[name].stride() == tensor.stride()
        assert found.attributes[name].dtype == tensor.dtype


def test_inputs_that_are_not_aligned_are_copied_and_written_back() -> None:
    whole = torch.zeros(9)
    off, fine = whole[1:].view(2, 4).t(), torch.zeros(8)
    seen = []

    def function(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.extend(tensor.data_ptr() % ALIGNMENT for tensor in inputs)
        inputs[0].add_(1)
        return [inputs[1] + 2]

    (result,) = aligning(function, [0, 1], [0])([off, fine])
    assert seen == [0, 0]
    assert whole.tolist() == [0.0] + [1.0] * 8
    assert result.tolist() == [2.0] * 8


def test_what_decides_the_code_decides_the_fingerprint() -> None:
    prints = {InductorBackend().fingerprint(), InductorBackend(options={"max_autotune": True}).fingerprint()}
    assert InductorBackend().fingerprint() in prints
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        prints.add(InductorBackend().fingerprint())
    finally:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        prints.add(InductorBackend().fingerprint())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(prints) == 4


def test_a_recipe_makes_the_same_backend() -> None:
    backend = InductorBackend(options={"max_autotune": False})
    recipe = json.loads(json.dumps(backend.recipe()))
    assert recipe["settings"] == settings()
    assert InductorBackend.from_recipe(recipe).fingerprint() == backend.fingerprint()
    assert InductorBackend(options={"custom": object()}).recipe() is None

    class Special(InductorBackend):
        pass

    assert Special().recipe() is None


@pytest.mark.slow
@needs_inductor
def test_a_library_that_was_being_written_when_its_process_died_is_built_again(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TARRY_STORE": "0", "TARRY_COMPILE": "wait"}
    program = (
        'import torch, tarry; tarry.set_backend("inductor"); x = torch.ones(4).to("tarry"); '
        "print((x * 2 + 1).sin().sum().item(), int(tarry.metrics.counters()['compile']), "
        "tarry.metrics.counters().get('interpreted', 0))"
    )

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    first = run()
    libraries = list(tmp_path.rglob("*.main.so"))
    assert libraries
    for library in libraries:
        os.truncate(library, 0)
    assert run() == first
    assert first.split()[1:] == ["1", "0"]
    assert all(library.stat().st_size > 0 for library in libraries)
