"""The directory of stored programs: damage, lack of room, other processes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
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
        store.reject(A, "because")  # another process was faster
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


# ---- others who could put code there


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=oct)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
def test_what_is_made_is_this_users_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "made" / "programs", 10_000)
    store.put(A, b"abc")
    assert store.get(A) == b"abc"
    made = [tmp_path / "made", *(tmp_path / "made").rglob("*")]
    assert len(made) == 4
    for path in made:
        assert path.stat().st_mode & 0o077 == 0, path


def _refused(store: Store, match: str) -> None:
    """Nothing is read, nothing is written, one warning says what to do, and the program goes on."""
    before = sorted(path.name for path in store.directory.iterdir())
    with record() as seen, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert store.get(A) is None
        store.put(B, b"b")
        assert not store.has(A)
        assert store.get(B) is None
    (message,) = (str(warning.message) for warning in warned)
    assert re.search(match, message)
    assert "TARRY_CACHE_DIR" in message
    assert _kinds(seen) == {"store_miss": 2}
    assert sorted(path.name for path in store.directory.iterdir()) == before


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o1777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "programs"
    Store(folder, 10_000).put(A, b"abc")
    folder.chmod(mode)
    _refused(Store(folder, 10_000), r"written by other users.*chmod -R go-w")
    folder.chmod(0o755)  # as earlier versions made it: others can look
    assert Store(folder, 10_000).get(A) == b"abc"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@needs_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    Store(folder, 10_000).put(A, b"abc")
    os.chown(folder, 12345, 12345)
    _refused(Store(folder, 10_000), "belongs to another user")


@needs_root
@pytest.mark.parametrize("which", ["the one asked for", "another"])
def test_a_folder_with_a_file_of_another_user_is_refused(tmp_path: Path, which: str) -> None:
    store = Store(tmp_path, 10_000)
    store.put(A, b"abc")
    store.put(C, b"c")
    os.chown(_file(store, A if which == "the one asked for" else C), 12345, 12345)
    _refused(Store(tmp_path, 10_000), "belongs to another user")


@needs_root
def test_a_file_that_is_given_away_later_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    store.put(A, b"abc")
    assert store.get(A) == b"abc"
    os.chown(_file(store, A), 12345, 12345)
    _refused(store, "belongs to another user")


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    store.put(A, b"abc")
    _file(store, A).chmod(0o666)
    _refused(store, "written by other users")


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    real = Store(tmp_path / "real", 10_000)
    real.put(A, b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    _refused(Store(tmp_path / "link", 10_000), "is a link")


def test_files_that_are_links_are_not_followed(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "programs", 10_000), Store(tmp_path / "other", 10_000)
    store.put(B, b"b")
    other.put(A, b"abc")
    _file(store, A).symlink_to(_file(other, A))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (store.directory / ".lock").unlink()
    (store.directory / ".lock").symlink_to(victim)
    assert store.get(A) is None
    with pytest.warns(UserWarning, match="cannot be kept"):  # the lock is a link
        store.put(A, b"new")
    assert victim.read_text() == "precious"
    assert other.get(A) == b"abc"
    assert store.get(A) == b"new"  # in the link's place


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    os.mkfifo(_file(store, A))
    with pytest.warns(UserWarning, match="no plain file"):
        assert store.get(A) is None


# ---- faults


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 10_000)
    store.put(A, b"abc")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        store.put(A, b"new")
    assert store.get(A) == b"abc"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", f"{A.key}{SUFFIX}"]


def test_a_write_that_ends_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    """A real one: the system takes no more than 4 KB of a file."""
    script = f"""
import os, resource, signal, warnings
from pathlib import Path
from tarry.store import Identity, Store
store = Store(Path({str(tmp_path)!r}), 1 << 30)
store.put(Identity("a"), b"abc")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    store.put(Identity("b"), b"b" * 100_000)
assert len(seen) == 1, seen
assert store.get(Identity("a")) == b"abc"
assert store.get(Identity("b")) is None
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not list(tmp_path.glob(".tmp-*"))


WRITER = """
import sys
from pathlib import Path
from tarry.store import Identity, Store
store = Store(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
k = 0
while True:
    store.put(Identity("victim"), bytes([k % 256]) * 3_000_000)
    k += 1
"""


def test_a_writer_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    victim = Identity("victim")
    for k in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.05 + 0.013 * k)  # somewhere in the middle of a write
            writer.send_signal(signal.SIGKILL)
        store = Store(tmp_path, 1 << 30)
        with record() as seen:
            found = store.get(victim)
        assert found is None or found == found[:1] * 3_000_000
        assert "store_corrupt" not in _kinds(seen)
    store.put(victim, b"again")
    assert store.get(victim) == b"again"


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    store.put(A, b"some program")
    data = _file(store, A).read_bytes()
    for k in range(8 * len(data)):
        changed = bytearray(data)
        changed[k // 8] ^= 1 << k % 8
        _file(store, A).write_bytes(changed)
        _file(store, A).chmod(0o600)
        assert store.get(A) is None
        assert not _file(store, A).exists()
    store.put(A, b"some program")
    assert store.get(A) == b"some program"


def test_a_folder_that_can_only_be_read_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    store.put(A, b"abc")
    tmp_path.chmod(0o500)
    try:
        reader = Store(tmp_path, 10_000)
        assert reader.get(A) == b"abc"
        if os.geteuid() != 0:  # root may write anywhere
            with pytest.warns(UserWarning, match="cannot be kept"):
                reader.put(B, b"b")
            assert reader.get(A) == b"abc"
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "programs", 10_000)
    store.put(A, b"abc")
    for path in store.directory.iterdir():
        path.unlink()
    store.directory.rmdir()
    assert store.get(A) is None
    store.put(A, b"abc")
    assert store.get(A) == b"abc"
