"""Every way a program looks at a value: each must give it, and none may cost more than one cut."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from tests.support import DEVICE, dev, expect, step, tarry_only

USES_DEVICE = True


def test_item_of_every_kind() -> None:
    assert dev(2.5).item() == 2.5
    assert dev(7).item() == 7
    assert isinstance(dev(7).item(), int)
    assert dev(True).item() is True
    assert dev(1 + 2j).item() == 1 + 2j
    assert math.isnan(dev(float("nan")).item())
    assert dev([[3.0]]).item() == 3.0
    with pytest.raises(RuntimeError, match="Tensor with 2 elements cannot be converted to Scalar"):
        dev([1, 2]).item()


def test_python_conversions() -> None:
    x = dev(3)
    assert int(x) == 3
    assert float(x) == 3.0
    assert complex(x) == 3
    assert bool(x) is True
    assert [10, 20, 30, 40][x] == 40, "an integer tensor is an index"
    assert f"{dev(1.5):.2f}" == "1.50"
    assert list(range(dev(2))) == [0, 1]
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(dev([1, 2]))
    assert bool(dev([0])) is False


def test_branching_on_values() -> None:
    x = dev([1.0, -2.0])
    assert (x > 0).any()
    assert not (x > 0).all()
    assert x.sum() < 0
    taken = "positive" if x[0] > 0 else "negative"
    assert taken == "positive"
    count = 0
    while x.abs().max() > 0.1:
        x = x / 2
        count += 1
    assert count == 5


def test_tolist_len_iteration_contains() -> None:
    x = dev([[1, 2], [3, 4]])
    assert x.tolist() == [[1, 2], [3, 4]]
    assert len(x) == 2
    assert [row.tolist() for row in x] == [[1, 2], [3, 4]]
    assert [int(v) for row in x for v in row] == [1, 2, 3, 4]
    assert 3 in x
    assert 9 not in x
    a, b = x
    assert a.device.type == DEVICE
    assert b.sum().item() == 7
    with pytest.raises(TypeError, match="0-d"):
        len(dev(1))
    with pytest.raises(TypeError, match="0-d"):
        iter(dev(1))
    assert [int(v) for v in reversed(dev([1, 2, 3]))] == [3, 2, 1]


def test_numpy_is_refused_with_the_way_out() -> None:
    if DEVICE == "cpu":
        pytest.skip("a CPU tensor has a numpy array")
    x = dev([1.0, 2.0])
    with pytest.raises(TypeError, match=r"\.cpu\(\)"):
        x.numpy()
    with pytest.raises(TypeError):
        np.asarray(x)
    assert x.cpu().numpy().tolist() == [1.0, 2.0]
    assert x.numpy(force=True).tolist() == [1.0, 2.0]


def _printed(tensor: torch.Tensor) -> str:
    return repr(tensor).replace(f", device='{DEVICE}:0'", "")


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3),
        torch.tensor([1.0, 2.5, -3.25e10]),
        torch.tensor([float("nan"), float("inf")]),
        torch.tensor(1.5),
        torch.zeros(0),
        torch.ones(2, 2, dtype=torch.bool),
        torch.ones(2, dtype=torch.complex64),
        torch.arange(2000.0),
        torch.ones(3, dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).t(),
    ],
    ids=["int", "float", "nan", "scalar", "empty", "bool", "complex", "long", "bfloat16", "view"],
)
def test_printing(value: torch.Tensor) -> None:
    assert _printed(dev(value)) == repr(value)


def test_printing_names_the_device_and_the_gradient() -> None:
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    assert ("device='tarry:0'" in repr(x)) == (DEVICE == "tarry")
    assert "requires_grad=True" in repr(x)
    assert "MulBackward0" in repr(x * 2)
    assert "Parameter containing" in repr(torch.nn.Parameter(x.detach()))


@tarry_only
def test_printing_reads_once() -> None:
    x = torch.arange(5000.0, device=DEVICE).reshape(50, 100) * 2
    with expect(syncs=1, executes=1):
        str(x)
    y = x + 1
    with expect(syncs=1):
        f"{y}"


@tarry_only
def test_ten_reads_run_one_graph() -> None:
    values = [torch.full((3,), float(i), device=DEVICE).sum() * 2 for i in range(10)]
    with expect(executes=1, compiles=1):
        assert [v.item() for v in values] == [6.0 * i for i in range(10)]


@tarry_only
def test_a_value_once_computed_costs_nothing_to_read_again() -> None:
    x = torch.ones(3, device=DEVICE) * 2
    x.tolist()
    with expect(executes=0, compiles=0):
        assert x.tolist() == [2.0] * 3
        assert x.sum is not None
        assert x.shape == (3,)


def test_equality_and_hashing() -> None:
    x, y = dev([1, 2]), dev([1, 2])
    assert torch.equal(x, y)
    assert not torch.equal(x, dev([1, 3]))
    assert torch.allclose(x.float(), y.float())
    assert x is not y
    assert len({x, y}) == 2
    assert copy.copy(x) is not x
    assert torch.equal(copy.copy(x), x)
    step()
    assert torch.equal(x, y)


def test_metadata_needs_no_value() -> None:
    with expect(syncs=0):
        x = torch.ones(2, 3, device=DEVICE) @ torch.ones(3, 4, device=DEVICE)
        assert x.shape == (2, 4)
        assert x.numel() == 8
        assert x.dim() == 2
        assert x.dtype == torch.float32
        assert x.stride() == (4, 1)
        assert x.is_contiguous()
        assert x.nbytes == 32
        assert x.itemsize == 4
        assert x.is_floating_point()
        assert not x.is_complex()
        assert x.size(1) == 4
        assert x.ndim == 2
