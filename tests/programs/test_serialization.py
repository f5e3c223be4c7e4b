"""Checkpoints: saved here and loaded there, in either direction, with sharing kept."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import DEVICE, assert_same, dev, step

USES_DEVICE = True


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_saved_here_loaded_here() -> None:
    x = dev(torch.arange(6.0).reshape(2, 3)) * 2
    loaded = torch.load(_saved(x))
    assert_same(loaded, torch.arange(6.0).reshape(2, 3) * 2, exact=True)


def test_saved_here_loaded_on_the_host() -> None:
    for map_location in ("cpu", torch.device("cpu"), {f"{DEVICE}:0": "cpu", DEVICE: "cpu"}, lambda storage, _: storage):
        loaded = torch.load(_saved(dev(torch.arange(3)) + 1), map_location=map_location)
        assert loaded.device.type == "cpu"
        assert loaded.tolist() == [1, 2, 3]


def test_saved_on_the_host_loaded_here() -> None:
    for map_location in (DEVICE, torch.device(DEVICE), {"cpu": DEVICE}):
        assert_same(torch.load(_saved(torch.arange(3.0)), map_location=map_location), torch.arange(3.0), exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1]).to(dtype)
    assert_same(torch.load(_saved(dev(x))), x, exact=True)


def test_views_and_sharing_survive() -> None:
    base = dev(torch.arange(6.0).reshape(2, 3))
    view = base.t()[1:]
    again_base, again_view = torch.load(_saved([base, view]))
    assert again_view.stride() == view.stride()
    again_base.add_(10)
    assert_same(again_view, (torch.arange(6.0).reshape(2, 3) + 10).t()[1:], exact=True)


def test_empty_scalar_and_requires_grad() -> None:
    for x in (torch.empty(0, 3), torch.tensor(1.5), torch.ones(2, requires_grad=True)):
        loaded = torch.load(_saved(x.detach().to(DEVICE).requires_grad_(x.requires_grad)))
        assert loaded.requires_grad == x.requires_grad
        assert_same(loaded, x, exact=True)


def test_parameter_and_file(tmp_path: Path) -> None:
    weight = nn.Parameter(dev(torch.ones(2)))
    torch.save({"weight": weight, "step": 3}, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert isinstance(loaded["weight"], nn.Parameter)
    assert loaded["step"] == 3
    assert_same(loaded["weight"], torch.ones(2))


def test_pickle() -> None:
    x = dev(torch.arange(4.0))[1:]
    assert_same(pickle.loads(pickle.dumps(x)), torch.arange(4.0)[1:], exact=True)


def test_deepcopy_of_a_tensor_and_of_shared_views() -> None:
    base = dev(torch.arange(4.0))
    pair = copy.deepcopy([base, base[1:]])
    pair[0].zero_()
    assert_same(pair[1], torch.zeros(3))
    assert_same(base, torch.arange(4.0), exact=True)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_deepcopy_of_a_module() -> None:
    net = _net().to(DEVICE)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net[0].weight.zero_()
    assert_same(twin[0].weight, _net()[0].weight)
    assert {p.device.type for p in twin.parameters()} == {DEVICE}


def test_state_dict_both_ways() -> None:
    host, here = _net(), _net().to(DEVICE)
    with torch.no_grad():
        for p in here.parameters():
            p.add_(1)
    here(dev(torch.randn(5, 3)))
    step()
    host.load_state_dict(here.state_dict())
    for name, value in here.state_dict().items():
        assert_same(value, host.state_dict()[name])
    other = _net().to(DEVICE)
    other.load_state_dict(torch.load(_saved(host.state_dict())))
    assert_same(other.state_dict(), host.state_dict())
    assign = _net()
    assign.load_state_dict(here.state_dict(), assign=True)
    assert next(assign.parameters()).device.type == DEVICE


def test_optimizer_state_resumes(tmp_path: Path) -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: str) -> None:
        for i in steps:
            optimizer.zero_grad()
            x = torch.full((4, 3), float(i)).to(device)
            net(x).pow(2).mean().backward()
            optimizer.step()

    reference = nn.Linear(3, 2)
    initial = copy.deepcopy(reference.state_dict())
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.1), range(6), "cpu")

    first = nn.Linear(3, 2).to(DEVICE)
    first.load_state_dict(initial)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    train(first, optimizer, range(3), DEVICE)
    torch.save({"net": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")

    saved = torch.load(tmp_path / "checkpoint.pt", map_location="cpu")
    second = nn.Linear(3, 2)
    second.load_state_dict(saved["net"])
    second = second.to(DEVICE)
    resumed = torch.optim.AdamW(second.parameters(), lr=0.1)
    resumed.load_state_dict(saved["optimizer"])
    train(second, resumed, range(3, 6), DEVICE)
    assert_same(second.state_dict(), reference.state_dict())


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    net = _net().to(DEVICE)
    safetensors.save_file(net.state_dict(), tmp_path / "net.safetensors")
    on_host = safetensors.load_file(tmp_path / "net.safetensors")
    assert_same(net.state_dict(), on_host)
    safetensors.save_model(net, str(tmp_path / "model.safetensors"))
    other = _net().to(DEVICE)
    with torch.no_grad():
        other[0].weight.zero_()
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    assert_same(other.state_dict(), net.cpu().state_dict())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_safetensors_opened_on_the_device(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    expected = torch.arange(6.0).reshape(2, 3)
    safetensors.save_file({"a": expected}, tmp_path / "a.safetensors", metadata={"of": "a"})
    for device in (DEVICE, torch.device(DEVICE), torch.device(DEVICE, 0) if DEVICE != "cpu" else "cpu"):
        with safetensors.safe_open(tmp_path / "a.safetensors", framework="pt", device=device) as file:
            assert (list(file.keys()), file.metadata()) == (["a"], {"of": "a"})
            assert file.get_slice("a").get_shape() == [2, 3]
            assert_same(file.get_slice("a")[:1], expected[:1])
            assert_same(file.get_tensor("a"), expected)
        assert_same(safetensors.load_file(tmp_path / "a.safetensors", device=device), {"a": expected})


def test_tied_weights_through_a_checkpoint() -> None:
    net = Tied().to(DEVICE)
    state = torch.load(_saved(net.state_dict()))
    assert state["embed.weight"].untyped_storage()._cdata == state["head.weight"].untyped_storage()._cdata
    whole = torch.load(_saved(net), weights_only=False)
    assert whole.head.weight is whole.embed.weight
