"""The directory of stored programs: damage, lack of room, other processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest

from tarry.events import Event, record
from tarry.store import Identity, Store
from tarry.store.files import STALE_SECONDS, SUFFIX


def _kinds(seen: list[Event]) -> Counter[str]:
    return Counter(event.kind for event in seen)


def _file(store: Store, identity: Identity) -> Path:
    return store.directory / f"{identity.key}{SUFFIX}"


A, B, C = (Identity(f"program {name}") for name in "abc")


def test_what_was_put_is_got(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "programs", 10_000)
    with record() as seen:
        assert store.get(A) is None
        store.put(A, b"abc")
        assert store.get(A) == b"abc"
        assert store.get(B) is None
    assert _kinds(seen) == {"store_miss": 2, "store_hit": 1}
    assert Store(store.directory, 10_000).get(A) == b"abc"
    assert sorted(path.name for path in store.directory.iterdir()) == [".lock", f"{A.key}{SUFFIX}"]


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed", "foreign", "of another identity"])
def test_a_damaged_file_is_removed_and_counted(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path, 10_000)
    store.put(A, b"abc" * 100)
    store.put(B, b"b")
    path = _file(store, A)
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-1],
            "emptied": b"",
            "changed": data[:200] + bytes([data[200] ^ 1]) + data[201:],
            "foreign": b"#!/bin/sh\necho hello\n",
            "of another identity": _file(store, B).read_bytes(),
        }[damage]
    )
    with record() as seen:
        assert store.get(A) is None
    assert _kinds(seen) == {"store_corrupt": 1, "store_miss": 1}
    assert not path.exists()
    store.put(A, b"again")
    assert store.get(A) == b"again"
    assert store.get(B) == b"b"


def test_a_program_that_cannot_be_loaded_is_rejected(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    store.put(A, b"abc")
    with record() as seen:
        store.reject(A, "because")
        store.reject(A, "because")  # somebody else was faster
    assert [event.fields["reason"] for event in seen] == ["because", "because"]
    assert store.get(A) is None


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 2_600)
    store.put(A, b"a" * 1000)
    store.put(B, b"b" * 1000)
    for age, identity in ((100, A), (50, B)):
        past = _file(store, identity).stat().st_mtime - age
        os.utime(_file(store, identity), (past, past))
    assert store.get(A) is not None  # used just now
    with record() as seen:
        store.put(C, b"c" * 1000)
    assert [event.fields["key"] for event in seen if event.kind == "store_evict"] == [B.key]
    assert store.get(A) is not None
    assert store.get(B) is None
    assert store.get(C) is not None


def test_one_that_is_larger_than_the_store_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, 500)
    with record() as seen:
        store.put(A, b"a" * 1000)
    assert _kinds(seen) == {"store_skip": 1}
    assert store.get(A) is None


def test_who_holds_the_lock_makes_room(tmp_path: Path) -> None:
    store = Store(tmp_path, 1_200)
    store.put(A, b"a" * 900)
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store.put(B, b"b" * 900)
        assert store.get(A) is not None  # not ours to remove
        assert store.get(B) is not None
    store.put(C, b"c" * 900)
    assert store.get(A) is None
    assert store.get(C) is not None


def test_files_of_a_writer_that_died_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    left, fresh = tmp_path / ".tmp-left", tmp_path / ".tmp-fresh"
    left.write_bytes(b"half")
    fresh.write_bytes(b"half")
    past = left.stat().st_mtime - STALE_SECONDS - 1
    os.utime(left, (past, past))
    store.put(A, b"a")
    assert not left.exists()
    assert fresh.exists()


def test_a_place_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    store = Store(tmp_path / "file" / "programs", 10_000)
    with pytest.warns(UserWarning, match=r"cannot be kept in .*TARRY_CACHE_DIR"):
        store.put(A, b"a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(B, b"b")
        assert store.get(A) is None


RACER = """
import random, sys
from pathlib import Path
from tarry.events import record
from tarry.store import Identity, Store

store = Store(Path(sys.argv[1]), 20_000)
choose = random.Random(int(sys.argv[2]))
with record() as seen:
    for _ in range(400):
        name = choose.randrange(12)
        content = bytes([name]) * 3000
        if choose.random() < 0.5:
            store.put(Identity(f"program {name}"), content)
        else:
            found = store.get(Identity(f"program {name}"))
            assert found is None or found == content, name
assert not [event for event in seen if event.kind == "store_corrupt"]
assert [event for event in seen if event.kind == "store_hit"]
print(len([event for event in seen if event.kind == "store_evict"]))
"""


def test_processes_at_once(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", RACER, tmp_path, str(k)], stdout=subprocess.PIPE)
        for k in range(2)
    ]
    evicted = [int(racer.communicate()[0]) for racer in racers]
    assert all(racer.returncode == 0 for racer in racers)
    assert sum(evicted) > 0
    assert not list(tmp_path.glob(".tmp-*"))
    assert sum(path.stat().st_size for path in tmp_path.glob(f"*{SUFFIX}")) <= 20_000
