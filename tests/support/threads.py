"""The same work on several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def on_threads(work: Callable[[], None], count: int = 3) -> None:
    """Run it on that many threads; what fails on one of them fails here."""
    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(work) for _ in range(count)]
    for one in running:
        one.result()
