"""Steps made of three parts: where a number is kept (`hostile_places.py`), by which route the step's code gets at it,
and what it does with it. `combined` draws combinations of the three, always the same ones."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.replay.hostile import Case, Make
from tests.replay.hostile_places import PLACES, Place

Read = Callable[[], float]
Route = Callable[[Read], Read]
Use = Callable[[str], Callable[[Tensor, float], Any]]


class Holder:
    """Has a way to read a number, under every name that Python knows for running code."""

    def __init__(self, read: Read) -> None:
        self.read = read

    def method(self) -> float:
        return self.read()

    @property
    def computed(self) -> float:
        return self.read()

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.read()

    def __call__(self) -> float:
        return self.read()

    def __getitem__(self, key: object) -> float:
        return self.read()

    def __add__(self, other: float) -> float:
        return self.read() + other

    def __float__(self) -> float:
        return float(self.read())

    def __bool__(self) -> bool:
        return self.read() > 2.5

    def __len__(self) -> int:
        return int(self.read())

    def __contains__(self, item: object) -> bool:
        return self.read() > 2.5

    def __eq__(self, other: object) -> bool:
        return self.read() > 2.5

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[float]:
        yield self.read()

    def __enter__(self) -> float:
        return self.read()

    def __exit__(self, *exc_info: object) -> None:
        return None

    def __format__(self, spec: str) -> str:
        return str(self.read())


class Layer(nn.Module):
    """Reads in forward."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.inner = [Holder(read)]

    def forward(self) -> float:
        return self.inner[0].read()


def _hops(read: Read, count: int) -> Read:
    return read if count == 0 else lambda: _hops(read, count - 1)()


def _wrapped(read: Read) -> Read:
    @functools.wraps(read)
    def wrapper() -> float:
        return read()

    return wrapper


def _hook(read: Read) -> Read:
    layer, found = nn.Identity(), [0.0]
    layer.register_forward_hook(lambda *_: found.__setitem__(0, read()))

    def through() -> float:
        layer(torch.zeros(()))
        return found.pop() if len(found) > 1 else found[0]

    return through


def _namespace(read: Read) -> Read:
    scope: dict[str, Any] = {"read": read}
    exec("def outer():\n    def inner():\n        return read()\n    return inner()", scope)
    return scope["outer"]  # type: ignore[no-any-return]


def _managed(read: Read) -> Read:
    @contextlib.contextmanager
    def manager() -> Iterator[float]:
        yield read()

    def through() -> float:
        with manager() as value:
            return value

    return through


def _by_holder(use: Callable[[Holder], float]) -> Route:
    def route(read: Read) -> Read:
        holder = Holder(read)
        return lambda: use(holder)

    return route


def _with(holder: Holder) -> float:
    with holder as value:
        return value


ROUTES: dict[str, Route] = {
    "itself": lambda read: read,
    "one function": lambda read: _hops(read, 1),
    "two functions": lambda read: _hops(read, 2),
    "five functions": lambda read: _hops(read, 5),
    "a default": lambda read: lambda r=read: r(),  # type: ignore[misc]
    "a keyword default": lambda read: lambda *, r=read: r(),  # type: ignore[misc]
    "a partial": lambda read: functools.partial(lambda r: r(), read),
    "a wrapper": _wrapped,
    "a list": lambda read: lambda r=[read]: r[0](),  # type: ignore[misc]
    "a dict": lambda read: lambda r={"a": {"b": read}}: r["a"]["b"](),  # type: ignore[misc]
    "map": lambda read: lambda: next(map(Holder.method, (Holder(read),))),
    "max with a key": lambda read: lambda: max((read(),), key=lambda v: v),
    "a generator": lambda read: lambda: sum(r() for r in (read,)),
    "a comprehension": lambda read: lambda: [read() for _ in range(2)][1],
    "an operator": lambda read: lambda: operator.call(read) if hasattr(operator, "call") else read(),
    "a module's forward": lambda read: Layer(read),
    "a hook": _hook,
    "exec": _namespace,
    "eval": lambda read: lambda: eval("read()", {"read": read}),
    "a context manager": _managed,
    "reduce": lambda read: lambda: functools.reduce(lambda a, b: a + b, [read(), 0.0]),
    "a recursion": lambda read: lambda: _recursive(read, 4),
    "a try": lambda read: lambda: _tried(read),
    "a method": _by_holder(lambda h: h.method()),
    "a bound method": lambda read: Holder(read).method,
    "a property": _by_holder(lambda h: h.computed),
    "__getattr__": _by_holder(lambda h: h.anything),
    "__call__": _by_holder(lambda h: h()),
    "__getitem__": _by_holder(lambda h: h[0]),
    "__add__": _by_holder(lambda h: h + 0.0),
    "__float__": _by_holder(float),
    "__bool__": _by_holder(lambda h: 3.0 if h else 2.0),
    "__len__": _by_holder(lambda h: float(len(h))),
    "__contains__": _by_holder(lambda h: 3.0 if 1 in h else 2.0),
    "__eq__": _by_holder(lambda h: 3.0 if h == 1 else 2.0),
    "__iter__": _by_holder(lambda h: next(iter(h))),
    "__enter__": _by_holder(_with),
    "__format__": _by_holder(lambda h: float(f"{h}")),
    "getattr": _by_holder(lambda h: getattr(h, "meth" + "od")()),
    "attrgetter": _by_holder(lambda h: operator.attrgetter("computed")(h)),
    "vars": _by_holder(lambda h: vars(h)["read"]()),
}


def _recursive(read: Read, depth: int) -> float:
    return read() if depth == 0 else _recursive(read, depth - 1)


