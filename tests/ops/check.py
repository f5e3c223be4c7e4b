"""One operator of PyTorch's OpInfo database, on the device against CPU eager.

Shared by the survey (all operators, in child processes) and by the pytest form. A check never raises for a
difference: it returns what went wrong, so that a survey can go on and group it.
"""

from __future__ import annotations

import itertools
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from tests.ops.nondeterministic import why_not_by_value
from tests.support.move import move

MODES = ("forward", "backward", "inplace", "out")
#: Operators whose tensor arguments but the first stay on the host whatever the device, by their own contract.
HOST_ARGUMENTS = {"tensor_split": "the number of sections decides how many results there are"}
#: Samples beyond this many are not looked at when the few to run are picked.
_LOOK_AT = 40


@dataclass
class ModeResult:
    """How one mode (forward, backward, in-place, out=) of one operator went."""

    samples: int = 0
    failures: list[str] = field(default_factory=list)
    stride_notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures


@dataclass
class OpResult:
    """All modes that apply to an operator; a mode that has no sample eager itself can run is absent."""

    name: str
    modes: dict[str, ModeResult] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    interpreted: int = 0  # steps that no program of the backend computed
    compiles: int = 0

    @property
    def failures(self) -> list[str]:
        return [f"{mode}: {text}" for mode, result in self.modes.items() for text in result.failures]


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def all_ops(dtype: torch.dtype, pattern: str = "") -> dict[str, OpInfo]:
    """The operators that eager supports for ``dtype`` on CPU, by full name, in the database's order."""
    wanted = re.compile(pattern)
    return {full_name(op): op for op in op_db if dtype in op.dtypes and wanted.search(full_name(op))}


def _pick(op: OpInfo, dtype: torch.dtype, count: int, *, requires_grad: bool) -> list[SampleInput]:
    """``count`` samples spread over the operator's first ones (neighbours in that list tend to test the same)."""
    torch.manual_seed(0)
    found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), _LOOK_AT))
    if len(found) <= count:
        return found
    return [found[round(i * (len(found) - 1) / max(count - 1, 1))] for i in range(count)]


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


@dataclass
class _Call:
    """A call's outcome: its value or the exception."""

    value: Any = None
    error: Exception | None = None
    where: str = ""


def _attempt(fn: Callable[[], Any]) -> _Call:
    try:
        return _Call(value=fn())
    except Exception as error:  # any exception is an outcome to compare
        frames = traceback.extract_tb(error.__traceback__)
        # Without the traceback, whose frames would keep the tensors of a failed step alive and so pending.
        return _Call(error=error.with_traceback(None), where=f" [{frames[-1].name}]" if frames else "")


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _differences(
    actual: Any, expected: Any, device: str, reason: str | None, host_ok: bool = False
) -> Iterator[tuple[str, str]]:
    """Pairs (kind, text), kind being 'value' or 'stride'; nothing when the trees agree."""
    got, want = tree_leaves(actual), tree_leaves(expected)
    if len(got) != len(want):
        yield "value", f"{len(got)} results instead of {len(want)}"
        return
    for i, (a, e) in enumerate(zip(got, want, strict=True)):
        if not isinstance(e, torch.Tensor):
            same = a == e or (isinstance(e, float) and isinstance(a, float) and (abs(a - e) < 1e-5 or e != e))
            if type(a) is not type(e) or (not same and reason is None):
                yield "value", f"result {i}: {a!r} instead of {e!r}"
            continue
        if not isinstance(a, torch.Tensor):
            yield "value", f"result {i} is a {type(a).__name__}, not a tensor"
            continue
        if a.device.type != device and not (a.device.type == "cpu" and host_ok):
            yield "value", f"result {i} is on {a.device}"
            continue
        if (a.shape, a.dtype, a.layout) != (e.shape, e.dtype, e.layout):
            yield "value", f"result {i} is {a.dtype}{tuple(a.shape)} instead of {e.dtype}{tuple(e.shape)}"
            continue
        if a.layout == torch.strided and a.numel() > 1:
            strides = [(s, t) for n, s, t in zip(e.shape, a.stride(), e.stride(), strict=True) if n > 1]
            if any(s != t for s, t in strides):
                yield "stride", f"result {i}: strides {a.stride()} instead of {e.stride()} for {tuple(e.shape)}"
        if a.is_conj() != e.is_conj() or a.is_neg() != e.is_neg():
            yield "stride", f"result {i}: conj/neg bits differ"
        if reason is not None:
            a.detach().cpu()  # the value must be computable, whatever it is
            continue
        try:
            torch.testing.assert_close(
                a.detach().cpu(), e.detach(), equal_nan=True, check_stride=False, check_layout=False
            )
        except AssertionError as error:
            lines = str(error).split("\n")
            yield "value", f"result {i}: " + " ".join(line for line in lines if line)[:200]


