"""Modules moved to the device: tied weights, buffers, hooks, running statistics, copies."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from tests.support import DEVICE, assert_same, dev, expect, step, tarry_only

USES_DEVICE = True


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids))
        return out


def test_moving_keeps_parameters_the_same_objects() -> None:
    net = nn.Linear(2, 2)
    before = list(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    net.to(DEVICE)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True))
    net(dev(torch.ones(1, 2))).sum().backward()
    old = net.weight.detach().clone().cpu()
    optimizer.step()
    assert not torch.equal(net.weight.detach().cpu(), old), "an optimizer made before the move trains the moved weights"


def test_weight_tying_survives_the_move_and_the_way_back() -> None:
    net = Tied().to(DEVICE)
    assert net.head.weight is net.embed.weight
    net.cpu()
    assert net.head.weight is net.embed.weight
    net.to(DEVICE, torch.float64)
    assert net.head.weight is net.embed.weight
    assert net.head.weight.dtype == torch.float64


def test_weight_tying_trains_as_on_cpu() -> None:
    torch.manual_seed(0)
    host = Tied()
    here = copy.deepcopy(host).to(DEVICE)
    ids = torch.tensor([[1, 2, 3]])
    for net, device in ((host, "cpu"), (here, DEVICE)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(ids.to(device)).square().mean().backward()
            optimizer.step()
    assert_same(here.state_dict(), host.state_dict())
    assert len(list(here.parameters())) == 1


@pytest.mark.parametrize("cut", ["nowhere", "item inside", "cut inside", "twice before a cut"])
def test_batchnorm_statistics_move_once(cut: str) -> None:
    host = nn.BatchNorm1d(3)
    here = copy.deepcopy(host).to(DEVICE)
    for i in range(3):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
        host(x)
        y = here(x.to(DEVICE))
        if cut == "twice before a cut":
            host(x)
            here(x.to(DEVICE))
        if cut == "item inside":
            y.sum().item()
        elif cut == "cut inside":
            step()
    assert_same(here.state_dict(), host.state_dict())
    assert here.num_batches_tracked.item() == (6 if cut == "twice before a cut" else 3)


def test_running_variance_is_the_unbiased_one() -> None:
    x = torch.tensor([[1.0], [2.0], [6.0]])
    norm = nn.BatchNorm1d(1, momentum=1.0).to(DEVICE)
    norm(x.to(DEVICE))
    assert norm.running_var.item() == pytest.approx(x.var(unbiased=True).item())


def test_evaluation_uses_the_statistics() -> None:
    host = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    here = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(2, 1, 6, 6)
    host(x), here(x.to(DEVICE))
    assert_same(here.eval()(x.to(DEVICE)), host.eval()(x))


def test_forward_and_backward_hooks() -> None:
    seen: list[tuple[str, torch.Size, str]] = []
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).to(DEVICE)
    net[0].register_forward_hook(lambda m, i, o: seen.append(("forward", o.shape, o.device.type)))
    net[0].register_full_backward_hook(lambda m, gi, go: seen.append(("backward", go[0].shape, go[0].device.type)))
    net[0].weight.register_hook(lambda g: seen.append(("weight", g.shape, g.device.type)))
    net(dev(torch.ones(2, 3))).sum().backward()
    assert [s[0] for s in seen[:2]] == ["forward", "backward"]
    assert seen[2][0] == "weight"
    assert {s[2] for s in seen} == {DEVICE}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: type[nn.RNNBase], batch_first: bool) -> None:
    torch.manual_seed(0)
    host = kind(3, 4, num_layers=2, batch_first=batch_first, bidirectional=True)
    here = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(2, 5, 3)
    expected, _ = host(x)
    actual, _ = here(x.to(DEVICE))
    assert_same(actual, expected)
    expected.sum().backward()
    actual.sum().backward()
    assert_same([p.grad for p in here.parameters()], [p.grad for p in host.parameters()])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_lstm_is_computed_as_by_eager_bit_for_bit(bias: bool, grad: bool, dropout: float) -> None:
    torch.manual_seed(0)
    host = nn.LSTM(3, 4, num_layers=2, bias=bias, bidirectional=True, batch_first=True, dropout=dropout).train(grad)
    here = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(2, 5, 3)

    def program(net: nn.Module, x: Tensor) -> list[Tensor]:
        torch.manual_seed(1)
        net.zero_grad()
        x = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            out, (hidden, cell) = net(x)
        if not grad:
            return [out, hidden, cell]
        ((out.sum() + (hidden * cell).sum()) * 2).backward()
        assert x.grad is not None
        return [out, hidden, cell, x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]

    actual, expected = program(here, x.to(DEVICE)), program(host, x)
    if dropout and grad:  # other random numbers than eager's
        assert [tensor.shape for tensor in actual] == [tensor.shape for tensor in expected]
    else:
        assert all(torch.equal(a.cpu(), e) for a, e in zip(actual, expected, strict=True))


def test_lstm_with_a_projection_or_without_onednn() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3)
    for options, onednn in (({"proj_size": 2}, True), ({}, False)):
        host = nn.LSTM(3, 4, **options)  # type: ignore[arg-type]
        here = copy.deepcopy(host).to(DEVICE)
        with torch.backends.mkldnn.flags(enabled=onednn):
            assert_same(here(x.to(DEVICE))[0], host(x)[0])


@pytest.mark.parametrize("last", ["output", "hidden", "cell"])
def test_lstm_is_computed_with_its_gradient_in_a_block_without(last: str) -> None:
    """oneDNN leaves what its gradient needs only if gradients are enabled when it runs."""
    torch.manual_seed(0)
    host = nn.LSTM(3, 4, num_layers=2)
    here = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(5, 2, 3)
    for net in (here, host):
        output, (hidden, cell) = net(x.to(next(net.parameters()).device))
        {"output": output, "hidden": hidden, "cell": cell}[last].sum().backward()
    with torch.no_grad():
        assert_same([p.grad for p in here.parameters()], [p.grad for p in host.parameters()])


def test_lstm_has_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    host = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    here = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(5, 2, 3)

    def program(net: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        output, (hidden, cell) = net(x)
        (first,) = torch.autograd.grad(output.square().sum() + (hidden * cell).sum(), x, create_graph=True)
        first.square().sum().backward()
        assert x.grad is not None
        return [first.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]

    assert_same(program(here, x.to(DEVICE)), program(host, x))


def test_lstm_under_transforms_of_functions() -> None:
    torch.manual_seed(0)
    host = nn.LSTM(3, 4)
    here = copy.deepcopy(host).to(DEVICE)
    x = torch.randn(5, 2, 3)
    gradients = [torch.func.grad(lambda x: net(x)[0].sum())(x.to(d)) for net, d in ((here, DEVICE), (host, "cpu"))]  # noqa: B023
    assert_same(*gradients)


def test_packed_sequences() -> None:
    torch.manual_seed(0)
    host = nn.GRU(3, 4, batch_first=True)
    here = copy.deepcopy(host).to(DEVICE)
    x, lengths = torch.randn(3, 5, 3), torch.tensor([5, 2, 3])

    def program(net: nn.Module, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = net(packed)
        padded: Tensor = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]
        return padded

    assert_same(program(here, x.to(DEVICE)), program(host, x))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "float, causal"])
@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (4, 6, 8), (1, 6, 8), (6, 8)])
def test_attention(shape: tuple[int, ...], mask: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    masks = {"bool": torch.rand(6, 6) > 0.3, "float": torch.randn(6, 6)}

    def program(device: str) -> list[Tensor]:
        qkv = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        chosen = masks.get(mask.split(",", maxsplit=1)[0])
        out = nn.functional.scaled_dot_product_attention(
            *qkv, attn_mask=None if chosen is None else chosen.to(device), is_causal="causal" in mask
        )
        out.square().sum().backward()
        return [out.detach(), *(t.grad for t in qkv)]

    try:
        expected = program("cpu")
    except RuntimeError as error:  # some of PyTorch's kernels take one or the other
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            program(DEVICE)
    else:
        assert_same(program(DEVICE), expected)


@tarry_only
def test_attention_is_one_operator() -> None:
    import tarry

    q = torch.randn(1, 2, 4, 8, device=DEVICE)
    out = nn.functional.scaled_dot_product_attention(q, q, q)
    text = tarry.explain(out, stage="recorded")
    assert "attention" in text, "decomposed attention hides from a backend what it could fuse"
    assert "softmax" not in text


@tarry_only
def test_convolution_is_one_operator_and_no_fallback() -> None:
    import tarry

    with expect(fallbacks=0):
        out = nn.functional.conv2d(torch.randn(1, 3, 8, 8, device=DEVICE), torch.randn(4, 3, 3, 3, device=DEVICE))
        assert "convolution" in tarry.explain(out, stage="recorded")
        out.sum().item()


def test_parametrizations_and_spectral_norm() -> None:
    torch.manual_seed(0)
    host = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    here = copy.deepcopy(host).to(DEVICE)
    assert_same(here(dev(torch.ones(1, 3))), host(torch.ones(1, 3)))


def test_module_to_dtype_and_half() -> None:
    net = nn.Linear(2, 2).to(DEVICE).to(torch.bfloat16)
    assert net(dev(torch.ones(1, 2)).bfloat16()).dtype == torch.bfloat16
    assert net.float().weight.dtype == torch.float32


@tarry_only
@pytest.mark.parametrize("backend", ["eager", "torchscript"])
def test_a_bias_trains_while_its_weight_is_frozen(backend: str) -> None:
    def gradients(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2)).to(device)
        for convolution in (net[0], net[2]):
            convolution.weight.requires_grad_(False)  # whose gradient the kernel computes all the same
        net(torch.arange(16.0).view(1, 1, 4, 4).to(device)).square().mean().backward()
        return [p.grad.cpu() for p in net.parameters() if p.grad is not None]

    import tarry

    tarry.set_backend(backend)
    torch.testing.assert_close(gradients(DEVICE), gradients("cpu"))
