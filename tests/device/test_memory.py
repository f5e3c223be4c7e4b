"""Memory: counts that are true, its want, a history that PyTorch's viewer reads, pinned memory of the host."""

from __future__ import annotations

import gc
import pickle
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

MB = 1 << 20


@pytest.fixture(autouse=True)
def _clean() -> None:
    gc.collect()
    tarry.sync()


def _megabytes(before: int) -> int:
    """What is allocated since then, rounded: tensors of earlier tests, which threads held, may go at any time."""
    return round((torch.tarry.memory_allocated() - before) / MB)


def test_a_tensor_is_counted_as_long_as_it_lives() -> None:
    makers = (
        lambda: torch.empty(MB, device="tarry"),  # never computed
        lambda: torch.zeros(MB, device="tarry"),  # pending
        lambda: torch.ones(MB).to("tarry"),
        lambda: torch.ones(MB, device="tarry") + 1,
    )
    for make in makers:
        before = torch.tarry.memory_allocated()
        x = make()
        assert _megabytes(before) == 4
        if make is not makers[0]:
            tarry.sync(x)
            assert _megabytes(before) == 4
        view = x[1:]
        del x
        assert _megabytes(before) == 4
        del view
        tarry.sync()
        assert _megabytes(before) == 0


def test_an_update_in_place_takes_no_more() -> None:
    x = torch.ones(MB).to("tarry")
    before = torch.tarry.memory_allocated()
    x.add_(1)
    assert torch.tarry.memory_allocated() - before < MB
    tarry.sync()
    assert torch.tarry.memory_allocated() - before < MB


def test_tensors_of_the_cpu_are_not_the_devices() -> None:
    before = torch.tarry.memory_allocated()
    kept = [torch.ones(MB), torch.ones(MB, device="tarry").cpu()]
    tarry.sync()
    assert torch.tarry.memory_allocated() - before < MB
    assert len(kept) == 2


def test_the_peak_has_the_temporaries_of_a_step() -> None:
    x = torch.ones(MB).to("tarry")
    tarry.sync()
    torch.tarry.reset_peak_memory_stats()
    before = torch.tarry.memory_allocated()
    assert torch.tarry.max_memory_allocated() == before
    (torch.cat([x, x]).sum() + x.sum()).item()
    assert torch.tarry.max_memory_allocated() - before >= 7 * MB  # 8, less what others may have let go of meanwhile
    assert torch.tarry.memory_allocated() - before < MB
    torch.tarry.reset_peak_memory_stats()
    assert torch.tarry.max_memory_allocated() - before < MB


def test_all_ways_to_ask_agree() -> None:
    x = torch.ones(MB).to("tarry")
    stats = torch.tarry.memory_stats()
    assert (
        torch.tarry.memory_allocated() == torch.accelerator.memory_allocated() == torch.accelerator.memory_allocated(0)
    )
    assert torch.tarry.memory_allocated("tarry:0") == stats["allocated_bytes.all.current"]
    assert stats["allocated_bytes.all.allocated"] >= stats["allocated_bytes.all.freed"] >= 0
    assert stats["allocation.all.current"] > 0
    assert torch.tarry.memory_reserved() <= torch.tarry.max_memory_reserved()
    free, total = torch.tarry.mem_get_info()
    assert 0 < free < total
    if hasattr(torch.accelerator, "get_memory_info"):
        assert torch.accelerator.get_memory_info()[1] == total
    summary = torch.tarry.memory_summary()
    assert "tarry:0 (cpu)" in summary
    assert "allocated" in summary
    torch.tarry.reset_accumulated_memory_stats()
    assert torch.tarry.memory_stats()["allocated_bytes.all.freed"] < stats["allocated_bytes.all.allocated"]
    torch.tarry.empty_cache()
    torch.accelerator.empty_cache()
    assert x.sum().item() == MB
    with pytest.raises(ValueError, match="no device 'tarry:5'"):
        torch.tarry.memory_allocated(5)


