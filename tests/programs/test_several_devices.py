"""Programs that use two devices of one process train as on the CPU: layers on both, a copy on each, a pipeline."""

from __future__ import annotations

import pytest

from tests.support.scripts import run_script

pytestmark = pytest.mark.process

_PRELUDE = """
    import copy
    import torch, tarry
    import torch.nn.functional as F
    from torch import nn
    from chip import Card
    from tests.backends.simple import Walking
    from tests.backends.simulated import Accelerator, Asynchronous, Updating

    class Pair(Walking):
        '''Two devices of a kind.'''
        def __init__(self, kind):
            super().__init__()
            self.both = [kind(), kind()]
        def devices(self):
            return self.both
        def setup(self):
            for one in self.both: one.setup()
        def teardown(self):
            for one in self.both: one.teardown()

    def eager():
        return tarry.backends.registry.find("eager")()

    def torchscript():
        return tarry.backends.registry.find("torchscript")()

    def inductor():
        return tarry.backends.registry.find("inductor")()

    def check(train, kinds):
        torch.manual_seed(0)
        wanted = train("cpu", "cpu")
        for kind in kinds:
            tarry.set_backend(Card() if kind is Card else Pair(kind), compile="wait")
            for devices in (("tarry:0", "tarry:1"), ("tarry:1", "tarry:0"), ("tarry:1", "tarry:1")):
                torch.manual_seed(0)
                made = train(*devices)
                for mine, theirs in zip(made, wanted, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=f"{kind} {devices}")
"""
_KINDS = ["[Card, Walking, Accelerator]", "[Updating, Asynchronous]", "[eager, torchscript]"]


def _run(script: str, kinds: str) -> str:
    return run_script(script + f"\n        check(train, {kinds})\n", _PRELUDE)


@pytest.mark.parametrize("kinds", [*_KINDS, pytest.param("[inductor]", marks=pytest.mark.slow)])
def test_layers_on_two_devices(kinds: str) -> None:
    _run(
        """
        class Net(nn.Module):
            def __init__(self, first, second):
                super().__init__()
                self.first, self.second = first, second
                self.a = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()).to(first)
                self.b = nn.Sequential(nn.Flatten(), nn.Linear(144, 16)).to(second)
                self.c = nn.Linear(16, 3).to(first)
            def forward(self, x):
                y = self.b(self.a(x.to(self.first)).to(self.second)).tanh()
                return self.c(y.to(self.first))               # there and back

        def train(first, second):
            net = Net(first, second)
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            losses = []
            for _ in range(5):
                x, y = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y.to(first))
                loss.backward()
                norm = nn.utils.clip_grad_norm_([p for p in net.parameters()], 1.0)
                optimizer.step()
                scheduler.step()
                losses += [loss.item(), norm.item()]
            return [torch.tensor(losses), *(v.detach().cpu() for v in net.state_dict().values())]
        """,
        kinds,
    )


@pytest.mark.parametrize("kinds", _KINDS)
def test_a_copy_on_each_device(kinds: str) -> None:
    _run(
        """
        def train(first, second):
            nets = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)) for _ in range(2)]
            nets[1].load_state_dict(nets[0].state_dict())
            nets = [nets[0].to(first), nets[1].to(second)]
            optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in nets]
            for _ in range(4):
                x, y = torch.randn(8, 4), torch.randn(8, 2)
                for net, part, wanted in zip(nets, x.chunk(2), y.chunk(2)):
                    net.zero_grad()
                    device = next(net.parameters()).device
                    F.mse_loss(net(part.to(device)), wanted.to(device)).backward()
                for a, b in zip(nets[0].parameters(), nets[1].parameters()):   # all-reduce
                    mean = (a.grad + b.grad.to(a.device)) / 2
                    a.grad.copy_(mean)
                    b.grad.copy_(mean)
                for optimizer in optimizers:
                    optimizer.step()
            made = [[p.detach().cpu() for p in net.parameters()] for net in nets]
            for a, b in zip(*made):
                torch.testing.assert_close(a, b)
            return made[0]
        """,
        kinds,
    )


