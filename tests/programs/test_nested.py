"""Nested tensors, strided (opaque: operators on them run eagerly) and jagged (a Python class over ordinary tensors)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import DEVICE, tarry_only

USES_DEVICE = True
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def nested(device: str, layout: torch.layout = torch.strided, requires_grad: bool = False) -> Tensor:
    rows = [torch.arange(6.0).reshape(2, 3), torch.arange(3.0).reshape(1, 3) - 1]
    return torch.nested.nested_tensor(rows, layout=layout, device=device, requires_grad=requires_grad)


def jagged(device: str, requires_grad: bool = False) -> Tensor:
    return nested(device, torch.jagged, requires_grad)


def weight(device: str) -> Tensor:
    return torch.arange(12.0).reshape(4, 3).to(device).requires_grad_()


def assert_same_on_cpu(program: Callable[[str], list[Tensor]]) -> None:
    torch.manual_seed(0)
    expected = program("cpu")
    torch.manual_seed(0)
    actual = program(DEVICE)
    for a, e in zip(actual, expected, strict=True):
        assert (a.device.type, a.layout, a.is_nested) == (DEVICE, e.layout, e.is_nested)
        for x, y in zip(*((t.unbind() if t.is_nested else [t]) for t in (a, e)), strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            torch.testing.assert_close(x.detach().cpu(), y.detach())


def write(tensor: Tensor, how: Callable[[Tensor], object]) -> list[Tensor]:
    """A tensor and one of its rows, after a write that both may see."""
    row = tensor.unbind()[0]
    how(tensor)
    return [tensor, row]


PROGRAMS: dict[str, Callable[[str], list[Tensor]]] = {
    "make": lambda d: [nested(d), jagged(d), torch.nested.as_nested_tensor([torch.ones(2, device=d)])],
    "empty": lambda d: [torch.nested.nested_tensor([], device=d)],
    "move": lambda d: [nested("cpu").to(d), jagged("cpu").to(d), nested(d).double(), jagged(d).half()],
    "clone": lambda d: [nested(d).clone(), nested(d).detach(), jagged(d).clone()],
    "padded": lambda d: [nested(d).to_padded_tensor(-1.0), jagged(d).to_padded_tensor(-1.0)],
    "pointwise": lambda d: [nested(d) * 2 + nested(d), jagged(d).sin() * 2, nested(d).relu(), F.gelu(nested(d))],
    "linear": lambda d: [F.linear(nested(d), weight(d)), F.linear(jagged(d), weight(d))],
    "normalise": lambda d: [F.layer_norm(jagged(d), (3,)), nested(d).softmax(-1), jagged(d).softmax(-1)],
    "views": lambda d: [
        nested(d).transpose(1, 2),
        nested(d)[0],
        nested(d).view(2, -1, 3, 1),
        jagged(d).transpose(1, 2),
    ],
    "write": lambda d: write(nested(d), lambda t: t.mul_(2)) + write(nested(d), lambda t: t.unbind()[0].fill_(7)),
    "copy": lambda d: write(nested(d), lambda t: t.copy_(nested("cpu") * 3)) + write(nested(d), lambda t: t.zero_()),
    "values": lambda d: [jagged(d).values(), jagged(d).offsets()],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators(name: str) -> None:
    assert_same_on_cpu(PROGRAMS[name])


def _attention(device: str) -> list[Tensor]:
    rows = [torch.randn(5, 2, 8), torch.randn(3, 2, 8)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged, device=device, requires_grad=True)
    heads = x.transpose(1, 2)
    result = F.scaled_dot_product_attention(heads, heads * 2, heads).transpose(1, 2)
    result.pow(2).sum().backward()
    return [result, x.grad]


def _strided_attention(device: str) -> list[Tensor]:
    x = torch.nested.nested_tensor([torch.randn(2, 5, 8), torch.randn(2, 3, 8)], device=device)
    return [F.scaled_dot_product_attention(x, x * 2, x)]


def _gradients(make: Callable[..., Tensor]) -> Callable[[str], list[Tensor]]:
    def program(device: str) -> list[Tensor]:
        x, w = make(device, requires_grad=True), weight(device)
        torch.nested.to_padded_tensor(F.linear(x * x, w), 0.0).pow(2).sum().backward()
        return [x.grad, w.grad]

    return program


def _encoder(device: str) -> list[Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval().to(device)
    x, padding = torch.randn(2, 5, 8).to(device), torch.tensor([[False] * 5, [False] * 3 + [True] * 2]).to(device)
    with torch.no_grad():
        return [encoder(x, src_key_padding_mask=padding)]


LARGER = {
    "attention": _attention,
    "strided attention": _strided_attention,
    "gradients": _gradients(nested),
    "jagged gradients": _gradients(jagged),
    "encoder with padding": _encoder,
}


@pytest.mark.parametrize("name", LARGER)
def test_programs(name: str) -> None:
    assert_same_on_cpu(LARGER[name])


def test_printing() -> None:
    on_cpu, on_device = str(nested("cpu")), str(nested(DEVICE))
    assert on_device.replace(f", device='{DEVICE}:0'", "") == on_cpu


@tarry_only
def test_other_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        nested(DEVICE) + nested("cpu")
    with pytest.raises(RuntimeError, match="same device"):
        F.linear(nested(DEVICE), weight("cpu"))


@tarry_only
def test_rows_that_could_not_be_computed_raise_at_every_read() -> None:
    row = F.embedding(torch.tensor([0, 99], device=DEVICE), torch.ones(4, 2, device=DEVICE))
    tensor = torch.nested.as_nested_tensor([row, torch.ones(1, 2, device=DEVICE)])
    for read in (lambda: tensor.to_padded_tensor(0.0), lambda: tensor + tensor, tensor.cpu, lambda: str(tensor)):
        with pytest.raises(IndexError):
            read()


def test_a_view_in_inference_mode_is_what_its_base_is() -> None:
    with torch.inference_mode():
        made_inside = nested(DEVICE)
        view = made_inside.transpose(1, 2)
        assert view.is_inference()
    base = nested(DEVICE)
    with torch.inference_mode():
        for view in (base.transpose(1, 2), base.view(2, -1, 3, 1), base[0]):
            assert not view.is_inference()
        assert (base * 2).is_inference()
