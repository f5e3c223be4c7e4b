"""Random programs of views, writes through views, reads and cuts: the device may not be told from CPU eager.

The lazy state lives in the storage, so aliasing ought to be right by construction; this looks for the holes in it.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.aliasing.lines import Writer
from tests.aliasing.world import World

USES_DEVICE = True


def play(data: st.DataObject, lines: int) -> None:
    """One random program of up to so many lines, run in both worlds."""
    world = World()
    try:
        write_views(world, data, lines)
    finally:
        note(world.program())


def write_views(world: World, data: st.DataObject, lines: int) -> None:
    writer = Writer(world, data)
    for _ in range(data.draw(st.integers(1, 2))):
        writer.base()
    moves = (
        writer.view,
        writer.view,
        writer.view,
        writer.pieces,
        writer.write_number,
        writer.write_tensor,
        writer.write_part,
        writer.write_number,
        writer.copy,
        writer.sync,
        writer.metadata,
        writer.drop,
        writer.base,
    )
    for _ in range(data.draw(st.integers(1, lines))):
        data.draw(st.sampled_from(moves))()
    world.check_all()


@given(st.data())
@settings(max_examples=150)
def test_views_and_writes(data: st.DataObject) -> None:
    play(data, lines=20)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=800)
def test_views_and_writes_at_length(data: st.DataObject) -> None:
    play(data, lines=40)


def play_gradients(data: st.DataObject, lines: int) -> None:
    world = World()
    try:
        write_gradients(world, data, lines)
    finally:
        note(world.program())


def write_gradients(world: World, data: st.DataObject, lines: int) -> None:
    """The same under autograd: views of a differentiable tensor, written in place; the gradient of all that is left."""
    shape = data.draw(st.sampled_from(((4, 3), (2, 3, 4), (6,))))
    count = int(torch.Size(shape).numel())
    leaf = f"torch.arange({count}, device=D, dtype=torch.float64).reshape({shape}).div(7).requires_grad_()"
    world.run(f"leaf = {leaf}")
    world.run("t0 = leaf * 2", ("t0",))
    world.made = 1
    writer = Writer(world, data, dtypes=("float64",))
    moves = (
        writer.view,
        writer.view,
        writer.pieces,
        writer.write_number,
        writer.write_tensor,
        writer.write_part,
        writer.copy,
        writer.sync,
    )
    for _ in range(data.draw(st.integers(1, lines))):
        data.draw(st.sampled_from(moves))()
    for name in (n for n in world.names if world.usable(n)):
        world.run(f"w = torch.arange(1, {name}.numel() + 1, device=D).reshape({name}.shape)")
        if world[name].requires_grad:
            world.run(f"({name} * w).sum().real.backward(retain_graph=True)")
    if world.run("g = leaf.grad") and world.cpu["g"] is not None:
        world.names.append("g")
    world.check_all()


@given(st.data())
@settings(max_examples=100)
def test_gradients(data: st.DataObject) -> None:
    play_gradients(data, lines=10)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=400)
def test_gradients_at_length(data: st.DataObject) -> None:
    play_gradients(data, lines=20)
