"""The command: `python -m tests.fuzz --minutes N --backend B [--direct D] [--seed S] [--what TOPIC ...]`.

Programs run in a child process: one that crashes or hangs is a finding, too. The exit status is the number of
findings.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from tests.fuzz.search import DIRECT, LoggedWorld, attempt, fresh_backend, minimise, replay, script
from tests.fuzz.topics import TOPICS
from tests.support import load_device

CHUNK = 50  # programs for which hypothesis draws from one seed
HANGS_AFTER = 120.0  # seconds without a new line
PER_TOPIC = 3  # different findings that are minimised and printed


class Search:
    """Programs of one topic after the other, until the time is over."""

    def __init__(self, backend: str, log: Path | None = None, save: Path | None = None, direct: str = "never") -> None:
        self.backend = backend
        self.direct = direct
        self.exact = backend == "eager"
        self.log = log
        self.save = save
        self.programs = 0
        self.found: dict[str, list[str]] = {}

    def chunk(self, topic: str, start: int, count: int = CHUNK) -> None:
        """Some programs of a topic. Those that fail are shown; the search goes on."""
        write = TOPICS[topic]
        failures: list[tuple[list[str], str]] = []

        @seed(start)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def run(data: st.DataObject) -> None:
            self.programs += 1

            def body(world: LoggedWorld) -> None:
                try:
                    write(world, data)
                except HypothesisException:
                    return

            lines, why = attempt(body, topic, exact=self.exact, log=self.log, direct=self.direct)
            if why:
                failures.append((lines, why))

        run()
        for lines, why in failures:
            self._show(topic, start, lines, why)

    def _show(self, topic: str, start: int, lines: list[str], why: str) -> None:
        kept = self.found.setdefault(topic, [])
        known = why in kept or len(set(kept)) >= PER_TOPIC
        kept.append(why)
        if known:
            return

        def fails(shorter: list[str]) -> bool:
            return bool(replay(shorter, topic, exact=self.exact, log=self.log))

        lines = [line for line in lines if not line.startswith("# not implemented")]
        fresh_backend(self.backend)
        alone = fails(lines)
        if alone:
            lines = minimise(lines, fails)
            fresh_backend(self.backend)
            why = replay(lines, topic, exact=self.exact) or why
        report(lines, self.backend, topic, start, why, self.save, alone=alone)


def report(lines: list[str], backend: str, topic: str, start: int, why: str, save: Path | None, *, alone: bool) -> None:
    """Print a finding, and keep it where that was asked for."""
    text = script(lines, backend, topic, why)
    note = "" if alone else " (only after other programs of the same seed)"
    print(f"\n=== {topic}, seed {start}{note}: {why}\n{text}", flush=True)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        (save / f"{backend}-{topic}-{start}-{abs(hash(why)) % 10000:04}.py").write_text(text)


def search(options: argparse.Namespace) -> int:
    """In the child: programs until the time is over. Gives the number of findings."""
    load_device()
    fresh_backend(options.backend)
    log = Path(options.child)
    found = Search(options.backend, log, options.save, options.direct)
    end = time.monotonic() + 60 * options.minutes
    start = options.seed
    while time.monotonic() < end:
        for topic in options.what:
            if time.monotonic() < end:
                found.chunk(topic, start)
        start += 1
        log.with_suffix(".seed").write_text(str(start))
    counts = ", ".join(f"{topic}: {len(whys)}" for topic, whys in found.found.items()) or "none"
    print(f"{found.programs} programs on {options.backend!r}; findings: {counts}", flush=True)
    return sum(map(len, found.found.values()))


def _run_child(arguments: list[str], log: Path) -> int | None:
    """The exit status; None if it hung."""
    with subprocess.Popen([sys.executable, "-m", "tests.fuzz", *arguments]) as child:
        while child.poll() is None:
            time.sleep(0.2)
            if log.exists() and time.time() - log.stat().st_mtime > HANGS_AFTER:
                child.kill()
                child.wait()
                return None
    return child.returncode


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--direct", choices=DIRECT, default="never", help="which calls run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--what", nargs="+", choices=sorted(TOPICS), default=sorted(TOPICS))
    parser.add_argument("--save", type=Path, help="a folder for the scripts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.replay:
        load_device()
        fresh_backend(options.backend)
        return int(bool(replay(options.replay.read_text().split("\0"), "", exact=options.backend == "eager")))
    if options.child:
        return min(search(options), 100)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "program")
        status = _run_child([*arguments, "--child", str(log)], log)
        if status is not None and status >= 0:
            return status
        why = "hangs" if status is None else f"dies of signal {-status}"
        lines = log.read_text().split("\0")

        def fails(shorter: list[str]) -> bool:
            log.write_text("\0".join(shorter))
            command = ["--backend", options.backend, "--replay", str(log)]
            try:
                ended = subprocess.run([sys.executable, "-m", "tests.fuzz", *command], timeout=60, check=False)
            except subprocess.TimeoutExpired:
                return status is None
            return ended.returncode < 0

        alone = fails(lines)
        if alone:
            lines = minimise(lines, fails, tries=40)
        report(lines, options.backend, "crash", options.seed, why, options.save, alone=alone)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
