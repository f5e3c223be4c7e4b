"""`python -m tarry.native`: build the native part now, for installers, container images and CI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tarry.errors import NativeBuildError

EPILOG = """\
environment:
  TARRY_CACHE_DIR  where the result is kept (default: ~/.cache/tarry)
  CXX              the C++ compiler (default: g++)
  MAX_JOBS         compilers at once (default: as processors and memory allow, 16 at most)
  TARRY_CXXFLAGS   more flags for the compiler, such as "-O0 -g"

exit status: 0 built (or there already), 1 not built; the reason is on standard error.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tarry.native",
        description="Build tarry's native part for this Python, torch and compiler, unless it is in the cache. "
        "`import tarry` does the same on first use.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--force", action="store_true", help="compile every file again")
    parser.add_argument("--where", action="store_true", help="print the library's path and build nothing")
    parser.add_argument("--wheel", metavar="DIR", help="write a wheel of this checkout with the native part in it")
    options = parser.parse_args(argv)

    from tarry.native._build import TARRY, Plan, build

    try:
        if options.where:
            plan = Plan(TARRY)
            found = plan.find()
            print(found if found is not None else plan.library)
            if found is None:
                print("not built yet; build it with: python -m tarry.native", file=sys.stderr)
            return 0 if found is not None else 1
        if options.wheel is not None:
            from tarry.native._wheel import make_wheel

            print(make_wheel(TARRY, TARRY.sources.parent.parent, Path(options.wheel)))
            return 0
        print(build(TARRY, force=options.force))
    except NativeBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
