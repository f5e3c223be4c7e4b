"""Peak memory of a training step, which is no matter of chance: at most eager's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.programs import ALL_PROGRAMS

pytestmark = pytest.mark.slow  # a process for each peer


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return memory.build_watch(tmp_path_factory.mktemp("watch"))


@pytest.mark.parametrize("name", ["GPT 4x256 16x128 AdamW recomputed", "ResNet 6x16 b16 SGD"])
def test_a_step_takes_no_more_memory_than_eagers(name: str, watch: Path) -> None:
    peaks = {
        peer: memory.measure(ALL_PROGRAMS[name], peer, "cpu", watch)
        for peer in ("eager", "tarry eager", "tarry torchscript")
    }
    assert all(isinstance(peak, dict) for peak in peaks.values()), peaks
    tensors = {peer: peak["tensors"] for peer, peak in peaks.items() if isinstance(peak, dict)}
    assert tensors["eager"] > 5_000_000, "not counted"
    assert tensors["tarry eager"] <= 1.02 * tensors["eager"], tensors
    assert tensors["tarry torchscript"] <= 1.02 * tensors["eager"], tensors


def test_recomputing_activations_saves_memory(watch: Path) -> None:
    whole, recomputed = (
        memory.measure(ALL_PROGRAMS[f"GPT 4x256 16x128 AdamW{kind}"], "tarry torchscript", "cpu", watch)
        for kind in ("", " recomputed")
    )
    assert isinstance(whole, dict), whole
    assert isinstance(recomputed, dict), recomputed
    assert recomputed["tensors"] < 0.7 * whole["tensors"]
