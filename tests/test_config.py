"""`tarry.config`: names, values, and where they came from."""

from __future__ import annotations

from pathlib import Path

import pytest

import tarry
from tarry.config import Config
from tarry.events import expect

USES_DEVICE = True


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no setting 'fallbak'; do you mean 'fallback'"):
        tarry.config.fallbak = "error"
    with pytest.raises(AttributeError, match="no setting 'colour'"), tarry.config.override(colour=1):
        pass
    with pytest.raises(ValueError, match=r"tarry\.config\.max_pending_nodes is a positive int, not 0"):
        tarry.config.max_pending_nodes = 0


def test_where_a_value_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARRY_FALLBACK", "error")
    monkeypatch.setenv("TARRY_CACHE_DIR", "/somewhere")
    monkeypatch.delenv("TARRY_COMPILE", raising=False)
    config = Config()
    assert (config.fallback, config.origin("fallback")) == ("error", "TARRY_FALLBACK in the environment")
    with config.override(compile="wait"):
        assert config.origin("compile") == "set in code"
    assert config.origin("compile") == "default"
    config.run_ahead = False
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in repr(config).splitlines()[1:]}
    assert lines["fallback"] == "'error' TARRY_FALLBACK in the environment"
    assert lines["run_ahead"] == "False set in code"
    assert lines["cache_dir"] == "'/somewhere' TARRY_CACHE_DIR in the environment"
    assert lines["max_pending_nodes"] == "100000 default"


def test_a_wrong_value_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARRY_COMPILE", "sometimes")
    with pytest.raises(ValueError, match=r"tarry\.config\.compile is None, .* not 'sometimes'"):
        Config()


def test_force_fallback_takes_base_names(device: str) -> None:
    import torch

    x = torch.ones(3, device=device)
    with tarry.config.override(force_fallback={"aten::sub"}), expect(fallbacks=1):
        assert (x - x).tolist() == [0, 0, 0]  # aten::sub.Tensor
    for wrong in ("aten::subb", "aten::sub.Nothing", "aten::matmul"):
        with pytest.raises(ValueError, match="fits no operator that is recorded"):
            tarry.config.force_fallback = {wrong}
        assert tarry.config.force_fallback == frozenset()


def test_graphs_are_saved(device: str, tmp_path: Path) -> None:
    import torch

    x = torch.ones(3).to(device)
    with tarry.config.override(save_graphs=tmp_path / "graphs"):
        for _ in range(2):
            (x.sin() + 1).tolist()
        (x.cos() + 1).tolist()
    (steps,) = (tmp_path / "graphs").glob("steps-*.txt")
    lines = steps.read_text().splitlines()
    assert len(lines) == 3
    names = [line.split("\t")[2] for line in lines]
    assert names[0] == names[1] != names[2]
    assert "aten::sin" in (tmp_path / "graphs" / names[0]).read_text()
    assert len(list((tmp_path / "graphs").glob("graph-*.txt"))) == 2
