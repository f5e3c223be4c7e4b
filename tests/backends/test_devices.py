"""A backend with several real devices: they are tarry:0, tarry:1, ... The number is fixed once the device is used, so
each of these programs is a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tarry
from tarry.backends.base import Backend
from tarry.errors import BackendError
from tests.backends.simple import Walking, using
from tests.support.scripts import run_script

USES_DEVICE = True

_PRELUDE = """
    import torch, tarry
    from tarry.events import record, expect
    from tests.backends.simple import Walking
    from tests.backends.simulated import Accelerator

    class Twins(Walking):
        name = "twins"
        def __init__(self, kind=Walking, **options):
            super().__init__(**options)
            self.both = [kind(**options), kind(**options)]
        def devices(self):
            return self.both
"""


def _run(script: str) -> str:
    return run_script(script, _PRELUDE)


def test_tensors_on_both_and_copies_between_them() -> None:
    _run("""
        tarry.set_backend(Twins())
        assert torch.tarry.device_count() == 2 == torch.accelerator.device_count()
        x = torch.arange(3.0, device="tarry:0")
        y = torch.arange(3.0, device="tarry:1") * 2
        assert (x.device.index, y.device.index) == (0, 1)
        moved = (x + 1).to("tarry:1")
        assert moved.device == torch.device("tarry:1")
        z = moved + y
        assert z.tolist() == [1.0, 4.0, 7.0]
        back = z.to("tarry:0")
        back.add_(x)
        assert back.tolist() == [1.0, 5.0, 9.0]
        assert z.tolist() == [1.0, 4.0, 7.0]
        y.copy_(back)
        assert y.tolist() == [1.0, 5.0, 9.0]
        try:
            x + y
        except RuntimeError as error:
            assert "tarry:0" in str(error) and "tarry:1" in str(error), error
        else:
            raise AssertionError("tensors of two devices were added")
        try:
            torch.ones(1, device="tarry:2")
        except RuntimeError as error:
            assert "tarry:2" in str(error)
        else:
            raise AssertionError("there is no third device")
    """)


def test_sparse_and_nested_tensors_stay_on_their_device() -> None:
    _run("""
        tarry.set_backend(Twins())
        there = torch.device("tarry:1")
        coo = torch.sparse_coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], (2, 3), device=there)
        csr, nested = coo.to_sparse_csr(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=there)
        made = [torch.zeros(2, 3, layout=torch.sparse_coo, device=there), coo.to_dense()]
        made += [csr @ torch.ones(3, 1, device=there)]
        made += [t for x in (coo, csr, nested) for t in (x, x.clone(), x * 2, torch.empty_like(x))]
        assert {t.device for t in made} == {there}
        assert coo.to("tarry:0").device.index == 0
        try:
            coo + coo.to("tarry:0")
        except RuntimeError as error:
            assert "tarry:0" in str(error) and "tarry:1" in str(error), error
        else:
            raise AssertionError("tensors of two devices were added")
    """)


def test_mark_step_cuts_all_of_them() -> None:
    _run("""
        from tarry.native import C
        backend = Twins()
        tarry.set_backend(backend)
        x, y = torch.ones(3).to("tarry:0"), torch.ones(3).to("tarry:1")
        a, b = x * 2 + 1, y.sin()
        with expect(syncs=2):
            tarry.mark_step()
        assert not C.is_pending(a) and not C.is_pending(b)
        with expect(syncs=0):
            assert a.tolist() == [3.0] * 3
            torch.testing.assert_close(b.cpu(), torch.ones(3).sin())
        a, b = x + 1, y + 1
        with expect(syncs=1):  # a read cuts the device it is on
            a.cpu()
        assert C.is_pending(b)
        assert tarry.metrics.counters()["record"] >= 4
        tarry.metrics.reset()
        assert tarry.metrics.counters()["record"] == 0
    """)


def test_training_on_the_second_device_and_across_both() -> None:
    _run("""
        tarry.set_backend(Twins())

        class Split(torch.nn.Module):
            def __init__(self, first, second):
                super().__init__()
                torch.manual_seed(0)
                self.a = torch.nn.Linear(4, 5).to(first)
                self.b = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).to(second)
                self.second = second
            def forward(self, x):
                return self.b(self.a(x).tanh().to(self.second))

        def train(first, second):
            net = Split(first, second)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            for k in range(4):
                x = (torch.linspace(-1, 1, 12).view(3, 4) * (k + 1)).to(first)
                loss = net(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return [v.cpu() for v in net.state_dict().values()]

        wanted = train("cpu", "cpu")
        for first, second in (("tarry:1", "tarry:1"), ("tarry:0", "tarry:1"), ("tarry:1", "tarry:0")):
            for mine, other in zip(train(first, second), wanted, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    """)


def test_the_default_ordinal() -> None:
    _run("""
        class Second(Twins):
            default_ordinal = 1

        tarry.set_backend(Second())
        assert torch.tarry.current_device() == 1
        x = torch.ones(3, device="tarry") + 1
        assert x.device == torch.device("tarry:1")
        assert torch.ones(3).to("tarry").device.index == 1
        assert x.tolist() == [2.0] * 3
        with torch.tarry.device(0):
            assert torch.ones(1, device="tarry").device.index == 0
        tarry.set_backend(Twins())
        assert torch.tarry.current_device() == 0
        torch.tarry.set_device(1)
        tarry.set_backend(Twins())  # the backend has no say in it: the user's choice stays
        assert torch.tarry.current_device() == 1
        assert (x + 1).tolist() == [3.0] * 3
    """)


def test_the_device_that_operators_fall_back_to() -> None:
    _run("""
        asked = []
        class Asked(Walking):
            def fallback_device(self):
                asked.append(self)
                return "cpu"

        backend = Twins(Asked, lacks=["aten::tanh"])
        tarry.set_backend(backend)
        for index in (0, 1):
            x = torch.ones(3).to(f"tarry:{index}")
            with expect(fallbacks=1):
                torch.testing.assert_close((x.tanh() + 1).cpu(), torch.ones(3).tanh() + 1)
        assert asked == backend.both
    """)


def test_data_of_the_backends_own_on_both() -> None:
    _run("""
        backend = Twins(Accelerator)
        tarry.set_backend(backend)
        x, y = torch.ones(3).to("tarry:0") + 1, torch.ones(3).to("tarry:1") + 2
        tarry.mark_step()
        z = x.to("tarry:1") + y
        x.add_(1)
        assert (x.tolist(), y.tolist(), z.tolist()) == ([3.0] * 3, [3.0] * 3, [5.0] * 3)
        for index, one in enumerate(backend.both):
            assert torch.tarry.mem_get_info(index)[0] == one.memory_info().free < 1 << 20
        tarry.set_backend("eager")
        assert (x.tolist(), (y + 1).tolist(), z.tolist()) == ([3.0] * 3, [4.0] * 3, [5.0] * 3)
    """)


def test_random_numbers_of_each_device() -> None:
    _run("""
        tarry.set_backend(Twins())
        torch.manual_seed(1)
        a, b = torch.rand(4, device="tarry:0"), torch.rand(4, device="tarry:1")
        torch.manual_seed(1)
        c, d = torch.rand(4, device="tarry:0"), torch.rand(4, device="tarry:1")
        assert a.tolist() == c.tolist() and b.tolist() == d.tolist()
        with torch.tarry.device(1):
            torch.tarry.manual_seed(7)
            e = torch.rand(4, device="tarry:1")
        torch.tarry.manual_seed_all(7)
        assert torch.rand(4, device="tarry:1").tolist() == e.tolist()
    """)


def test_a_backend_of_fewer_devices_serves_all_with_its_last() -> None:
    _run("""
        tarry.set_backend(Twins())
        x, y = torch.ones(3).to("tarry:0"), torch.ones(3).to("tarry:1") * 2
        for single in ("eager", Walking(), Walking(lacks=["aten::tanh"]), Accelerator()):
            tarry.set_backend(single)
            assert torch.tarry.device_count() == 2
            y = y + 1
            torch.testing.assert_close(y.tanh().cpu(), torch.tensor(y.tolist()).tanh())
            assert torch.tarry.mem_get_info(1)[1] > 0
        assert (y.tolist(), y.device.index) == ([6.0] * 3, 1)
    """)


def test_once_used_the_number_of_devices_stays() -> None:
    class Twins(Walking):
        def devices(self) -> list[Backend]:
            return [self, Walking()]

    before = torch.tarry.device_count()
    torch.ones(1, device="tarry")
    with using(Twins()):
        assert torch.tarry.device_count() == before
        assert (torch.ones(2).to("tarry") + 1).tolist() == [2.0, 2.0]


def test_a_default_ordinal_that_does_not_exist_is_refused() -> None:
    class Beyond(Walking):
        name = "beyond"
        default_ordinal = 7

    before = tarry.get_backend()
    with pytest.raises(BackendError, match="'beyond': default_ordinal is 7, but there are 1 devices"):
        tarry.set_backend(Beyond())
    assert tarry.get_backend() is before
    assert (torch.ones(2).to("tarry") + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("wrong", [[], ["cpu", "cpu"], [None]])
def test_devices_that_are_no_backends_are_refused(wrong: list[Any]) -> None:
    class Wrong(Walking):
        name = "wrong"

        def devices(self) -> list[Any]:
            return wrong

    before = tarry.get_backend()
    with pytest.raises(BackendError, match=r"'wrong': devices\(\) gives a tarry.Backend for each device"):
        tarry.set_backend(Wrong())
    assert tarry.get_backend() is before
