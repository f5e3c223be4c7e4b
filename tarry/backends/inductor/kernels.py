"""Inductor's kernels for a CPU, compiled together.

Inductor has each kernel compiled by itself, with a Python binding: nearly all of that time goes into reading the same
headers again. Here, the kernels of all graphs that are compiled at once make a few C++ files, and have no binding: a
program's list of instructions (launch.py) calls them by address. Where Python runs a program, Inductor binds its
kernels as usual.

Private names used, checked on torch 2.11 and 2.13: `AsyncCompile.cpp_pybinding` and `CppCodeCache`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

LEAST = 50_000
"""Characters of a C++ file that is worth a compiler of its own: the headers take as long."""
KERNEL = "kernel"  # what Inductor calls the function in a kernel's source


class Kernel:
    """A kernel that Inductor has generated. Called from Python, it is bound first, with the settings that `configured`
    makes."""

    def __init__(self, types: list[str], source: str, configured: Callable[[], AbstractContextManager[None]]) -> None:
        self._types = types
        self.source = source
        self._configured = configured
        self._bound: Callable[..., Any] | None = None
        self.library = ""
        """The path of the library that it is in, as a C function named `symbol`; empty until there is one."""
        self.symbol = f"{KERNEL}_{hashlib.sha256(source.encode()).hexdigest()[:16]}"

    def __call__(self, *args: Any) -> Any:
        if self._bound is None:
            from torch._inductor.codecache import CppPythonBindingsCodeCache

            with self._configured():
                self._bound = CppPythonBindingsCodeCache.load_pybinding(self._types, self.source)
        return self._bound(*args)

    def future(self) -> Any:
        """The bound kernel, as Inductor gives it to a module that waits for it."""
        from torch._inductor.async_compile import AsyncCompile

        return AsyncCompile().cpp_pybinding(self._types, self.source)


@contextlib.contextmanager
def uncompiled(configured: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within the block, modules that Inductor generates have `Kernel`s."""
    from torch._inductor.async_compile import AsyncCompile

    def kernel(_: Any, types: list[str], source: str) -> Kernel:
        return Kernel(types, source, configured)

    with mock.patch.object(AsyncCompile, "cpp_pybinding", kernel):
        yield


def bind(function: Any) -> None:
    """Have Inductor bind the kernels of a generated function, since Python will run it."""
    from torch._inductor.async_compile import AsyncCompile

    scope = getattr(function, "__globals__", {})
    found = {name: value.future() for name, value in scope.items() if isinstance(value, Kernel)}
    if found:
        scope.update(found)
        AsyncCompile().wait(scope)


def build(wanted: Iterable[Kernel]) -> None:
    """Compile kernels, and give each its library."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    missing = [kernel for kernel in wanted if not kernel.library]
    if not missing:
        return
    distinct = {kernel.symbol: kernel for kernel in missing}
    threads = get_compile_threads()
    files = _files(list(distinct.values()), threads)
    submit = AsyncCompile.submit if threads > 1 else None
    loading = [_libraries().load_async(_merged(each), "cpu", submit_fn=submit) for each in files]
    paths: dict[str, str] = {}
    for each, load in zip(files, loading, strict=True):
        paths |= dict.fromkeys((kernel.symbol for kernel in each), load()._name)
    for kernel in missing:
        kernel.library = paths[kernel.symbol]


@functools.cache
def _libraries() -> Any:
    """Inductor's cache of libraries, with the flags and the precompiled header that kernels with a binding have."""
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache
    from torch._inductor.utils import clear_on_fresh_cache

    class Libraries(CppCodeCache):
        cache: dict[str, Any] = {}
        cache_clear = staticmethod(cache.clear)
        cpp_compile_command_flags = CppPythonBindingsCodeCache.cpp_compile_command_flags
        _get_uncompiled_header = CppPythonBindingsCodeCache._get_uncompiled_header

    return clear_on_fresh_cache(Libraries)


def _files(wanted: Sequence[Kernel], most: int) -> list[list[Kernel]]:
    """The kernels of each C++ file, in order, of about the same length."""
    ends = list(itertools.accumulate(len(kernel.source) for kernel in wanted))
    count = max(1, min(most, ends[-1] // LEAST))
    files: list[list[Kernel]] = [[] for _ in range(count)]
    for kernel, end in zip(wanted, ends, strict=True):
        files[(end - 1) * count // ends[-1]].append(kernel)
    return [each for each in files if each]


def _merged(wanted: Iterable[Kernel]) -> str:
    """The source of a library that has some kernels, each in a namespace of its own and with a name of its own."""
    includes: dict[str, None] = {}
    bodies = []
    for kernel in wanted:
        lines = kernel.source.splitlines()
        includes |= dict.fromkeys(line for line in lines if line.lstrip().startswith("#include"))
        body = "\n".join(line for line in lines if line not in includes)
        bodies.append(
            f"#define {KERNEL} {kernel.symbol}\nnamespace in_{kernel.symbol} {{\n{body}\n}}\n#undef {KERNEL}\n"
        )
    return "\n".join([*includes, *bodies])
