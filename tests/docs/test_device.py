"""docs/device.md answers every item of the list, and the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ITEMS = 47


def _rows() -> list[tuple[str, str, str, str]]:
    lines = (ROOT / "docs" / "device.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d", line)]
    return [(number, item, answer, reason) for number, item, answer, reason in cells]


def test_every_item_is_there_once_in_order() -> None:
    assert [int(number) for number, *_ in _rows()] == list(range(1, ITEMS + 1))


@pytest.mark.parametrize(("number", "item", "answer", "reason"), _rows(), ids=[row[0] for row in _rows()])
def test_an_answer_has_its_test_or_its_reason(number: str, item: str, answer: str, reason: str) -> None:
    tests = re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", reason)
    for path, name in tests:
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), f"{path} has no {name}"
    assert answer in ("yes", "partly", "no")
    assert tests if answer == "yes" else reason
