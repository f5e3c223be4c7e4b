"""What random programs are made of. A topic writes lines into a world, one at a time, and looks at what they made."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.aliasing.test_random_programs import write_gradients, write_views
from tests.aliasing.world import World, overlaps_itself, overlaps_partly
from tests.fuzz.drawn import DTYPES, SIZES, Drawn, Topic, make
from tests.fuzz.topics_training import amp, training

# ---- views and writes through them


def views(world: World, data: st.DataObject) -> None:
    write_views(world, data, 25)


def gradients_of_views(world: World, data: st.DataObject) -> None:
    write_gradients(world, data, 15)


# ---- out=, resizing, storages


def out(world: World, data: st.DataObject) -> None:
    d = Drawn(data)
    for k in range(d.int(2, 4)):
        shape = d.pick(((3,), (2, 3), (3, 2), (1, 3), (6,), (0,), ()))
        make(world, f"torch.arange({k}, {k} + {_count(shape)}, device=D).reshape({shape}).to(torch.{d.pick(_WIDE)})")
    for _ in range(d.int(1, 10)):
        a, b, target = (d.pick(world.names) for _ in range(3))
        kind = d.int(0, 5)
        if kind == 0:
            d.pick((_empty_out, _view))(world, d, a)
        elif kind == 1:
            world.run(d.pick(("cut()", f"read({a})")))
        elif kind == 2:
            _storage(world, d, target)
        elif not overlaps_itself(world[target]) and not any(overlaps_partly(world[target], world[s]) for s in (a, b)):
            text = d.pick(_OUT)
            pointwise = any(name in text for name in _POINTWISE)
            shares = [s for s in (a, b) if _share(world, target, s)]
            harmless = pointwise and all(world[target].shape == world[s].shape for s in shares)
            if shares and not harmless:
                continue  # eager would read what it has just written
            if not world.run(text.format(a=a, b=b, t=target)):
                world.run(f"{target}.zero_()")  # eager may have grown it before it refused
    world.check_all()


_POINTWISE = ("add", "mul(", "sub", "neg", "abs", "clamp", "maximum", "logical_not", "copy_", "eq(")
_WIDE = ("float32", "float64", "int64", "int32", "complex64", "bool")
_OUT = (
    "torch.add({a}, {b}, out={t})",
    "torch.mul({a}, 2, out={t})",
    "torch.sub({a}, {b}, alpha=3, out={t})",
    "torch.sum({a}, out={t})",
    "torch.sum({a}, 0, out={t})",
    "torch.cat([{a}.flatten(), {b}.flatten()], out={t})",
    "torch.stack([{a}, {a}], out={t})",
    "torch.where({a} == {b}, {a}, {b})",
    "torch.eq({a}, {b}, out={t})",
    "torch.cumsum({a}, 0, out={t})",
    "torch.neg({a}, out={t})",
    "torch.abs({a}, out={t})",
    "torch.clamp({a}, max=2, out={t})",
    "torch.matmul({a}, {b}, out={t})",
    "torch.index_select({a}, 0, torch.tensor([0], device=D), out={t})",
    "torch.arange(4, out={t})",
    "torch.linspace(0, 1, 5, out={t})",
    "torch.zeros((2, 2), out={t})",
    "torch.full((3,), 2, out={t})",
    "torch.logical_not({a}, out={t})",
    "torch.mean({a}, 0, out={t})",
    "torch.maximum({a}, {b}, out={t})",
    "{t}.copy_({a})",
    "{t}.add_({a})",
)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _share(world: World, a: str, b: str) -> bool:
    return world[a].untyped_storage()._cdata == world[b].untyped_storage()._cdata


def _empty_out(world: World, d: Drawn, like: str) -> None:
    make(world, f"torch.empty(0, dtype={world[like].dtype}, device=D)")


def _view(world: World, d: Drawn, of: str) -> None:
    make(
        world,
        d.pick(("{0}[1:]", "{0}.t()", "{0}[::2]", "{0}.flatten()", "{0}.unsqueeze(0)", "{0}.detach()")).format(of),
    )


def _storage(world: World, d: Drawn, target: str) -> None:
    t = world[target]
    numel = t.untyped_storage().nbytes() // max(t.element_size(), 1)
    other = d.pick(world.names)
    lines = [
        f"{target}.resize_(0)",
        f"{target}.resize_(1, 2).fill_(1)",
        f"{target}.resize_(7).fill_(2)",
        f"{target}.untyped_storage().fill_(0)",
        f"{target}.untyped_storage().resize_({t.untyped_storage().nbytes()})",
        f"r = {target}.untyped_storage().nbytes(), {target}.data_ptr() == {target}.untyped_storage().data_ptr()",
        f"{target}.set_()",
        f"{target} = {target}.clone()",
    ]
    if world[other].dtype == t.dtype:
        lines += [
            f"{target}.set_({other})",
            f"{target}.data = {other}",
            f"{target}.untyped_storage().copy_({other}.untyped_storage())",
        ]
    if numel:
        lines.append(f"{target}.set_({target}.untyped_storage(), {d.int(0, numel - 1)}, (1,), (1,))")
    line = d.pick(lines)
    if "untyped_storage().copy_" in line and t.untyped_storage().nbytes() != world[other].untyped_storage().nbytes():
        return
    if world.run(line) and line.startswith("r ="):
        world.check_variable("r")


# ---- dtypes


def dtypes(world: World, data: st.DataObject) -> None:
    d = Drawn(data)
    for _ in range(d.int(2, 4)):
        dtype = d.pick(DTYPES)
        values = "[0, 1, 2, 3, 7, 100]" if dtype in ("bool", "uint8") else "[-3, -1, 0, 1, 2, 100]"
        shape = d.pick(("", ".reshape(2, 3)", "[2]"))
        make(world, f"torch.tensor({values}, device=D).to(torch.{dtype}){shape}")
    for _ in range(d.int(1, 10)):
        a, b = d.pick(world.names), d.pick([*world.names, *_NUMBERS])
        if d.int(0, 5) == 0:
            world.run(d.pick(("cut()", f"read({a})")))
        elif d.int(0, 3) == 0:
            if not overlaps_itself(world[a]):
                world.run(d.pick(_INPLACE).format(a=a, b=b))
        else:
            make(world, d.pick(_BINARY).format(a=a, b=b))
    world.check_all()


_NUMBERS = ("2", "2.5", "True", "-1", "0.0", "-0.0", "3j", "1e10", "float('nan')", "float('inf')")
_BINARY = (
    "{a} + {b}",
    "{a} - {b}",
    "{a} * {b}",
    "{a} / {b}",
    "{b} - {a}",
    "{a} == {b}",
    "{a} < {b}",
    "{a} & {b}",
    "{a} ** 2",
    "{a} ** {b}",
    "torch.maximum({a}, torch.as_tensor({b}, device=D))",
    "torch.where({a} == {b}, {a}, {b})",
    "torch.result_type({a}, {b}) and {a}.to(torch.result_type({a}, {b}))",
    "{a}.sum()",
    "{a}.mean()",
    "{a}.prod()",
    "{a}.cumsum(-1)",
    "{a}.amax()",
    "{a}.to(torch.float32)",
    "{a}.to(torch.int64)",
    "{a}.to(torch.bfloat16).to(torch.float32)",
    "{a}.bool()",
    "{a}.sqrt()",
    "{a}.exp()",
    "{a}.sigmoid()",
    "-{a}",
    "~{a}",
    "{a}.abs()",
    "{a}.sign()",
    "{a}.clamp(0, 5)",
    "{a}.reciprocal()",
    "torch.atan2({a}, torch.as_tensor({b}, device=D))",
    "torch.div({a}, {b}, rounding_mode='floor')",
    "torch.div({a}, {b}, rounding_mode='trunc')",
    "torch.addcmul({a}, {a}, {a}, value=2)",
    "torch.lerp({a}, {a}, 0.5)",
    "torch.cat([{a}.flatten(), {a}.flatten().to(torch.float32)])",
    "{a}.softmax(-1)",
    "{a}.argmax()",
    "{a}.sort().values",
    "{a}.std()",
    "{a}.new_tensor([1, 2, 3])",
    "{a}.isnan()",
    "{a}.nan_to_num()",
    "{a}.round()",
)
_INPLACE = (
    "{a}.add_({b})",
    "{a}.sub_({b})",
    "{a}.mul_({b})",
    "{a}.div_({b})",
    "{a}.copy_(torch.as_tensor({b}, device=D))",
    "{a}.fill_({b})",
    "{a}.clamp_(min=0)",
    "{a}.masked_fill_({a} == 1, {b})",
    "{a}.eq_({b})",
    "{a}.pow_(2)",
    "{a}.sqrt_()",
    "{a}.neg_()",
    "{a}.add_({b}, alpha=2)",
)


# ---- autograd


def autograd(world: World, data: st.DataObject) -> None:
    d = Drawn(data)
    n = d.pick((1, 2, 3, 5))
    for k in range(2):
        world.run(f"p{k} = (torch.arange({n * n}.0, device=D).double().reshape({n}, {n}) / 7 + {k}).requires_grad_()")
    world.run("seen = []")
    values = ["p0", "p1"]
    for _ in range(d.int(2, 10)):
        kind, a, b = d.int(0, 9), d.pick(values), d.pick(values)
        if kind <= 5:
            name = make(world, d.pick(_SMOOTH).format(a=a, b=b))
            values += [name] if name and world[name].shape == (n, n) else []
        elif kind == 6:
            world.run(
                d.pick(
                    (
                        f"{a}.register_hook(lambda g: g * 2)",
                        f"{a}.register_hook(lambda g: seen.append(tuple(g.shape)))",
                        f"{a}.retain_grad()",
                    )
                )
            )
        elif kind == 7:
            world.run(
                d.pick(
                    (
                        f"with torch.no_grad(): {a}.mul_(0.5)",
                        f"{a}.data.mul_(0.5)",
                        f"{a} = {a}.detach().requires_grad_()",
                    )
                )
            )
        elif kind == 8:
            world.run(d.pick(("cut()", f"read({a})", f"r = {a}.sum().item()")))
        else:
            world.run(f"({a} * {b}).sum().backward(retain_graph=True)")
    last = values[-1]
    end = d.int(0, 4)
    if end == 0:
        world.run(f"{last}.sum().backward()")
    elif end == 1:
        world.run(f"{last}.square().sum().backward(retain_graph=True)\n{last}.sum().backward()")
    elif end == 2:
        world.run(f"g, = torch.autograd.grad({last}.square().sum(), [p0], create_graph=True, allow_unused=True)")
        world.run("g.square().sum().backward() if g is not None else None")
    elif end == 3:
        world.run(f"g, h = torch.autograd.grad({last}.sum(), [p0, p1], allow_unused=True)")
    else:
        world.run(f"{last}.backward(torch.ones_like({last}))")
    for k in range(2):
        world.run(f"g{k} = p{k}.grad")
        world.names += [f"g{k}"] if world.cpu.get(f"g{k}") is not None else []
    world.run("r = seen")
    world.check_variable("r")
    world.check_all()


_SMOOTH = (
    "{a} * {b}",
    "{a} + {b}.t()",
    "{a} @ {b}",
    "{a}.sin() * {b}",
    "{a}.exp().clamp(max=10)",
    "{a}.relu()",
    "torch.cat([{a}, {b}])[::2][:{a}.shape[0]]",
    "{a}.softmax(-1)",
    "{a} / ({b}.square() + 1)",
    "{a}.cumsum(0)",
    "torch.where({a} > 1, {a}, {b} * 3)",
    "{a}.clone().mul_({b})",
    "{a}.clone().index_fill_(0, torch.tensor([0], device=D), 2.0)",
    "{a}.flip(0)",
    "{a}.tril()",
    "{a}.sum(0, keepdim=True).expand_as({a}) * {b}",
    "{a}.diagonal().diag_embed() + {b}",
    "{a}.sort(0).values",
    "{a}[:, torch.tensor([0] * {a}.shape[1], device=D)] * {b}",
    "{a}.logsumexp(0) * {b}",
    "torch.einsum('ij,jk->ik', {a}, {b})",
    "torch.nn.functional.layer_norm({a}, ({a}.shape[1],))",
    "torch.utils.checkpoint.checkpoint(lambda x: x.sin() * x, {a}, use_reentrant=False)",
    "torch.nn.functional.gelu({a})",
    "{a}.prod(0) + {b}",
    "{a}.std(0) + {b} if {a}.shape[0] > 1 else {a}",
    "{a}.detach() * {b}",
)


# ---- torch.func

_FUNCTIONS = (
    "lambda x: (x.sin() * x).sum()",
    "lambda x: (x @ x.t()).tanh().sum() if x.dim() == 2 else (x * x).sum()",
    "lambda x: x.softmax(-1)[..., 0].sum()",
    "lambda x: (x.cumsum(-1) / (x.square().sum() + 1)).sum()",
    "lambda x: torch.where(x > 0, x.square(), x).mean()",
    "lambda x: x.clone().mul_(2).add_(x).sum()",
    "lambda x: x.logsumexp(-1).sum()",
    "lambda x: torch.zeros_like(x).copy_(x).mul(x).sum()",
    "lambda x: x.norm()",
    "lambda x: (x[..., 0] * x[..., -1]).sum()",
)


def functions(world: World, data: st.DataObject) -> None:
    d = Drawn(data)
    world.run("import torch.func as tf")
    for _ in range(d.int(1, 4)):
        n, m = d.pick((1, 2, 3, 5)), d.pick((1, 2, 4))
        x = make(world, f"torch.linspace(-1, 2, {n * m}, device=D, dtype=torch.float64).reshape({n}, {m})")
        world.run(f"f = {d.pick(_FUNCTIONS)}")
        make(
            world,
            d.pick(
                (
                    "tf.vmap(f)({x})",
                    "tf.grad(f)({x})",
                    "tf.vmap(tf.grad(f))({x})",
                    "tf.jvp(f, ({x},), (torch.ones_like({x}),))[1]",
                    "tf.vjp(f, {x})[1](torch.ones((), device=D, dtype=torch.float64))[0]",
                    "tf.jacrev(f)({x})",
                    "tf.jacfwd(f)({x})",
                    "tf.hessian(f)({x})",
                    "tf.vmap(f, in_dims=1)({x})",
                    "tf.grad(lambda y: tf.grad(f)(y).square().sum())({x})",
                    "tf.vmap(tf.vmap(lambda y: y.sin() * y))({x})",
                    "tf.vmap(lambda y, z: (y * z).sum(), in_dims=(0, None))({x}, {x}[0])",
                    "tf.grad_and_value(f)({x})[0]",
                    "tf.vmap(lambda y: y.index_fill(0, torch.tensor([0], device=D), 3.0))({x})",
                    "tf.functionalize(f)({x})",
                )
            ).format(x=x),
        )
        if d.int(0, 2) == 0:
            world.run("cut()")
    world.check_all()


# ---- the same lines with other sizes, and with one thing changed

_SIZED = (
    "x * 2 + 1",
    "x.sum()",
    "x.sum(0) / (n + 1)",
    "x.softmax(0)",
    "x @ x.t()",
    "x.t().contiguous()",
    "torch.cat([x, x])",
    "x[n // 2:]",
    "x[:-1]",
    "x.reshape(-1)",
    "x.view(n, 3, 1).expand(n, 3, 2).sum(-1)",
    "torch.zeros(n, device=D) + x[:, 0]",
    "torch.arange(n, device=D) * 2",
    "x.mean(0)",
    "x.clone().add_(n)",
    "x.cumsum(0)",
    "x.flip(0)",
    "x.new_ones(n, n).tril().sum(0)",
    "torch.nn.functional.pad(x, (0, 0, 1, 2))",
    "x.unsqueeze(0).repeat(2, 1, 1)",
    "torch.eye(n, device=D) @ x",
    "x.index_select(0, torch.arange(n, device=D).flip(0))",
    "x.std(0)",
    "x.amax(1)",
    "x.transpose(0, 1).reshape(-1)",
    "torch.stack([x, x], 1).view(2 * n, 3)",
    "x[:, None] - x[None]",
    "x.argsort(0)",
    "x.masked_fill(x > n, 0.0)",
)


def sizes(world: World, data: st.DataObject) -> None:
    d = Drawn(data)
    chosen = d.some(_SIZED, 1, 4)
    body = ", ".join(f"({text})" for text in chosen)
    inplace = d.pick(("", "x.mul_(1.5); ", "x[:1] = 0; ", "x[n // 2:].add_(1); "))
    world.run(f"def f(x, n):\n    {inplace}return {body},")
    for n in d.some(SIZES, 2, 6):
        world.names.clear()
        world.run(f"x = torch.arange({n} * 3, device=D, dtype=torch.float32).reshape({n}, 3) + 0.5")
        world.run(f"y = f(x, {n})")
        if "y" not in world.cpu:
            continue
        for k in range(len(chosen)):
            world.run(f"y{k} = y[{k}]", (f"y{k}",))
        world.names.append("x")
        world.check_all()
        world.names.clear()
        world.run(f"del y, {', '.join(f'y{k}' for k in range(len(chosen)))}")


#: Lines with one hole, and what may stand there: each must give its own result.
_HOLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("x + {}", ("1", "1.0", "True", "2", "-0.0", "0.0")),
    ("x * {}", ("2", "2.0", "0.0", "-0.0", "float('nan')", "float('inf')")),
    ("i + {}", ("1", "1.0", "True", "2", "1j")),
    ("i * {}", ("2", "2.0", "True")),
    ("x.sum({})", ("0", "1", "-1", "(0, 1)", "0, keepdim=True", "dtype=torch.float64")),
    ("x.to({})", ("torch.float64", "torch.int64", "torch.bfloat16", "torch.bool", "torch.float32")),
    ("torch.div(x, 2.0, rounding_mode={})", ("None", "'floor'", "'trunc'")),
    ("torch.add(x, x, alpha={})", ("1", "2", "0.5", "-1")),
    ("x.std({})", ("0", "1", "0, correction=0", "0, correction=2")),
    ("x.tril({})", ("0", "1", "-1")),
    ("x.clamp({})", ("min=0", "max=0", "0, 1", "0.0, 1.5", "min=1")),
    ("x.softmax({})", ("0", "1", "-1")),
    ("x.cumsum({})", ("0", "1")),
    ("torch.full((2, 3), {}, device=D)", ("1", "1.0", "True", "2", "-0.0")),
    ("torch.arange({}, device=D)", ("3", "3.0", "0, 3", "1, 4", "0, 6, 2")),
    ("torch.nn.functional.gelu(x, approximate={})", ("'none'", "'tanh'")),
    (
        "torch.nn.functional.interpolate(x[None, None], scale_factor=2, mode={})",
        ("'nearest'", "'bilinear'", "'bicubic'"),
    ),
    ("torch.nn.functional.mse_loss(x, x * 2, reduction={})", ("'mean'", "'sum'", "'none'")),
    ("{}.sum(0)", ("x", "x.t()", "x[:, :2]", "x[1:]", "x[::2]", "x.double()", "x[:, ::2]")),
    ("{} @ x.t()", ("x", "x.flip(0)", "x[1:]", "x.clone()")),
    ("x.clone().mul_({})", ("1", "2", "0.5", "x", "x[0]", "x[:, :1]")),
    ("x.sort({}).values", ("0", "1", "0, descending=True")),
    ("x.topk(2, {}).values", ("0", "1", "largest=False")),
    ("torch.where(x > {}, x, 0.0)", ("0", "1", "1.5", "x.mean()")),
    ("x.masked_fill(x > 1, {})", ("0", "1.5", "float('-inf')", "float('nan')")),
    ("torch.linspace(0, 1, {}, device=D)", ("2", "3", "5")),
    ("x.roll({})", ("1", "2", "-1", "(1, 1), (0, 1)")),
    ("x ** {}", ("2", "2.0", "3", "0.5", "-1", "0")),
    ("i ** {}", ("2", "3", "0", "2.0")),
    ("x.quantile({})", ("0.5", "0.25", "0.75")),
    ("x.norm({})", ("1", "2", "float('inf')", "0")),
    (
        "torch.nn.functional.pad(x, {})",
        ("(1, 1)", "(0, 1)", "(1, 0, 1, 0)", "(1, 1), value=3.0", "(1, 1), mode='replicate'"),
    ),
    ("x.expand({})[0]", ("2, -1, -1", "3, -1, -1")),
    ("x.view({})", ("3, 2", "6", "1, 6", "2, 3")),
    ("x.permute({})", ("0, 1", "1, 0")),
    ("x.as_strided({})", ("(2,), (1,)", "(2,), (2,)", "(2,), (1,), 1", "(2, 2), (1, 1)")),
    ("torch.tensor({}, device=D) * x", ("1", "2.0", "[1.0, 2.0, 3.0]", "[3.0, 2.0, 1.0]", "True")),
    ("torch.nn.functional.dropout(x, {}, training=False)", ("0.1", "0.5")),
    ("torch.nn.functional.leaky_relu(x - 2, {})", ("0.1", "0.5", "0.0", "-0.0")),
    ("torch.isclose(x, x + 0.1, atol={})", ("0.2", "0.01")),
    ("torch.cat([x, x], {})", ("0", "1", "-1")),
    ("torch.cat({})", ("[x, x]", "[x]", "[x, x, x]", "[x, x * 2]")),
    ("x[{}]", ("0", "1", "-1", "..., 0", "[0, 1]", "[1, 0]", "None", "x > 1", "torch.tensor([1, 0], device=D)")),
    ("x.argmax({})", ("", "0", "1", "0, keepdim=True")),
    ("x.to(torch.complex64) * {}", ("1j", "2", "1 + 1j", "0.5")),
)
_AFTER = ("{}", "({}) * 2", "({}).sum()", "({}) + 1.0", "({}).clone().neg_()")


def keys(world: World, data: st.DataObject) -> None:
    """A line again and again, with one thing in it changed: a program must not be taken for another's."""
    d = Drawn(data)
    world.run("x = torch.tensor([[0.5, -0.0, 2.0], [1.5, -3.0, 0.0]], device=D)", ("x",))
    world.run("i = torch.tensor([[3, 1, 2], [-1, 0, 5]], device=D)", ("i",))
    line, fillings = d.pick(_HOLES)
    after = d.pick(_AFTER)
    for filling in d.some(fillings, 2, 8):
        name = make(world, after.format(line.format(filling)))
        if name is not None:
            world.run(f"s = torch.signbit({name}) if {name}.is_floating_point() else {name}")  # zeros have signs
            world.names.append("s")
            world.check_value(name)
            world.check_value("s")
            world.names.remove("s")
            world.drop(name)


TOPICS: dict[str, Topic] = {
    "amp": amp,
    "autograd": autograd,
    "dtypes": dtypes,
    "functions": functions,
    "gradients-of-views": gradients_of_views,
    "keys": keys,
    "out": out,
    "sizes": sizes,
    "training": training,
    "views": views,
}
