"""Building the native part: cache keys, what is compiled again, and the messages of a build that cannot work."""

from __future__ import annotations

import io
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import NativeBuildError
from tarry.native import _build, _toolchain
from tarry.native._build import Extension, Plan, build
from tarry.native._load import load
from tests.native.support import ANSWER, tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TARRY_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("CXX", "MAX_JOBS", "TARRY_CXXFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def built(extension: Extension, **options: bool) -> str:
    """What building says."""
    stream = io.StringIO()
    assert build(extension, stream=stream, **options).is_file()
    return stream.getvalue()


def test_builds_loads_and_then_is_quiet(tmp_path: Path, cache: Path) -> None:
    extension = tiny(tmp_path)
    said = io.StringIO()
    module = load(Extension("tests_native_first._tiny", extension.sources), stream=said)
    assert module.value() == 42
    first, last = said.getvalue().splitlines()
    assert "(2 files to compile)" in first
    assert "built in" in last
    assert Path(str(module.__file__)).is_relative_to(cache)
    assert built(extension) == ""
    assert not list(cache.glob("native/*/build-*")), "the temporary directory is left"


@pytest.mark.slow
def test_pybind11_and_torch_headers_are_found(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "m.cpp").write_text(
        "#include <pybind11/pybind11.h>\n#include <c10/core/Device.h>\n#include <c10/core/DeviceType.h>\n"
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n"
        '  m.def("kind", [] { return c10::DeviceTypeName(c10::DeviceType::PrivateUse1, true); });\n'
        '  m.def("file", [] { return __FILE__; });\n'
        "}\n"
    )
    module = load(Extension("tests_native_pybind._pybind", tmp_path / "csrc"), stream=io.StringIO())
    assert isinstance(module.kind(), str)
    assert module.file() == f"{tmp_path.name}/csrc/m.cpp", "messages must not show where the package is installed"


def test_a_change_compiles_the_sources_that_read_it(tmp_path: Path) -> None:
    extension = tiny(tmp_path)
    built(extension)
    (extension.sources / "answer.cpp").write_text(ANSWER % 43)
    assert "(1 file to compile)" in built(extension)
    (extension.sources / "answer.cpp").write_text(ANSWER % 42)
    assert built(extension) == "", "going back to an earlier text must find the earlier library"
    with (extension.sources / "answer.h").open("a") as header:
        header.write("// more\n")
    assert "(2 files to compile)" in built(extension)
    (extension.sources / "more.h").write_text("// a header of one source\n")
    (extension.sources / "answer.cpp").write_text('#include "more.h"\n' + ANSWER % 42)
    built(extension)
    (extension.sources / "more.h").write_text("// changed\n")
    assert "(1 file to compile)" in built(extension), "a header that one source reads must compile that source alone"


def test_an_edit_during_a_build_is_not_taken_for_the_text_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tiny(tmp_path).sources
    run_ninja = _build._run_ninja

    def edit_then_run(*arguments: Any) -> None:
        (sources / "answer.cpp").write_text(ANSWER % 43)
        run_ninja(*arguments)

    with monkeypatch.context() as during:
        during.setattr(_build, "_run_ninja", edit_then_run)
        assert load(Extension("tests_native_before._tiny", sources), stream=io.StringIO()).value() == 42
    assert load(Extension("tests_native_after._tiny", sources), stream=io.StringIO()).value() == 43


@pytest.mark.parametrize("folder", ["plain", "a $HOME 'b"])
def test_a_shared_header_is_read_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setattr(_build, "WORTH_PRECOMPILING", 1)
    (tmp_path / folder).mkdir()
    monkeypatch.setenv("TARRY_CACHE_DIR", str(tmp_path / folder / "cache"))
    sources = tiny(tmp_path / folder).sources
    with (sources / "answer.h").open("a") as header:
        header.write('#pragma message("reading")\n')
    said: list[str] = []
    monkeypatch.setattr(_build.Progress, "output", lambda self, line: said.append(line))
    module = load(Extension(f"tests_native_{len(folder)}._tiny", sources, "answer.h"), stream=io.StringIO())
    assert module.value() == 42
    assert sum("reading" in line and "note:" in line for line in said) == 1


def test_force_compiles_everything_again(tmp_path: Path) -> None:
    extension = tiny(tmp_path)
    built(extension)
    before = Plan(extension).library.stat().st_ino
    assert "(2 files to compile)" in built(extension, force=True)
    assert Plan(extension).library.stat().st_ino != before


def test_a_lost_library_is_linked_from_the_cached_objects(tmp_path: Path) -> None:
    extension = tiny(tmp_path)
    built(extension)
    Plan(extension).library.unlink()
    assert "(0 files to compile)" in built(extension)


def test_paths_with_spaces_and_dollars_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "a $HOME 'b"
    odd.mkdir()
    monkeypatch.setenv("TARRY_CACHE_DIR", str(odd / "cache"))
    module = load(Extension("tests_native_odd._tiny", tiny(odd).sources), stream=io.StringIO())
    assert module.value() == 42


@pytest.mark.parametrize("change", ["flags", "compiler", "torch", "commit", "file name"])
def test_the_key_depends_on(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = tiny(tmp_path)
    before = Plan(extension)
    same = Plan(extension)
    assert before.library == same.library
    match change:
        case "flags":
            monkeypatch.setenv("TARRY_CXXFLAGS", "-O0")
        case "compiler":
            monkeypatch.setattr(_toolchain, "find_compiler", lambda: _toolchain.Compiler(("g++",), "g++ 99"))
        case "torch":
            monkeypatch.setattr("torch.__version__", "2.99.0")
        case "commit":
            monkeypatch.setattr("torch.version.git_version", "0" * 40)
        case "file name":
            (extension.sources / "answer.cpp").rename(extension.sources / "reply.cpp")
    after = Plan(extension)
    assert after.library != before.library
    if change != "file name":
        unit = extension.sources / "module.cpp"
        assert after.object_of(unit) != before.object_of(unit)


def test_the_key_does_not_depend_on_where_the_sources_are(tmp_path: Path) -> None:
    extension = tiny(tmp_path)
    shutil.copytree(extension.sources, tmp_path / "elsewhere")
    assert Plan(Extension(extension.full_name, tmp_path / "elsewhere")).library == Plan(extension).library


def test_old_objects_and_surplus_libraries_are_removed(tmp_path: Path, cache: Path) -> None:
    extension = tiny(tmp_path)
    built(extension)
    old = cache / "objects" / "old-0.o"
    old.write_bytes(b"")
    os.utime(old, (1, 1))
    for number in range(20):
        surplus = cache / "native" / f"_tiny-{number}" / "_tiny.so"
        surplus.parent.mkdir()
        surplus.write_bytes(b"")
        os.utime(surplus, (number, number))
    built(extension, force=True)
    assert not old.exists()
    left = sorted(path.parent.name for path in cache.glob("native/*/_tiny.so"))
    assert len(left) == 16
    assert Plan(extension).library.is_file()
    assert "_tiny-0" not in left


def test_no_compiler(tmp_path: Path, no_compiler: None) -> None:
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler was found.*\n.*apt-get install g\+\+"):
        build(tiny(tmp_path), stream=io.StringIO())


def test_no_compiler_is_needed_for_what_is_built(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    extension = tiny(tmp_path)
    library = build(extension, stream=io.StringIO())
    request.getfixturevalue("no_compiler")
    assert build(extension) == library


def test_nonsense_in_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    with pytest.raises(NativeBuildError, match="CXX='no-such-compiler --flag' cannot be run"):
        build(tiny(tmp_path), stream=io.StringIO())


def test_no_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "ninja" else which(name, path=path))
    with pytest.raises(NativeBuildError, match=r"ninja was not found.*\n.*-m pip install ninja"):
        build(tiny(tmp_path), stream=io.StringIO())


def test_no_python_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get_path = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path) if name == "include" else get_path(name))
    with pytest.raises(
        NativeBuildError, match=r"Python's headers were not found.*\n.*apt-get install python3\.\d+-dev"
    ):
        build(tiny(tmp_path), stream=io.StringIO())


