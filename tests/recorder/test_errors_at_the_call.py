"""What eager PyTorch refuses because of shapes, dtypes, numbers or overlapping memory, tarry refuses at the same call.

With the same error: also when the same call was recorded before with other numbers, and when its result is never read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

import tarry
from tests.support import DEVICE, tarry_only

USES_DEVICE = True
pytestmark = tarry_only

Call = Callable[[str], object]


def _error(call: Call, device: str) -> tuple[type[Exception], str] | None:
    try:
        call(device)
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return None


def _assert_same_error(call: Call) -> None:
    expected = _error(call, "cpu")
    assert expected is not None, "the case is wrong: eager accepts it"
    found = _error(call, DEVICE)
    assert found is not None, f"no error at the call; eager raises {expected}"
    assert found[0] is expected[0]
    assert found[1] == expected[1].replace("cpu", DEVICE) or found[1] == expected[1]


# A call that is right with the first numbers and wrong with the second ones.
NUMBERS: dict[str, tuple[Callable[..., object], tuple[object, ...], tuple[object, ...]]] = {
    "cauchy_": (lambda d, *n: torch.empty(4, device=d).cauchy_(*n), (0.0, 0.5), (0.0, 0.0)),
    "exponential_": (lambda d, *n: torch.empty(4, device=d).exponential_(*n), (0.5,), (-0.5,)),
    "normal_": (lambda d, *n: torch.empty(4, device=d).normal_(*n), (0.0, 1.0), (0.0, -1.0)),
    "uniform_": (lambda d, *n: torch.empty(4, device=d).uniform_(*n), (0.0, 1.0), (1.0, 0.0)),
    "log_normal_": (lambda d, *n: torch.empty(4, device=d).log_normal_(*n), (1.0, 2.0), (1.0, -2.0)),
    "geometric_": (lambda d, *n: torch.empty(4, device=d).geometric_(*n), (0.5,), (1.5,)),
    "bernoulli_": (lambda d, *n: torch.empty(4, device=d).bernoulli_(*n), (0.5,), (1.5,)),
    "bernoulli": (lambda d, *n: torch.bernoulli(torch.ones(4, device=d), *n), (0.5,), (-0.5,)),
    "random_": (
        lambda d, *n: torch.empty(4, device=d, dtype=torch.int16).random_(*n),
        (-5, 5),
        (-(2**20), 5),
    ),
    "histc": (lambda d, *n: torch.histc(torch.ones(4, device=d), 4, *n), (0.0, 1.0), (5.0, 1.0)),
    "addcdiv": (lambda d, n: torch.addcdiv(*[torch.ones(4, device=d)] * 3, value=n), (3 + 0j,), (3 + 4j,)),
    "softshrink": (lambda d, n: F.softshrink(torch.ones(4, device=d), n), (0.5,), (-0.5,)),
    "celu": (lambda d, n: F.celu(torch.ones(4, device=d), n), (1.0,), (0.0,)),
    "pow of integers": (lambda d, n: torch.ones(4, device=d, dtype=torch.int64) ** n, (2,), (-2,)),
    "renorm": (lambda d, n: torch.renorm(torch.ones(4, 4, device=d), n, 0, 1.0), (2.0,), (-1.0,)),
    "huber_loss": (
        lambda d, n: F.huber_loss(torch.ones(4, device=d), torch.ones(4, device=d), delta=n),
        (1.0,),
        (-1.0,),
    ),
    "fill_ with too much for the dtype": (
        lambda d, n: torch.zeros(4, device=d, dtype=torch.uint8).fill_(n),
        (3,),
        (300,),
    ),
    "masked_fill_ with too much for the dtype": (
        lambda d, n: torch.zeros(4, device=d, dtype=torch.int8).masked_fill_(torch.ones(4, device=d) > 0, n),
        (3,),
        (300,),
    ),
    "full with too much for a float": (lambda d, n: torch.zeros(4, device=d).fill_(n), (1e30,), (1e300,)),
    "fill_ of half precision": (lambda d, n: torch.zeros(4, device=d, dtype=torch.float16).fill_(n), (1e3,), (1e6,)),
    "fill_ of eight bits": (
        lambda d, n: torch.zeros(4, device=d, dtype=torch.uint8).view(torch.float8_e4m3fn).fill_(n),
        (3.0,),
        (1000.0,),
    ),
    "fill_ of a large tensor": (
        lambda d, n: torch.zeros(2**17, device=d, dtype=torch.uint8).fill_(n),
        (3,),
        (300,),
    ),
    "division of integers": (
        lambda d, n: torch.ones(4, device=d, dtype=torch.int64).div(n, rounding_mode="floor"),
        (2,),
        (0,),
    ),
    "division of integers in place": (
        lambda d, n: torch.ones(4, device=d, dtype=torch.int32).div_(n, rounding_mode="trunc"),
        (2,),
        (0,),
    ),
    "remainder of integers": (lambda d, n: torch.ones(4, device=d, dtype=torch.int64) % n, (2,), (0,)),
    "floor division of integers": (lambda d, n: torch.ones(4, device=d, dtype=torch.int64) // n, (2,), (0,)),
    "fill_ of integers": (lambda d, n: torch.zeros(4, device=d, dtype=torch.int64).fill_(n), (3.0,), (float("nan"),)),
    "infinity for integers": (lambda d, n: torch.full((4,), n, device=d, dtype=torch.int32), (3.0,), (float("inf"),)),
    "masked_fill_ of integers": (
        lambda d, n: torch.zeros(4, device=d, dtype=torch.int64).masked_fill_(torch.ones(4, device=d) > 0, n),
        (3.0,),
        (float("nan"),),
    ),
    "normal_ of a large tensor": (lambda d, *n: torch.empty(2**17, device=d).normal_(*n), (0.0, 1.0), (0.0, -1.0)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_numbers(name: str) -> None:
    call, right, wrong = NUMBERS[name]
    _assert_same_error(lambda device: call(device, *wrong))
    call(DEVICE, *right)
    _assert_same_error(lambda device: call(device, *wrong))
    call(DEVICE, *right)


def test_not_a_number_is_right_for_floats() -> None:
    for number in (float("nan"), float("inf"), -float("inf")):
        expected = torch.zeros(2).fill_(number)
        torch.testing.assert_close(torch.zeros(2, device=DEVICE).fill_(number).cpu(), expected, equal_nan=True)


def test_a_loss_without_classes_whose_targets_are_ignored() -> None:
    def loss(device: str, target: int, ignored: int) -> torch.Tensor:
        return F.nll_loss(
            torch.empty(2, 0, device=device),
            torch.full((2,), target).to(device),
            ignore_index=ignored,
            reduction="none",
        )

    for ignored in (-100, 7):
        torch.testing.assert_close(loss(DEVICE, ignored, ignored).cpu(), loss("cpu", ignored, ignored))
    _assert_same_error(lambda device: F.nll_loss(torch.ones(2, 3, device=device), torch.ones(3).to(device).long()))
    with pytest.raises(IndexError):
        loss(DEVICE, 0, -100).cpu()


def _in_place_leaky_relu(device: str, slope: float) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    F.leaky_relu_(x.clone(), slope).backward(torch.ones(3, device=device))


def test_wrong_numbers_in_backward() -> None:
    _in_place_leaky_relu(DEVICE, 0.5)
    _assert_same_error(lambda device: _in_place_leaky_relu(device, -2.0))


def _zero(device: torch.device | str) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


# Written memory that overlaps: itself, in a tensor that was expanded ...
ITSELF: dict[str, Callable[[torch.Tensor], object]] = {
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "random_": lambda x: x.random_(),
    "add_": lambda x: x.add_(1),
    "put_": lambda x: x.put_(_zero(x.device), torch.ones(1, device=x.device)),
    "index_copy_": lambda x: x.index_copy_(0, _zero(x.device), torch.ones(1, device=x.device)),
    "scatter_": lambda x: x.scatter_(0, _zero(x.device), 1.0),
}
# ... or with what is read.
ANOTHER: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda x: x[1:].add_(x[:-1]),
    "gather": lambda x: torch.gather(x, 0, _zero(x.device), out=x[:1]),
    "index_select": lambda x: torch.index_select(x, 0, _zero(x.device), out=x[:1]),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(x.numel(), dtype=torch.int64, device=x.device), x),
    "take": lambda x: torch.take(x, _zero(x.device), out=x[:1]),
    "cat": lambda x: torch.cat([x[:2], x[2:4]], out=x[:4]),
}


def _expanded(device: str, size: int = 6) -> torch.Tensor:
    return torch.rand(1, device=device).expand(size)


def _of_another(call: Callable[[torch.Tensor], object], size: int = 6) -> Call:
    return lambda device: call(torch.rand(size, device=device))


def _of_itself(call: Callable[[torch.Tensor], object], size: int = 6) -> Call:
    return lambda device: call(_expanded(device, size))


OVERLAP: dict[str, Call] = {
    **{f"{name} of itself": _of_itself(call) for name, call in ITSELF.items()},
    **{f"{name} of another": _of_another(call) for name, call in ANOTHER.items()},
    "a large tensor that overlaps itself": _of_itself(ITSELF["add_"], 2**17),
    "a large tensor that overlaps another": _of_another(ANOTHER["add_"], 2**17),
}


@pytest.mark.parametrize("name", OVERLAP)
def test_overlapping_memory(name: str) -> None:
    _assert_same_error(OVERLAP[name])
    _assert_same_error(OVERLAP[name])


def test_memory_that_does_not_overlap_is_accepted() -> None:
    x = torch.arange(8.0, device=DEVICE)
    x[:4].add_(x[4:])
    x[::2].add_(x[1::2])
    x.add_(x)
    y = torch.arange(8.0)
    y[:4].add_(y[4:])
    y[::2].add_(y[1::2])
    y.add_(y)
    assert torch.equal(x.cpu(), y)


# Shapes and dtypes that meta kernels let pass.
SHAPES_AND_DTYPES: dict[str, Call] = {
    "in-place comparison that would broadcast": lambda d: torch.zeros(2, device=d).eq_(torch.ones(3, 2, device=d)),
    "in-place add that would broadcast": lambda d: torch.zeros(2, device=d).add_(torch.ones(3, 2, device=d)),
    "masked_fill_ that would broadcast": lambda d: torch.zeros(2, device=d).masked_fill_(
        torch.ones(3, 2, device=d) > 0, 1.0
    ),
    "reflection_pad that is too large": lambda d: F.pad(torch.rand(1, 2, 3, device=d), (4, 4), mode="reflect"),
    "avg_pool2d with stride 0": lambda d: F.avg_pool2d(torch.rand(1, 2, 4, 4, device=d), 2, 0),
    "bucketize with boundaries of two dimensions": lambda d: torch.bucketize(
        torch.rand(2, device=d), torch.rand(2, 3, device=d)
    ),
    "complex of two dtypes": lambda d: torch.complex(
        torch.ones(2, device=d), torch.ones(2, dtype=torch.float64, device=d)
    ),
    "all into floats": lambda d: torch.all(torch.ones(3, device=d), 0, out=torch.empty((), device=d)),
    "logcumsumexp into another dtype": lambda d: torch.logcumsumexp(
        torch.ones(3, device=d), 0, out=torch.zeros(3, dtype=torch.float64, device=d)
    ),
    "avg_pool2d with a stride beyond int": lambda d: F.avg_pool2d(torch.rand(1, 2, 4, 4, device=d), 2, (1, 2**61)),
    "max_pool2d with a stride beyond int": lambda d: F.max_pool2d(torch.rand(1, 2, 4, 4, device=d), 2, (1, 2**61)),
    "subtraction of a bool": lambda d: torch.rand(5, device=d) - True,
    "alpha that is a bool": lambda d: torch.rand(5, device=d).sub(torch.rand(5, device=d), alpha=True),
    "packed numbers of another length": lambda d: torch._foreach_addcmul(
        *[[torch.rand(2, device=d)]] * 3, torch.tensor([1.0, 2.0])
    ),
    **{
        f"a complex number for {dtype}": lambda d, dtype=dtype: torch._foreach_addcmul(
            *[[torch.rand(2, device=d).to(dtype)]] * 3, torch.tensor([3 + 4j])
        )
        for dtype in (torch.float16, torch.float32, torch.float64)
    },
    **{
        f"{name} of integers": lambda d, call=call: call(torch.ones(4, dtype=torch.int64, device=d))
        for name, call in {
            "leaky_relu": F.leaky_relu,
            "elu": F.elu,
            "softshrink": F.softshrink,
            "normal_": torch.Tensor.normal_,
            "randn_like": torch.randn_like,
        }.items()
    },
    "geometric_ of booleans": lambda d: torch.ones(4, dtype=torch.bool, device=d).geometric_(0.5),
    "floor_divide of complex numbers": lambda d: torch.ones(4, dtype=torch.complex64, device=d).floor_divide_(2),
    "a convolution with a weight of no dimensions": lambda d: F.conv2d(
        torch.ones(4, 8, 8, device=d), torch.tensor(1.0, device=d), groups=100
    ),
    "65 dimensions": lambda d: torch.nansum(torch.zeros([1] * 65, device=d), dim=0),
    "an index into an empty dimension": lambda d: torch.empty(10, 0, device=d)[:, [0, 1]],
    "index_put_ of another dtype": lambda d: torch.ones(5, 2, dtype=torch.float64, device=d).index_put_(
        (torch.tensor([1], device=d),), torch.zeros(1, 2, dtype=torch.int32, device=d)
    ),
    "index_put without indices": lambda d: torch.ones([], device=d).index_put([], torch.ones(1, device=d), True),
    "an assignment that does not fit": lambda d: torch.randn(2, 3, device=d).__setitem__(
        torch.tensor(True, device=d), torch.randn(5, 1, 2, 3, device=d)
    ),
}


@pytest.mark.parametrize("name", SHAPES_AND_DTYPES)
def test_wrong_shapes_and_dtypes(name: str) -> None:
    _assert_same_error(SHAPES_AND_DTYPES[name])


# Too large to be tried as they are: what is wrong with them is not their size.
MANY = 2**17
LARGE: dict[str, Call] = {
    "alpha": lambda d: torch.add(torch.ones(MANY, device=d), torch.ones(MANY, device=d), alpha=True),
    "bitwise": lambda d: torch.ones(MANY, device=d) & 1,
    "relu": lambda d: torch.ones(MANY, device=d, dtype=torch.bool).relu(),
    "mm": lambda d: torch.ones(400, 400, device=d) @ torch.ones(400, 400, device=d, dtype=torch.float64),
    **{
        f"{convolve.__name__} {name}": lambda d, convolve=convolve, name=name, value=value: convolve(
            torch.ones(1, 2, 300, 300, device=d), torch.ones(2, 2, 3, 3, device=d), **{name: value}
        )
        for convolve in (F.conv2d, F.conv_transpose2d)
        for name, value in (("stride", 0), ("padding", -1), ("dilation", 0), ("groups", 0), ("padding", (1, 1, 1)))
    },
    "output_padding": lambda d: F.conv_transpose2d(
        torch.ones(1, 2, 300, 300, device=d), torch.ones(2, 2, 3, 3, device=d), output_padding=5
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_wrong_dtypes_and_numbers_of_large_calls(name: str) -> None:
    _assert_same_error(LARGE[name])


def test_warnings_come_at_every_call() -> None:
    def count(device: str) -> int:
        x = torch.arange(16.0, device=device).view(4, 4)
        mask = torch.tensor([1, 0, 1, 0], dtype=torch.uint8, device=device)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            x[mask] = torch.arange(4.0, device=device)
            x.cpu()  # the step runs without a warning of its own
        return len(seen)

    assert [count(DEVICE), count(DEVICE)] == [count("cpu")] * 2


def test_checks_do_not_draw_from_the_generators() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    torch.empty(7, device=DEVICE).normal_(0.0, 3.0)
    F.dropout(torch.ones(5, device=DEVICE), 0.25)
    assert torch.equal(torch.rand(3), expected)


@pytest.fixture
def deterministic() -> object:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_what_a_call_needs_of_its_contents_is_not_refused_at_the_call() -> None:
    a = torch.eye(3, device=DEVICE) * 4.0
    assert torch.equal(torch.linalg.cholesky(a).cpu(), torch.eye(3) * 2.0)
    assert torch.multinomial(torch.ones(3, device=DEVICE), 2).shape == (2,)
    x = torch.zeros(4, device=DEVICE)
    x[torch.tensor([True, False, True, False], device=DEVICE)] = torch.tensor([1.0, 2.0], device=DEVICE)
    assert x.tolist() == [1.0, 0.0, 2.0, 0.0]


def test_uninitialised_memory_is_filled_if_deterministic(deterministic: None) -> None:
    made = [
        torch.empty(10, 9, device=DEVICE),
        torch.empty_like(torch.zeros(10, 9, device=DEVICE)),
        torch.empty_strided((10, 9), (1, 5), device=DEVICE),
        torch.zeros(3, device=DEVICE).new_empty(4),
    ]
    integers = torch.empty(4, dtype=torch.int32, device=DEVICE)
    torch.use_deterministic_algorithms(False)
    assert all(bool(tensor.isnan().all()) for tensor in made)
    assert bool((integers == torch.iinfo(torch.int32).max).all())


def test_an_operator_that_is_not_deterministic_is_refused_at_the_call(deterministic: None) -> None:
    def call(device: str) -> None:
        torch.ones(4, device=device).put_(_zero(device), torch.ones(1, device=device))

    torch.use_deterministic_algorithms(False)
    call(DEVICE)
    torch.use_deterministic_algorithms(True)
    assert _error(call, DEVICE) == _error(call, "cpu")


@pytest.fixture(params=["eager", "torchscript"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    tarry.set_backend(request.param)
    with tarry.config.override(compile="wait"):
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_default_dtype_counts_as_it_was_when_recorded(dtype: torch.dtype, backend: None) -> None:
    def compute(device: str) -> list[torch.Tensor]:
        integers = torch.arange(1, 4, device=device)
        with _default_dtype(dtype):
            return [integers / 3, (integers / 3 * 1e3).to(torch.float32), integers.sqrt()]

    expected = compute("cpu")
    for mine in (compute(DEVICE), compute(DEVICE)):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, expected, strict=True))


def test_a_replay_counts_with_the_default_dtype_that_it_was_recorded_with(backend: None) -> None:
    halve = tarry.compile(lambda x: x / 2)
    integers = torch.arange(3, device=DEVICE)
    for _ in range(8):
        assert halve(integers).cpu().dtype == torch.float32
    with _default_dtype(torch.float64):
        assert (integers / 3).cpu().dtype == torch.float64
    replays = halve.replays
    assert halve(integers).cpu().dtype == halve(integers).cpu().dtype == torch.float32
    assert halve.replays > replays


def test_the_precision_of_products_counts_as_it_was_when_recorded(backend: None) -> None:
    matrix = torch.randn(256, 256)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, other in (("highest", "medium"), ("medium", "highest")):
            torch.set_float32_matmul_precision(precision)
            expected, mine = matrix @ matrix, matrix.to(DEVICE) @ matrix.to(DEVICE)
            torch.set_float32_matmul_precision(other)
            assert torch.equal(mine.cpu(), expected)
            assert torch.get_float32_matmul_precision() == other
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", ["inv_ex", "cholesky_ex", "lu_factor_ex", "ldl_factor_ex"])
def test_what_is_checked_about_a_matrix_is_checked_on_the_matrix(name: str) -> None:
    matrix = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    found = getattr(torch.linalg, name)(matrix.to("tarry"), check_errors=True)
    expected = getattr(torch.linalg, name)(matrix, check_errors=True)
    torch.testing.assert_close([t.cpu() for t in found], list(expected))


def test_a_source_that_is_too_short_for_a_known_mask_raises_at_the_call() -> None:
    x, mask = torch.zeros(2, 4, device=DEVICE), torch.tensor([True, False, True, True], device=DEVICE)
    for call in (torch.masked_scatter, torch.Tensor.masked_scatter_):
        with pytest.raises(RuntimeError, match="Number of elements of source < number of ones in mask"):
            call(x, mask, torch.ones(5, device=DEVICE))
    assert torch.equal(x.cpu(), torch.zeros(2, 4))
    expected = torch.zeros(2, 4).masked_scatter_(mask.cpu(), torch.arange(6.0))
    assert torch.equal(x.masked_scatter_(mask, torch.arange(6.0).to(DEVICE)).cpu(), expected)


def test_a_range_of_known_contents_that_is_not_finite_raises_at_the_call() -> None:
    for values in ([float("inf")], [1.0, float("-inf")], [float("nan")]):
        x = torch.tensor(values, device=DEVICE)
        with pytest.raises(RuntimeError, match=r"range of \[.*\] is not finite"):
            torch.histc(x)
        assert torch.equal(torch.histc(x, 2, 0, 3).cpu(), torch.histc(torch.tensor(values), 2, 0, 3))
    x = torch.tensor([1.0, 2.0, 5.0], device=DEVICE)
    assert torch.equal(torch.histc(x[:2], 3).cpu(), torch.tensor([1.0, 0.0, 1.0]))
