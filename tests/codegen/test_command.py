"""The command: what it writes, when, and how it says no."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tarry.codegen import output
from tarry.codegen.__main__ import main
from tarry.codegen.emit import nodes
from tarry.codegen.natives import natives
from tarry.codegen.reading import _has_node
from tests.codegen.yamls import SMALL, write

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path, SMALL, "mine.yaml").relative_to(tmp_path)


def _run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def _files(folder: Path) -> dict[str, tuple[int, str]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_text()) for path in folder.iterdir()}


def test_files_are_written_once_and_only_when_they_change(yaml: Path) -> None:
    assert _run("-s", yaml, "-o", "out") == 0
    first = _files(Path("out"))
    assert {"nodes.py", "kernels.py", "backend.py", "declarations.py", "COVERAGE.md", "operators.json"} <= set(first)
    assert "python -m tarry.codegen --source-yaml mine.yaml --output-dir out" in first["nodes.py"][1]
    assert _run("-s", yaml, "-o", "out") == 0
    assert _files(Path("out")) == first
    yaml.write_text(SMALL.replace("  - relu\n", "  - relu\n  - sin\n"))
    assert _run("-s", yaml, "-o", "out") == 0
    second = _files(Path("out"))
    assert second["nodes.py"] != first["nodes.py"]
    assert second["non_native_nodes.py"] == first["non_native_nodes.py"]  # not even touched
    assert not [name for name in second if name.endswith(".tmp")]


def test_what_is_no_longer_made_is_removed(yaml: Path) -> None:
    assert _run("-s", yaml, "-o", "out") == 0
    Path("out/mine.py").write_text("# not generated\n")
    yaml.write_text(SMALL.partition("non_native:")[0])
    assert _run("-s", yaml, "-o", "out", "--check") == 1
    assert _run("-s", yaml, "-o", "out") == 0
    assert not Path("out/non_native_nodes.py").exists()
    assert Path("out/mine.py").exists()


def test_nothing_is_written_unless_all_is_right(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml.write_text(SMALL.replace("relu", "rely").replace("cat\n", "catt\n"))
    assert _run("-s", yaml, "-o", "out") == 1
    assert not Path("out").exists()
    errors = capsys.readouterr().err
    assert "mine.yaml:10:5: error: there is no operator 'catt'" in errors
    assert "2 errors; nothing was written" in errors


def test_all_files_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {tmp_path / "a.py": "a = 1\n", tmp_path / "b.py": "b = 1\n"}
    made: list[str] = []

    def fails(*args: object, **kwargs: object) -> tuple[int, str]:
        if made:
            raise OSError(28, "No space left on device")
        made.append("one")
        return original(*args, **kwargs)  # type: ignore[arg-type]

    original = output.tempfile.mkstemp
    monkeypatch.setattr(output.tempfile, "mkstemp", fails)
    with pytest.raises(OSError, match="No space"):
        output.write(wanted)
    assert list(tmp_path.iterdir()) == []


def test_what_the_author_wrote_is_not_replaced(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    yaml.write_text("backend: Lazy\ncpp_namespace: mine\nfull_codegen: [bernoulli]\nsupported: [mm]\n")
    kernels = "def mm(self, mat2): ...\n"
    Path("kernels.py").write_text(kernels)
    for folder in (".", "../" + Path.cwd().name):
        assert _run("-s", yaml, "-o", folder, "--impl-path", "kernels.py") == 1
        errors = capsys.readouterr().err
        assert "kernels.py:1:1: error: this file was given to be read" in errors
        assert "1 error; nothing was written" in errors
    assert _run("-s", yaml, "-o", ".", "--dry-run") == 1
    assert "kernels.py:1:1: error: this file was not generated" in capsys.readouterr().err
    assert _run("-s", yaml, "-o", ".") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["kernels.py", "mine.yaml"]
    assert Path("kernels.py").read_text() == kernels


def test_a_copy_of_a_stub_that_is_read_is_not_replaced(yaml: Path) -> None:
    """It still says that it was generated."""
    assert _run("-s", yaml, "-o", "out", "-q") == 0
    stub = Path("out/shape_inference.py")
    mine = stub.read_text() + "# mine\n"
    stub.write_text(mine)
    assert _run("-s", yaml, "-o", "out", "--shape-inference-path", stub) == 1
    assert stub.read_text() == mine


def test_an_empty_file_is_in_nobodys_way(yaml: Path) -> None:
    Path("out").mkdir()
    Path("out/__init__.py").touch()
    assert _run("-s", yaml, "-o", "out", "-q") == 0
    assert Path("out/__init__.py").read_text().startswith("# Generated.")


def test_a_directory_in_the_way_is_noticed_before_anything_is_written(
    yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out/nodes.py").mkdir(parents=True)
    assert _run("-s", yaml, "-o", "out") == 1
    assert "out/nodes.py:1:1: error: this is a directory" in capsys.readouterr().err
    assert [path.name for path in Path("out").iterdir()] == ["nodes.py"]


def test_an_error_names_the_file_and_not_a_temporary_one(
    yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(source: str, target: Path) -> None:
        raise OSError(13, "Permission denied", source)

    monkeypatch.setattr(output.os, "replace", fails)
    assert _run("-s", yaml, "-o", "out") == 1
    assert "out/__init__.py: error: cannot be written: Permission denied" in capsys.readouterr().err
    assert list(Path("out").iterdir()) == []


def test_files_are_fresh_whatever_paths_the_command_was_given(yaml: Path) -> None:
    assert _run("-s", yaml, "-o", "out", "-q") == 0
    assert _run("-s", yaml.absolute(), "-o", Path("out").absolute(), "--check") == 0
    for name in ("nodes.py", "COVERAGE.md", "operators.json"):
        path = Path("out") / name
        kept = path.read_text()
        path.write_text(kept.rstrip("\n") + " \n")
        assert _run("-s", yaml.absolute(), "-o", Path("out").absolute(), "--check") == 1, name
        path.write_text(kept)


def test_check_fails_on_stale_files_and_writes_nothing(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("-s", yaml, "-o", "out", "--check") == 1
    assert not Path("out").exists()
    assert _run("-s", yaml, "-o", "out", "-q") == 0
    assert _run("-s", yaml, "-o", "out", "--check") == 0
    Path("out/nodes.py").write_text("# edited\n")
    capsys.readouterr()
    assert _run("-s", yaml, "-o", "out", "--check") == 1
    errors = capsys.readouterr().err
    assert "nodes.py: error: not what mine.yaml gives" in errors
    assert "python -m tarry.codegen --source-yaml mine.yaml --output-dir out" in errors
    assert Path("out/nodes.py").read_text() == "# edited\n"


def test_dry_run_says_what_would_be_written(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("-s", yaml, "-o", "out", "--dry-run") == 0
    assert "would write out/nodes.py" in capsys.readouterr().out
    assert not Path("out").exists()
    assert _run("-s", yaml, "-o", "out", "--dry_run", "True", "--tensor-class", "torch::lazy::LazyTensor") == 0


def test_the_listing_is_json(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("-s", yaml, "--json") == 0
    listing = json.loads(capsys.readouterr().out)
    nodes = {node["class"]: node for node in listing["nodes"]}
    assert nodes["AddTensor"]["operands"] == ["self", "other", "alpha"]
    assert nodes["MaxDim"]["attributes"] == ["dim", "keepdim"]
    owed = {function["operator"]: function for function in listing["shape_functions"]}
    assert owed["bernoulli.p"]["cpp_name"] == "compute_shape_bernoulli"
    assert owed["bernoulli.p"]["signature"].startswith("def compute_shape_bernoulli_p(")
    assert [node["class"] for node in listing["non_native"]] == ["Scalar", "Expand", "Cast"]


def test_missing_kernels_are_listed_with_their_signatures(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(
        "def _adaptive_avg_pool2d(self, output_size): ...\n"
        "def unbind_copy_int(self): ...\n"
        "def max_pool3d(self, kernel_size, stride, padding, dilation, ceil_mode): ...\n"
        "def index_tenser(self, indices): ...\n"
    )
    assert _run("-s", yaml, "-o", "out", "--impl-path", "mine.py") == 1
    errors = capsys.readouterr().err
    assert "mine.yaml:24:5: error: mine.py lacks the kernel of index.Tensor" in errors
    assert "It has 'index_tenser'; did you mean that?" in errors
    assert "def index_tensor(self: Any, indices: list[Any]) -> Any:" in errors
    assert "mine.py:2:1: error: unbind_copy_int is the kernel of unbind_copy.int, but takes 1 positional" in errors
    assert "max_pool3d" not in errors
    Path("mine.py").write_text("def broken(:\n")
    assert _run("-s", yaml, "-o", "out", "--impl-path", "mine.py") == 1
    assert "mine.py:1:12: error: this is not Python" in capsys.readouterr().err
    assert _run("-s", yaml, "-o", "out", "--impl-path", "nowhere.py") == 1
    assert "there is no such file" in capsys.readouterr().err


def test_missing_shape_functions_are_listed_with_their_signatures(
    yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("shapes.py").write_text("def compute_shape_bernoulli(self, *, generator=None): ...\n")
    assert _run("-s", yaml, "-o", "out", "--shape-inference-path", "shapes.py") == 1
    errors = capsys.readouterr().err
    assert "mine.yaml:9:5: error: shapes.py lacks the shape function of bernoulli.p" in errors
    assert "def compute_shape_bernoulli_p(" in errors
    assert "shape function of bernoulli\n" not in errors
    assert _run("-s", yaml, "-o", "stubs", "-q") == 0
    Path("shapes.py").write_text(Path("stubs/shape_inference.py").read_text())
    assert _run("-s", yaml, "-o", "out", "--shape-inference-path", "shapes.py") == 0
    assert "from shapes import (" in Path("out/shape_inference.py").read_text()


def test_a_missing_shape_function_of_a_non_native_node_is_an_error_at_its_line(
    yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it has the name of an ATen operator that the YAML lists."""
    yaml.write_text(
        "backend: Lazy\ncpp_namespace: mine\nsupported:\n  - expand_copy\n  - _to_copy\nnon_native:\n"
        "  - func: expand_copy(Tensor input) -> Tensor\n"
    )
    Path("shapes.py").write_text("")
    assert _run("-s", yaml, "-o", "out", "--shape-inference-path", "shapes.py") == 1
    assert "mine.yaml:7:5: error: shapes.py lacks the shape function of expand_copy" in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["    )", "    def f(a, a): ..."])