def _tried(read: Read) -> float:
    try:
        raise KeyError(read())
    except KeyError as error:
        return error.args[0]  # type: ignore[no-any-return]


# ---- what is done with the number, which is 2.0 and becomes 3.0


def _stateless(use: Callable[[Tensor, float], Any]) -> Use:
    return lambda device: use


def _in_place(device: str) -> Callable[[Tensor, float], Any]:
    state = torch.zeros(3, device=device)

    def use(x: Tensor, v: float) -> Tensor:
        state.add_(x.sum(0), alpha=v)
        return state * 1

    return use


def _training(device: str) -> Callable[[Tensor, float], Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def use(x: Tensor, v: float) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) * v).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return use


def _chosen(device: str) -> Callable[[Tensor, float], Any]:
    weights = [torch.full((3,), float(k), device=device) for k in range(4)]
    return lambda x, v: x * weights[int(v)]


def _chosen_module(device: str) -> Callable[[Tensor, float], Any]:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3).to(device) for _ in range(4)])
    return lambda x, v: layers[int(v)](x).detach()


def _without_grad(device: str) -> Callable[[Tensor, float], Any]:
    weight = torch.ones(3, device=device, requires_grad=True)

    def use(x: Tensor, v: float) -> Tensor:
        weight.grad = None
        with torch.set_grad_enabled(v < 2.5):
            y = x * weight
        (y.sum() + (weight * 3).sum()).backward()
        assert weight.grad is not None
        return weight.grad * 1

    return use


def _custom(device: str) -> Callable[[Tensor, float], Any]:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, v: float) -> Tensor:
            ctx.v = v
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad * ctx.v, None

    weight = torch.ones(4, 3, device=device, requires_grad=True)

    def use(x: Tensor, v: float) -> Tensor:
        (found,) = torch.autograd.grad(Scaled.apply(weight, v).sum(), weight)
        return found + x

    return use


USES: dict[str, Use] = {
    "factor": _stateless(lambda x, v: x * v + 1),
    "summand": _stateless(lambda x, v: (x + v).tanh()),
    "exponent": _stateless(lambda x, v: x.abs().pow(v)),
    "branch": _stateless(lambda x, v: x.sin() if v > 2.5 else x.cos()),
    "slice": _stateless(lambda x, v: x[: int(v)] * 2),
    "view": _stateless(lambda x, v: x[int(v) - 2] * 2),
    "index": _stateless(lambda x, v: x.select(0, int(v)).sum()),
    "dimension": _stateless(lambda x, v: x.sum(int(v) - 2)),
    "shape": _stateless(lambda x, v: x.repeat(int(v), 1).sum(0)),
    "dtype": _stateless(lambda x, v: x.to(torch.float64 if v > 2.5 else torch.float16)),
    "loop": _stateless(lambda x, v: functools.reduce(lambda y, _: y * 1.5, range(int(v)), x)),
    "full": _stateless(lambda x, v: torch.full_like(x, v) * x),
    "tensor": _stateless(lambda x, v: torch.tensor([v, 1.0, v], device=x.device) * x),
    "arange": _stateless(lambda x, v: torch.arange(int(v), device=x.device).sum() + x),
    "dropout": _stateless(lambda x, v: F.dropout(x, 0.0 if v < 2.5 else 1.0, True) + 1),
    "clamp": _stateless(lambda x, v: (x * 10).clamp(-v, v)),
    "where": _stateless(lambda x, v: torch.where(x > v - 2.5, x, -x)),
    "transpose": _stateless(lambda x, v: x.t() @ x if v < 2.5 else x @ x.t()),
    "order": _stateless(lambda x, v: (x.exp(), x.sin())[:: 1 if v < 2.5 else -1]),
    "a number": _stateless(lambda x, v: (x * 2, v)),
    "a key": _stateless(lambda x, v: {str(v): x * 2}),
    "nothing": _stateless(lambda x, v: x * 2 if v < 2.5 else None),
    "the argument": _stateless(lambda x, v: x * 1 if v < 2.5 else x),
    "in place": _in_place,
    "training": _training,
    "which tensor": _chosen,
    "which module": _chosen_module,
    "grad mode": _without_grad,
    "a backward": _custom,
}

WHEN: dict[str, Callable[[int], float]] = {
    "once": lambda k: 3.0 if k >= 7 else 2.0,
    "for a while": lambda k: 3.0 if 9 <= k < 28 else 2.0,
    "late": lambda k: 3.0 if k >= 16 else 2.0,
}
SET_ONCE = ("file_exists", "event", "lock", "ordered_dict", "set")


def make(place: Callable[[], Place], route: Route, use: Use, when: Callable[[int], float]) -> Make:
    def made(device: str) -> Case:
        read, write = place()
        through, apply, now = route(read), use(device), [2.0]

        def before(k: int) -> None:
            if when(k) != now[0]:
                now[0] = when(k)
                write(now[0])

        return Case(lambda x: apply(x, through()), before=before)

    return made


def combined(count: int) -> dict[str, Make]:
    """Each place, route and use comes as often as any other."""
    draw = random.Random(0)
    made: dict[str, Make] = {}
    while len(made) < count:
        place, route = sorted(PLACES)[len(made) % len(PLACES)], sorted(ROUTES)[len(made) % len(ROUTES)]
        use, when = draw.choice(sorted(USES)), draw.choice(["once", "late"] if place in SET_ONCE else sorted(WHEN))
        made[f"{place}, {route}, {use}, {when}"] = make(PLACES[place], ROUTES[route], USES[use], WHEN[when])
    return made
