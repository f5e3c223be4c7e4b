"""Step functions that depend on what no guard can see, or do what no replay can do. Each is a function of a device that
gives a `Case`; the tables at the end are what `test_hostile.py` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tarry
from tests.replay.hostile_places import Hidden, Place


@dataclass
class Case:
    """A step function, and something that happens to what it depends on."""

    step: Callable[[Tensor], Any]
    change: Callable[[], object] = lambda: None
    state: Callable[[], list[Tensor]] = list
    before: Callable[[int], object] = lambda k: None  # what happens before the call of that number
    around: Callable[[int], Any] | None = None  # a context for that call


Make = Callable[[str], Case]


def in_place(place: Callable[[], Place]) -> Make:
    """A step that scales by a number in such a place."""

    def make(device: str) -> Case:
        read, write = place()

        def step(x: Tensor) -> Tensor:
            return x * read() + 1

        return Case(step, lambda: write(3.0))

    return make


# ---- effects: what a number that no guard sees can do. It is False at first, and becomes True.

Effect = Callable[[Hidden, str], Case]
EFFECTS: dict[str, Effect] = {}


def effect(function: Effect) -> Effect:
    EFFECTS[function.__name__] = function
    return function


def trained(device: str) -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def parameters(model: nn.Module) -> Callable[[], list[Tensor]]:
    return lambda: [*model.parameters(), *model.buffers()]


@effect
def another_operator(flag: Hidden, device: str) -> Case:
    return Case(lambda x: (x.exp() if flag.value else x.sin()) + 1)


@effect
def one_more_operator(flag: Hidden, device: str) -> Case:
    def step(x: Tensor) -> Tensor:
        y = x * 2
        if flag.value:
            y = y + 1
        return y.tanh()

    return Case(step)


@effect
def one_operator_less(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x if flag.value else x * 2)


@effect
def another_order(flag: Hidden, device: str) -> Case:
    return Case(lambda x: (x + 1) * 2 if flag.value else x * 2 + 1)


@effect
def operands_change_places(flag: Hidden, device: str) -> Case:
    return Case(lambda x: (x.sin() - x.cos()) if flag.value else (x.cos() - x.sin()))


@effect
def another_constant(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x.sum(dim=1 if flag.value else 0, keepdim=True).sum())


@effect
def another_number(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x * (0.5 if flag.value else 0.25))


@effect
def negative_zero(flag: Hidden, device: str) -> Case:
    return Case(lambda x: 1 / (x * 0 * (-0.0 if flag.value else 0.0) - (0.0 if flag.value else -0.0)))


@effect
def not_a_number(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x + (float("nan") if flag.value else 1.0))


@effect
def another_type_of_number(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x.long() * (1.0 if flag.value else 1))


@effect
def a_bool_for_a_number(flag: Hidden, device: str) -> Case:
    return Case(lambda x: (x > 0) + (1 if flag.value else True))


@effect
def another_dtype(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x.double() if flag.value else x.half())


@effect
def another_view(flag: Hidden, device: str) -> Case:
    return Case(lambda x: (x[1:3] if flag.value else x[:2]) * 2)


@effect
def another_shape(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x.flatten() * 2 if flag.value else x * 2)


@effect
def another_transpose(flag: Hidden, device: str) -> Case:
    square = torch.arange(9.0, device=device).view(3, 3)
    return Case(lambda x: x @ (square.t() if flag.value else square))


@effect
def another_tensor(flag: Hidden, device: str) -> Case:
    a, b = torch.ones(3, device=device), torch.full((3,), 5.0, device=device)
    return Case(lambda x: x * (b if flag.value else a))


@effect
def another_argument_twice(flag: Hidden, device: str) -> Case:
    other = torch.full((4, 3), 3.0, device=device)
    return Case(lambda x: x + (other if flag.value else x))


@effect
def another_structure(flag: Hidden, device: str) -> Case:
    return Case(lambda x: [x * 2] if flag.value else (x * 2,))


@effect
def another_key(flag: Hidden, device: str) -> Case:
    return Case(lambda x: {1 if flag.value else True: x * 2})


@effect
def another_value(flag: Hidden, device: str) -> Case:
    return Case(lambda x: (x * 2, "late" if flag.value else "early"))


@effect
def an_equal_value(flag: Hidden, device: str) -> Case:
    return Case(lambda x: (x * 2, 1.0 if flag.value else 1))


@effect
def results_change_places(flag: Hidden, device: str) -> Case:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x * 2, x * 3
        return (b, a) if flag.value else (a, b)

    return Case(step)


@effect
def one_result_twice(flag: Hidden, device: str) -> Case:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x * 2, x * 3
        return (a, a) if flag.value else (a, b)

    return Case(step)


@effect
def the_argument_itself(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x if flag.value else x.clone())


@effect
def no_result(flag: Hidden, device: str) -> Case:
    return Case(lambda x: None if flag.value else x * 2)


@effect
def the_argument_is_written(flag: Hidden, device: str) -> Case:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        if flag.value:
            x.add_(1)
        return y, x

    return Case(step)


@effect
def another_buffer_is_written(flag: Hidden, device: str) -> Case:
    a, b = torch.zeros(3, device=device), torch.zeros(3, device=device)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        (b if flag.value else a).add_(x.sum(0))
        return a * 1, b * 1

    return Case(step, state=lambda: [a, b])


@effect
def one_more_buffer_is_written(flag: Hidden, device: str) -> Case:
    a, b = torch.zeros(3, device=device), torch.zeros(3, device=device)

    def step(x: Tensor) -> Tensor:
        a.add_(x.sum(0))
        if flag.value:
            b.add_(1)
        return a + b

    return Case(step, state=lambda: [a, b])


@effect
def a_hidden_list_of_buffers(flag: Hidden, device: str) -> Case:
    hidden = Hidden([torch.zeros(3, device=device), torch.ones(3, device=device)])

    def step(x: Tensor) -> Tensor:
        return x * hidden.value[1 if flag.value else 0]

    return Case(step)


@effect
def one_more_draw(flag: Hidden, device: str) -> Case:
    def step(x: Tensor) -> Tensor:
        if flag.value:
            torch.rand(2, device=x.device)
        return F.dropout(x, 0.0) * 2 if not flag.value else x * 3

    return Case(step)


@effect
def a_value_is_read(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x * x.sum().item() if flag.value else x * 2)


@effect
def a_branch_by_a_value(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x * 3 if flag.value and x.sum() > -1e9 else x * 2)


@effect
def an_eager_operator(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x.nonzero() * 2 if flag.value else x * 2)


@effect
def a_host_tensor_is_read(flag: Hidden, device: str) -> Case:
    host = torch.tensor([2.0, 3.0])
    return Case(lambda x: x * (host[1].item() if flag.value else 2.0))


@effect
def a_host_tensor_is_made(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x + (torch.arange(3.0) * 2).to(device) if flag.value else x * 2)


@effect
def a_literal(flag: Hidden, device: str) -> Case:
    return Case(lambda x: x * torch.tensor([1.0, 2.0, 3.0 + bool(flag.value)], device=device))


@effect
def the_loss(flag: Hidden, device: str) -> Case:
    model, optimizer = trained(device)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (F.l1_loss if flag.value else F.mse_loss)(model(x), torch.zeros(len(x), 2, device=device))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(step, state=parameters(model))


@effect
def no_gradient_through_a_part(flag: Hidden, device: str) -> Case:
    model, optimizer = trained(device)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        y = model(x)
        loss = (y.detach() * y if flag.value else y * y).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(step, state=parameters(model))


@effect
def gradients_add_up(flag: Hidden, device: str) -> Case:
    model, optimizer = trained(device)

    def step(x: Tensor) -> Tensor:
        if not flag.value:
            optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    return Case(step, state=lambda: [p.grad for p in model.parameters() if p.grad is not None])


@effect
def the_step_is_left_out(flag: Hidden, device: str) -> Case:
    model, optimizer = trained(device)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        if not flag.value:
            optimizer.step()
        return loss.detach()

    return Case(step, state=parameters(model))


@effect
def another_optimizer(flag: Hidden, device: str) -> Case:
    model, first = trained(device)
    second = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(x: Tensor) -> Tensor:
        first.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        (second if flag.value else first).step()
        return loss.detach()

    return Case(step, state=parameters(model))


@effect
def the_decay_of_an_average(flag: Hidden, device: str) -> Case:
    average = torch.zeros(3, device=device)

    def step(x: Tensor) -> Tensor:
        average.lerp_(x.mean(0), 0.5 if flag.value else 0.1)
        return average.clone()

    return Case(step, state=lambda: [average])


@effect
def clipping(flag: Hidden, device: str) -> Case:
    model, optimizer = trained(device)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01 if flag.value else 100.0)
        optimizer.step()
        return loss.detach()

    return Case(step, state=parameters(model))


@effect
def a_compiled_function_inside(flag: Hidden, device: str) -> Case:
    inner = tarry.compile(lambda x: x * (3 if flag.value else 2)) if device == "tarry" else None
    return Case(lambda x: (inner or (lambda x: x * (3 if flag.value else 2)))(x) + 1)


@effect
def recursion(flag: Hidden, device: str) -> Case:
    def step(x: Tensor, depth: int = 0) -> Tensor:
        return x if depth == (4 if flag.value else 3) else step(x * 2, depth + 1)

    return Case(step)


@effect
def a_gradient_is_returned(flag: Hidden, device: str) -> Case:
    weight = torch.ones(3, device=device, requires_grad=True)

    def step(x: Tensor) -> Any:
        weight.grad = None
        (x * weight * (3 if flag.value else 2)).sum().backward()
        return weight.grad

    return Case(step)


@effect
def a_tensor_is_kept(flag: Hidden, device: str) -> Case:
    kept: Hidden = Hidden(None)

    def step(x: Tensor) -> Tensor:
        y = x * 2
        if flag.value:
            kept.value = y + 1
        return y if kept.value is None else y + kept.value

    return Case(step)


def with_effect(make: Effect) -> Make:
    def made(device: str) -> Case:
        flag = Hidden(False)
        case = make(flag, device)
        case.change = lambda: setattr(flag, "value", True)
        return case

    return made


# ---- changes that guards see

SEEN: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "a learning rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.01),
    "momentum": lambda model, optimizer: optimizer.param_groups[0].update(momentum=0.5),
    "weight decay": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.1),
    "nesterov": lambda model, optimizer: optimizer.param_groups[0].update(nesterov=True),
    "dropout": lambda model, optimizer: setattr(model[1], "p", 0.0),
    "evaluation": lambda model, optimizer: model.eval(),
    "a module": lambda model, optimizer: model.__setitem__(1, nn.Tanh()),
    "a module more": lambda model, optimizer: model.append(nn.Tanh()),
    "a module less": lambda model, optimizer: model.__delitem__(1),
    "a parameter": lambda model, optimizer: setattr(model[0], "bias", None),
    "frozen": lambda model, optimizer: model[0].weight.requires_grad_(False),
    "tied": lambda model, optimizer: setattr(model[0], "bias", model[2].bias),
    "data": lambda model, optimizer: setattr(model[0].bias, "data", torch.ones_like(model[0].bias)),
    "in place": lambda model, optimizer: model[0].bias.data.fill_(3.0),
    "a hook": lambda model, optimizer: model[0].register_forward_hook(lambda m, i, o: o * 2),
    "a hook of a tensor": lambda model, optimizer: model[0].weight.register_hook(lambda g: g * 2),
    "a forward of its own": lambda model, optimizer: setattr(model[1], "forward", lambda x: x * 3),
    "loaded": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "another group": lambda model, optimizer: optimizer.add_param_group(
        {"params": [torch.ones(1, requires_grad=True)]}
    ),
    "no gradients": lambda model, optimizer: model.zero_grad(),
    "a state that is gone": lambda model, optimizer: optimizer.state.clear(),
}


def seen(change: Callable[[nn.Module, torch.optim.Optimizer], object]) -> Make:
    """A training step whose surroundings change."""

    def make(device: str) -> Case:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0), nn.Linear(3, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Case(step, lambda: change(model, optimizer), parameters(model))

    return make