def test_want_of_memory_is_torchs_error() -> None:
    x = torch.zeros(1 << 60, dtype=torch.uint8, device="tarry")
    for _ in range(2):  # at every read
        with pytest.raises(torch.OutOfMemoryError, match="out of memory on 'tarry:0'"):
            x[0].item()
    del x
    assert (torch.ones(3, device="tarry") + 1).tolist() == [2.0] * 3


def test_a_limit() -> None:
    ooms = torch.tarry.memory_stats()["num_ooms"]
    total = torch.tarry.mem_get_info()[1]
    torch.tarry.set_per_process_memory_fraction((torch.tarry.memory_allocated() + 14 * MB) / total)
    try:
        small = torch.ones(MB, device="tarry") + 1
        assert small.sum().item() == 2 * MB
        with pytest.raises(torch.OutOfMemoryError, match="set_per_process_memory_fraction"):
            torch.ones(8 * MB).to("tarry")
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([small] * 4).sum().item()
        assert small.sum().item() == 2 * MB  # what was there is still there
    finally:
        torch.tarry.set_per_process_memory_fraction(1.0)
    assert torch.tarry.memory_stats()["num_ooms"] >= ooms + 2
    with pytest.raises(ValueError, match="between 0 and 1"):
        torch.tarry.set_per_process_memory_fraction(2.0)


def test_threads_leave_the_counts_right() -> None:
    before = torch.tarry.memory_allocated()

    def work() -> None:
        for _ in range(20):
            (torch.ones(1000).to("tarry") + 1).sum().item()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tarry.sync()
    assert abs(torch.tarry.memory_allocated() - before) < MB


def test_memory_viz_reads_the_snapshot(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz as viz

    torch.tarry.memory._record_memory_history()
    try:
        kept = torch.ones(MB, device="tarry") + 1
        (kept * 2).sum().item()
        assert sum(segment["total_size"] for segment in torch.tarry.memory_snapshot()) >= 4 * MB
        torch.tarry.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    finally:
        torch.tarry.memory._record_memory_history(None)
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    actions = [entry["action"] for entry in snapshot["device_traces"][0]]
    assert {"alloc", "free_completed"} <= set(actions)
    lines = [frame for entry in snapshot["device_traces"][0] for frame in entry["frames"]]
    assert any(frame["filename"] == __file__ for frame in lines)
    for read in (viz.segsum, viz.trace, viz.trace_plot, viz.segment_plot):
        assert read(snapshot)
    assert torch.tarry.memory_snapshot() == []


def test_pinned_memory_is_known() -> None:
    plain = torch.randn(10)
    assert not plain.is_pinned()
    assert not plain.untyped_storage().is_pinned()
    pinned = plain.pin_memory()
    assert torch.equal(pinned, plain)
    for each in (pinned, pinned[2:5], pinned.view(2, 5), torch.empty(3, pin_memory=True)):
        assert each.is_pinned()
    assert pinned.untyped_storage().is_pinned()
    part = torch.tensor(()).set_(pinned.untyped_storage()[8:], size=(5,), stride=(1,), storage_offset=0)
    assert part.is_pinned()
    assert plain.untyped_storage().pin_memory().is_pinned()
    assert pinned.pin_memory().data_ptr() == pinned.data_ptr()
    assert not pinned.clone().is_pinned()
    on_device = torch.ones(3, device="tarry")
    assert not on_device.is_pinned()
    for wrong in (on_device.pin_memory, lambda: torch.empty(3, device="tarry", pin_memory=True)):
        with pytest.raises(RuntimeError, match="pin"):
            wrong()


@pytest.mark.filterwarnings("ignore:.*pin_memory_device.*")
def test_a_loader_pins_its_batches() -> None:
    data = TensorDataset(torch.arange(8.0))
    for arguments in ({"pin_memory": True}, {"pin_memory": True, "pin_memory_device": "tarry"}):
        batches = [batch for (batch,) in DataLoader(data, batch_size=4, **arguments)]
        assert all(batch.is_pinned() for batch in batches)
        assert [batch.to("tarry", non_blocking=True).tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
