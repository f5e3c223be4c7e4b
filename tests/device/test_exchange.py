"""DLPack and `__cuda_array_interface__`: others look at the device's memory."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import DLDeviceType

import tarry
from tarry.events import expect
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.complex64,
)


def _x(n: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(n).to(dtype).to("tarry")


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_looks_at_the_memory(dtype: torch.dtype) -> None:
    x = _x(dtype=dtype) + 1
    seen = np.from_dlpack(x)
    assert seen.tolist() == (torch.arange(6).to(dtype) + 1).tolist()


def test_views_keep_their_strides() -> None:
    x = _x(12).reshape(3, 4) * 2
    want = torch.arange(12.0).reshape(3, 4) * 2
    for view in (lambda t: t.t(), lambda t: t[1], lambda t: t[:, 1::2], lambda t: t.expand(2, 3, 4), lambda t: t[:0]):
        seen = np.from_dlpack(view(x))
        assert seen.shape == tuple(view(want).shape)
        assert np.array_equal(seen, view(want).numpy())


def test_what_the_program_writes_shows_outside_at_once() -> None:
    x = _x()
    seen = torch.from_dlpack(torch.to_dlpack(x))
    assert seen.device.type == "cpu"
    for write in (
        lambda t: t.add_(1),
        lambda t: t[2:].mul_(3),
        lambda t: t.copy_(torch.full((6,), 7.0)),
        lambda t: t.copy_(torch.full((6,), 8.0).to(t.device)),
        lambda t: torch._foreach_add_([t, t], 1.0),
        lambda t: torch.neg(t, out=t),
        lambda t: t.zero_(),
        lambda t: t.uniform_(),
    ):
        write(x)
        assert torch.equal(seen, x.cpu())


def test_what_is_written_outside_shows_in_what_is_called_later() -> None:
    x, eager = _x(), torch.arange(6.0)
    seen, other = torch.from_dlpack(x.__dlpack__()), torch.from_dlpack(eager.__dlpack__())
    results = []
    for t, view in ((x, seen), (eager, other)):
        before = t * 2  # must not see the next line
        view[0] = 100
        after = t * 2
        view[1] = 200
        t.add_(after)
        view.mul_(2)
        results.append([before.tolist(), after.tolist(), t.tolist(), view.tolist(), (t + 1).tolist()])
    assert results[0] == results[1]


def test_work_that_was_pending_before_is_done_first() -> None:
    x = _x()
    y = x + 1
    x.mul_(2)
    z = x + y
    seen = torch.from_dlpack(x.__dlpack__())
    seen.zero_()
    assert y.tolist() == [1, 2, 3, 4, 5, 6]
    assert z.tolist() == [1, 4, 7, 10, 13, 16]
    assert x.tolist() == [0] * 6


def test_others_that_had_the_same_contents_do_not_see_the_writes() -> None:
    x = _x()
    copies = [x.clone(), torch._lazy_clone(x), x + 0]
    tarry.sync()
    seen = torch.from_dlpack(x.__dlpack__())
    seen.fill_(9)
    for copy in copies:
        assert copy.tolist() == [0, 1, 2, 3, 4, 5]
    assert x.tolist() == [9] * 6


def test_the_memory_outlives_the_tensor_and_recording_goes_on_afterwards() -> None:
    x = _x() + 1
    seen = np.from_dlpack(x)
    with expect(fallbacks=1):
        y = x + 1
    del x
    gc.collect()
    torch.ones(1000, device="tarry").add_(1).cpu()
    assert seen.tolist() == [1, 2, 3, 4, 5, 6]
    assert y.tolist() == [2, 3, 4, 5, 6, 7]
    x = _x()
    capsule: Any = x.__dlpack__()
    del capsule
    with expect(fallbacks=0):
        assert (x + 1).tolist() == [1, 2, 3, 4, 5, 6]


def test_two_holders_see_the_same_memory() -> None:
    x = _x()
    first, second = torch.from_dlpack(x.__dlpack__()), torch.from_dlpack(x[1:].__dlpack__())
    second[0] = 50
    assert first[1] == 50
    del first
    x.add_(1)
    assert second.tolist() == [51, 3, 4, 5, 6]


def test_a_failed_step_behind_the_view() -> None:
    x, index = _x(), torch.tensor([99]).to("tarry")
    bad = x[index]
    with pytest.raises(IndexError):
        bad.__dlpack__()
    with pytest.raises(IndexError):
        bad.__dlpack__()
    seen = torch.from_dlpack(x.__dlpack__())
    with pytest.raises(IndexError):
        x.index_add_(0, index, torch.ones(1).to("tarry"))
    assert torch.equal(seen, x.cpu())


def test_training_on_a_parameter_that_is_looked_at() -> None:
    def train(device: str) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        seen = torch.from_dlpack(model.bias.detach().__dlpack__())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3, device=device)).pow(2).sum().backward()
            optimizer.step()
        return seen.tolist(), model.bias.tolist()

    assert train("tarry") == train("cpu")


def test_replays_are_recorded_while_others_look() -> None:
    x, total = _x(), torch.zeros(6, device="tarry")

    @tarry.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total * 1

    for _ in range(4):
        step(x)
    seen = torch.from_dlpack(total.__dlpack__())
    step(x)
    assert seen.tolist() == [0, 5, 10, 15, 20, 25]
    seen[0] = 1000
    assert step(x).tolist() == [1000, 6, 12, 18, 24, 30]


def test_torchs_own_consumer_stays_on_the_device() -> None:
    x = _x()
    with expect(syncs=0):
        y = torch.from_dlpack(x)
        assert y.device == x.device
        y.add_(1)
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    z = torch.from_dlpack(x, copy=True)
    z.zero_()
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.from_dlpack(x, device="cpu").device.type == "cpu"
    assert torch.from_dlpack(x, device="tarry:0").device == x.device
    with pytest.raises(ValueError, match="without copying"):
        torch.from_dlpack(x, device="cpu", copy=False)


def test_tensors_of_others_come_to_the_device() -> None:
    array = np.arange(4.0)
    x = torch.from_dlpack(array, device="tarry")
    assert x.device.type == "tarry"
    array[0] = 9
    assert x.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="without copying"):
        torch.from_dlpack(array, device="tarry", copy=False)
    assert torch.from_dlpack(array).device.type == "cpu"


def test_the_protocol() -> None:
    x = _x()
    assert x.__dlpack_device__() == (DLDeviceType.kDLCPU, 0)
    assert '"dltensor"' in str(x.__dlpack__())
    assert '"dltensor_versioned"' in str(x.__dlpack__(max_version=(1, 0)))
    copy = torch.from_dlpack(x.__dlpack__(copy=True))
    copy.zero_()
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    for wrong in (x.clone().requires_grad_(), torch.ones(2, dtype=torch.complex64, device="tarry").conj()):
        with pytest.raises(BufferError):
            wrong.__dlpack__()
    with pytest.raises(TypeError):
        x.__dlpack__(stream=object())
    with pytest.raises(AttributeError):
        x.__cuda_array_interface__


def test_jax_looks_at_the_memory() -> None:
    dlpack = pytest.importorskip("jax.dlpack")
    x = _x() * 2
    assert dlpack.from_dlpack(x).tolist() == [0, 2, 4, 6, 8, 10]
    back = torch.from_dlpack(dlpack.from_dlpack(x), device="tarry")
    assert (back + 1).tolist() == [1, 3, 5, 7, 9, 11]


def test_threads_share_and_compute() -> None:
    x, errors = _x(64), []

    def work(k: int) -> None:
        try:
            for _ in range(30):
                seen = torch.from_dlpack(x.__dlpack__())
                y = torch.full((64,), float(k), device="tarry")
                assert (y + seen.to("tarry") * 0).tolist() == [float(k)] * 64
                del seen
                (x + 1).sum()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert x.tolist() == list(range(64))


def _random_program(device: str, seed: int) -> list[list[float]]:
    """Tensors that share storages, looks at their memory that come and go, and work that is read late."""
    choose = random.Random(seed)
    tensors = [torch.arange(8.0).to(device), torch.full((2, 4), 2.0).to(device)]
    tensors += [tensors[0][2:6], tensors[1].t()]
    looks: list[torch.Tensor] = []
    results: list[torch.Tensor] = []
    for _ in range(60):
        t = choose.choice(tensors)
        match choose.randrange(9):
            case 0:
                looks.append(torch.from_dlpack(t.__dlpack__()))
            case 1 if looks:
                looks.pop(choose.randrange(len(looks)))
            case 2 if looks:
                choose.choice(looks).mul_(0.5).add_(1)
            case 3:
                t.mul_(0.75)
            case 4:
                t.copy_(torch.full(t.shape, float(choose.randrange(5))))
            case 5:
                other = choose.choice(tensors)
                results.append(t.sum() + other.sum())
            case 6:
                t.add_(choose.choice(tensors).mean())
            case 7:
                tensors[choose.randrange(2)].reshape(-1)[1:5].copy_(torch.arange(4.0).to(device))
            case _:
                if device == "tarry":
                    tarry.mark_step()
        if looks and choose.random() < 0.3:
            results.append(choose.choice(looks).clone().sum())
    return [result.reshape(-1).tolist() for result in [*results, *tensors, *looks]]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_with_looks_from_outside(seed: int) -> None:
    assert _random_program("tarry", seed) == _random_program("cpu", seed)


def test_a_closure_may_look_at_memory() -> None:
    x, y, seen = _x(), _x() + 1, []
    tarry.add_step_closure(lambda: seen.append(np.from_dlpack(y).tolist()))
    assert np.from_dlpack(x + 1).tolist() == [1, 2, 3, 4, 5, 6]
    assert seen == [[1, 2, 3, 4, 5, 6]]


def test_memory_of_a_storage_that_is_resized_or_swapped() -> None:
    x, y = _x(), _x() * 2
    seen = torch.from_dlpack(x.__dlpack__())
    x.untyped_storage().resize_(8 * x.element_size())
    x.add_(1)
    assert seen.tolist() == [0, 1, 2, 3, 4, 5]  # what it held; eager PyTorch leaves an address of freed memory
    again = torch.from_dlpack(y.__dlpack__())
    y.resize_(3)
    y.zero_()
    assert again.tolist() == [0, 0, 0, 6, 8, 10]
