"""torchmetrics: metrics are updated on the device without a read, and computed to the CPU's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.frameworks.support import installed, reads

installed("torchmetrics")
import torchmetrics
from torchmetrics import classification as c
from torchmetrics import regression as r

USES_DEVICE = True
CLASSES = 4
# How often torchmetrics waits in an update: for torch.bincount, or to look for NaN.
READS = {"accuracy": 1, "f1": 1, "auroc": 1, "confusion": 1, "mean": 2}

CLASSIFICATION: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: c.MulticlassAccuracy(CLASSES),
    "top2": lambda: c.MulticlassAccuracy(CLASSES, top_k=2),
    "f1": lambda: c.MulticlassF1Score(CLASSES),
    "auroc": lambda: c.MulticlassAUROC(CLASSES, thresholds=10),
    "confusion": lambda: c.MulticlassConfusionMatrix(CLASSES),
    "calibration": lambda: c.MulticlassCalibrationError(CLASSES),
}
REGRESSION: dict[str, Callable[[], Any]] = {
    "mean": torchmetrics.MeanMetric,
    "mse": r.MeanSquaredError,
    "r2": r.R2Score,
    "pearson": r.PearsonCorrCoef,
    "mae": r.MeanAbsoluteError,
}


def _scores(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 8, CLASSES, generator=source).softmax(-1).to(device)
    return list(zip(scores, torch.randint(CLASSES, (3, 8), generator=source).to(device), strict=True))


def _values(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [(x.to(device), (2 * x + 0.1).to(device)) for x in torch.randn(3, 8, generator=source)]


def _computed(metric: Any, batches: list[Any]) -> Any:
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


@pytest.mark.parametrize("name", [*CLASSIFICATION, *REGRESSION])
def test_values_are_those_of_the_cpu(name: str) -> None:
    make, data = (CLASSIFICATION[name], _scores) if name in CLASSIFICATION else (REGRESSION[name], _values)
    expected = _computed(make(), data("cpu"))
    metric = make().to("tarry")
    batches = data("tarry")
    with reads() as seen:
        for batch in batches:
            metric.update(*batch)
    assert seen.count <= READS.get(name, 0) * len(batches)
    value = metric.compute()
    assert value.device.type == "tarry"
    torch.testing.assert_close(value.cpu(), expected)


def test_counts_are_not_waited_for_in_deterministic_mode() -> None:
    metric, batches = c.MulticlassAccuracy(CLASSES).to("tarry"), _scores("tarry")
    torch.use_deterministic_algorithms(True)
    try:
        with reads() as seen:
            for batch in batches:
                metric.update(*batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen.count == seen.fallbacks == 0
    torch.testing.assert_close(metric.compute().cpu(), _computed(c.MulticlassAccuracy(CLASSES), _scores("cpu")))


def test_a_collection_is_logged_reset_and_saved() -> None:
    collection = torchmetrics.MetricCollection({name: make() for name, make in CLASSIFICATION.items()})
    host, lazy = collection.clone(), collection.clone().to("tarry")
    expected, values = _computed(host, _scores("cpu")), _computed(lazy, _scores("tarry"))
    for name, value in expected.items():
        torch.testing.assert_close(values[name].cpu(), value)
    lazy.persistent()
    again = collection.clone().to("tarry")
    again.persistent()
    again.load_state_dict(lazy.state_dict())
    for name, value in again.compute().items():
        torch.testing.assert_close(value.cpu(), expected[name])
    lazy.reset()
    assert lazy["confusion"].confmat.sum().item() == 0
