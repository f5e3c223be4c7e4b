"""Memory of the device's GPU: others look at it, and its counts are PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tarry

pytestmark = pytest.mark.gpu
MB = 1 << 20


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    tarry.set_backend("eager", device="cuda:0")
    yield
    tarry.set_backend("eager", device="cpu")


def test_dlpack_shares_the_memory_of_the_gpu() -> None:
    x = torch.arange(6.0, device="tarry") + 1
    seen = torch.from_dlpack(x.__dlpack__(stream=1))
    assert seen.device == torch.device("cuda:0")
    assert x.__dlpack_device__()[1] == 0
    seen.mul_(2)
    assert x.tolist() == [2, 4, 6, 8, 10, 12]
    x.add_(1)
    assert seen.tolist() == x.tolist()


def test_cuda_array_interface() -> None:
    x = torch.arange(6.0, device="tarry").reshape(2, 3)
    interface = x.__cuda_array_interface__
    assert interface["shape"] == (2, 3)
    seen = torch.as_tensor(type("Array", (), {"__cuda_array_interface__": interface, "owner": x})(), device="cuda")
    seen.add_(1)
    assert x.tolist() == [[1, 2, 3], [4, 5, 6]]
    x.mul_(2)  # the address stays the tensor's
    assert seen.tolist() == x.tolist()
    with pytest.raises(RuntimeError, match="requires grad"):
        x.clone().requires_grad_().__cuda_array_interface__


def test_cupy_looks_at_the_memory() -> None:
    cupy = pytest.importorskip("cupy")
    x = torch.arange(3.0, device="tarry") + 1
    for seen in (cupy.from_dlpack(x), cupy.asarray(x)):
        assert seen.tolist() == [1, 2, 3]


def test_counts_are_those_of_the_gpu() -> None:
    before = torch.tarry.memory_allocated()
    x = torch.ones(MB, device="tarry") + 1
    assert torch.tarry.memory_allocated() - before >= 4 * MB
    tarry.sync(x)
    assert torch.tarry.memory_allocated() - before >= 4 * MB
    assert torch.accelerator.max_memory_allocated() >= torch.cuda.memory_allocated()
    assert torch.tarry.mem_get_info()[1] == torch.cuda.mem_get_info()[1]
    assert torch.ones(3).pin_memory().is_pinned()
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1 << 50, dtype=torch.uint8, device="tarry")[0].item()


def test_events_wait_for_the_gpu() -> None:
    start, end = torch.tarry.Event(enable_timing=True), torch.tarry.Event(enable_timing=True)
    x = torch.randn(1024, 1024, device="tarry")
    start.record()
    for _ in range(10):
        x = x @ x / 1024
    end.record()
    assert start.elapsed_time(end) > 0
    event = torch.tarry.current_stream().record_event()
    event.synchronize()
    assert event.query()
