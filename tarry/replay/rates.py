"""Learning rates that change from call to call: which numbers of a step follow from them, and how.

A replay runs no Python that could compute `-lr` or `1 - lr * weight_decay`. So while a call is watched, the learning
rates of its optimizers are floats that note what is computed from them. Two calls with different rates that did the
same but for some numbers, each of which is the value of the same expression in both, show how those numbers follow
from the rates: all else that they could depend on is guarded. From then on a replay computes them.

Values are matched, so they must distinguish the expressions: if two have the same value in both calls, or one has a
value that did not change, nothing is concluded. Nor is anything if the call does more with a rate than arithmetic:
compares it, converts it, prints it, makes a tensor of it. What C functions do with a float is not seen: verification is
what finds a number that does not follow as it seemed to.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Expression: TypeAlias = tuple[Any, ...]
"""("rate", which), ("number", value), or the name of an operator and the expressions that it takes."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv, "pow": operator.pow,
    "neg": operator.neg,
}  # fmt: skip
_LOOKS = (
    "bool", "eq", "ne", "lt", "le", "gt", "ge", "hash", "int", "float", "trunc", "floor", "ceil", "round", "abs",
    "mod", "rmod", "divmod", "rdivmod", "floordiv", "rfloordiv", "str", "repr", "format", "pos", "getnewargs",
)  # fmt: skip


class Rate(float):
    """A learning rate, or what was computed from one."""

    __slots__ = ("expression", "watch")

    expression: Expression
    watch: RateWatch

    def _made(self, value: Any, expression: Expression | None) -> Any:
        """What was computed from it. Without an expression, it is unknown how."""
        if self.watch.is_over or value is NotImplemented:
            return value
        if expression is None or type(value) is not float:
            self.watch.looked_at = True
            return value
        return _rate(value, expression, self.watch)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.watch.looked_at = True
        return float, (float.__float__(self),)  # copied and stored as what it looks like

    def __neg__(self) -> Any:
        return self._made(float.__neg__(self), ("neg", self.expression))


def _rate(value: float, expression: Expression, watch: RateWatch) -> Rate:
    made = Rate(value)
    made.expression, made.watch = expression, watch
    watch.computed[expression] = value
    return made


def _binary(name: str, reflected: bool) -> Callable[[Rate, Any], Any]:
    plain = getattr(float, f"__r{name}__" if reflected else f"__{name}__")

    def compute(self: Rate, other: Any, *modulo: Any) -> Any:
        value = plain(self, other, *modulo)
        if isinstance(other, Rate) and other.watch is self.watch:
            theirs = other.expression
        elif type(other) in (int, float) and not modulo:
            theirs = ("number", other)
            if other == 0 and name == "mul":
                return value  # the same whatever the rate is
            if other == 1 and not reflected and name in ("mul", "truediv", "pow"):
                return self
        else:
            return self._made(value, None)
        operands = (theirs, self.expression) if reflected else (self.expression, theirs)
        return self._made(value, (name, *operands))

    return compute


def _look(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def look(self: Rate, *args: Any) -> Any:
        self.watch.looked_at = True
        return plain(self, *args)

    return look


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Rate, f"__{_name}__", _binary(_name, reflected=False))
    setattr(Rate, f"__r{_name}__", _binary(_name, reflected=True))
for _name in (*(f"__{name}__" for name in _LOOKS), "conjugate", "is_integer", "hex", "as_integer_ratio"):
    setattr(Rate, _name, _look(_name))
Rate.real = property(operator.pos)  # type: ignore[method-assign,assignment]


def note_rates(value: Any) -> None:
    """Something else than arithmetic is done with this: a rate in it may have been rounded, or looked at."""
    if isinstance(value, Rate):
        value.watch.looked_at = True
    elif isinstance(value, list | tuple):
        for item in value:
            note_rates(item)


