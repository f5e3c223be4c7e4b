"""Operators come and go: removed, declared anew, imported twice, declared by two modules."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tarry
from tarry import _custom_ops as functional
from tests.custom_ops.operators import BACKENDS, cube

USES_DEVICE = True

MODULE = """
import torch, tarry
from torch import Tensor

@tarry.custom_op("optest::shared")
def shared(x: Tensor) -> Tensor: ...

shared.impl("cpu")(lambda x: x * {factor})
shared.impl_abstract()(torch.empty_like)
"""


def test_removed_is_gone() -> None:
    op = cube()
    assert hasattr(torch.ops.tarry_autograd, "_6optest_cube")
    op.remove()
    assert not hasattr(torch.ops.optest, "cube")
    assert not hasattr(torch.ops.tarry_autograd, "_6optest_cube")
    with pytest.raises(RuntimeError, match="was removed, or declared anew"):
        op(torch.ones(2))
    assert cube()(torch.full((2,), 2.0)).tolist() == [8.0, 8.0]


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_declared_anew_with_another_schema(backend: str) -> None:
    before = tarry.get_backend()
    tarry.set_backend(backend)
    try:
        x = torch.ones(3).to("tarry")
        for k in (1, 2, 3):
            parameters = ", ".join(f"Tensor x{i}" for i in range(k))
            scope: dict[str, object] = {}
            exec(f"def again({', '.join(f'x{i}' for i in range(k))}): ...", scope)
            op = tarry.custom_op("optest::again", f"({parameters}) -> Tensor", exist_ok=True)(scope["again"])  # type: ignore[arg-type]
            op.impl("cpu")(lambda *xs: xs[0].new_full((len(xs),), float(len(xs))))
            op.impl_abstract()(lambda *xs: xs[0].new_empty(len(xs)))
            assert (op(*[x] * k) + 1).tolist() == [k + 1.0] * k
    finally:
        tarry.set_backend(before)


def test_what_is_recorded_survives_a_removal() -> None:
    op = cube()
    x = torch.full((2,), 2.0, device="tarry")
    y = op(x)
    op.remove()
    assert y.tolist() == [8.0, 8.0]


def test_declared_twice_says_where_the_first_is() -> None:
    @tarry.custom_op("optest::f")
    def f(x: Tensor) -> Tensor: ...

    line = test_declared_twice_says_where_the_first_is.__code__.co_firstlineno + 1
    with pytest.raises(RuntimeError, match=rf"multiple times, and this one is at .*test_lifetime.py:{line}.*exist_ok"):

        @tarry.custom_op("optest::f")
        def f(x: Tensor) -> Tensor: ...

    with pytest.raises(RuntimeError, match=rf"multiple times, and this one is at .*test_lifetime.py:{line}"):
        functional.custom_op("optest::f", "(Tensor x) -> Tensor")


def test_an_operator_of_somebody_else_is_not_replaced() -> None:
    library = torch.library.Library("optest", "FRAGMENT")
    library.define("theirs(Tensor x) -> Tensor")

    def theirs(x: Tensor) -> Tensor: ...

    with pytest.raises(RuntimeError, match="multiple times"):
        tarry.custom_op("optest::theirs", exist_ok=True)(theirs)
    library._destroy()


def test_copied_and_pickled_by_name() -> None:
    op = cube()
    assert copy.deepcopy({"op": op})["op"] is op
    text = pickle.dumps(op)
    assert pickle.loads(text) is op
    op.remove()
    with pytest.raises(RuntimeError, match="import the module that declares it"):
        pickle.loads(text)


def test_names_that_run_together() -> None:
    def c(x: Tensor) -> Tensor: ...
    def b_c(x: Tensor) -> Tensor: ...

    first, second = tarry.custom_op("optest_b::c")(c), tarry.custom_op("optest::b_c")(b_c)
    first.remove()
    second.remove()


def test_a_failed_declaration_leaves_nothing() -> None:
    with pytest.raises(ValueError, match="unsupported type"):

        @tarry.custom_op("optest::f")
        def f(x: Tensor, y: dict[str, int]) -> Tensor: ...

    @tarry.custom_op("optest::f")
    def f(x: Tensor) -> Tensor: ...

    assert str(inspect.signature(f)) == "(x: 'Tensor') -> 'Tensor'"


def test_a_reloaded_module_replaces_its_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reloaded_op.py").write_text(MODULE.format(factor=2))
    module = importlib.import_module("reloaded_op")
    importlib.import_module("reloaded_op")
    assert module.shared(torch.ones(1)).item() == 2.0
    module = importlib.reload(module)
    assert module.shared(torch.ones(1)).item() == 2.0


def test_two_modules_with_one_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first_op", "second_op"):
        (tmp_path / f"{name}.py").write_text(MODULE.format(factor=2))
    importlib.import_module("first_op")
    with pytest.raises(RuntimeError, match=r"second_op.py:5: .*first_op.py:5"):
        importlib.import_module("second_op")


def test_a_cell_that_is_run_again_replaces_its_operator() -> None:
    for cell, factor in enumerate((2, 3)):
        scope: dict[str, object] = {"__name__": "__main__"}
        exec(compile(MODULE.format(factor=factor), f"<ipython-input-{cell}>", "exec"), scope)
        assert torch.ops.optest.shared(torch.ones(1)).item() == factor
        assert torch.ops.optest.shared(torch.ones(1, device="tarry")).item() == factor


def test_the_end_of_a_process() -> None:
    """Registrations that are native and those of PyTorch are taken down in no particular order."""
    script = """
        import torch, tarry
        from torch import Tensor
        @tarry.custom_op("optest::f")
        def f(x: Tensor) -> Tensor: ...
        f.impl("cpu")(torch.sin)
        f.impl_abstract()(torch.empty_like)
        f.impl_save_for_backward()(lambda inputs, output: inputs.x)
        f.impl_backward()(lambda ctx, saved, grad: {"x": grad})
        x = torch.ones(2, device="tarry", requires_grad=True)
        f(x).sum().backward()
        print(x.grad.tolist())
        pending = f(x)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[1.0, 1.0]"
