"""Compiles a directory of C++ sources into an extension module, once per torch, Python, compiler and source.

Invariants:
 - a library that exists under its final name is complete: it is built elsewhere and renamed into place;
 - one process builds, others wait: the lock is a `flock`, which the kernel drops when its holder dies, so a killed
   build leaves no stale lock, only a temporary directory that the next build of the same library removes;
 - only what this user alone can have written is linked and loaded (`tarry.trust`);
 - a compiled object is cached by all that went into it, so a change to one source compiles one file;
 - what is compiled is a copy of what was hashed, so an edit during a build never gets into an object of another name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TextIO

import tarry.trust as trust  # "from tarry" would load the whole package
from tarry.config import config
from tarry.errors import NativeBuildError
from tarry.native import _toolchain
from tarry.native._progress import Progress

LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")
KEPT_LIBRARIES = 16  # per module name: a developer's edits would otherwise fill the disk
KEPT_OBJECT_DAYS = 14
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_COPIES = "sources"  # folder of a build, where the compiler reads
WORTH_PRECOMPILING = 4  # sources: a precompiled header takes as long to make as two or three of them


@dataclass(frozen=True)
class Extension:
    """What to build: every `*.cpp` of a directory, into the module `full_name`."""

    full_name: str
    sources: Path
    precompiled: str = ""
    """A header of the headers that most sources include. When many are compiled, it is read once for all of them."""

    @property
    def name(self) -> str:
        return self.full_name.rpartition(".")[2]


_ROOT = Path(__file__).resolve().parent.parent.parent
TARRY = Extension("tarry.native._C", _ROOT / "tarry/csrc", "precompiled.h")


def _digest(*parts: str | bytes) -> str:
    """Hash of a sequence of strings; lengths are hashed too, so that moving a byte between two parts shows."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:20]


class Plan:
    """One extension in this environment: its files, flags, hashes and places. Reads the sources, builds nothing."""

    def __init__(self, extension: Extension) -> None:
        if sys.platform != "linux":
            raise NativeBuildError(f"tarry runs on Linux; this is {sys.platform!r}")
        self.extension = extension
        self.cache = config.cache_dir.expanduser().absolute()  # absolute: ninja runs elsewhere
        files = sorted(path for path in extension.sources.rglob("*") if path.is_file())
        self.contents = {path: path.read_bytes() for path in files if path.suffix in {".cpp", ".h", ".hpp", ".inc"}}
        self.units = [path for path in self.contents if path.suffix == ".cpp"]
        if not self.units:
            raise NativeBuildError(
                f"no C++ sources in {extension.sources}: the installation of tarry is incomplete, install it again"
            )

    @cached_property
    def compile_flags(self) -> tuple[str, ...]:
        """The flags that decide what is compiled. Paths are not among them: they must not change the key."""
        import torch

        return (
            # From 2.12 on torch's own headers need C++20.
            "-std=c++20" if _torch_release() >= (2, 12) else "-std=c++17",
            "-O2",
            "-g0",
            "-fPIC",
            "-fvisibility=hidden",
            "-Wall",
            # As PyTorch is: at::RecordFunction has one more field otherwise, and headers are full of assertions.
            "-DNDEBUG",
            f"-DTORCH_EXTENSION_NAME={self.extension.name}",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            # A header of PyTorch then includes the operators that it uses, not all 2,700.
            "-DAT_PER_OPERATOR_HEADERS",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            # A PyTorch without torch.distributed has no class to derive from.
            *(() if torch.distributed.is_available() else ("-DTARRY_WITHOUT_C10D",)),
            # For developers of tarry: "-O0 -g", a sanitizer, ...
            *shlex.split(os.environ.get("TARRY_CXXFLAGS", "")),
        )

    @cached_property
    def environment(self) -> str:
        """Hash of all that objects depend on besides sources and compiler: torch, Python, flags."""
        import torch

        soabi = sysconfig.get_config_var("SOABI") or ""
        return _digest(torch.__version__, str(torch.version.git_version), soabi, *self.compile_flags)

    @cached_property
    def compiler(self) -> _toolchain.Compiler:
        return _toolchain.find_compiler()

    @cached_property
    def source_key(self) -> str:
        """Everything but the compiler: what a machine without a compiler can still look for."""
        import torch

        names = [str(path.relative_to(self.extension.sources)) for path in self.contents]
        digest = _digest(self.environment, *names, *self.contents.values())
        soabi = sysconfig.get_config_var("SOABI") or "unknown"
        return f"{self.extension.name}-torch{torch.__version__}-{soabi}-{digest}"

    @property
    def directory(self) -> Path:
        return self.cache / "native" / f"{self.source_key}-{_digest(self.compiler.version)[:8]}"

    @property
    def library(self) -> Path:
        """Where the built module is, or will be."""
        return self.directory / f"{self.extension.name}.so"

    def packaged(self) -> str:
        """Where a wheel has the built module (see _wheel.py): the folder's name is all that it was built from."""
        package = self.extension.full_name.rpartition(".")[0].replace(".", "/")
        return f"{package}/prebuilt/{self.source_key}/{self.extension.name}.so"

    def find(self) -> Path | None:
        """The built module, if there is one: in the package, or in the cache. Without a compiler, one in the cache that
        any compiler has built will do."""
        packaged = _ROOT / self.packaged()
        if packaged.is_file():  # as trustworthy as the Python files beside it
            return packaged
        try:
            library = self.library
        except NativeBuildError:
            found = sorted((self.cache / "native").glob(f"{self.source_key}-*/{self.extension.name}.so"))
            return next(filter(_is_usable, found), None)
        return library if _is_usable(library) else None

    def object_of(self, unit: Path) -> Path:
        """Where the compiled form of one source is cached: a function of its text and of our headers that it reads."""
        read = sorted(self._included(unit, {unit}))
        parts = [part for path in read for part in (path.name.encode(), self.contents[path])]
        digest = _digest(self.environment, self.compiler.version, *parts)
        return self.cache / "objects" / f"{unit.stem}-{digest}.o"

    def _included(self, path: Path, seen: set[Path]) -> set[Path]:
        """The file and all that it includes by `#include "..."`, directly or not, of this extension's own sources."""
        for name in _INCLUDE.findall(self.contents[path]):
            for header in (path.parent / name.decode(), self.extension.sources / name.decode()):
                if header in self.contents and header not in seen:
                    seen.add(header)
                    self._included(header, seen)
        return seen


