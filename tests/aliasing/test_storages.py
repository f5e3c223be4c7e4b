"""Storages as objects of their own: slices, resizing, exchanging, bytes; each against the same program on the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import tarry_only


def _fresh(device: str) -> torch.Tensor:
    """Not materialised yet, on a device that computes lazily."""
    return torch.arange(12.0).to(device).view(3, 4) * 2 + 1


def _item(device: str) -> Any:
    s = _fresh(device).untyped_storage()
    return [s[i] for i in range(8)], s.tolist()


def _slice(device: str) -> Any:
    s = _fresh(device).untyped_storage()
    return s[4:12].tolist(), s[4:].nbytes(), s[6:6].tolist(), s[4:20][4:8].tolist(), s[:].tolist()


def _write_through_slice(device: str) -> Any:
    t = _fresh(device)
    t.untyped_storage()[8:16].fill_(0)
    return t


def _tensor_over_slice(device: str) -> Any:
    t = _fresh(device)
    view = torch.empty(0, device=device).set_(t.untyped_storage()[8:40])
    view.mul_(10)
    return t, view, view.shape


def _copy_between_slices(device: str) -> Any:
    t = _fresh(device)
    t.untyped_storage()[0:8].copy_(t.untyped_storage()[16:24])
    return t


def _set_item(device: str) -> Any:
    t = _fresh(device)
    t.untyped_storage()[3] = 65
    t.untyped_storage()[4:8] = 0
    return t


def _fill(device: str) -> Any:
    t = _fresh(device)
    t.untyped_storage().fill_(1)
    return t.view(torch.int32)


def _copy(device: str) -> Any:
    t, source = _fresh(device), _fresh(device) + 5
    t.untyped_storage().copy_(source.untyped_storage())
    source.zero_()
    return t


def _clone(device: str) -> Any:
    t = _fresh(device)
    twin = t.untyped_storage().clone()
    t.zero_()
    return torch.empty(0, device=device).set_(twin)


def _free_and_refill(device: str) -> Any:
    t = _fresh(device)
    s = t.untyped_storage()
    size = s.nbytes()
    s.resize_(0)
    sizes = [s.nbytes()]
    s.resize_(size)
    t.copy_(torch.ones(3, 4))
    return t, sizes, s.nbytes()


def _grow(device: str) -> Any:
    t = _fresh(device)
    t.untyped_storage().resize_(400)
    return t, t.untyped_storage().nbytes(), t.as_strided((12,), (1,), 0)


def _shrink_and_grow(device: str) -> Any:
    t = _fresh(device)
    t.untyped_storage().resize_(16)
    t.untyped_storage().resize_(48)
    return t.flatten()[:4]


def _swap(device: str) -> Any:
    a, b = _fresh(device), torch.arange(12.0).to(device) - 1
    row = a[0]
    a.untyped_storage()._swap_data_ptr_(b.untyped_storage())
    row.add_(100)
    return row, b, a.untyped_storage().nbytes(), b.untyped_storage().nbytes()


def _swap_after_freeing(device: str) -> Any:
    a, b = _fresh(device), _fresh(device) * 3
    row = a[1]
    a.untyped_storage().resize_(0)
    a.untyped_storage()._swap_data_ptr_(b.untyped_storage())
    return a, row, b.untyped_storage().nbytes()


def _swap_with_itself(device: str) -> Any:
    a = _fresh(device)
    a.untyped_storage()._swap_data_ptr_(a.untyped_storage())
    a[0].mul_(2)
    return a, a.untyped_storage().nbytes()


def _byteswap(device: str) -> Any:
    t = _fresh(device)
    t.untyped_storage().byteswap(torch.float32)
    return t.view(torch.int32)


def _deepcopy(device: str) -> Any:
    t = _fresh(device)
    twin = copy.deepcopy(t.untyped_storage())
    t.zero_()
    return twin.tolist()


def _legacy_file(device: str) -> Any:
    buffer = io.BytesIO()
    torch.save({"t": _fresh(device)}, buffer, _use_new_zipfile_serialization=False)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu")["t"]


def _set_beyond(device: str) -> Any:
    t = _fresh(device)
    big = torch.empty(0, device=device).set_(t.untyped_storage(), 2, (20,), (1,))
    return big[:10], t, big.shape, t.untyped_storage().nbytes()


def _lazy_clone(device: str) -> Any:
    t = _fresh(device)
    twin = t.t()[1:]._lazy_clone()
    t.zero_()
    twin.add_(1)
    return twin, t, twin.stride(), twin.storage_offset()


def _lazy_clone_shares_its_address_until_written(device: str) -> Any:
    t = _fresh(device)
    address, seen = t.data_ptr(), []
    twin, third = t._lazy_clone(), t._lazy_clone()

    def look() -> None:
        seen.extend((torch._C._is_cow_tensor(x), x.const_data_ptr() == address) for x in (t, twin, third))

    look()
    t[0].add_(1)  # recorded
    look()
    twin.copy_(torch.ones(3, 4))  # filled from the host
    look()
    third.add_(1)  # has the address to itself by now
    look()
    return seen, t, twin, third, len({x.data_ptr() for x in (t, twin, third)})


def _new_empty_strided(device: str) -> Any:
    t = _fresh(device)
    made = [
        t.new_empty_strided([5, 3], [0, 1]),
        t.new_empty_strided((2, 3, 4), (2, 4, 6)),
        t.new_empty_strided((2, 2), (1, 2), dtype=torch.int64),
    ]
    made[2].fill_(3)
    return [(m.stride(), m.shape, m.dtype, m.untyped_storage().nbytes()) for m in made], made[2]


def _resize_in_place(device: str) -> Any:
    t = _fresh(device)
    row = t[1]
    row.resize_(2)
    seen = [row.clone(), row.untyped_storage().nbytes()]
    row.resize_(8)
    t.resize_(2, 2)
    return seen, row, row.storage_offset(), t, t.untyped_storage().nbytes()


_PROGRAMS = {
    program.__name__.strip("_"): program
    for program in (
        _item, _slice, _write_through_slice, _tensor_over_slice, _copy_between_slices, _set_item, _fill, _copy, _clone,
        _free_and_refill, _grow, _shrink_and_grow, _swap, _swap_after_freeing, _swap_with_itself, _byteswap, _deepcopy,
        _legacy_file, _set_beyond, _lazy_clone, _lazy_clone_shares_its_address_until_written, _new_empty_strided,
        _resize_in_place,
    )
}  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu().tolist(), tuple(value.shape), value.dtype
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


@pytest.mark.parametrize("program", _PROGRAMS.values(), ids=_PROGRAMS)
def test_storages_work_as_on_the_cpu(program: Callable[[str], Any], device: str) -> None:
    assert _plain(program(device)) == _plain(program("cpu"))


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.cpu(),
        lambda t: t + 1,
        lambda t: t.fill_(0),
        lambda t: t.copy_(torch.ones(3, 4)),
        lambda t: torch.add(t, 1, out=t),
        lambda t: torch.masked_select(t, t > 0),
        lambda t: t[2].sum().item(),
        lambda t: t._lazy_clone(),
    ],
)
@tarry_only
def test_a_tensor_beyond_its_storage_is_refused(use: Callable[[torch.Tensor], Any], device: str) -> None:
    """On the CPU this reads or writes memory of others."""
    for nbytes in (0, 8):
        t = _fresh(device)
        t.untyped_storage().resize_(nbytes)
        with pytest.raises(RuntimeError, match=r"storage was resized to|out of bounds for storage"):
            use(t)


@tarry_only
def test_a_slice_has_the_size_that_it_has(device: str) -> None:
    t = _fresh(device)
    part = t.untyped_storage()[4:12]
    for beyond in ((3,), (2, 2)):
        with pytest.raises(RuntimeError, match="not resizable"):
            torch.empty(0, device=device).set_(part, 0, beyond)
    with pytest.raises(RuntimeError, match="not resizable"):
        part.resize_(100)
    with pytest.raises(RuntimeError, match="step of 2"):
        t.untyped_storage()[::2]
    with pytest.raises(NotImplementedError, match="cannot be swapped"):
        part._swap_data_ptr_(torch.empty(12, device=device).untyped_storage())
    with pytest.raises(NotImplementedError, match="from byte 2 on"):
        torch.empty(0, device=device).set_(t.untyped_storage()[2:6])


def test_forward_gradients_cross_devices(device: str) -> None:
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        dual = forward.make_dual(torch.tensor([[3.0]]).to(device), torch.tensor([[5.0]]).to(device))
        host = torch.tensor([[1.0]])
        host.copy_(dual)
        assert forward.unpack_dual(host).tangent.tolist() == [[5.0]]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch._saturate_weight_to_fp16(x * 1e6),
        lambda x: torch._reshape_from_tensor(x, torch.tensor([4, 3]).to(x.device)),
        lambda x: torch.choose_qparams_optimized(x, 12, 200, 0.16, 8),
    ],
)
def test_kernels_that_read_addresses(call: Callable[[torch.Tensor], Any], device: str) -> None:
    """PyTorch's composite kernels read raw memory, which this device has none of."""
    assert _plain(call(_fresh(device))) == _plain(call(_fresh("cpu")))


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.empty_strided((2,), (-1,), device=device),
        lambda device: torch.empty_strided((2, 3), (1,), device=device),
        lambda device: torch.empty(0, device=device).set_(torch.ones(3).to(device).untyped_storage(), 0, (2,), (-1,)),
        lambda device: torch.empty(0, device=device).set_(torch.ones(3).to(device).untyped_storage(), -1, (2,), (1,)),
        lambda device: torch.ones(2).to(device).resize_(2**40, 2**40),
        lambda device: torch.ones(3).to(device).untyped_storage().resize_(-1),
        lambda device: torch.ones(3).to(device).untyped_storage()[100],
    ],
)
def test_impossible_sizes_are_refused(make: Callable[[str], Any], device: str) -> None:
    for where in ("cpu", device):
        with pytest.raises((RuntimeError, IndexError)):
            make(where)


@tarry_only
def test_batch_sizes_are_read_on_the_host(device: str) -> None:
    gru = torch.nn.GRU(2, 3).to(device)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 2).to(device)] * 2)
    assert gru(packed)[1].shape == (1, 2, 3)
    with pytest.raises(RuntimeError, match="'batch_sizes' should be"):
        torch.gru(
            packed.data,
            packed.batch_sizes.to(device),
            torch.zeros(1, 2, 3).to(device),
            gru._flat_weights,
            True,
            1,
            0.0,
            False,
            False,
        )
