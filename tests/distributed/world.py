"""Runs a function on several processes that form one world, and gives what each returned."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

TIMEOUT = 240
"""Seconds until processes that hang are killed: tests with two cores and cold caches take a tenth of it."""


def run(function: Callable[..., Any], folder: Path, *args: Any, size: int = 2, backend: str = "eager") -> list[Any]:
    """What `function(*args)` returned on each rank; an exception as `repr`, None from a process that died."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(function, args, rank, size, port, str(folder), backend))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hanging, f"ranks {hanging} did not end"
    files = [folder / f"{rank}.pt" for rank in range(size)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def free_port() -> int:
    """One below those that the system gives to connections, which another test's process could take meanwhile."""
    for port in random.sample(range(15_000, 30_000), 100):
        with socket.socket() as candidate, suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def _rank(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, port: int, folder: str, backend: str
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ["TARRY_BACKEND"] = backend
    torch.set_num_threads(1)
    import tarry  # noqa: F401 - the device

    try:
        result = function(*args)
    except Exception as error:
        traceback.print_exc()
        result = repr(error)
    torch.save(result, f"{folder}/{rank}.part")
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.pt")