def _is_usable(library: Path) -> bool:
    """Whether there is a library that only this user can have written: it will be run as code."""
    try:
        for folder in (library.parent.parent, library.parent):
            with trust.open_folder(folder):
                pass
    except trust.UntrustedError as error:
        raise NativeBuildError(f"tarry's native part is not loaded: {error}") from error
    except OSError:
        return False
    return trust.is_trusted_file(library)


def _torch_release() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def build(extension: Extension, *, force: bool = False, stream: TextIO | None = None) -> Path:
    """The path of the built module; compiles it unless it is in the cache. `force` compiles every file again."""
    plan = Plan(extension)
    found = plan.find()
    if found is not None and not force:
        return found
    library = plan.library  # raises here if there is no compiler
    progress = Progress(stream if stream is not None else sys.stderr)
    try:
        for folder in (library.parent.parent, library.parent, plan.cache / "objects"):
            trust.make_folder(folder)
            with trust.open_folder(folder):
                pass
        with _locked(library.with_suffix(".lock"), progress) as waited:
            if _is_usable(library) and (waited or not force):
                return library
            _build_locked(plan, library, force, progress)
    except trust.UntrustedError as error:
        raise NativeBuildError(f"tarry's native part is not built: {error}") from error
    except OSError as error:
        raise NativeBuildError(
            f"tarry's native part cannot be built in {plan.cache}: {error}. "
            f"Set the environment variable TARRY_CACHE_DIR to a directory that can be written to."
        ) from error
    _prune(plan)
    return library


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[bool]:
    """Hold the lock file; yields whether another process held it first."""
    with path.open("a+") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            file.seek(0)
            progress.waiting(file.read().strip())
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield waited


def _build_locked(plan: Plan, library: Path, force: bool, progress: Progress) -> None:
    for leftover in library.parent.glob("build-*"):  # of a killed build: ours is the only live one, by the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as name:
        work = Path(name)
        for path, content in plan.contents.items():
            copy = work / _COPIES / path.relative_to(plan.extension.sources)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)
        objects = {unit: plan.object_of(unit) for unit in plan.units}
        stale = [unit for unit in plan.units if force or not trust.is_trusted_file(objects[unit])]
        (work / "build.ninja").write_text(_ninja_file(plan, objects, stale, work))
        progress.start([unit.name for unit in stale])
        begin = time.monotonic()
        try:
            _run_ninja(plan, work, len(stale), progress)
        finally:
            progress.stop()
        os.replace(work / library.name, library)
        now = time.time()
        for path in objects.values():
            os.utime(path, (now, now))  # in use: see _prune
        progress.finished(time.monotonic() - begin)


