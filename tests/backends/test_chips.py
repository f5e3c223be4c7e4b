"""The example of a card with two chips (docs/examples/chip): each chip has its own programs, data, memory and queue."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.scripts import CHIP, ROOT, run_script

pytestmark = pytest.mark.process

_PRELUDE = """
    import gc, threading, time
    import torch, tarry
    from torch import nn
    from chip import Buffer, Card, Chip, ChipBackend
    from tarry.errors import BackendError
    from tarry.events import record

    class Watched(Card):
        '''Notes what each chip is asked to do; its chips can be held up.'''
        def __init__(self, **options):
            super().__init__(**options)
            self.calls = []
            for ordinal, one in enumerate(self.devices()):
                for name in ("compile", "to_data", "to_tensor", "receive"):
                    self.watch(ordinal, one, name)
        def watch(self, ordinal, one, name):
            method = getattr(one, name)
            def noted(*arguments):
                self.calls.append((ordinal, name))
                return method(*arguments)
            setattr(one, name, noted)
            if name == "receive":  # the runtime looks at the class
                assert type(one).receive is not tarry.Backend.receive
        def taken(self):
            calls, self.calls = self.calls, []
            return calls

    def raises(kind, text, function, *arguments):
        try:
            function(*arguments)
        except kind as error:
            assert text in str(error), error
            return error
        raise AssertionError(f"no error with {text!r}")
