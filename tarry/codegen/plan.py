"""What has to be made for a backend: kernels for operators as graphs have them, and what the author owes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tarry.codegen.emit.kernels import KernelSpec
from tarry.codegen.model import Backend, BackendOperator, LazySchema, Section
from tarry.codegen.natives import Natives, natives
from tarry.codegen.op_table import Kind, OperatorRules, operator_rules
from tarry.codegen.schema import Rejected, native_schema

if TYPE_CHECKING:
    from torchgen.model import NativeFunction


@dataclass(frozen=True)
class Plan:
    """`generated` and `written` are kernels by the operator that graphs have; `never_called` are listed operators that
    do not reach a backend, with the reason."""

    generated: tuple[KernelSpec, ...]
    written: tuple[KernelSpec, ...]
    autograd: tuple[KernelSpec, ...]
    never_called: dict[str, str] = field(default_factory=dict)


def make_plan(backend: Backend) -> Plan:
    """The kernels that a backend needs."""
    return _Planner(natives(), operator_rules()).plan(backend)


class _Planner:
    def __init__(self, known: Natives, rules: OperatorRules) -> None:
        self.natives = known
        self.rules = rules
        self.never_called: dict[str, str] = {}

    def plan(self, backend: Backend) -> Plan:
        generated = self._kernels(backend.of(Section.FULL_CODEGEN))
        written = self._kernels(backend.of(Section.SUPPORTED))
        for name in [name for name in written if name in generated]:
            # The pure operator is generated, a variant is listed as written: graphs have the pure one only.
            spec = written.pop(name)
            generated[name] = replace(generated[name], listed=(*generated[name].listed, *spec.listed))
        autograd = [
            KernelSpec(operator.schema, (operator.name,), is_autograd=True) for operator in backend.of(Section.AUTOGRAD)
        ]
        return Plan(_sorted(generated.values()), _sorted(written.values()), _sorted(autograd), self.never_called)

    def _kernels(self, operators: Iterable[BackendOperator]) -> dict[str, KernelSpec]:
        found: dict[str, KernelSpec] = {}
        for operator in operators:
            schema = self._pure(operator)
            reason = self._why_never(operator.name, schema)
            if schema is None or reason:
                self.never_called[operator.name] = reason
                continue
            listed = found[schema.name].listed if schema.name in found else ()
            found[schema.name] = KernelSpec(schema, (*listed, operator.name), view=self._view(schema.name))
        return found

    def _view(self, name: str) -> str:
        """The view that graphs have in place of an operator that copies one: `view` for `view_copy`."""
        base, dot, overload = name.partition(".")
        view = base.removesuffix("_copy") + dot + overload
        return view if view != name and view in self.rules.graph_views else ""

    def _why_never(self, name: str, pure: LazySchema | None) -> str:
        """Why an operator never reaches a backend; empty if it may."""
        function = self.natives.by_name[name]
        if name in self.rules.outside_graphs:
            return "tarry carries it out itself"
        if self.rules.kind(function) is Kind.OPAQUE:
            return "it is of sparse or nested tensors, and runs on the real device"
        if self.rules.kind(function) is Kind.UNSUPPORTED:
            return "tarry has no tensors of its layout"
        if function.has_composite_implicit_autograd_kernel and (pure is None or not self._is_whole(function)):
            return "PyTorch decomposes it before a backend sees it"
        return "it has no pure form, so it runs on the real device" if pure is None else ""

    def _is_whole(self, function: NativeFunction) -> bool:
        """Whether an operator that PyTorch takes apart is recorded whole for a backend that has a kernel for it: not
        one that may give its argument back."""
        returns = function.func.returns
        return bool(returns) and all(ret.type.is_tensor_like() and ret.annotation is None for ret in returns)

    def _pure(self, operator: BackendOperator) -> LazySchema | None:
        """The schema of the operator that graphs have."""
        if operator.functional is None:
            return operator.schema if operator.schema.variant == "functional" else None
        try:
            return native_schema(self.natives.by_name[operator.functional], takes_symints=operator.schema.takes_symints)
        except Rejected:
            return None


def _sorted(specs: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    return tuple(sorted(specs, key=lambda spec: spec.schema.name))
