"""Operators that are declared again: imported twice, reloaded, run again in a notebook; and what outlives them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import tarry
from tarry import custom_ops
from tarry.custom_ops.operator import global_registry
from tests.custom_ops.operators import cube

USES_DEVICE = True

MODULE = """
import torch, tarry
from torch import Tensor

@tarry.custom_op("optest::shared")
def shared(x: Tensor{more}) -> Tensor: ...

shared.impl("cpu")(lambda x, *more: x * {factor})
shared.impl_abstract()(lambda x, *more: torch.empty_like(x))
"""


def write(path: Path, text: str) -> None:
    """Write a module, so that no compiled file of an earlier text is taken for it."""
    path.write_text(text)
    importlib.invalidate_caches()
    for compiled in path.parent.glob("__pycache__/*"):
        compiled.unlink()


def test_a_script_whose_operators_are_imported_by_another_module(tmp_path: Path) -> None:
    main = "\nif __name__ == '__main__':\n    import user\n    for f in user.shared, shared: print(f(torch.ones(1)))\n"
    write(tmp_path / "script.py", MODULE.format(more="", factor=2) + main)
    write(tmp_path / "user.py", "from script import shared\n")
    result = subprocess.run([sys.executable, str(tmp_path / "script.py")], check=False, capture_output=True, text=True)
    assert result.stdout.strip() == "tensor([2.])\ntensor([2.])", result.stderr


@pytest.mark.parametrize("more", ["", ", k: int = 1"], ids=["same schema", "other schema"])
def test_objects_taken_before_a_reload(more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"taken_op{len(more)}"
    write(tmp_path / f"{name}.py", MODULE.format(more="", factor=2))
    module = importlib.import_module(name)
    taken = module.shared
    write(tmp_path / f"{name}.py", "\n# the lines have moved\n" + MODULE.format(more=more, factor=3))
    module = importlib.reload(module)
    assert taken is module.shared
    for device in ("cpu", "tarry"):
        assert taken(torch.ones(1, device=device)).item() == 3.0
    assert (len(taken._schema.arguments) == 2) == bool(more)


def test_handles_of_pytorch_survive_a_cell_that_is_run_again() -> None:
    held: list[Any] = []
    for cell, factor in enumerate((2, 3)):
        scope: dict[str, object] = {"__name__": "__main__"}
        exec(compile(MODULE.format(more="", factor=factor), f"<ipython-input-{cell}>", "exec"), scope)
        held += [torch.ops.optest.shared, torch.ops.optest.shared.default]
        assert [handle(torch.ones(1)).item() for handle in held] == [factor] * len(held)


def declare(factor: int, choice: Any = None, **options: Any) -> custom_ops.CustomOp:
    def again(x, way=None): ...

    again.__annotations__ = {"x": Tensor, "way": choice, "return": Tensor}
    op = tarry.custom_op("optest::again", **options)(again)
    op.impl("cpu")(lambda x, way=None: x * factor)
    return op


def test_what_other_modules_registered_stays() -> None:
    op = declare(2, str | None)
    op.impl_abstract()(lambda x, way=None: torch.empty_like(x))
    assert declare(3, str | None) is op
    assert op(torch.ones(1)).item() == 3.0
    assert op(torch.ones(1, device="meta")).shape == (1,)  # the abstract implementation
    with pytest.raises(RuntimeError, match="there is a cpu impl already"):
        op.impl("cpu")(torch.sin)
    op.impl_abstract()(lambda x, way=None: x.new_empty(7))
    assert op(torch.ones(1, device="meta")).shape == (7,)


def test_exist_ok_replaces_everything() -> None:
    op = declare(2, str | None)
    op.impl_abstract()(lambda x, way=None: torch.empty_like(x))
    declare(3, str | None, exist_ok=True)
    assert op(torch.ones(1)).item() == 3.0
    with pytest.raises(NotImplementedError, match=r"no (abstract|fake) impl"):
        op(torch.ones(1, device="meta"))


def test_choices_may_change() -> None:
    op = declare(2, Literal["a"] | None)
    handle = torch.ops.optest.again
    declare(3, Literal["b"] | None)
    assert handle(torch.ones(1), "b").item() == 3.0
    with pytest.raises(ValueError, match="way='a' is none of 'b'"):
        op(torch.ones(1), "a")


def test_tags_may_change() -> None:
    declare(2, str | None)
    op = declare(3, str | None, tags=iter([torch.Tag.nondeterministic_seeded]))
    assert torch.Tag.nondeterministic_seeded in torch.ops.optest.again.default.tags
    assert op(torch.ones(1)).item() == 3.0


def test_gradients_and_lowerings_are_replaced() -> None:
    for slope in (2.0, 3.0):
        op = declare(1, str | None)
        op.impl_abstract()(lambda x, way=None: torch.empty_like(x))
        op.impl_save_for_backward()(lambda inputs, output: None)
        op.impl_backward()(lambda ctx, saved, grad, slope=slope: {"x": grad * slope})
        op.lower("inductor")(lambda x, way=None, slope=slope: x * slope)
        op.lower("torchscript", kernel=True)(lambda x, way=None, slope=slope: x * slope)
        x = torch.ones(1, requires_grad=True)
        op(x).backward()
        assert x.grad is not None
        assert x.grad.item() == slope


def test_what_is_recorded_is_computed_with_the_kernels_of_its_time() -> None:
    op = declare(2, str | None)
    op.impl_abstract()(lambda x, way=None: torch.empty_like(x))
    y = op(torch.ones(1, device="tarry"))
    declare(3, str | None)
    assert y.item() == 2.0


def test_a_graph_outlives_its_operator() -> None:
    x = torch.full((2,), 2.0, requires_grad=True)
    op = cube()
    y = op(x).sum()
    op.remove()
    y.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [12.0, 12.0]


def test_a_removed_operator_says_so() -> None:
    op = cube()
    op.remove()
    cube()
    for use in (
        lambda: op(torch.ones(2)),
        lambda: op.check(torch.ones(2)),
        lambda: op.impl("cpu"),
        lambda: op.impl_abstract()(torch.empty_like),
        lambda: op.impl_save_for_backward()(lambda inputs, output: None),
        lambda: op.impl_vmap()(lambda *args: None),
        lambda: op.impl_autocast("cpu", torch.float16),
        lambda: op.lower("inductor")(torch.sin),
    ):
        with pytest.raises(RuntimeError, match="was removed, or declared anew"):
            use()
    op.remove()
    assert "optest::cube" in global_registry  # the new one


def test_parameters_that_are_no_fields_of_a_named_tuple() -> None:
    custom_ops.custom_op("optest::odd", "(Tensor _x, Tensor from, float lambda) -> Tensor")
    custom_ops.impl("optest::odd", device_types="cpu", func=lambda x, y, k: x * y * k)
    custom_ops.impl_save_for_backward(
        "optest::odd", func=lambda inputs, output: (inputs._x, getattr(inputs, "from"), getattr(inputs, "lambda"))
    )
    custom_ops.impl_backward(
        "optest::odd", func=lambda ctx, saved, grad: {"_x": grad * saved[1] * saved[2], "from": None}
    )
    x = torch.ones(1, requires_grad=True)
    torch.ops.optest.odd(x, torch.full((1,), 5.0), 3.0).backward()
    assert x.grad is not None
    assert x.grad.item() == 15.0


def test_a_name_that_torch_library_has() -> None:
    library = torch.library.Library("optest", "FRAGMENT")
    library.define("theirs(Tensor x) -> Tensor")

    def theirs(x: Tensor) -> Tensor: ...

    with pytest.raises(RuntimeError, match=r"test_again.py:\d+: .*multiple times, and torch.library or a C\+\+"):
        tarry.custom_op("optest::theirs")(theirs)
    library._destroy()


def test_gradients_of_empty_and_missing_lists() -> None:
    custom_ops.custom_op("optest::lists", "(Tensor x, Tensor[] ys, Tensor[]? zs) -> Tensor")
    custom_ops.impl("optest::lists", device_types="cpu", func=lambda x, ys, zs: x + sum(ys) + sum(zs or ()))
    custom_ops.impl_save_for_backward(
        "optest::lists", func=lambda inputs, output: (len(inputs.ys), inputs.zs and len(inputs.zs))
    )
    custom_ops.impl_backward(
        "optest::lists",
        func=lambda ctx, counts, grad: {
            "x": grad,
            "ys": [grad * 2] * counts[0],
            "zs": None if counts[1] is None else [grad * 3] * counts[1],
        },
    )
    for ys, zs in (0, None), (2, None), (1, 2):
        x, *others = (torch.ones(1, requires_grad=True) for _ in range(1 + ys + (zs or 0)))
        torch.ops.optest.lists(x, others[:ys], None if zs is None else others[ys:]).backward()
        assert [other.grad.item() for other in others if other.grad is not None] == [2.0] * ys + [3.0] * (zs or 0)
