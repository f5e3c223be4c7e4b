"""The XLA backend: memory that is shared with PyTorch, and what is left to the real device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tarry
from tarry.events import expect, record
from tests.backends.test_xla import _same

USES_DEVICE = True


def test_memory_is_shared_both_ways(xla: None) -> None:
    from tarry.backends.xla.data import Exchange, find_device

    exchange = Exchange(find_device("cpu"))
    tensor = torch.arange(64, dtype=torch.float32)
    array = exchange.to_array(tensor, None)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = exchange.to_tensor(array, "key")
    assert back.data_ptr() == tensor.data_ptr()
    assert exchange.to_array(back.detach(), "key") is array
    assert exchange.to_array(back.detach(), "another") is not array
    assert exchange.to_array(back[16:], "key") is not array


def test_a_tensor_at_an_odd_place_is_copied(xla: None) -> None:
    from tarry.backends.xla.data import Exchange, find_device

    odd = torch.arange(9, dtype=torch.float32)[1:]
    assert Exchange(find_device("cpu")).to_array(odd, None).tolist() == odd.tolist()


@pytest.mark.parametrize("native", [True, False], ids=["native", "public"])
def test_every_dtype_crosses(xla: None, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tarry.backends.xla import data
    from tarry.backends.xla.dtypes import JAX_DTYPES

    if not native:
        monkeypatch.setattr(data, "_native", None)
    exchange = data.Exchange(data.find_device("cpu"))
    for dtype in JAX_DTYPES:
        for tensor in (torch.ones(3, dtype=dtype), torch.ones((), dtype=dtype), torch.ones(0, 2, dtype=dtype)):
            with data.wide_types():
                array = exchange.to_array(tensor, None)
                assert array.dtype == JAX_DTYPES[dtype]
                torch.testing.assert_close(exchange.to_tensor(array, None), tensor)


def test_results_have_memory_of_their_own(xla: None) -> None:
    x = torch.zeros(3, device="tarry")
    tarry.mark_step()
    a, b = x.clone(), x.clone()
    tarry.mark_step()
    a.add_(1)
    tarry.mark_step()
    assert (x.tolist(), a.tolist(), b.tolist()) == ([0.0] * 3, [1.0] * 3, [0.0] * 3)


def test_a_program_sees_what_an_eager_operator_wrote(xla: None) -> None:
    x = torch.zeros(3, device="tarry") + 1
    tarry.mark_step()
    with tarry.config.override(force_fallback={"aten::add_.Tensor"}):
        x.add_(torch.ones(3, device="tarry"))
    assert (x * 2).tolist() == [4.0] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).view(2, 3).T,
        lambda: torch.arange(6.0)[::2],
        lambda: torch.arange(3.0).expand(2, 3),
        lambda: torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        lambda: torch.arange(4.0).as_strided((4, 1), (1, 7)),
        lambda: torch.empty_strided((2, 3), (8, 2)).fill_(2.0),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(3.0),
    ],
    ids=["transposed", "strided", "expanded", "channels last", "idle stride", "gaps", "empty", "scalar"],
)
def test_any_layout_crosses(xla: None, make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    moved = torch.empty_strided(tensor.shape, tensor.stride(), device="tarry") if 0 not in tensor.stride() else None
    if moved is not None:
        moved.copy_(tensor)
        tarry.mark_step()
        torch.testing.assert_close((moved * 2 + moved).cpu(), tensor * 3)
    _same(lambda x: x * 2, tensor)
    _same(lambda x: x.transpose(0, -1).relu() if x.ndim else x.relu(), tensor)


# ---- what it does not know


def test_other_operators_run_on_the_real_device(xla: None) -> None:
    x = torch.tensor([3.0, 1.0, 2.0], device="tarry")
    with expect(fallbacks=1, compiles=1):
        y = torch.cummax(x * 2, 0).values + 1
        assert y.tolist() == [7.0, 7.0, 7.0]


def test_dtypes_that_jax_lacks_run_on_the_real_device(xla: None) -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float16, device="tarry")
    with record() as seen:  # they meet in complex32
        assert (x == 1 + 0j).tolist() == [True, False]
    assert {event.fields["op"] for event in seen if event.kind == "fallback"} == {"aten::eq.Scalar"}
    assert not [event for event in seen if event.kind in ("interpreted", "error")]


def test_a_lowering_that_fails_costs_no_values(xla: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tarry.backends.xla.table import LOWERINGS, Lowering

    def broken(call: Any, x: Any) -> Any:
        raise ValueError("not today")

    monkeypatch.setitem(LOWERINGS, "aten::exp", Lowering(broken))
    x = torch.zeros(2, device="tarry")
    tarry.mark_step()
    y = x.exp()
    with pytest.warns(UserWarning, match="aten::exp at .*test_xla_data.py.*not today"), record() as seen:
        assert y.tolist() == [1.0, 1.0]
    assert [event.kind for event in seen].count("interpreted") == 1


def test_the_program_can_be_read(xla: None) -> None:
    x = torch.ones(2, 3, device="tarry")
    tarry.mark_step()
    text = tarry.explain(torch.tanh(x), stage="compiled")
    assert "stablehlo.tanh" in text
    assert "tensor<2x3xf32>" in text


def test_programs_are_counted(xla: None) -> None:
    assert (torch.ones(2, device="tarry") + 1).tolist() == [2.0, 2.0]
    metrics = tarry.get_backend().metrics()
    assert metrics["programs"] == 1
    assert metrics["compile_seconds"] > 0