def test_broken_source_shows_the_compilers_first_error_and_the_log(tmp_path: Path, cache: Path) -> None:
    extension = tiny(tmp_path)
    (extension.sources / "answer.cpp").write_text('#include "answer.h"\nlong answer() { return nonsense; }\n')
    with pytest.raises(NativeBuildError, match=r"answer\.cpp:2:\d+: error: .nonsense. was not declared") as caught:
        build(extension, stream=io.StringIO())
    log = cache / "_tiny-build.log"
    assert f"The whole log: {log}" in str(caught.value)
    assert "ninja:" not in str(caught.value)
    assert "nonsense" in log.read_text()
    assert not Plan(extension).library.exists()
    tiny(tmp_path)
    assert "(1 file to compile)" in built(extension), "the file that did compile must not compile again"


def test_a_killed_compiler_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "cxx"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo fake 1; exit; }\n'
        'echo "g++: fatal error: Killed signal terminated program cc1plus" >&2\nexit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(NativeBuildError, match=r"Killed signal[\s\S]*MAX_JOBS=1"):
        build(tiny(tmp_path), stream=io.StringIO())


def test_a_library_that_does_not_load_says_how_to_rebuild(tmp_path: Path) -> None:
    extension = Extension("tests_native_broken._tiny", tiny(tmp_path).sources)
    build(extension, stream=io.StringIO()).write_bytes(b"not a library")
    with pytest.raises(NativeBuildError, match=r"cannot be loaded: .*python -m tarry\.native --force"):
        load(extension)


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="no C\\+\\+ sources in"):
        build(Extension("x._x", tmp_path))


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TARRY_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(NativeBuildError, match="Set the environment variable TARRY_CACHE_DIR"):
        build(tiny(tmp_path), stream=io.StringIO())


