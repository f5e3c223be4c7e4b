"""Sparse tensors: PyTorch's own objects over lazy parts. Operators on them run eagerly, on the real device."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import DEVICE, expect, tarry_only

USES_DEVICE = True
pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def coo(device: str, requires_grad: bool = False) -> Tensor:
    """Not coalesced: one position comes twice."""
    indices = torch.tensor([[0, 1, 1, 0], [2, 0, 2, 2]], device=device)
    values = torch.tensor([3.0, 4.0, 5.0, -1.0], device=device)
    return torch.sparse_coo_tensor(indices, values, (2, 4), requires_grad=requires_grad)


def csr(device: str, requires_grad: bool = False) -> Tensor:
    return coo(device).to_sparse_csr().requires_grad_(requires_grad)


def hybrid(device: str) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]], device=device), torch.ones(2, 3, device=device), (4, 3))


def dense(device: str, requires_grad: bool = False) -> Tensor:
    return torch.arange(8.0).reshape(4, 2).to(device).requires_grad_(requires_grad)


def assert_same_on_cpu(program: Callable[[str], Any]) -> None:
    """The same results as on the CPU: layouts, shapes, dtypes, which elements are stored, values."""
    torch.manual_seed(0)
    expected = program("cpu")
    torch.manual_seed(0)
    actual = program(DEVICE)
    for a, e in zip(actual, expected, strict=True):
        assert a.device.type == DEVICE
        assert (a.layout, a.shape, a.dtype, a.requires_grad) == (e.layout, e.shape, e.dtype, e.requires_grad)
        if e.layout == torch.sparse_coo:
            assert (a.is_coalesced(), a._nnz()) == (e.is_coalesced(), e._nnz())
        torch.testing.assert_close(a.detach().cpu(), e.detach())


def write(tensor: Tensor, how: Callable[[Tensor], object]) -> list[Tensor]:
    """A tensor, its parts and a second look at it, after a write that all of them may see."""
    alias, values = tensor.detach(), tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
    how(tensor)
    return [tensor, alias, values]


PROGRAMS: dict[str, Callable[[str], list[Tensor]]] = {
    "make": lambda d: [coo(d), csr(d), hybrid(d)],
    "infer sizes": lambda d: [torch.sparse_coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], device=d)],
    "parts": lambda d: [
        coo(d)._indices(),
        coo(d)._values(),
        csr(d).crow_indices(),
        csr(d).col_indices(),
        csr(d).values(),
    ],
    "coalesce": lambda d: [coo(d).coalesce(), coo(d).coalesce().indices(), coo(d).coalesce().values()],
    "factories": lambda d: [
        torch.zeros(2, 3, layout=torch.sparse_coo, device=d),
        torch.empty_like(coo(d)),
        torch.zeros_like(csr(d)),
    ],
    "dense to sparse": lambda d: [torch.eye(3, device=d).to_sparse(), torch.eye(3, device=d).to_sparse_csr()],
    "blocks": lambda d: [torch.eye(4, device=d).to_sparse_bsr((2, 2)), torch.eye(4, device=d).to_sparse_csc()],
    "to dense": lambda d: [coo(d).to_dense(), csr(d).to_dense(), hybrid(d).to_dense()],
    "layouts": lambda d: [coo(d).to_sparse_csr(), csr(d).to_sparse()],
    "move": lambda d: [coo("cpu").to(d), csr("cpu").to(d)],
    "dtype": lambda d: [coo(d).double(), csr(d).to(torch.complex64)],
    "clone": lambda d: [coo(d).clone(), csr(d).clone(), copy.deepcopy(coo(d))],
    "products": lambda d: [
        torch.sparse.mm(coo(d), dense(d)),
        csr(d) @ dense(d),
        coo(d) @ dense(d)[:, 0],
        torch.sparse.mm(coo(d), coo(d).t()),
        torch.sparse.addmm(torch.ones(2, 2, device=d), coo(d), dense(d), beta=0.5),
        dense(d).t() @ coo(d).t(),
    ],
    "reductions": lambda d: [torch.sparse.sum(coo(d)), torch.sparse.sum(coo(d), 0), torch.sparse.softmax(coo(d), 1)],
    "pointwise": lambda d: [coo(d) + coo(d), coo(d) * 2, coo(d).sin(), csr(d).neg(), coo(d) * coo(d), csr(d) * csr(d)],
    "with dense": lambda d: [dense(d).t() + coo(d), dense(d).t() * coo(d), dense(d).t().sparse_mask(coo(d).coalesce())],
    "views": lambda d: [
        coo(d).t(),
        hybrid(d).unsqueeze(0),
        coo(d).index_select(0, torch.tensor([1], device=d)),
        coo(d)[1],
    ],
    "cat": lambda d: [torch.cat([coo(d), coo(d)]), torch.stack([coo(d), coo(d)])],
    "write": lambda d: write(coo(d).coalesce(), lambda s: s.mul_(2)) + write(csr(d), lambda s: s.mul_(2)),
    "write sparse": lambda d: write(coo(d).coalesce(), lambda s: s.add_(coo(d))),
    "write values": lambda d: write(coo(d).coalesce(), lambda s: s._values().mul_(3)),
    "zero": lambda d: write(coo(d), lambda s: s.zero_()) + write(csr(d), lambda s: s.zero_()),
    "copy": lambda d: write(coo(d), lambda s: s.copy_(coo(d) * 2)) + write(csr(d), lambda s: s.copy_(csr("cpu") * 2)),
    "into dense": lambda d: [
        torch.ones(2, 4, device=d).add_(coo(d), alpha=-0.5),
        torch.ones(2, 4, device=d).sub_(coo(d)),
    ],
    "out": lambda d: [torch.mm(coo(d), dense(d), out=torch.empty(0, device=d)), torch.mul(coo(d), 2, out=coo(d))],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of out= arguments that are resized
        assert_same_on_cpu(PROGRAMS[name])


GRADIENTS: dict[str, Callable[[str], list[Tensor]]] = {
    "mm": lambda d: [s := coo(d, True), x := dense(d, True), torch.sparse.mm(s, x)],
    "csr mm": lambda d: [s := csr(d, True), x := dense(d, True), torch.sparse.mm(s, x, "amax")],
    "matmul": lambda d: [s := coo(d, True), x := dense(d, True), s @ x],
    "sum": lambda d: [s := coo(d, True), torch.sparse.sum(s * 2, 0).to_dense()],
    "softmax": lambda d: [s := coo(d, True), torch.sparse.softmax(s, 1).to_dense()],
    "to dense": lambda d: [s := coo(d, True), s.to_dense()],
    "to sparse": lambda d: [x := dense(d, True), (x.to_sparse() * 3).to_dense()],
    "values": lambda d: [s := coo(d, True), s.coalesce().values()],
    "constructor": lambda d: [
        v := torch.ones(2, device=d, requires_grad=True),
        torch.sparse_coo_tensor(torch.tensor([[0, 1]], device=d), v, (3,)).to_dense(),
    ],
    "gather": lambda d: [
        x := dense(d, True),
        torch.gather(x, 1, torch.tensor([[0], [1], [1], [0]], device=d), sparse_grad=True),
    ],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    def program(device: str) -> list[Tensor]:
        *leaves, result = GRADIENTS[name](device)
        weights = torch.arange(1.0, 1 + result.numel()).reshape(result.shape).to(device)
        (result * weights).sum().backward()
        return [grad for leaf in leaves if (grad := leaf.grad) is not None]

    assert_same_on_cpu(program)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters), 0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
}
EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(10, 3, sparse=True, padding_idx=0),
    "bag of sums": lambda: nn.EmbeddingBag(10, 3, sparse=True, mode="sum"),
    "bag of means": lambda: nn.EmbeddingBag(10, 3, sparse=True, mode="mean"),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_training_with_sparse_gradients(embedding: str, optimizer: str) -> None:
    def program(device: str) -> list[Tensor]:
        model = EMBEDDINGS[embedding]().to(device)
        steps = OPTIMIZERS[optimizer](model.parameters())
        for i in range(4):
            steps.zero_grad(set_to_none=i != 2)
            batch = torch.tensor([[1, 2, 2], [0, 1, i]]).to(device)
            for _ in range(1 + i % 2):  # accumulated in every second step
                model(batch).pow(2).sum().backward()
            steps.step()
        return [model.weight, model.weight.grad]

    assert_same_on_cpu(program)


def test_printing() -> None:
    for tensor in (coo, csr):
        on_cpu, on_device = str(tensor("cpu")), str(tensor(DEVICE))
        assert "".join(on_device.replace(f"device='{DEVICE}:0',", "").split()) == "".join(on_cpu.split())


def test_files() -> None:
    for tensor in (coo(DEVICE), csr(DEVICE)):
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        loaded = torch.load(file)
        assert (loaded.device, loaded.layout) == (tensor.device, tensor.layout)
        torch.testing.assert_close(loaded.cpu(), tensor.cpu())


@tarry_only
def test_gradients_of_embeddings_are_made_lazily_and_calls_on_them_are_counted() -> None:
    model = nn.Embedding(10, 3, sparse=True).to(DEVICE)
    batch = torch.tensor([1, 2]).to(DEVICE)
    with expect(syncs=0, fallbacks=0):
        model(batch).sum().backward()
    with expect(fallbacks=1) as seen, torch.no_grad():
        model.weight.add_(model.weight.grad, alpha=-1.0)
    [fallback] = [event for event in seen if event.kind == "fallback"]
    assert fallback.fields["file"] == __file__
    assert "sparse=False" in fallback.fields["remedy"]


@tarry_only
def test_other_devices_do_not_mix() -> None:
    for call in (
        lambda: torch.sparse.mm(coo(DEVICE), dense("cpu")),
        lambda: torch.sparse.mm(coo("cpu"), dense(DEVICE)),
        lambda: dense(DEVICE).t() + coo("cpu"),
        lambda: torch.cat([csr(DEVICE).to_sparse(), coo("cpu")]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            call()


def test_after_a_failure_everything_holds_what_it_held() -> None:
    x, s = torch.ones(3, 3, device=DEVICE), coo(DEVICE).coalesce()
    with pytest.raises(RuntimeError):
        x.add_(coo(DEVICE))  # of another shape
    with pytest.raises(RuntimeError):
        s.add_(hybrid(DEVICE))
    with pytest.raises(RuntimeError):
        torch.sparse.mm(s, x)
    assert torch.equal(x.cpu(), torch.ones(3, 3))
    torch.testing.assert_close(s.cpu(), coo("cpu").coalesce())


@tarry_only
def test_parts_that_could_not_be_computed_raise_at_every_read() -> None:
    values = nn.functional.embedding(torch.tensor([0, 99], device=DEVICE), torch.ones(4, 2, device=DEVICE))
    x = torch.ones(3, 2, device=DEVICE)
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1]], device=DEVICE), values, (3, 2), check_invariants=False)
    for read in (tensor.to_dense, tensor.cpu, lambda: tensor + tensor, lambda: x.add_(tensor), lambda: str(tensor)):
        with pytest.raises(IndexError):
            read()
    assert torch.equal(x.cpu(), torch.ones(3, 2))


QUANTIZED: dict[str, Callable[[], object]] = {
    "per tensor": lambda: torch.quantize_per_tensor(torch.ones(3, device=DEVICE), 0.1, 10, torch.qint8),
    "dynamic": lambda: torch.quantize_per_tensor_dynamic(torch.ones(3, device=DEVICE), torch.qint8, False),
    "move": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 10, torch.qint8).to(DEVICE),
    "oneDNN": lambda: torch.ones(3, device=DEVICE).to_mkldnn(),
}


@tarry_only
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_refused_at_the_call(name: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"\.cpu\(\)") as caught:
        QUANTIZED[name]()
    assert len(str(caught.value)) < 800, "not a listing of dispatch keys"


@tarry_only
def test_tools_look_at_the_parts() -> None:
    import tarry

    tensor = torch.sparse_coo_tensor(torch.zeros(1, 2, device=DEVICE).long(), torch.ones(2, device=DEVICE) * 3, (3,))
    assert "aten::mul" in str(tarry.explain(tensor))
    with expect(syncs=1):
        tarry.sync(tensor)
        tarry.sync(tensor)