def test_what_is_no_python_is_not_written(
    broken: str, yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "docstring", lambda text: broken if text.startswith("relu(") else '    """a"""')
    assert _run("-s", yaml, "-o", "out") == 1
    errors = capsys.readouterr().err
    assert "internal error of the generator" in errors
    assert "class Relu(t.TypedNode):" in errors
    assert not Path("out").exists()


def test_the_code_is_formatted_as_the_project_is(tmp_path: Path) -> None:
    """Among these are schemas and calls that just fit into a line, or just do not."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if ruff is None:
        pytest.skip("ruff is not installed")
    names = [*natives().by_name][::3]
    generated = [name for name in names if name.partition(".")[0][-1] != "_" and _has_node(natives().by_name[name])]
    listed = "".join(f"  - {name}\n" for name in generated)
    supported = "".join(f"  - {name}\n" for name in [*natives().by_name][1::3])
    text = f"backend: Lazy\ncpp_namespace: mine\nfull_codegen:\n{listed}supported:\n{supported}"
    source = write(tmp_path, text, "many.yaml")
    assert _run("-s", source, "-o", tmp_path / "out", "-q", "--gen-ts-lowerings") == 0
    arguments = [ruff, "format", "--diff", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "out"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[:4000] + done.stderr[-500:]


def test_the_summary_counts_every_list(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("-s", yaml, "-o", "out") == 0
    counts = "13 full_codegen, 2 ir_gen, 4 supported, 1 autograd, 5 symint"
    assert counts in capsys.readouterr().out


def test_a_base_class_of_ones_own(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("-s", yaml, "-o", "out", "--node-base", "my.nodes:MyNode") == 0
    assert "from my.nodes import MyNode as NodeBase" in Path("out/node_base.py").read_text()
    assert "class AddTensor(NodeBase):" in Path("out/nodes.py").read_text()
    with pytest.raises(SystemExit) as caught:
        _run("-s", yaml, "-o", "out", "--node-base", "Node")
    assert caught.value.code == 2
    assert "module:Class" in capsys.readouterr().err


def test_the_coverage_report_says_what_becomes_of_operators(yaml: Path) -> None:
    assert _run("-s", yaml, "-o", "out", "-q") == 0
    report = Path("out/COVERAGE.md").read_text()
    sections = {part.partition("\n")[0]: part for part in report.split("\n## ")}
    assert "`add_.Tensor`" in sections["Native"]  # through add.Tensor
    assert "`index.Tensor`" in sections["Declared"]
    assert "`nonzero`" in sections["Data-dependent"]
    assert "`einsum`" in sections["Decomposes"]
    assert "`mm`" in sections["Falls back"]
    assert "`_sparse_mm_reduce_impl`" in sections["Opaque"]
    assert "`quantize_per_tensor`" in sections["Missing"]


def test_the_table_for_the_recorder(yaml: Path) -> None:
    assert _run("-s", yaml, "-o", "out", "-q") == 0
    rows = {row["name"]: row for row in json.loads(Path("out/operators.json").read_text())["operators"]}
    assert rows["aten::fill_.Scalar"]["in_place"]
    assert rows["aten::fill_.Scalar"]["mutable_arguments"] == ["self"]
    assert rows["aten::bernoulli"]["random"]
    assert rows["aten::arange.start_out"]["out"]
    assert "aten::fill.Scalar" in rows  # the pure form


def test_the_command_needs_neither_torch_nor_the_device(yaml: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TARRY_CACHE_DIR": "/nonexistent/cache"}
    arguments = [sys.executable, "-X", "importtime", "-m", "tarry.codegen", "-s", "mine.yaml", "-o", "out", "-q"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torchgen.model" in imported
    assert not {"torch", "tarry._api", "tarry.native"} & imported
