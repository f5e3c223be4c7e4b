"""What ``out=`` does to the tensors that it is given, against CPU eager: a few operators of each kind, in all forms.

``python -m tests.ops.survey_out`` runs all operators.
"""

from __future__ import annotations

import pytest
import torch

from tests.ops.check import all_ops
from tests.ops.out_arguments import FORMS, check
from tests.support import tarry_only

#: Structured kernels and others; views, reductions, several results, linear algebra, factories, data-dependent shapes.
_OPERATORS = (
    "add", "eq", "where", "mm", "bmm", "addmm", "sum", "argmax", "cumsum", "logcumsumexp", "cat", "stack", "gather",
    "index_select", "masked_select", "nonzero", "take", "sort", "topk", "max.reduction_with_dim", "linspace", "arange",
    "linalg.solve", "linalg.qr", "linalg.inv", "tril", "clamp", "nn.functional.avg_pool2d",
)  # fmt: skip
_F32 = all_ops(torch.float32)
#: Eager's own result depends on the order in which it works: it multiplies with what it is writing.
_UNDEFINED = {(name, form) for name in ("mm", "bmm", "addmm") for form in FORMS if form.endswith("input")}


@pytest.mark.parametrize("op_name", _OPERATORS)
def test_out_is_treated_as_in_eager(op_name: str, device: str) -> None:
    forms = tuple(form for form in FORMS if (op_name, form) not in _UNDEFINED)
    assert check(_F32[op_name], torch.float32, device, samples=1, forms=forms) == []


@tarry_only
@pytest.mark.parametrize("form", ["right", "empty", "input", "strided"])
def test_what_is_usual_is_recorded(form: str, device: str) -> None:
    """Fallbacks are for the unusual."""
    import tarry

    x, y = torch.rand(3, 4).to(device), torch.rand(3, 4).to(device)
    out = {
        "right": torch.zeros(3, 4).to(device),
        "empty": torch.empty(0, device=device),
        "input": x,
        "strided": torch.zeros(7, 9).to(device)[1::2, 1::2],
    }[form]
    tarry.mark_step(wait=True)
    tarry.metrics.reset()
    torch.add(x, y, out=out)
    torch.mul(out, y, out=out)
    assert not [name for name in tarry.metrics.counters() if name.startswith("fallback/")]


@tarry_only
@pytest.mark.parametrize("op_name", ["add", "frexp", "logcumsumexp", "sort", "linalg.solve", "linalg.qr", "cat"])
def test_out_of_large_calls(op_name: str, device: str) -> None:
    """As if they were too large to be tried on the real kernel."""
    from tarry.native import C

    forms = tuple(form for form in FORMS if (op_name, form) not in _UNDEFINED)
    C.set_small_call(-1)
    try:
        assert check(_F32[op_name], torch.float64, device, samples=1, forms=forms) == []
    finally:
        C.set_small_call(1 << 16)


@tarry_only
@pytest.mark.parametrize("op_name", ["nn.functional.avg_pool3d", "narrow_copy", "geqrf", "nn.functional.logsigmoid"])
def test_what_overlaps_itself_is_refused(op_name: str, device: str) -> None:
    """Some of eager's kernels write beyond such memory."""
    assert check(_F32[op_name], torch.float32, device, samples=1, forms=("expanded",)) == []


def test_large_calls_are_checked_like_small_ones(device: str) -> None:
    """Small ones are tried on the real kernel when they are recorded; for large ones a meta kernel has to do."""
    big = torch.ones(300, 300).to(device)
    with pytest.raises(RuntimeError, match=r"dtype|scalar|type"):
        torch.logcumsumexp(big, 0, out=torch.zeros(300, 300, dtype=torch.float64).to(device))
    with pytest.raises(RuntimeError, match=r"dtype|scalar|type|cast"):
        torch.linalg.inv(big, out=torch.zeros(300, 300, dtype=torch.int64).to(device))
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.add(big, big, out=torch.zeros(1).to(device).expand(300, 300))
    with pytest.raises(RuntimeError, match=r"doesn't match the broadcast shape|single memory location"):
        torch.add(big[0], big, out=big[0])
    base = torch.zeros(301, 301).to(device)
    eye = 2 * torch.eye(300).to(device)
    torch.linalg.solve(eye, 2 * big, out=base[1:, 1:])
    assert base[1:, 1:].sum().item() == 90000.0
    assert base.sum().item() == 90000.0


def test_an_argument_that_grew_is_whole(device: str) -> None:
    """Other views of its storage stay valid when a result is smaller than what was there."""
    t = torch.arange(1000, dtype=torch.float64).to(device)
    tail = t[900:]
    expected = tail.cpu()
    m = torch.ones(1, dtype=torch.float64).to(device)
    torch.masked_select(m, m == m, out=t)
    assert t.untyped_storage().nbytes() == 8000
    t.resize_(10)
    assert torch.equal(tail.cpu(), expected)
    tail.fill_(7.0)
    assert tail.sum().item() == 700.0


@tarry_only
def test_what_was_resized_is_not_read(device: str) -> None:
    """Eager multiplies with uninitialised memory."""
    x, y = torch.ones(2, 3).to(device), torch.ones(3, 5).to(device)
    with pytest.raises(RuntimeError, match="resized before it was read"):
        torch.mm(x, y, out=x)
    z = torch.ones(2, 3).to(device)
    torch.unsqueeze_copy(z, 0, out=z)  # has its result before it resizes
    assert z.tolist() == torch.ones(1, 2, 3).tolist()


def test_a_view_without_elements_takes_other_strides(device: str) -> None:
    a, tau, c = (torch.zeros(shape).to(device) for shape in ((0, 5, 5), (0, 5), (0, 5, 5)))
    out = torch.zeros(5, 5, 0).to(device).permute(2, 1, 0)
    torch.ormqr(a, tau, c, out=out)
    assert tuple(out.cpu().shape) == (0, 5, 5)
