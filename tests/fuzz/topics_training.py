"""Topics of random programs: training, and autocast."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.aliasing.world import World
from tests.fuzz.drawn import Drawn

_NETS = (
    "nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))",
    "nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2, bias=False))",
    "nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 2))",
    "nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Flatten(), nn.Linear(27, 2))",
    "nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 2)).double()",
)
_OPTIMIZERS = (
    "SGD(ps, lr=0.1)",
    "SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "SGD(ps, lr=0.1, momentum=0.9, dampening=0.1, maximize=True)",
    "Adam(ps, lr=0.01)",
    "Adam(ps, lr=0.01, amsgrad=True, weight_decay=0.1)",
    "AdamW(ps, lr=0.01, foreach=True)",
    "AdamW(ps, lr=0.01, foreach=False)",
    "AdamW(ps, lr=0.01, fused=True)",
    "RMSprop(ps, lr=0.01, momentum=0.5, centered=True)",
    "Adagrad(ps, lr=0.01, lr_decay=0.1)",
    "Adadelta(ps)",
    "Adamax(ps, lr=0.01)",
    "NAdam(ps, lr=0.01)",
    "RAdam(ps, lr=0.01)",
    "Rprop(ps, lr=0.01)",
    "ASGD(ps, lr=0.01)",
)


def training(world: World, data: st.DataObject) -> None:
    d = Drawn(data)
    world.run("from torch import nn, optim")
    torch_seed = d.int(0, 3)
    world.run(f"torch.manual_seed({torch_seed})\nnet = {d.pick(_NETS)}.to(D)\nps = list(net.parameters())")
    world.run(f"o = optim.{d.pick(_OPTIMIZERS)}")
    if d.int(0, 2) == 0:
        scheduler = d.pick(("StepLR(o, 2, 0.5)", "CosineAnnealingLR(o, 3)", "ExponentialLR(o, 0.5)"))
        world.run(f"s = optim.lr_scheduler.{scheduler}")
    world.run("losses = []")
    before = d.pick(("", "\nnn.utils.clip_grad_norm_(ps, 0.5)", "\nnn.utils.clip_grad_value_(ps, 0.1)"))
    zero = d.pick(("o.zero_grad()", "o.zero_grad(set_to_none=False)", "for p in ps: p.grad = None"))
    read = d.pick(("", "\nlosses.append(round(loss.item(), 3))", "\nlosses.append(loss.detach())"))
    early = d.pick(("", "\nloss.item()"))
    for _ in range(d.int(1, 5)):
        rows = d.pick((3, 3, 3, 4, 5))  # of two, BatchNorm makes the same, and gradients are rounding errors
        kind = d.int(0, 7)
        if kind == 0:
            world.run(
                d.pick(
                    (
                        "cut()",
                        "state = o.state_dict()\no.load_state_dict(state)",
                        "net.eval()",
                        "net.train()",
                        "ps[0].requires_grad_(False)",
                        "ps[0].requires_grad_(True)",
                    )
                )
            )
        world.run(
            f"x = torch.arange({rows} * 4.0).mul(1.7).sin().reshape({rows}, 4).to(D, next(net.parameters()).dtype)\n"
            f"loss = net(x).square().mean(){early}\n{zero}\nloss.backward(){before}\no.step(){read}"
        )
        if "s" in world.cpu:
            world.run("s.step()")
    world.run("for k, v in net.state_dict().items(): globals()['v_' + k.replace('.', '_')] = v.detach().clone()")
    world.names += [name for name in world.cpu if name.startswith("v_")]
    world.check_all()


_CAST = (
    "{a} @ {b}",
    "torch.nn.functional.linear({a}, p1)",
    "({a} @ p1).relu()",
    "{a} + {b}",
    "{a}.float() * {b}",
    "torch.bmm({a}[None], {b}[None])[0]",
    "torch.matmul({a}, p0).float()",
)


def amp(world: World, data: st.DataObject) -> None:
    """Autocast: dtypes must be those that it says; values are those of low precision."""
    d = Drawn(data)
    for k, shape in enumerate(((4, 4), (4, 4))):
        world.run(
            f"p{k} = (torch.arange(16, device=D, dtype=torch.float32).reshape({shape}) / 16 - {k}).requires_grad_()"
        )
    values = ["p0", "p1"]
    world.run("A = lambda: torch.autocast(D, dtype=torch.bfloat16)")
    for _ in range(d.int(1, 8)):
        a, b = d.pick(values), d.pick(values)
        inner = d.pick(_CAST).format(a=a, b=b)
        name = world.fresh()
        line = f"with A(): {name} = {inner}" if d.int(0, 3) else f"{name} = ({inner})"
        if world.run(line, (name,)) and name in world.names:
            values.append(name)
        if d.int(0, 4) == 0:
            world.run("cut()")
    world.run(f"{values[-1]}.float().sum().backward()")
    for k in range(2):
        world.run(f"g{k} = p{k}.grad")
        world.names += [f"g{k}"] if world.cpu.get(f"g{k}") is not None else []
    world.check_all()
