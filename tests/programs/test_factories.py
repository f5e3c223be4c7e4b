"""Tensors made on the device: factory functions, torch.tensor, the *_like and new_* families, default device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import DEVICE, assert_same, dev, expect

USES_DEVICE = True

FACTORIES: dict[str, Callable[[str], Tensor]] = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones((2, 3), dtype=torch.int64, device=d),
    "full": lambda d: torch.full((2, 2), 1.5, device=d),
    "full int": lambda d: torch.full((2,), 3, device=d),
    "full bool": lambda d: torch.full((2,), True, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange float": lambda d: torch.arange(0.0, 1.0, 0.25, device=d),
    "arange dtype": lambda d: torch.arange(3, 9, 2, dtype=torch.bfloat16, device=d),
    "linspace": lambda d: torch.linspace(-1, 1, 5, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 3, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "triu_indices": lambda d: torch.triu_indices(3, 4, 1, device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(2.5, device=d),
    "hann_window": lambda d: torch.hann_window(6, device=d),
    "complex": lambda d: torch.full((2,), 1 + 2j, device=d),
    "empty then fill": lambda d: torch.empty(2, 3, device=d).fill_(4),
    "empty_strided then fill": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(4),
    "tensor list": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor float": lambda d: torch.tensor(1.5, device=d),
    "tensor dtype": lambda d: torch.tensor([1, 2], dtype=torch.float64, device=d),
    "tensor bool": lambda d: torch.tensor([True, False], device=d),
    "tensor empty": lambda d: torch.tensor([], device=d),
    "tensor complex": lambda d: torch.tensor([1 + 1j], device=d),
    "tensor of tensors": lambda d: torch.tensor([torch.tensor(1.0, device=d), torch.tensor(2.0, device=d)], device=d),
    "as_tensor numpy": lambda d: torch.as_tensor(np.arange(4.0), device=d),
    "asarray": lambda d: torch.asarray([1, 2, 3], device=d),
    "from_numpy": lambda d: torch.from_numpy(np.arange(6).reshape(2, 3)).to(d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 3, device=d).t()),
    "ones_like dtype": lambda d: torch.ones_like(torch.ones(2, device=d), dtype=torch.int32),
    "full_like": lambda d: torch.full_like(torch.ones(2, device=d), 7),
    "zeros_like from cpu": lambda d: torch.zeros_like(torch.ones(2), device=d),
    "new_zeros": lambda d: torch.ones(2, device=d).new_zeros(3),
    "new_ones": lambda d: torch.ones(2, device=d, dtype=torch.int32).new_ones((2, 1)),
    "new_full": lambda d: torch.ones(2, device=d).new_full((2,), 3.0),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([1.0, 2.0]),
    "cartesian_prod": lambda d: torch.cartesian_prod(torch.arange(2, device=d), torch.arange(3, device=d)),
    "meshgrid": lambda d: torch.meshgrid(torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij")[1],
    "zeros out": lambda d: torch.zeros(3, out=torch.empty(3, device=d)),
}


@pytest.mark.parametrize("name", list(FACTORIES))
def test_as_on_cpu(name: str) -> None:
    make = FACTORIES[name]
    actual, expected = make(DEVICE), make("cpu")
    assert actual.stride() == expected.stride()
    assert_same(actual, expected, exact=True)


@pytest.mark.parametrize("spelling", ["name", "name with index", "torch.device", "default device"])
def test_ways_to_name_the_device(spelling: str) -> None:
    if spelling == "default device":
        with torch.device(DEVICE):
            made = torch.ones(2) + torch.arange(2)
        assert torch.ones(1).device.type == "cpu", "the block's end restores the default"
    else:
        made = torch.ones(
            2, device={"name": DEVICE, "name with index": f"{DEVICE}:0", "torch.device": torch.device(DEVICE)}[spelling]
        )
    assert made.device.type == DEVICE


def test_requires_grad_at_creation() -> None:
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    assert x.is_leaf
    assert x.requires_grad
    (x * 2).sum().backward()
    assert_same(x.grad, torch.full((3,), 2.0))


def test_device_attributes() -> None:
    x = dev(torch.ones(2))
    assert x.device == torch.device(DEVICE, 0) or DEVICE == "cpu"
    assert x.is_cuda is False
    assert getattr(x, f"is_{DEVICE}") is True
    assert x.to("cpu").device.type == "cpu"


def test_constants_make_one_graph() -> None:
    with expect(syncs=1, fallbacks=0):
        total = torch.zeros(3, device=DEVICE) + torch.ones(3, device=DEVICE) * torch.arange(3, device=DEVICE)
        assert total.tolist() == [0.0, 1.0, 2.0]


def test_module_built_on_the_device() -> None:
    with torch.device(DEVICE):
        layer = torch.nn.Linear(3, 2)
    assert {p.device.type for p in layer.parameters()} == {DEVICE}
    built = torch.nn.Sequential(torch.nn.Linear(3, 4, device=DEVICE), torch.nn.BatchNorm1d(4, device=DEVICE))
    assert {t.device.type for t in built.state_dict().values()} == {DEVICE}
    assert built(torch.ones(2, 3, device=DEVICE)).shape == (2, 4)


def test_meta_module_given_memory_here() -> None:
    with torch.device("meta"):
        layer = torch.nn.Linear(3, 2)
    layer = layer.to_empty(device=DEVICE)
    torch.nn.init.constant_(layer.weight, 0.5)
    torch.nn.init.zeros_(layer.bias)
    assert_same(layer(dev(torch.ones(1, 3))), torch.full((1, 2), 1.5))


@pytest.mark.parametrize(
    "init", ["normal_", "uniform_", "xavier_uniform_", "kaiming_normal_", "orthogonal_", "trunc_normal_"]
)
def test_initialisers_run_on_the_device(init: str) -> None:
    weight = torch.empty(8, 8, device=DEVICE)
    getattr(torch.nn.init, init)(weight)
    values = weight.cpu()
    assert bool(values.isfinite().all())
    assert len(values.unique()) > 32