class Checker:
    """Runs the modes of one operator; ``device`` may be ``cpu``, which checks the checker."""

    def __init__(self, device: str, dtype: torch.dtype, samples: int, modes: tuple[str, ...] = MODES[:3]) -> None:
        self.device = device
        self.dtype = dtype
        self.samples = samples
        self.modes = modes

    def check(self, op: OpInfo) -> OpResult:
        result = OpResult(full_name(op))
        runners = {
            "forward": self._forward,
            "backward": self._backward,
            "inplace": self._inplace,
            "out": self._out,
        }
        for mode in self.modes:
            if not self._applies(op, mode):
                continue
            outcome = ModeResult()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for sample in _pick(op, self.dtype, self.samples, requires_grad=mode == "backward"):
                    runners[mode](op, sample, outcome)
            if outcome.samples:
                result.modes[mode] = outcome
        return result

    def _applies(self, op: OpInfo, mode: str) -> bool:
        if mode == "backward":
            return op.supports_autograd and self.dtype in op.supported_backward_dtypes("cpu")
        if mode == "inplace":
            return op.inplace_variant is not None
        if mode == "out":
            return op.supports_out
        return True

    def _compare(
        self,
        op: OpInfo,
        sample: SampleInput,
        outcome: ModeResult,
        run: Callable[[Any, str], Any],
        reason: str | None,
    ) -> None:
        """Run ``run(inputs, device)`` on both sides; eager's refusal must be the device's refusal too."""
        inputs = (sample.input, sample.args, sample.kwargs)
        cpu_inputs = move(inputs, "cpu")
        cpu_arguments = move(sample.args, "cpu")
        torch.manual_seed(0)
        expected = _attempt(lambda: run(cpu_inputs, "cpu"))
        if isinstance(expected.error, NotImplementedError | torch.cuda.CudaError) or (
            expected.error is not None and "CUDA" in str(expected.error)
        ):
            return  # eager CPU does not have it at all
        outcome.samples += 1
        where = f"sample {outcome.samples}"

        def on_device() -> Any:
            # Another seed than eager's: with device "cpu" this shows which operators are random.
            torch.manual_seed(4321)
            dev_inputs = move(inputs, self.device)
            if full_name(op) in HOST_ARGUMENTS:
                dev_inputs = (dev_inputs[0], cpu_arguments, dev_inputs[2])
            value = run(dev_inputs, self.device)
            # Reading inside the attempt: an error of a deferred operator counts as that operator's error.
            for tensor in _tensors((value, dev_inputs)):
                tensor.detach().cpu()
            return value, dev_inputs

        actual = _attempt(on_device)
        if expected.error is not None:
            if actual.error is None:
                outcome.failures.append(f"{where}: eager raises {_short(expected.error)}, the device does not")
            return
        if actual.error is not None:
            outcome.failures.append(f"{where}: {_short(actual.error)}{actual.where}")
            return
        value, dev_inputs = actual.value
        # A factory whose sample names no device makes its result on the host, on purpose.
        names_device = any(str(leaf) == "cpu" for leaf in tree_leaves(inputs) if isinstance(leaf, str | torch.device))
        host_ok = not names_device and not _tensors(inputs)
        for kind, text in _differences(value, expected.value, self.device, reason, host_ok):
            notes = outcome.stride_notes if kind == "stride" else outcome.failures
            notes.append(f"{where}: {text}")
        for kind, text in _differences(_tensors(dev_inputs), _tensors(cpu_inputs), self.device, reason, host_ok=True):
            if kind == "value":
                outcome.failures.append(f"{where}: after the call, inputs differ: {text}")

    def _forward(self, op: OpInfo, sample: SampleInput, outcome: ModeResult) -> None:
        def run(inputs: Any, _device: str) -> Any:
            x, args, kwargs = inputs
            return op(x, *args, **kwargs)

        self._compare(op, sample, outcome, run, why_not_by_value(full_name(op), sample))

    def _inplace(self, op: OpInfo, sample: SampleInput, outcome: ModeResult) -> None:
        if sample.broadcasts_input:
            return  # the result does not fit into the input, by the sample's own word
        inplace = op.inplace_variant

        def run(inputs: Any, _device: str) -> Any:
            x, args, kwargs = inputs
            return inplace(x, *args, **kwargs)

        self._compare(op, sample, outcome, run, why_not_by_value(full_name(op), sample))

    def _out(self, op: OpInfo, sample: SampleInput, outcome: ModeResult) -> None:
        x, args, kwargs = move((sample.input, sample.args, sample.kwargs), "cpu")
        shapes = _attempt(lambda: op(x, *args, **kwargs))
        if shapes.error is not None or not _tensors(shapes.value):
            return

        def run(inputs: Any, device: str) -> Any:
            x, args, kwargs = inputs
            out = tuple(torch.zeros_like(t, device=device) for t in _tensors(shapes.value))
            op(x, *args, **{**kwargs, "out": out[0] if isinstance(shapes.value, torch.Tensor) else out})
            return out

        self._compare(op, sample, outcome, run, why_not_by_value(full_name(op), sample))

    def _backward(self, op: OpInfo, sample: SampleInput, outcome: ModeResult) -> None:
        def run(inputs: Any, device: str) -> Any:
            x, args, kwargs = inputs
            wrt = [t for t in _tensors(inputs) if t.requires_grad]
            value = op.gradcheck_wrapper(op.get_op(), x, *args, **kwargs)
            outs = [t for t in _tensors(sample.output_process_fn_grad(value)) if t.requires_grad]
            if not wrt or not outs:
                return ()
            # Weighted, not a plain sum: the gradient of sum(softmax(x)) is zero whatever the kernel does.
            weights = torch.Generator().manual_seed(1)
            cotangents = [torch.randn(t.shape, generator=weights, dtype=t.dtype).to(device) for t in outs]
            grads = torch.autograd.grad(outs, wrt, cotangents, allow_unused=True)
            return [g if g is not None else "unused" for g in grads]

        self._compare(op, sample, outcome, run, why_not_by_value(full_name(op), sample))


def dtype_named(name: str) -> torch.dtype:
    """``float32`` -> ``torch.float32``; an unknown name lists what there is."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SystemExit(f"no dtype is called {name!r}; say float32, bfloat16, float64, int64, bool or complex64")
    return dtype
