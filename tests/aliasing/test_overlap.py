"""Views and writes with one answer each, where a random program would only sometimes come by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.aliasing.world import World
from tests.support import assert_same, both, dev, expect, step, tarry_only

USES_DEVICE = True


def _program(*lines: str) -> World:
    """Run lines in lock-step; tensors are the variables named t-something."""
    world = World()
    for line in lines:
        target = line.split("=")[0].strip() if "=" in line.split("(")[0] else ""
        names = tuple(n.strip() for n in target.split(",") if n.strip().isidentifier() and n.strip().startswith("t"))
        world.run(line, tuple(n for n in names if n not in world.names))
    world.check_all()
    return world


@pytest.mark.parametrize(
    "write",
    ["t1.add_(1)", "t1.copy_(t0)", "t1.mul_(t1)", "t1[0] = 5", "torch.add(t0, 1, out=t1)"],
)
def test_write_through_an_expanded_view_is_refused_as_in_eager(write: str) -> None:
    _program("t0 = torch.arange(4., device=D)", "t1 = t0.expand(3, 4)", write)


@pytest.mark.parametrize("write", ["t1.add_(1)", "t1.mul_(t2)", "t1[0].fill_(3)", "t1.clamp_(max=4)"])
@pytest.mark.parametrize("view", ["t0.unfold(0, 3, 1)", "t0.as_strided((4, 3), (1, 2))"])
@pytest.mark.parametrize("backend", ["eager", "ir-recorded", "ir-optimized", "torchscript"])
@tarry_only
def test_write_through_a_view_whose_elements_share_memory(view: str, write: str, backend: str) -> None:
    """Eager finds such views too hard to tell, and its kernel's order decides; no other order gives the same."""
    import tarry
    from tests.support.backends import register

    register()
    tarry.set_backend(backend)
    _program("t0 = torch.arange(8., device=D)", f"t1 = {view}", "t2 = t1 + 1", write)


@pytest.mark.parametrize("write", ["t1.copy_(t2)", "t1.add_(t2)", "torch.neg(t2, out=t1)"])
def test_partly_overlapping_operands_are_refused_as_in_eager(write: str) -> None:
    _program("t0 = torch.arange(6., device=D)", "t1, t2 = t0[:-1], t0[1:]", write)


def test_write_to_a_slice_is_seen_through_every_view() -> None:
    _program(
        "t0 = torch.arange(24., device=D).reshape(4, 6)",
        "t1 = t0.t()",
        "t2 = t0[1:3, ::2]",
        "t3 = t0.diagonal()",
        "t2.mul_(10)",
        "t1[0].fill_(-1)",
        "t3 += 100",
        "t4 = t1.reshape(-1)",
        "t0.zero_()",
    )


def test_write_before_and_after_a_cut() -> None:
    _program(
        "t0 = torch.arange(6., device=D)",
        "t1 = t0[::2]",
        "t1.add_(1)",
        "cut()",
        "t0.mul_(2)",
        "cut()",
        "cut()",
        "t1.sub_(3)",
        "r = t0[0].item()",
        "t1.add_(1)",
    )


@pytest.mark.parametrize("cut_at", range(6))
def test_an_update_pending_at_a_cut_is_applied_once(cut_at: int) -> None:
    lines = [
        "t0 = torch.ones(4, device=D)",
        "t1 = t0.view(2, 2)",
        "t0.add_(1)",
        "t1[0].mul_(3)",
        "t0.add_(t0)",
        "t1.neg_()",
    ]
    lines.insert(cut_at + 1, "cut()")
    _program(*lines)


def test_results_of_split_chunk_and_unbind_are_on_the_device(device: str) -> None:
    x = dev(torch.arange(12.0).reshape(3, 4))
    for piece in (*x.split(2, 1), *x.chunk(3), *x.unbind(1), *x.tensor_split(3), *torch.split(x, [1, 3], 1)):
        assert piece.device.type == device
        assert (piece * 2).device.type == device
        assert piece.untyped_storage()._cdata == x.untyped_storage()._cdata
    both(lambda t: [p * i + p.sum() for i, p in enumerate(t.chunk(2, dim=1))], torch.arange(12.0).reshape(3, 4))


