"""Seeds, generators and their state: the same guarantees as on the CPU, however the graph is cut."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def native() -> Any:
    from tarry.native import C

    return C


def draws(n: int = 4, **kwargs: Any) -> list[torch.Tensor]:
    return [torch.rand(5, device="tarry", **kwargs).cpu() for _ in range(n)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_first_seed_is_the_one_given() -> None:
    for seed in (0, 1, 2**31, 2**32 + 5, 2**63 - 1):
        assert native().derive_seed(seed, 0) == seed


def test_seeds_are_non_negative_and_keep_the_bits_that_the_cpu_generator_reads() -> None:
    derived = native().derive_seed(2**64 - 1, 0)
    assert derived == 2**63 - 1
    assert all(0 <= native().derive_seed(2**64 - 1, i) < 2**63 for i in range(1000))


@pytest.mark.parametrize("seed", [0, 1, 42, 2**40])
def test_low_halves_of_the_seeds_never_repeat(seed: int) -> None:
    # The CPU generator takes 32 bits: 200,000 independent ones would be expected to collide about five times.
    low = {native().derive_seed(seed, offset) & 0xFFFFFFFF for offset in range(200_000)}
    assert len(low) == 200_000


def test_neighbouring_seeds_and_offsets_differ_in_about_half_of_their_bits() -> None:
    derive = native().derive_seed
    pairs = [(derive(s, o), derive(s, o + 1)) for s in range(1, 9) for o in range(1, 33)]
    pairs += [(derive(s, o), derive(s + 1, o)) for s in range(1, 9) for o in range(1, 33)]
    flipped = [sum(((a ^ b) >> bit) & 1 for a, b in pairs) / len(pairs) for bit in range(63)]
    assert min(flipped) > 0.35
    assert max(flipped) < 0.65


def test_first_numbers_after_manual_seed_are_those_of_the_cpu() -> None:
    torch.manual_seed(11)
    expected = torch.randn(7)
    torch.manual_seed(11)
    assert torch.equal(torch.randn(7, device="tarry").cpu(), expected)


def test_numbers_do_not_depend_on_where_the_graph_is_cut() -> None:
    torch.manual_seed(3)
    pending = [torch.rand(5, device="tarry") for _ in range(4)]
    at_once = [t.cpu() for t in pending]
    torch.manual_seed(3)
    assert same(draws(), at_once)
    assert not torch.equal(at_once[0], at_once[1])


def test_manual_seed_repeats_and_different_seeds_do_not() -> None:
    torch.manual_seed(1)
    first = draws()
    torch.manual_seed(2)
    assert not same(draws(), first)
    torch.tarry.manual_seed(1)
    assert same(draws(), first)
    torch.tarry.manual_seed_all(1)
    assert same(draws(), first)


def test_initial_seed_and_seed() -> None:
    torch.tarry.manual_seed(77)
    assert torch.tarry.initial_seed() == 77
    assert torch.tarry.seed() == torch.tarry.initial_seed()
    assert torch.tarry.seed_all() == torch.tarry.initial_seed()


def test_state_is_saved_and_restored() -> None:
    torch.manual_seed(5)
    draws(2)
    state = torch.tarry.get_rng_state()
    assert state.device.type == "cpu"
    assert state.dtype == torch.uint8
    assert state.shape == (16,)
    expected = draws()
    torch.tarry.set_rng_state(state)
    assert same(draws(), expected)
    torch.tarry.set_rng_state_all([state])
    assert torch.equal(torch.tarry.get_rng_state_all()[0], state)


def test_state_is_a_host_tensor_even_with_another_default_device() -> None:
    with torch.device("meta"):
        assert torch.tarry.get_rng_state().device.type == "cpu"


def test_state_of_another_size_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"16 bytes, but 3 were given"):
        torch.tarry.set_rng_state(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(TypeError, match="ByteTensor"):
        torch.tarry.set_rng_state(torch.zeros(16))


def test_fork_rng_leaves_the_state_alone() -> None:
    torch.manual_seed(5)
    expected = draws()
    torch.manual_seed(5)
    with torch.random.fork_rng(devices=[0], device_type="tarry"):
        draws(3)
    assert same(draws(), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_only_for_dropout(dropout: float) -> None:
    q = torch.rand(1, 2, 4, 8).to("tarry").requires_grad_()
    before = torch.tarry.get_rng_state()
    torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=dropout).sum().backward()
    assert torch.equal(torch.tarry.get_rng_state(), before) == (dropout == 0.0)


def test_own_generator() -> None:
    generator = torch.Generator(device="tarry")
    assert generator.device == torch.device("tarry:0")
    generator.manual_seed(9)
    before = torch.tarry.get_rng_state()
    first = draws(generator=generator)
    assert generator.get_offset() == 4
    assert torch.equal(torch.tarry.get_rng_state(), before)
    generator.manual_seed(9)
    assert generator.get_offset() == 0
    assert same(draws(generator=generator), first)


def test_generator_is_copied_pickled_and_shared() -> None:
    generator = torch.Generator(device="tarry").manual_seed(9)
    draws(1, generator=generator)
    copied = generator.clone_state()
    pickled = pickle.loads(pickle.dumps(generator))
    shared = torch.Generator(device="tarry")
    shared.graphsafe_set_state(generator.graphsafe_get_state())
    expected = draws(generator=generator)
    assert same(draws(generator=copied), expected)
    assert same(draws(generator=pickled), expected)
    assert shared.get_offset() == generator.get_offset() == 5
    deep = copy.deepcopy(torch.tarry.get_rng_state())
    assert torch.equal(deep, torch.tarry.get_rng_state())


def test_generator_of_another_device_is_refused_like_in_pytorch() -> None:
    with pytest.raises(RuntimeError, match="Expected a 'tarry' device type for generator but found 'cpu'"):
        torch.empty(3, device="tarry").normal_(generator=torch.Generator())


def test_default_generators() -> None:
    (generator,) = torch.tarry.default_generators
    generator.manual_seed(123)
    assert torch.tarry.initial_seed() == 123
    assert generator is torch.tarry.default_generators[0]


def test_dropout_repeats_with_the_seed() -> None:
    x = torch.ones(1000, device="tarry")
    torch.manual_seed(4)
    first = torch.nn.functional.dropout(x, 0.5).cpu()
    second = torch.nn.functional.dropout(x, 0.5).cpu()
    torch.manual_seed(4)
    assert torch.equal(torch.nn.functional.dropout(x, 0.5).cpu(), first)
    assert not torch.equal(first, second)
    assert 400 < int((first == 0).sum()) < 600