class RateWatch:
    """Within the block, the learning rates of parameter groups are of type Rate. `groups` have floats as rates."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.groups = list(groups)
        self.values: list[float] = [group["lr"] for group in self.groups]
        self.leaders = [self.values.index(value) for value in self.values]
        """Per group: the first one with the same rate. It stands for all of them."""
        self.computed: dict[Expression, float] = {}
        self.looked_at = False  # compared, say: what the call does may depend on it
        self.is_over = False

    def __enter__(self) -> RateWatch:
        self._lent = [
            _rate(value, ("rate", leader), self) for value, leader in zip(self.values, self.leaders, strict=True)
        ]
        for group, rate in zip(self.groups, self._lent, strict=True):
            group["lr"] = rate
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_over = True
        for group, lent, value in zip(self.groups, self._lent, self.values, strict=True):
            for key, now in group.items():
                if isinstance(now, Rate):
                    group[key] = value if now is lent else float.__float__(now)
        self._lent = []

    def expressions(self, varying: Iterable[int]) -> dict[str, set[Expression]]:
        """What depends on these rates, by value."""
        rates = set(varying)
        found: dict[str, set[Expression]] = {}
        for expression, value in self.computed.items():
            if not rates.isdisjoint(_rates_in(expression)):
                found.setdefault(repr(value), set()).add(expression)
        return found


def _rates_in(expression: Expression) -> set[int]:
    match expression:
        case ("rate", index):
            return {index}
        case ("number", _):
            return set()
        case (_, *operands):
            return {index for operand in operands for index in _rates_in(operand)}
    raise AssertionError(expression)


def _evaluate(expression: Expression, rates: Sequence[float]) -> float:
    match expression:
        case ("rate", index):
            return rates[index]
        case ("number", value):
            return value
        case (name, *operands):
            result: float = _OPERATORS[name](*(_evaluate(operand, rates) for operand in operands))
            return result
    raise AssertionError(expression)


@dataclass
class Schedule:
    """How numbers of a step follow from learning rates."""

    groups: list[dict[str, Any]]
    leaders: list[int]
    fixed: list[tuple[int, float]]  # groups whose rates have not been seen to change
    expressions: list[Expression]  # each once
    positions: list[int]  # of the numbers that follow from rates, among all,
    expression_of: list[int]  # ... and by which expression

    def evaluate(self) -> list[float] | None:
        """The numbers for the rates of now; None if they are unknown."""
        rates = [group["lr"] for group in self.groups]
        if any(rates[k] != value for k, value in self.fixed) or not all(map(math.isfinite, rates)):
            return None
        if any(rates[leader] != rate for leader, rate in zip(self.leaders, rates, strict=True)):
            return None
        try:
            values = [_evaluate(expression, rates) for expression in self.expressions]
        except ArithmeticError:
            return None
        return [values[k] for k in self.expression_of] if all(type(value) is float for value in values) else None

    def explain(self) -> str:
        """Why evaluate() gives None."""
        return "learning rates of an optimizer that were the same, or did not change, have changed"


def schedule(before: RateWatch, earlier: Sequence[Any], now: RateWatch, later: Sequence[Any]) -> Schedule | None:
    """How the numbers of two calls that did the same follow from their rates; None if that is not clear."""
    same_groups = len(before.groups) == len(now.groups) and all(map(operator.is_, before.groups, now.groups))
    if (
        not same_groups
        or before.leaders != now.leaders
        or before.looked_at
        or now.looked_at
        or len(earlier) != len(later)
    ):
        return None
    varying = {k for k, (a, b) in enumerate(zip(before.values, now.values, strict=True)) if a != b}
    if not varying:
        return None
    first, second = before.expressions(varying), now.expressions(varying)
    follows: dict[int, Expression] = {}
    for k, (a, b) in enumerate(zip(earlier, later, strict=True)):
        candidates = first.get(repr(a), set()) & second.get(repr(b), set())
        unchanged = type(a) is type(b) and repr(a) == repr(b)
        if unchanged and not candidates:
            continue
        if unchanged or len(candidates) != 1 or type(b) is not float:
            return None
        follows[k] = candidates.pop()
    expressions = list(dict.fromkeys(follows.values()))
    return Schedule(
        now.groups,
        now.leaders,
        [(k, value) for k, value in enumerate(now.values) if now.leaders[k] not in varying],
        expressions,
        list(follows),
        [expressions.index(expression) for expression in follows.values()],
    )