@pytest.mark.parametrize("kinds", _KINDS)
def test_a_pipeline_of_parts(kinds: str) -> None:
    _run(
        """
        def train(first, second):
            a, b = nn.Linear(4, 8).to(first), nn.Linear(8, 1).to(second)
            optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.05, momentum=0.9)
            shared = nn.Parameter(torch.ones(8).to(first))    # both devices use it
            optimizer.add_param_group({"params": [shared]})
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                total = torch.zeros((), device=second)
                for part in torch.randn(8, 4).chunk(4):
                    hidden = (a(part.to(first)) * shared).relu().to(second)
                    loss = (b(hidden) * shared.to(second).sum()).square().mean()
                    loss.backward()
                    total += loss.detach()
                optimizer.step()
                losses.append(total.item())
            return [torch.tensor(losses), a.weight.detach().cpu(), b.weight.detach().cpu(), shared.detach().cpu()]
        """,
        kinds,
    )


@pytest.mark.parametrize("kinds", ["[Card, Updating, eager]"])
def test_a_step_that_is_replayed_and_checkpointed_layers(kinds: str) -> None:
    _run(
        """
        from torch.utils.checkpoint import checkpoint

        def train(first, second):
            a, b = nn.Linear(4, 8).to(first), nn.Linear(8, 1).to(second)
            optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.05)
            def step(x):
                optimizer.zero_grad()
                hidden = checkpoint(lambda t: a(t).relu(), x, use_reentrant=False)
                loss = b(hidden.to(second)).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()
            replayed = step if first == "cpu" else tarry.compile(step)
            losses = [replayed(torch.randn(5, 4).to(first)).item() for _ in range(8)]
            return [torch.tensor(losses), a.weight.detach().cpu(), b.weight.detach().cpu()]
        """,
        kinds,
    )


def test_data_parallel_itself() -> None:
    run_script(
        """
        import warnings
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Was asked to gather")

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
                self.phase = nn.Parameter(torch.randn(2, dtype=torch.complex64))
            def forward(self, x, scale=1.0):
                return self.layers(x) * scale * self.phase.abs(), x.sum()

        torch.manual_seed(0)
        net, x, y = Net(), torch.randn(5, 4, 4), torch.randn(5, 4, 2)
        net.layers[0].bias.requires_grad_(False)     # batch norm takes it away again

        def train(net, forward, device):
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
            losses = []
            for a, b in zip(x, y):
                optimizer.zero_grad()
                loss = (forward(a) - b.to(device)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return [torch.tensor(losses), *(p.detach().cpu() for p in net.parameters())]

        def in_halves(module):
            def forward(x):
                halves = [module(part, scale=2.0) for part in x.chunk(2)]   # statistics of each half
                return torch.cat([out for out, _ in halves])
            return forward

        wanted = train(ours := copy.deepcopy(net), in_halves(ours), "cpu")
        for make in (Card, lambda: Pair(Walking), lambda: Pair(eager)):
            tarry.set_backend(make())
            for upload in (False, True):             # what is on the host is scattered from there
                there = copy.deepcopy(net).to("tarry:0")
                parallel = nn.DataParallel(there)
                assert parallel.device_ids == [0, 1]
                def forward(x):
                    out, sums = parallel(x.to("tarry:0") if upload else x, scale=2.0)
                    assert out.device.index == 0 and sums.shape == (2,)
                    return out
                for mine, theirs in zip(train(there, forward, "tarry:0"), wanted, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        backwards = nn.DataParallel(copy.deepcopy(net).to("tarry:1"), device_ids=[1, 0], output_device=0)
        assert backwards(x[0].to("tarry:1"))[0].device.index == 0
        moved = torch.nn.parallel.comm.reduce_add([torch.ones(2, device="tarry:0"), torch.ones(2, device="tarry:1")], 1)
        assert moved.device.index == 1 and moved.tolist() == [2.0, 2.0]
        assert torch.nn.parallel.comm.gather([moved, moved.to("tarry:0")], 0, -1).tolist() == [2.0] * 4
        """,
        _PRELUDE,
    )
