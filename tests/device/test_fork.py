"""Forked processes may use the device unless the parent has, and are told what to do instead."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.support import tarry_only

pytestmark = tarry_only


def run(program: str) -> str:
    preamble = "import os, sys, torch, tarry\ntorch.set_num_threads(1)\n"
    command = [sys.executable, "-c", preamble + textwrap.dedent(program)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORK = """
def in_child(function):
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            function()
            status = 0
        except BaseException as error:
            print(type(error).__name__, str(error).splitlines()[0])
            status = 1
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_importing_and_seeding_use_nothing() -> None:
    out = run(
        FORK
        + """
torch.manual_seed(1)
def child():
    assert not torch.tarry._is_in_bad_fork()
    print((torch.ones(3, device="tarry") + 1).tolist())
assert in_child(child) == 0
"""
    )
    assert out == "[2.0, 2.0, 2.0]\n"


def test_child_of_a_user_is_refused() -> None:
    out = run(
        FORK
        + """
x = torch.ones(3, device="tarry") + 1
print(x.tolist())
assert in_child(lambda: torch.ones(3, device="tarry")) == 1
assert in_child(lambda: x + 1) == 1
assert in_child(lambda: torch.ones(3).to("tarry")) == 1
def on_the_cpu():
    assert torch.tarry._is_in_bad_fork() and not torch.tarry.is_initialized()
    torch.manual_seed(3)
    print(torch.ones(2).add(1).tolist())
assert in_child(on_the_cpu) == 0
assert not torch.tarry._is_in_bad_fork()
print((x + 1).tolist())
"""
    )
    lines = out.splitlines()
    assert lines[0] == "[2.0, 2.0, 2.0]"
    assert lines[-1] == "[3.0, 3.0, 3.0]"
    assert lines[-2] == "[2.0, 2.0]"
    assert len(lines) == 6
    for line in lines[1:4]:
        assert line.startswith("RuntimeError tarry: this process was forked")
        assert "'spawn'" in line


LOADER = """
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, device):
        self.device = device
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.full((2,), float(i), device=self.device)

print((torch.ones(1, device="tarry") + 1).item())
"""


def test_data_loader_workers_make_cpu_tensors() -> None:
    out = run(
        LOADER
        + """
loader = DataLoader(Numbers("cpu"), batch_size=2, num_workers=1, multiprocessing_context="fork")
print([batch.to("tarry").sum().item() for batch in loader])
"""
    )
    assert out == "2.0\n[2.0, 10.0]\n"


def test_data_loader_workers_that_use_the_device_say_what_to_do() -> None:
    out = run(
        LOADER
        + """
try:
    list(DataLoader(Numbers("tarry"), batch_size=2, num_workers=1, multiprocessing_context="fork"))
except RuntimeError as error:
    print("keep tensors on the CPU in worker processes" in str(error))
"""
    )
    assert out == "2.0\nTrue\n"