def _path(path: Path | str) -> str:
    """A path as an input or output of the ninja file; ninja itself quotes `$in` and `$out` for the shell."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _word(text: Path | str) -> str:
    """One word of a command in the ninja file: quoted for the shell, `$` doubled for ninja."""
    return shlex.quote(str(text)).replace("$", "$$")


def _ninja_file(plan: Plan, objects: dict[Path, Path], stale: list[Path], work: Path) -> str:
    """One edge per source that must be compiled, and the link. Paths of headers are here, outside the key.

    A compiler writes beside build.ninja and the result is renamed: an object in the cache is always whole, and
    the ones that were done when a build is killed serve the next.
    """
    import torch

    package = Path(torch.__file__).resolve().parent
    # Not torch.utils.cpp_extension: it gives just these for a CPU extension, and importing it costs a second.
    includes = [package / "include", package / "include/torch/csrc/api/include", _toolchain.python_include()]
    sources, copies = plan.extension.sources, work / _COPIES
    command = " ".join(_word(word) for word in plan.compiler.command)
    compiling = " ".join(
        [
            *(_word(flag) for flag in plan.compile_flags),
            _word(f"-I{copies}"),
            *(f"-isystem {_word(path)}" for path in includes),
            # __FILE__ in error messages reads tarry/csrc/... and torch/include/... wherever the two are installed
            _word(f"-ffile-prefix-map={copies}={sources.parent.name}/{sources.name}"),
            _word(f"-ffile-prefix-map={package}=torch"),
        ]
    )
    # Some compilers link their C++ library statically. Two copies in one process do not share their locales, and the
    # first number written to a stream crashes; torch uses the shared one, so ours must.
    libraries = [*(f"-l{library}" for library in LIBRARIES), "-l:libstdc++.so.6"]
    linking = " ".join([f"-L{_word(package / 'lib')}", *libraries])
    lines = [
        "ninja_required_version = 1.5",
        "rule compile",
        f"  command = {command} {compiling} $header -c $in -o $part && mv $part $out",
        "  description = $name",
        "rule precompile",
        f"  command = {command} {compiling} -x c++-header $in -o $out",
        "  description = $name",
        "rule link",
        f"  command = {command} -shared $in -o $out {linking}",
        "  description = linking",
    ]
    header = _precompiled_header(plan, stale)
    precompiled = work / header
    if header:
        # GCC takes HEADER.gch for HEADER where it was made with the same flags, and reads HEADER itself otherwise.
        precompiled.write_text(f'#include "{copies / header}"\n')
        lines += [f"build {_path(f'{precompiled}.gch')}: precompile {_path(precompiled)}", f"  name = {header}"]
    after = f" | {_path(f'{precompiled}.gch')}" if header else ""
    for unit in sorted(stale, key=lambda unit: len(plan.contents[unit]), reverse=True):  # the longest first
        lines += [
            f"build {_path(objects[unit])}: compile {_path(copies / unit.relative_to(sources))}{after}",
            f"  name = {unit.name}",
            f"  part = {_word(work / f'{objects[unit].name}.part')}",
            f"  header = {f'-include {_word(precompiled)}' if header else ''}",
        ]
    inputs = " ".join(_path(objects[unit]) for unit in plan.units)
    lines += [f"build {_path(plan.library.name)}: link {inputs}", ""]
    return "\n".join(lines)


def _precompiled_header(plan: Plan, stale: list[Path]) -> str:
    """The header that is read beforehand; "" if none is: for few sources, or with a compiler that is not GCC."""
    worth = len(stale) >= WORTH_PRECOMPILING and "clang" not in plan.compiler.version.lower()
    return plan.extension.precompiled if worth else ""


def _run_ninja(plan: Plan, work: Path, tasks: int, progress: Progress) -> None:
    arguments = [_toolchain.find_ninja(), "-C", str(work), "-j", str(_toolchain.job_count(tasks))]
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C.UTF-8"}
    log: list[str] = []
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        umask=0o077,  # only what this user alone can write is loaded
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                line = line.replace(str(work / _COPIES), str(plan.extension.sources))
                log.append(line)
                progress.output(line)
        except BaseException:
            process.terminate()  # ninja passes it on to its compilers
            raise
    if process.returncode == 0:
        return
    log_path = plan.cache / f"{plan.extension.name}-build.log"
    trust.write_file(log_path, "".join(log).encode())
    raise NativeBuildError(_failure(log, plan.compiler, log_path))


def _failure(log: list[str], compiler: _toolchain.Compiler, log_path: Path) -> str:
    """The message for a build that failed: the compiler's first error, a guess at the cause, the log's place."""
    errors = [number for number, line in enumerate(log) if "error:" in line or "undefined reference" in line]
    begin = errors[0] if errors else max(0, len(log) - 12)
    message = [line for line in log[begin : begin + 12] if not line.startswith(("[", "ninja:"))]
    shown = "".join(f"  {line}" for line in message).rstrip()
    text = f"tarry's native part did not compile with {compiler.version}:\n{shown}\nThe whole log: {log_path}"
    if any("Killed" in line for line in log):
        text += "\nThe compiler was killed, most likely for want of memory: try again with MAX_JOBS=1 set."
    elif any("unrecognized command" in line and "-std=" in line for line in log):
        text += "\nThe compiler is too old for this torch's headers: install g++ 11 or newer, or set CXX to one."
    return text


def _prune(plan: Plan) -> None:
    """Remove what is not needed again; best effort, since another process may be doing the same."""
    libraries = sorted(
        (plan.cache / "native").glob(f"{plan.extension.name}-*/{plan.extension.name}.so"),
        key=lambda path: path.stat().st_mtime if path.exists() else 0.0,
    )
    for library in libraries[:-KEPT_LIBRARIES]:
        shutil.rmtree(library.parent, ignore_errors=True)
    oldest = time.time() - KEPT_OBJECT_DAYS * 86400
    for path in (plan.cache / "objects").glob("*.o"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except OSError:
            continue
