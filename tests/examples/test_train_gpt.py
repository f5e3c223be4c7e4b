"""The training script of tarry/examples: a step is one graph, compiled once, and its losses are eager's."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tarry
from tarry.backends.inductor import why_not
from tarry.events import expect
from tarry.examples import train_gpt
from tarry.examples.train_gpt import Settings
from tarry.runtime.compile import reasons

USES_DEVICE = True

SMALL = Settings(
    "tarry", steps=12, batch=2, accumulate=4, heads=2, width=16, context=16, warm_up=4, workers=1, validate_every=1000
)
INDUCTOR = pytest.param(
    "inductor",
    marks=[pytest.mark.slow, pytest.mark.skipif(bool(why_not("cpu")), reason="Inductor does not work here")],
)


@pytest.fixture(autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    tarry.set_backend(getattr(request, "param", "torchscript"))
    yield
    tarry.set_backend("eager")


def on(*names: object) -> pytest.MarkDecorator:
    """Run a test with each of these backends."""
    return pytest.mark.parametrize("_backend", names, indirect=True)


def changed(settings: Settings = SMALL, **options: object) -> Settings:
    return Settings(**{**vars(settings), **options})  # type: ignore[arg-type]


def losses_of(settings: Settings, **options: object) -> list[float]:
    losses: list[float] = []
    train_gpt.train(settings, lambda step, loss, validation: losses.append(loss), **options)  # type: ignore[arg-type]
    return losses


class Training:
    """A run that is taken step by step."""

    def __init__(self, settings: Settings) -> None:
        self.run = train_gpt.Run(settings, train_gpt.TEXT.read_text())
        self.training, self.validation = train_gpt.loaders(settings, self.run.tokens, 0)
        self.batches = iter(self.training)

    def steps(self, count: int) -> list[float]:
        return [self.run.train_step(self.batches).item() for _ in range(count)]


def small() -> Settings:
    """As small as suits the backend: a graph of 1,800 operators takes Inductor minutes, one with dropout longer."""
    return changed(layers=1, accumulate=1) if tarry.get_backend().name == "inductor" else SMALL


@on("eager", "torchscript")
def test_a_step_is_one_graph_and_nothing_is_compiled_after_the_second() -> None:
    training = Training(SMALL)
    with expect(compiles=2, syncs=2, fallbacks=0):  # the first step makes the optimizer's state, the others update it
        training.steps(2)
    with expect(compiles=0, syncs=100, fallbacks=0, cache_hits=100) as seen:
        training.steps(100)
    assert not [event for event in seen if event.kind == "interpreted"]


def test_validation_has_a_graph_of_its_own_and_disturbs_nothing() -> None:
    training = Training(SMALL)
    training.steps(2)
    batches = len(training.validation)
    with expect(compiles=1, syncs=batches, fallbacks=0):
        training.run.validate(training.validation)
    with expect(compiles=0, syncs=4 + batches, fallbacks=0):
        training.steps(4)
        training.run.validate(training.validation)


@pytest.mark.parametrize(
    ("_backend", "amp", "tolerance"),
    [
        ("eager", False, 1e-5),
        ("eager", True, 2e-2),
        ("torchscript", False, 1e-5),
        ("torchscript", True, 2e-2),
        pytest.param("inductor", True, 2e-2, marks=INDUCTOR.marks),
    ],
    indirect=["_backend"],
)
def test_losses_are_those_of_eager(amp: bool, tolerance: float) -> None:
    # Without dropout, which draws other random numbers on tarry than on the CPU.
    settings = changed(small(), dropout=0.0, amp=amp)
    settings = changed(settings, accumulate=max(settings.accumulate, 2))
    expected = losses_of(changed(settings, device="cpu"))
    assert losses_of(settings) == pytest.approx(expected, rel=tolerance)
    assert expected[-1] < 0.97 * expected[0], "nothing was learned, so nothing is shown"


@on("torchscript", INDUCTOR)
def test_with_dropout_losses_are_those_of_the_reference_path() -> None:
    settings = small()
    losses = losses_of(settings)
    same_kernels = tarry.get_backend().name == "torchscript"
    tarry.set_backend("eager")
    assert losses == pytest.approx(losses_of(settings), rel=0 if same_kernels else 2e-2, abs=0)


@on("eager", "torchscript", INDUCTOR)
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = small()
    path = tmp_path / "run.pt"
    through = train_gpt.train(settings, lambda *_: None)
    train_gpt.train(settings, lambda *_: None, stop=5, save=path)
    torch.manual_seed(99)
    resumed = train_gpt.train(settings, lambda *_: None, resume=path)
    assert resumed.step == through.step == 12
    states = resumed.model.state_dict(), through.model.state_dict()
    assert all(torch.equal(states[0][name].cpu(), states[1][name].cpu()) for name in states[1])
    assert resumed.schedule.get_last_lr() == through.schedule.get_last_lr()
    assert torch.equal(torch.tarry.get_rng_state(), _rng_after(settings))


def _rng_after(settings: Settings) -> torch.Tensor:
    losses_of(settings)
    return torch.tarry.get_rng_state()


def test_a_resumed_run_has_the_graphs_of_the_first(tmp_path: Path) -> None:
    train_gpt.train(SMALL, lambda *_: None, stop=3, save=tmp_path / "run.pt")
    with expect(compiles=0, fallbacks=0):
        train_gpt.train(SMALL, lambda *_: None, resume=tmp_path / "run.pt")


def test_activations_are_recomputed_in_the_compiled_graph() -> None:
    """Recomputing what forward computed looks like work done twice; merging the two would keep every activation."""

    def gelus(recompute: bool) -> int:
        training = Training(changed(recompute=recompute))
        loss = training.run.loss(*next(training.batches))
        loss.backward()
        grads = [parameter.grad for parameter in training.run.model.parameters()]
        return tarry.explain(loss, *(g for g in grads if g is not None), stage="optimized").count("aten::gelu(")

    assert gelus(recompute=False) == SMALL.layers
    assert gelus(recompute=True) == 2 * SMALL.layers


def test_one_line_says_why_when_the_batch_size_changes(caplog: pytest.LogCaptureFixture) -> None:
    reasons.reasons.forget()  # a process says so a few times only
    with caplog.at_level(logging.WARNING, "tarry"):
        Training(SMALL).steps(3)
        assert not caplog.messages, "a first graph needs no reason"
        Training(changed(batch=3)).steps(3)
    assert caplog.messages
    assert "[2, 16]" in caplog.messages[0]
    assert "[3, 16]" in caplog.messages[0]
    assert "train_gpt.py" in caplog.messages[0]


def test_a_resumed_sampler_goes_on_where_it_stopped() -> None:
    def first(start: int, count: int) -> list[int]:
        return list(itertools.islice(train_gpt.EndlessShuffle(10, seed=3, start=start), count))

    through = first(0, 35)
    assert sorted(through[:10]) == sorted(through[10:20]) == list(range(10))
    assert through[:10] != through[10:20]
    assert first(13, 22) == through[13:]


def test_learning_rate_warms_up_and_comes_down() -> None:
    rates = [train_gpt.learning_rate(step, 10, 100) for step in range(101)]
    assert max(rates) == pytest.approx(1.0)
    assert rates.index(max(rates)) == 10
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.slow  # two processes that load torch
@pytest.mark.parametrize("device", ["cpu", "tarry"])
def test_the_script_runs_by_itself_and_resumes(device: str, tmp_path: Path) -> None:
    options = f"--device {device} --batch 2 --width 16 --context 16 --workers 1 --validate-every 10".split()
    command = [sys.executable, train_gpt.__file__, *options, "--checkpoint", str(tmp_path / "run.pt"), "--steps"]
    first = subprocess.run([*command, "10"], capture_output=True, text=True, check=True)
    assert "step    10" in first.stdout
    assert "validation" in first.stdout
    second = subprocess.run([*command, "20", "--resume"], capture_output=True, text=True, check=True)
    assert "step    20" in second.stdout
    assert "step    10" not in second.stdout


def test_a_run_can_be_resumed_on_another_device(tmp_path: Path) -> None:
    settings = changed(SMALL, steps=2, workers=0)
    train_gpt.train(settings, lambda *_: None, save=tmp_path / "run.pt")
    resumed = train_gpt.train(changed(settings, device="cpu", steps=3), lambda *_: None, resume=tmp_path / "run.pt")
    assert resumed.step == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"validate_every": 0}, "validate_every is 0"),
        ({"heads": 3}, "cannot be divided among 3 heads"),
        ({"context": 2}, "context is 2"),
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(SMALL, **wrong)


@pytest.mark.parametrize("wrong", [{"batch": 100_000}, {"context": 100_000}])
def test_a_text_that_is_too_short(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="take a longer text"):
        train_gpt.train(changed(SMALL, **wrong), lambda *_: None)
