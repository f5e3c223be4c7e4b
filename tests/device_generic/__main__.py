"""PyTorch's own device-generic tests on tarry: ``python -m tests.device_generic FOLDER --files test_view_ops``.

FOLDER is the ``test/`` folder of a checkout of PyTorch, of the version that is installed; it is not part of this
repository. torch.testing instantiates its test classes for a device of its own kind (``PrivateUse1TestBase``). Each
test runs in a child process on tarry; those that fail run on the CPU as well. What fails on tarry and passes on the
CPU is listed, grouped by the first line of its error. So is what fails on tarry and has no answer from the CPU: its
twin is skipped there (``skipped``), does not exist (``absent``) or ends its process (``crashed``). A crash, or a test
that gives no answer in time, is that test's result. ``--json`` writes the texts of all failures.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.device_generic import child
from tests.support.pool import Outcome, run_pool

FILES = (
    "test_view_ops",
    "test_indexing",
    "test_type_promotion",
    "test_tensor_creation_ops",
    "test_reductions",
    "test_sort_and_select",
    "test_scatter_gather_ops",
    "test_shape_ops",
    "test_torch",
    "test_nn",
    "test_autograd",
    "test_optim",
    "test_foreach",
    "test_dlpack",
    "test_serialization",
)

SECTIONS = {
    "passed": "fail on tarry and pass on the CPU",
    "skipped": "fail on tarry and are skipped on the CPU",
    "absent": "fail on tarry and do not exist on the CPU",
    "crashed": "fail on tarry and end their process, or give no answer, on the CPU",
}  # by the CPU's outcome


@dataclass(frozen=True)
class Failure:
    """A test that fails on tarry."""

    file: str
    test: str
    cpu: str  # its twin's outcome there: passed, skipped, absent, crashed, failed
    error: str  # its first line
    text: str


def first_line(text: str) -> str:
    """What a traceback says in the end: the first line of its last error, and not what testing adds."""
    lines = [line for line in text.splitlines() if line.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if re.match(r"^[\w.]*(Error|Exception|Warning|Exit|Skip)\w*(:|$)", lines[i]):
            return " ".join(lines[i : i + 2])[:300]
    return lines[-1][:300] if lines else "no text"


def cause(error: str) -> str:
    """A first line without what differs from one instance to the next."""
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "N", re.sub(r"\[[^\]]*\]|\([\d, ]*\)", "", error))[:160]


def result(outcome: Outcome) -> tuple[str, str]:
    """What became of a test (passed, failed, skipped, absent, crashed), and the text of its error."""
    kind, text = outcome.value or ("crashed", outcome.crash or "")
    return kind, text


def cpu_name(test: str) -> str:
    """The name of a test's twin on the CPU."""
    return re.sub(r"_tarry(?=_|$)", "_cpu", test)


def run_file(options: argparse.Namespace, file: str) -> tuple[collections.Counter[str], list[Failure]]:
    """Counts of outcomes on tarry, and the tests that fail there with what their twins do on the CPU."""

    def pool(tasks: list[str], device: str, work: Any = child.work) -> Iterator[Outcome]:
        given = (options.folder, file, device, options.backend)
        jobs = min(options.jobs, 1 + len(tasks) // 20)
        return run_pool(tasks, work, setup=child.setup, setup_args=given, jobs=jobs, timeout=options.timeout)

    [listed] = pool(["names"], "tarry", child.names)
    names = [name for name in listed.value or [] if re.search(options.tests, name)]
    counts: collections.Counter[str] = collections.Counter()
    failed: dict[str, str] = {}
    for done, outcome in enumerate(pool(names, "tarry"), 1):
        kind, text = result(outcome)
        counts[kind] += 1
        if kind in ("failed", "crashed"):
            failed[outcome.task] = text
        elif text:
            counts["late"] += 1
            print(f"  left pending after a test that passed: {outcome.task}: {text.splitlines()[0]}"[:400])
        if done % 500 == 0:
            print(f"  {file}: {done} of {len(names)}, {len(failed)} fail", flush=True)
    on_cpu = {name: cpu_name(name) for name in failed}
    twins = {outcome.task: result(outcome)[0] for outcome in pool(list(on_cpu.values()), "cpu")}
    found = [Failure(file, name, twins[on_cpu[name]], first_line(text), text) for name, text in failed.items()]
    return counts, found


def by_cause(found: list[Failure]) -> list[str]:
    groups = collections.defaultdict(list)
    for failure in found:
        groups[cause(failure.error)].append(failure)
    lines = []
    for text, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(members):4}  {text}")
        lines += [f"        {m.file}: {m.test}" for m in members[:6]]
        lines += [f"        and {len(members) - 6} more"] if len(members) > 6 else []
    return lines


def report(found: list[Failure]) -> str:
    """The failures by what the CPU says of them; those that fail there as well are left out."""
    lines = []
    for kind, title in SECTIONS.items():
        members = [failure for failure in found if failure.cpu == kind]
        lines += [f"{len(members)} {title}", *by_cause(members)]
    return "\n".join(lines)


def summary(file: str, counts: collections.Counter[str], found: list[Failure]) -> str:
    """One line on a file."""
    run = counts["passed"] + counts["failed"] + counts["crashed"]
    cpu = collections.Counter(failure.cpu for failure in found)
    twins = ", ".join(f"{cpu[kind]} {kind}" for kind in (*SECTIONS, "failed"))
    return f"{file}: {run} run, {counts['skipped']} skipped, {len(found)} fail on tarry; on the CPU: {twins}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.device_generic", description=__doc__)
    parser.add_argument("folder", help="the test/ folder of a checkout of PyTorch, of the installed version")
    parser.add_argument("--files", nargs="+", default=list(FILES), help="names without .py")
    parser.add_argument("--tests", default="", help="a regular expression on Class.test names")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one test")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    options.folder = str(Path(options.folder).resolve())
    total: collections.Counter[str] = collections.Counter()
    found: list[Failure] = []
    per_file = {}
    for file in options.files:
        try:
            counts, failures = run_file(options, file)
        except RuntimeError as error:  # the file cannot be imported
            print(f"{file}: {error}", flush=True)
            continue
        total += counts
        found += failures
        per_file[file] = dict(counts)
        print(summary(file, counts, failures), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"files": per_file, "failures": [asdict(f) for f in found]}, indent=1))
    print(report(found))
    print(summary("all", total, found))


if __name__ == "__main__":
    main()