def test_a_relative_cache_directory_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TARRY_CACHE_DIR", "here")
    build(tiny(tmp_path), stream=io.StringIO())
    assert list(tmp_path.glob("here/native/*/_tiny.so"))


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(_toolchain, "_available_memory", lambda: 64 * 1024**3)
    assert _toolchain.job_count(20) == 8
    assert _toolchain.job_count(2) == 2
    monkeypatch.setattr(_toolchain, "_available_memory", lambda: 1024**3)
    assert _toolchain.job_count(20) == 1
    monkeypatch.setenv("MAX_JOBS", "7")
    assert _toolchain.job_count(20) == 7
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(NativeBuildError, match="MAX_JOBS must be a positive number, not 'many'"):
        _toolchain.job_count(1)


@pytest.mark.parametrize("place", ["native", "native/*", "objects"])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, cache: Path, place: str) -> None:
    extension = tiny(tmp_path)
    built(extension)
    (folder,) = cache.glob(place)
    folder.chmod(0o777)
    with pytest.raises(NativeBuildError, match=r"written by other users.*chmod -R go-w"):
        build(extension, stream=io.StringIO(), force=place == "objects")


@pytest.mark.parametrize("place", ["native/*/_tiny.so", "objects/answer*.o"])
@pytest.mark.parametrize("fault", ["writable", "a link"])
def test_a_file_that_others_can_write_is_made_again(tmp_path: Path, cache: Path, place: str, fault: str) -> None:
    extension = tiny(tmp_path)
    built(extension)
    library = Plan(extension).library
    (path,) = cache.glob(place)
    if fault == "writable":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    if path != library:
        library.unlink()
    said = built(extension)
    assert f"({int(path != library)} file" in said
    assert library.stat().st_mode & 0o022 == 0
    assert not path.is_symlink()


def test_what_is_built_is_this_users_alone_whatever_the_umask(tmp_path: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        built(tiny(tmp_path))
    finally:
        os.umask(before)
    for folder in (cache, *(path for path in cache.rglob("*") if path.is_dir())):
        assert folder.stat().st_mode & 0o077 == 0, folder
    assert built(tiny(tmp_path)) == "", "and it is found again"
