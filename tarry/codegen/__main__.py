"""`python -m tarry.codegen`: see docs/codegen.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

_EPILOG = """\
Exit codes: 0 done (with --check: the files are fresh), 1 mistakes in what was read (with --check: or stale files),
2 wrong use of the command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    given = _parser().parse_args(argv)
    if given.output_dir is None and not (given.dry_run or given.json):
        _parser().error("--output-dir is needed, unless with --dry-run or --json")
    if given.check and given.output_dir is None:
        _parser().error("--check compares files: say with --output-dir which")
    node_base = _node_base(given.node_base)
    from tarry.codegen.command import Options, run

    return run(
        Options(
            source_yaml=given.source_yaml,
            output_dir=given.output_dir,
            impl_path=given.impl_path,
            shape_inference_path=given.shape_inference_path,
            gen_ts_lowerings=given.gen_ts_lowerings,
            node_base=node_base,
            backend_name=given.backend_name,
            dry_run=given.dry_run,
            check=given.check,
            json=given.json,
            quiet=given.quiet,
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tarry.codegen",
        description="From a backend's YAML, in the format of PyTorch's lazy tensor backends, to Python: classes of IR "
        "nodes, kernels, shape functions, registrations, a coverage report.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-s", "--source-yaml", "--source_yaml", type=Path, required=True, metavar="YAML", help="the backend's YAML")
    add("-o", "--output-dir", "--output_dir", type=Path, metavar="DIR", help="the package to generate")
    add("--impl-path", "--impl_path", type=Path, metavar="PY", help="your kernels, which are checked")
    add(
        "--shape-inference-path",
        "--shape_inference_path",
        "--shape-inference-hdr",
        "--shape_inference_hdr",
        type=Path,
        metavar="PY",
        help="your shape functions, which are checked",
    )
    add("--gen-ts-lowerings", "--gen_ts_lowerings", action="store_true", help="nodes that lower to TorchScript")
    add("--node-base", "--node_base", default="", metavar="MODULE:CLASS", help="your base class of nodes")
    add("--backend-name", "--backend_name", default="", metavar="NAME", help="its name (default: the YAML's)")
    dry = "write nothing, say what would be written"
    add("--dry-run", "--dry_run", nargs="?", const=True, default=False, type=_truth, help=dry)
    add("--check", action="store_true", help="write nothing, fail if files are stale")
    add("--json", action="store_true", help="print the nodes, fields and shape functions as JSON")
    add("-q", "--quiet", action="store_true", help="print mistakes only")
    for name in ("--tensor-class", "--tensor-class-hdr", "--node-base-hdr"):  # of C++; here for scripts that pass them
        add(name, name.replace("-", "_").replace("__", "--", 1), help=argparse.SUPPRESS)
    return parser


def _truth(text: str) -> bool:
    return text.lower() not in ("", "0", "false", "no")


def _node_base(text: str) -> str:
    """ "module:Class", also given as "module.Class"."""
    module, separator, name = text.rpartition(":" if ":" in text else ".")
    if text and not (separator and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        _parser().error(f"--node-base {text}: write it as module:Class, such as my_package.nodes:MyNode")
    return f"{module}:{name}" if text else ""


if __name__ == "__main__":
    raise SystemExit(main())
