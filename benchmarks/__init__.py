"""Timings, as ratios against a peer in the same run. Not tests: nothing here passes or fails."""

from __future__ import annotations

import tarry_command

# The model of `tarry demo` is borrowed from the package, but eager PyTorch is measured in a process without tarry.
tarry_command.defer_package()
