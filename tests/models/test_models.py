"""Every model of the zoo trains and generates on the device as on CPU eager."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

from tests.models import huggingface
from tests.models.program import TOLERANCE, compare
from tests.models.zoo import QUICK, ZOO


def _check(name: str, device: str) -> None:
    if name in huggingface.ZOO and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs the transformers package")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compare(ZOO[name], device)
    assert result.loss_difference <= TOLERANCE
    assert result.parameter_difference <= TOLERANCE, f"{result.worst_parameter} differs most"
    assert result.tokens_agree is not False, "greedy generation chose other tokens than eager"


@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str, device: str) -> None:
    _check(name, device)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in QUICK])
def test_whole_zoo(name: str, device: str) -> None:
    _check(name, device)


def test_quick_names_exist() -> None:
    assert set(QUICK) <= set(ZOO)