"""


def _run(script: str) -> str:
    return run_script(script, _PRELUDE)


def test_it_runs_as_the_page_says() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "train.py"],
        cwd=CHIP,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == ["halves", "copies", "chip 0", "chip 1"]
    page = (ROOT / "docs" / "write-a-backend.md").read_text()
    assert all(line in page for line in lines[:2])


def test_the_example_is_short() -> None:
    assert len((CHIP / "chip.py").read_text().splitlines()) <= 200


def test_two_chips_are_told_apart() -> None:
    _run("""
        card = Watched()
        tarry.set_backend(card)
        x, y = torch.ones(3).to("tarry:0"), torch.ones(3).to("tarry:1")
        assert (x + 1).tolist() == [2.0] * 3
        assert card.taken() == [(0, "compile"), (0, "to_data"), (0, "to_tensor")]
        assert (y + 1).tolist() == [2.0] * 3
        assert card.taken() == [(1, "compile"), (1, "to_data"), (1, "to_tensor")]  # the program is not the other chip's
        assert (x + 1).tolist() == (y + 1).tolist()
        assert card.taken() == [(0, "to_tensor"), (1, "to_tensor")]
        assert [chip.launched for chip in card.chips] == [2, 2]
        gc.collect()
        assert [torch.tarry.mem_get_info(k) for k in (0, 1)] == [(64 * 2**20 - 12, 64 * 2**20)] * 2
        assert tarry.metrics.counters()["chip/launched on 1"] == 2
    """)


def test_data_of_a_chip_are_never_passed_to_the_other() -> None:
    """ChipBackend's programs check that their buffers are their own chip's."""
    _run("""
        card = Watched()
        tarry.set_backend(card)
        x = torch.arange(6.0).view(2, 3).to("tarry:0") * 1
        tarry.mark_step()
        card.taken()
        with record() as seen:
            y = x.to("tarry:1")
            assert y.device.index == 1 and card.taken() == []      # nothing was copied yet
            z = y + 1
            tarry.mark_step()
            assert card.taken() == [(1, "compile"), (1, "receive")]  # without the host
            w = y * 2                                                # y is there now
            tarry.mark_step()
            assert (1, "receive") not in card.taken()
        moves = [e.fields for e in seen if e.kind == "transfer"]
        assert [(m["direction"], m["bytes"]) for m in moves] == [("between devices", 24)], moves
        for t, f in ((y, lambda t: t), (z, lambda t: t + 1), (w, lambda t: t * 2)):
            assert t.tolist() == f(torch.arange(6.0).view(2, 3)).tolist()
        parts = [x[1].to("tarry:1"), x.t().to("tarry:1"), x.to("tarry:1", torch.float64), x[:, 1:].to("tarry:1")]
        for mine, t in zip(parts, [x[1], x.t(), x.double(), x[:, 1:]]):
            assert mine.device.index == 1 and (mine + 0).tolist() == t.tolist(), mine
            assert mine.dtype == t.dtype and mine.stride() == t.cpu().to(t.dtype, copy=True).stride()
        other = torch.zeros(4, 3, device="tarry:1")
        other[1:3] = x.to("tarry:1")
        other[3].copy_(x[0])
        assert other.tolist() == [[0, 0, 0], [0, 1, 2], [3, 4, 5], [0, 1, 2]]
        c = torch.complex(x, x).conj().to("tarry:1")
        assert c.tolist() == torch.complex(x.cpu(), x.cpu()).conj().tolist()
    """)


def test_a_copy_is_what_was_there_when_it_was_made() -> None:
    _run("""
        for computed in (False, True):
            if not computed:
                tarry.set_backend(Card())
            x = torch.ones(3).to("tarry:0")
            x = x * 1
            if computed:
                tarry.mark_step()
            y = x.to("tarry:1")
            x.add_(1)
            tarry.mark_step()
            x.mul_(3)
            assert y.tolist() == [1.0] * 3
            y.sub_(5)
            assert (x.tolist(), y.tolist()) == ([6.0] * 3, [-4.0] * 3)
            back = y.to("tarry:0")
            del y
            gc.collect()
            assert (back + x).tolist() == [2.0] * 3
        kept = x.to("tarry:1")
        tarry.set_backend("eager")     # what was on its way is still there
        assert (kept + 1).tolist() == [7.0] * 3 and kept.device.index == 1
        kept = kept.to("tarry:0") + x
        tarry.set_backend(Card())
        assert kept.tolist() == [12.0] * 3
    """)


def test_an_update_in_place_spares_what_was_copied() -> None:
    _run("""
        from tests.backends.simulated import Updating
        class Pair(Updating):
            def __init__(self):
                super().__init__()
                self.both = [Updating(), Updating()]
            def devices(self):
                return self.both
        tarry.set_backend(Pair())
        x = torch.ones(3).to("tarry:0") * 1
        tarry.mark_step()
        y = x.to("tarry:1")
        for _ in range(3):
            x.add_(1)
            tarry.mark_step()
        assert (x.tolist(), y.tolist()) == ([4.0] * 3, [1.0] * 3)
        y.add_(1)
        tarry.mark_step()
        assert (x.tolist(), y.tolist()) == ([4.0] * 3, [2.0] * 3)
    """)


def test_want_of_memory_names_the_chip_and_loses_nothing() -> None:
    _run("""
        card = Card(memory=10_000)
        tarry.set_backend(card)
        x, y = torch.ones(1000).to("tarry:0"), torch.ones(1000).to("tarry:1")
        a, b = y + 1, x + 1
        tarry.mark_step()
        c = y + 2                                                 # 4000 bytes each: y, a, c
        text = "chip 1 is out of memory: 4000 bytes are needed, and of 10000 bytes 2000 are free"
        error = raises(BackendError, text, c.cpu)
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        assert c[0].item() == 3.0 and a[0].item() == 2.0         # the reference path has computed it
        assert (b[:2] + 1).tolist() == [3.0, 3.0]                # the other chip has room
        moved = b.to("tarry:1")
        raises(BackendError, "chip 1 is out of memory", (moved * 2).sum().item)
        del a, c
        gc.collect()
        assert (moved * 2).sum().item() == 4000.0
        del moved, b, x, y, error                                # whose frames know buffers
        gc.collect()
        tarry.wait()
        assert [chip.used for chip in card.chips] == [0, 0]
    """)


def test_nothing_leaks_in_a_thousand_copies() -> None:
    _run("""
        from tarry.runtime import data
        card = Card()
        tarry.set_backend(card)
        x = torch.ones(100).to("tarry:0")
        for k in range(300):
            x = (x.to("tarry:1") * 1).to("tarry:0") * 1
            tarry.mark_step()
        tarry.wait()
        gc.collect()
        assert x.sum().item() == 100.0
        assert max(chip.used for chip in card.chips) <= 4 * 400
        assert len(data._shared) < 10 and len(data._stand_ins) < 10
    """)


def test_chips_compute_at_the_same_time() -> None:
    """Each program takes 0.3 s, and none waits for one of the other chip that it does not depend on."""
    _run("""
        card = Card(seconds=0.3)
        tarry.set_backend(card)
        nets = [nn.Linear(4, 4).to(f"tarry:{k}") for k in (0, 1)]
        x = [torch.randn(2, 4).to(f"tarry:{k}") for k in (0, 1)]
        tarry.wait()

        def overlap():
            spans = [chip.busy[count:] for chip, count in zip(card.chips, counts)]
            return sum(max(0.0, min(e, f) - max(b, c)) for b, e in spans[0] for c, f in spans[1])

        counts = [len(chip.busy) for chip in card.chips]
        start = time.perf_counter()
        losses = [net(t).square().sum() for net, t in zip(nets, x)]
        for loss in losses:
            loss.backward()
        launched = time.perf_counter() - start
        total = nets[0].weight.grad + nets[1].weight.grad.to("tarry:0")   # ends both steps, and waits for none
        assert time.perf_counter() - start < 0.27, (launched, time.perf_counter() - start)
        total.cpu()
        assert overlap() > 0.2, overlap()

        # A pipeline: the second chip has a part while the first one has the next.
        counts = [len(chip.busy) for chip in card.chips]
        parts = []
        with torch.no_grad():
            for k in range(4):
                hidden = nets[0](x[0] + k).to("tarry:1")
                parts.append(nets[1](hidden))
        for part in parts:
            part.cpu()
        assert overlap() > 0.6, overlap()
    """)


@pytest.mark.parametrize("link", [True, False])
def test_an_error_on_one_chip_is_raised_where_it_is_read(link: bool) -> None:
    _run(f"""
        link = {link}
        class Plain(ChipBackend):
            receive = tarry.Backend.receive
        card = Card(seconds=0.02)
        if not link:
            card._backends = [Plain(chip) for chip in card.chips]
        tarry.set_backend(card)
        table, index = torch.arange(6.0).view(3, 2).to("tarry:0"), torch.tensor([5]).to("tarry:0")
        good = torch.ones(2).to("tarry:1")
        before = good * 2
        bad = nn.functional.embedding(index, table)      # fails on the chip, when it gets there
        moved = bad.to("tarry:1")                         # launches it
        after = moved + good
        apart = good * 3
        for read in (after, moved, bad, after, moved):
            raises(IndexError, "index out of range", read.cpu)
        assert apart.tolist() == [3.0, 3.0]  # though it was computed by the program that was given what failed
        # Whatever was computed before or is computed now is there, on both chips.
        assert before.tolist() == [2.0, 2.0]
        assert (good * 3).tolist() == [3.0, 3.0]
        assert table.sum().item() == 15.0
        assert (table[1].to("tarry:1") + good).tolist() == [3.0, 4.0]
        # What is overwritten is there again.
        moved.copy_(torch.ones(1, 2))
        assert (moved + good).tolist() == [[2.0, 2.0]]
        bad.zero_()
        assert bad.to("tarry:1").tolist() == [[0.0, 0.0]]
    """)


@pytest.mark.parametrize("devices", [("tarry:0", "tarry:1"), ("tarry:1", "tarry:1")])
def test_a_batch_that_fails_on_a_chip_leaves_the_weights_as_they_were(devices: tuple[str, str]) -> None:
    _run(f"""
        devices = {devices}
        def train(first, second):
            torch.manual_seed(0)
            table, layer = nn.Embedding(10, 4).to(first), nn.Linear(4, 2).to(second)
            optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1, momentum=0.9)
            losses, errors = [], 0
            for k in range(8):
                index = torch.full((3,), 12 if k in (3, 4) else k)
                try:
                    optimizer.zero_grad()
                    loss = layer(table(index.to(first)).to(second)).square().sum()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                except IndexError:
                    errors += 1
            assert errors == 2, errors
            return torch.tensor(losses), table.weight.detach().cpu(), layer.weight.detach().cpu()

        wanted = train("cpu", "cpu")
        tarry.set_backend(Card())
        for mine, theirs in zip(train(*devices), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
    """)


def test_a_backend_without_a_link_of_its_own_goes_through_the_host() -> None:
    _run("""
        class Plain(ChipBackend):
            receive = tarry.Backend.receive
        card = Card()
        card._backends = [Plain(chip) for chip in card.chips]
        tarry.set_backend(card)
        x = torch.arange(3.0).to("tarry:0") * 2
        y = x.to("tarry:1") + 1
        assert y.tolist() == [1.0, 3.0, 5.0]
        data = card._backends[1].receive(card._backends[0].to_data(torch.ones(2)), card._backends[0])
        assert data.chip is card.chips[1] and data.wait().tolist() == [1.0, 1.0]
    """)


def test_threads_on_two_chips() -> None:
    """Each thread trains on its own chip, and looks at the other's weights now and then."""
    _run("""
        tarry.set_backend(Card())
        torch.manual_seed(0)
        first = [nn.Linear(3, 3) for _ in range(2)]
        x = torch.randn(4, 3)

        def train(net, device, steps=12):
            net = net.to(device)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for _ in range(steps):
                optimizer.zero_grad()
                net(x.to(device)).square().sum().backward()
                optimizer.step()
            return net

        import copy
        wanted = [train(copy.deepcopy(net), "cpu") for net in first]
        made, errors = [None, None], []
        def work(k):
            try:
                for _ in range(3):
                    made[k] = train(copy.deepcopy(first[k]), f"tarry:{k}")
                    (made[k].weight.detach().to(f"tarry:{1 - k}") + 1).sum().item()
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=(k,)) for k in (0, 1)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(60)
        assert not errors, errors
        assert not any(thread.is_alive() for thread in threads)
        for mine, theirs in zip(made, wanted):
            torch.testing.assert_close(mine.weight.detach().cpu(), theirs.weight.detach(), rtol=1e-5, atol=1e-6)
    """)


def test_sizes_that_vary_and_numbers_are_each_devices_own() -> None:
    """What is counted against the budgets of one device does not count for the other."""
    _run("""
        from tests.backends.simple import Walking
        class Pair(Walking):
            def __init__(self):
                super().__init__()
                self.both = [Walking(refuses=lambda *_: True), Walking(refuses=lambda *_: True)]
            def devices(self):
                return self.both
        card = Pair()
        tarry.set_backend(card)
        for length in range(2, 8):
            for k in (0, 1):
                x = torch.ones(length).to(f"tarry:{k}")
                assert (x * float(length)).sum().item() == length * length
        assert [len(one.graphs) for one in card.both] == [6, 6]
        assert [one.runs for one in card.both] == [6, 6]
    """)


def test_random_numbers_are_those_of_the_device_whatever_the_host_draws() -> None:
    _run("""
        def draw():
            torch.manual_seed(3)
            x = [torch.ones(50).to(f"tarry:{k}") for k in (0, 1)]
            made = []
            for _ in range(5):
                made += [nn.functional.dropout(t * 1, 0.5) + torch.rand(50, device=t.device) for t in x]
                made[-1] = made[-1] + made[-2].to("tarry:1")
            tarry.mark_step()
            torch.rand(1000).sum().item()
            return [t.tolist() for t in made], torch.rand(3).tolist()

        # The number of devices is that of the first backend that is used.
        tarry.set_backend(Card())
        mine = draw()
        tarry.set_backend("eager")
        assert mine == draw()
    """)


def test_devices_that_are_alike_share_what_is_stored() -> None:
    """A graph is compiled for one of them, and loaded for the other."""
    _run("""
        import tempfile, pathlib
        from tests.runtime.portable import Portable
        place = pathlib.Path(tempfile.mkdtemp())
        type(tarry.config).cache_dir = property(lambda self: place)
        tarry.config.store = True
        calls = []
        class Noting(Portable):
            def compile(self, graph):
                calls.append(("compile", self.ordinal))
                return super().compile(graph)
            def load(self, graph, data):
                calls.append(("load", self.ordinal))
                return super().load(graph, data)
        class Pair(Portable):
            def __init__(self):
                super().__init__()
                self.both = [Noting(), Noting()]
                for k, one in enumerate(self.both):
                    one.ordinal = k
            def devices(self):
                return self.both
        tarry.set_backend(Pair(), compile="wait")
        x = [torch.ones(3).to(f"tarry:{k}") for k in (0, 1)]
        for _ in range(2):
            assert [(t.sin() + 1).sum().item() for t in x] == [(torch.ones(3).sin() + 1).sum().item()] * 2
        compiled = [call for call in calls if call[0] == "compile"]
        assert compiled == [("compile", 0)], calls
        assert ("load", 1) in calls
    """)


def test_one_device_may_serve_both_and_still_copies() -> None:
    _run("""
        from tests.backends.simulated import Accelerator, Asynchronous, Updating
        tarry.set_backend(Card())
        torch.ones(1, device="tarry:1")
        for kind in (Accelerator, Updating, Asynchronous, lambda: Card(chips=1)):
            tarry.set_backend(kind())
            x = torch.ones(3).to("tarry:0") * 1
            tarry.mark_step()
            y = x.to("tarry:1")
            y.add_(1)
            x.add_(5)
            tarry.mark_step()
            x.add_(5)
            y.add_(1)
            assert (x.tolist(), y.tolist(), y.device.index) == ([11.0] * 3, [3.0] * 3, 1)
    """)


def test_tensors_of_an_asynchronous_backend() -> None:
    """Its data are tensors: a copy of one that is pending still launches both."""
    _run("""
        from tests.backends.simple import Walking
        class Early(Walking):
            capabilities = tarry.Capabilities(asynchronous=True)
        class Pair(Early):
            def __init__(self):
                super().__init__()
                self.both = [Early(), Early()]
            def devices(self):
                return self.both
        pair = Pair()
        tarry.set_backend(pair)
        x, y = torch.ones(3).to("tarry:0"), torch.ones(3).to("tarry:1")
        a, b = x + 1, y + 2
        with record() as seen:
            c = a.to("tarry:1")
            d = c + b
            for _ in range(3):
                d = d + a.to("tarry:1")                # it is there: nothing is cut
        cuts = [(e.fields["device"], e.fields["reason"]) for e in seen if e.kind == "sync"]
        assert cuts == [(0, "copy to another device"), (1, "copy from another device")], cuts
        assert d.tolist() == [11.0] * 3
    """)


def test_an_interrupt_while_a_chip_is_waited_for_loses_nothing() -> None:
    _run("""
        import os, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore interrupts
        card = Card(seconds=0.5)
        tarry.set_backend(card)
        x = torch.ones(3).to("tarry:0") * 2
        y = x.to("tarry:1") + 1
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            y.cpu()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("not interrupted")
        assert y.tolist() == [3.0] * 3 and x.tolist() == [2.0] * 3
    """)


def test_a_compiler_that_fails_for_one_chip_leaves_the_other_alone() -> None:
    _run("""
        card = Watched()
        tarry.set_backend(card)
        broken = card.devices()[1]
        def refuse(graph):
            raise MemoryError("no room for the program")
        compile_, broken.compile = broken.compile, refuse
        x, y = torch.ones(3).to("tarry:0"), torch.ones(3).to("tarry:1")
        a, b = x + 1, y + 1
        raises(BackendError, "no room for the program", b.cpu)
        assert a.tolist() == [2.0] * 3
        # The copy launches what is pending on both: the error is the receiver's, and nothing is lost.
        c = x * 3
        raises(BackendError, "no room for the program", c.to, "tarry:1")
        broken.compile = compile_
        assert b.tolist() == [2.0] * 3 and c.to("tarry:1").tolist() == [3.0] * 3
    """)


def test_devices_of_different_kinds() -> None:
    """A chip with data of its own, a backend that computes with tensors, and one whose programs are native."""
    _run("""
        from tests.backends.simple import Walking
        class Mixed(Card):
            def __init__(self):
                super().__init__(chips=1)
                self.mixed = [*super().devices(), Walking(), tarry.backends.registry.find("torchscript")()]
            def devices(self):
                return self.mixed
        def train(devices):
            torch.manual_seed(0)
            layers = [nn.Linear(4, 4).to(device) for device in devices]
            optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=0.01)
            losses = []
            for _ in range(4):
                optimizer.zero_grad()
                x = torch.randn(3, 4)
                for layer, device in zip(layers, devices):
                    x = layer(x.to(device)).tanh()
                loss = x.square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses
        tarry.set_backend(Mixed())
        wanted = train(["cpu"] * 3)
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 1), (0, 2, 0)):
            torch.testing.assert_close(train([f"tarry:{k}" for k in order]), wanted)
        assert tarry.explain(torch.ones(3).to("tarry:2").sin(), stage="compiled").startswith("graph(%p0")
    """)
