"""Memory of the device: how much there is, how much is used, and for what.

Memory is the real device's. *Allocated* is what PyTorch has allocated on the device's GPU, or, on a CPU, what
tarry has allocated there to compute (csrc/device/host_memory.h), temporaries of a running step among it; and what the
tensors that are recorded but not computed yet will take, so that a line that makes a tensor shows at once, as in eager
PyTorch. *Peaks* are of what was really allocated. On a CPU nothing is kept in reserve: reserved is allocated.

These functions are also `torch.tarry.memory.*`, where tools written for `torch.cuda.memory` look for `_snapshot`,
`_dump_snapshot` and `_record_memory_history`. The snapshot has the form that torch.cuda._memory_viz and
https://pytorch.org/memory_viz read (2.11 and 2.13).
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import torch

from tarry.device.index import index_of
from tarry.native import C


def _gpu(device: Any) -> torch.device | None:
    real = torch.device(C.real_device(index_of(device)))
    return real if real.type == "cuda" else None


# ---- how much


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total memory of the real device in bytes, from the backend; 0 where it is not known."""
    return C.memory_info(index_of(device))


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """All counts, under the names that torch.cuda.memory_stats has."""
    return torch.accelerator.memory_stats(index_of(device))


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(index_of(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(index_of(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(index_of(device))


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(index_of(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def reset_accumulated_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(index_of(device))


def empty_cache() -> None:
    """Give back what is kept of freed memory."""
    torch.accelerator.empty_cache()


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Let the device use this part of the memory at most; an operator that needs more raises torch.OutOfMemoryError."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"torch.tarry: a fraction of memory lies between 0 and 1, got {fraction}")
    gpu = _gpu(device)
    if gpu is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, gpu)
        return
    limit = -1 if fraction == 1 else int(fraction * mem_get_info(device)[1])
    C.set_memory_limit(index_of(device), limit)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The counts as a table."""
    stats = memory_stats(device)
    rows = [("allocated", "allocated_bytes"), ("reserved", "reserved_bytes")]
    lines = [f"memory of tarry:{index_of(device)} ({C.real_device(index_of(device))}), in KiB", _row("", *_COLUMNS)]
    lines += [_row(name, *(f"{stats[f'{key}.all.{kind}'] / 1024:,.0f}" for kind in _COLUMNS)) for name, key in rows]
    if not abbreviated:
        lines.append(_row("blocks", *(f"{stats[f'allocation.all.{kind}']:,}" for kind in _COLUMNS)))
        free, total = mem_get_info(device)
        lines.append(f"free {free / 1024:,.0f} of {total / 1024:,.0f}; out of memory {stats['num_ooms']} times")
    return "\n".join(lines)


_COLUMNS = ("current", "peak", "allocated", "freed")


def _row(name: str, *cells: str) -> str:
    return f"{name:<10}" + "".join(f"{cell:>16}" for cell in cells)


# ---- for what


def _record_memory_history(enabled: Any = "all", *, max_entries: int = 1 << 20, **kwargs: Any) -> None:
    """Begin to keep a history of what is allocated and freed, or end it with None."""
    if _gpu(None) is not None:
        torch.cuda.memory._record_memory_history(enabled, max_entries=max_entries, **kwargs)
        return
    C.keep_memory_history(max_entries if enabled else 0)


def _snapshot(device: Any = None) -> dict[str, Any]:
    """The memory that is in use, and the history that was kept, as torch.cuda.memory._snapshot gives them."""
    gpu = _gpu(device)
    if gpu is not None:
        return torch.cuda.memory._snapshot(gpu)
    events, live = C.memory_history()
    traces: list[list[dict[str, Any]]] = [[] for _ in range(C.device_count())]
    for is_alloc, index, address, size, microseconds, file, line in events:
        entry = {"addr": address, "size": size, "stream": 0, "time_us": microseconds, "frames": _frames(file, line)}
        traces[index] += [{"action": each} | entry for each in (("alloc",) if is_alloc else _FREE)]
    segments = [_segment(index, address, size, _frames(file, line)) for _, index, address, size, _, file, line in live]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


_FREE = ("free_requested", "free_completed")


def _frames(file: str, line: int) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": "recorded here"}] if file else []


def _segment(index: int, address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """A block of the C library's heap: PyTorch calls what it has from the system a segment, and its parts blocks."""
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames}
    return {
        "device": index,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large" if size >= 1 << 20 else "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": frames,
        "blocks": [block],
    }


def memory_snapshot() -> list[dict[str, Any]]:
    """The memory in use that was allocated since `torch.tarry.memory._record_memory_history()`."""
    segments: list[dict[str, Any]] = _snapshot()["segments"]
    return segments


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    """Write the snapshot to a file, for https://pytorch.org/memory_viz."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(), file)
