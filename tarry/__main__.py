"""`python -m tarry`: the same as the command `tarry`."""

from __future__ import annotations

from tarry.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
