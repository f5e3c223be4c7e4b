"""Peak memory of a training step, which is no matter of chance: at most eager's."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks import memory
from benchmarks.programs import ALL_PROGRAMS

pytestmark = pytest.mark.slow  # a process for each peer


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return memory.build_watch(tmp_path_factory.mktemp("watch"))


@functools.cache
def peak(name: str, peer: str, watch: Path) -> int:
    found = memory.measure(ALL_PROGRAMS[name], peer, "cpu", watch)
    assert isinstance(found, dict), found
    return found["tensors"]


@pytest.mark.parametrize("name", ["GPT 4x256 16x128 AdamW recomputed", "ResNet 6x16 b16 SGD"])
def test_a_step_takes_no_more_memory_than_eagers(name: str, watch: Path) -> None:
    tensors = {peer: peak(name, peer, watch) for peer in ("eager", "tarry eager", "tarry torchscript")}
    assert tensors["eager"] > 5_000_000, "not counted"
    assert tensors["tarry eager"] <= 1.02 * tensors["eager"], tensors
    assert tensors["tarry torchscript"] <= 1.02 * tensors["eager"], tensors


def test_recomputing_activations_saves_memory(watch: Path) -> None:
    whole, recomputed = (
        peak(f"GPT 4x256 16x128 AdamW{kind}", "tarry torchscript", watch) for kind in ("", " recomputed")
    )
    assert recomputed < 0.7 * whole
