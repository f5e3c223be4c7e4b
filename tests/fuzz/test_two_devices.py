"""Random programs on two devices of a process: see two_devices.py."""

from __future__ import annotations

import pytest

from tests.support.scripts import run_script


@pytest.mark.process
def test_random_programs_on_two_devices() -> None:
    assert "120 programs agree" in run_script("from tests.fuzz.two_devices import main; main(0, 120)")