def test_writes_through_pieces() -> None:
    def program(t: Tensor) -> Tensor:
        a, b = t.chunk(2, dim=1)
        a.add_(b)
        for i, row in enumerate(t.unbind(0)):
            row.mul_(i)
        torch.add(a, 1, out=b)
        return t

    both(program, torch.arange(12.0).reshape(3, 4), exact=True)


def test_resize() -> None:
    def program(t: Tensor) -> tuple[Tensor, Tensor]:
        u = t.clone()
        u.resize_(2, 2)
        v = torch.empty(0, device=t.device, dtype=t.dtype)
        torch.mul(t, 2, out=v)
        return u, v

    both(program, torch.arange(6.0), exact=True)


def test_growing_and_shrinking_keeps_what_was_there() -> None:
    def program(t: Tensor) -> Tensor:
        u = t.clone()
        u.resize_(10)
        u[6:] = 7
        u.resize_(3)
        u.resize_(8)
        return u

    both(program, torch.arange(6.0), exact=True)


def test_set_data_shares_the_other_storage(device: str) -> None:
    x, y = dev(torch.zeros(3)), dev(torch.arange(3.0))
    x.data = y
    y.add_(1)
    assert_same(x, torch.arange(3.0) + 1, exact=True)
    x.data = torch.ones(2, 2, device=device)
    assert x.shape == (2, 2)
    assert_same(y, torch.arange(3.0) + 1, exact=True)


def test_complex_and_its_real_view() -> None:
    def program(z: Tensor) -> list[Tensor]:
        r = torch.view_as_real(z)
        r[..., 0].add_(1)
        z.imag.mul_(2)
        w = z.conj()
        z.real.zero_()
        return [z.clone(), r.clone(), w.clone(), torch.view_as_complex(r.clone()), w * z, w.resolve_conj()]

    both(program, torch.randn(3, 2, dtype=torch.complex128), exact=True)


def test_bits_of_another_dtype() -> None:
    def program(x: Tensor) -> Tensor:
        bits = x.view(torch.int32)
        bits.bitwise_and_(0x7FFFFFFF)
        return x

    both(program, torch.tensor([-1.5, 2.0, -0.0]), exact=True)


def test_wider_and_narrower_dtypes() -> None:
    def program(x: Tensor) -> list[Tensor]:
        small = x.view(torch.int16)
        small[..., ::2] = 0
        return [x, small, x.view(torch.uint8), x.view(torch.float64)]

    both(program, torch.arange(8, dtype=torch.int32).reshape(2, 4), exact=True)


def test_a_dead_base_leaves_its_views_alive() -> None:
    def program(x: Tensor) -> Tensor:
        base = x * 2
        view = base[1:]
        del base
        view.add_(1)
        step()
        view.add_(1)
        return view

    both(program, torch.arange(4.0), exact=True)


def test_views_record_nothing() -> None:
    from tests.support import counters

    x = dev(torch.arange(24.0).reshape(2, 3, 4))
    before = counters().get("record", 0)
    x.transpose(0, 1)[1:, :, ::2].unsqueeze(0).expand(5, -1, -1, -1).select(0, 2).detach()
    assert counters().get("record", 0) == before


def test_a_read_makes_one_graph_of_views_and_writes() -> None:
    x = dev(torch.arange(24.0).reshape(4, 6))
    step()
    with expect(syncs=1, fallbacks=0):
        x[1:3].mul_(2)
        x.t()[0].add_(x[:, 1])
        total = x.sum().item()
    y = torch.arange(24.0).reshape(4, 6)
    y[1:3].mul_(2)
    y.t()[0].add_(y[:, 1])
    assert total == y.sum().item()
