"""Threads that record at once, data loader workers, and use after a fork."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.support import DEVICE, assert_same, dev, step, tarry_only

USES_DEVICE = True


def _chain(seed: int, device: str) -> float:
    x = torch.full((16, 16), 1.0 + seed, device=device)
    for i in range(20):
        x = (x @ x).tanh() + i
        x[0].mul_(0.5)
        if i % 7 == 3:
            x.sum().item()
    return x.sum().item()


def test_threads_record_side_by_side() -> None:
    expected = [_chain(i, "cpu") for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(lambda i: _chain(i, DEVICE), range(8)))
    assert actual == pytest.approx(expected)


def test_threads_train_side_by_side() -> None:
    def train(seed: int, device: str) -> list[Tensor]:
        net = nn.Linear(4, 2)
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(0.1 * (seed + 1))
        net = net.to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for i in range(5):
            optimizer.zero_grad()
            net(torch.full((3, 4), float(i)).to(device)).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    expected = [train(i, "cpu") for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(lambda i: train(i, DEVICE), range(4)))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_a_tensor_recorded_in_one_thread_is_read_in_another() -> None:
    x = torch.ones(3, device=DEVICE) * 2
    seen: list[list[float]] = []
    thread = threading.Thread(target=lambda: seen.append((x + 1).tolist()))
    thread.start()
    thread.join()
    assert seen == [[3.0] * 3]


def test_one_thread_cuts_while_another_records() -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def cut() -> None:
        try:
            while not stop.is_set():
                step()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        x = torch.zeros(8, device=DEVICE)
        for _ in range(200):
            x.add_(1)
            y = x * 2
        assert y.tolist() == [400.0] * 8
    finally:
        stop.set()
        thread.join()
    assert not errors


class Squares(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(i)), i * i


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.process)])
def test_data_loader_workers(method: str) -> None:
    (torch.ones(2, device=DEVICE) + 1).sum().item()  # the device is in use before the workers start
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method)
    rows = []
    for x, y in loader:
        here = x.to(DEVICE, non_blocking=True) * y[:, None].to(DEVICE)
        rows += here[:, 0].tolist()
    assert rows == [float(i**3) for i in range(8)]


def test_data_loader_in_process_and_pinning() -> None:
    data = TensorDataset(torch.arange(6.0), torch.arange(6))
    assert [x.to(DEVICE).sum().item() for x, _ in DataLoader(data, batch_size=3)] == [3.0, 12.0]
    here = TensorDataset(dev(torch.arange(6.0)))
    assert [x.sum().item() for (x,) in DataLoader(here, batch_size=2)] == [1.0, 5.0, 9.0]


def _child_uses_device(queue: multiprocessing.Queue) -> None:
    try:
        queue.put(("value", (torch.ones(2, device=DEVICE) + 1).tolist()))
    except RuntimeError as error:
        queue.put(("error", str(error)))


def _in_child(method: str) -> tuple[str, object]:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_child_uses_device, args=(queue,))
    process.start()
    try:
        answer: tuple[str, object] = queue.get(timeout=120)
        return answer
    finally:
        process.join(20)
        if process.is_alive():
            process.kill()


@tarry_only
def test_use_after_a_fork_is_a_clear_error() -> None:
    (torch.ones(2, device=DEVICE) + 1).sum().item()
    kind, text = _in_child("fork")
    assert kind == "error"
    assert "fork" in str(text)
    assert "spawn" in str(text)
    assert (torch.ones(2, device=DEVICE) + 1).tolist() == [2.0, 2.0], "the parent is unharmed"


@pytest.mark.process
def test_a_spawned_child_has_a_device_of_its_own() -> None:
    code = f"""
        import multiprocessing
        from tests.support import load_device
        from tests.programs.test_threads_fork import _in_child
        load_device()
        if __name__ == "__main__":
            import torch
            print(torch.ones(2, device={DEVICE!r}).sum().item())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "2.0", done.stderr


@tarry_only
@pytest.mark.process
def test_importing_initialises_nothing_that_a_fork_would_break() -> None:
    code = """
        import os
        import tarry, torch
        pid = os.fork()
        if pid == 0:
            ok = (torch.ones(2, device="tarry") + 1).tolist() == [2.0, 2.0]
            os._exit(0 if ok else 3)
        _, status = os.waitpid(pid, 0)
        raise SystemExit(os.waitstatus_to_exitcode(status))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@tarry_only
@pytest.mark.process
def test_the_process_ends_quietly_with_work_pending() -> None:
    code = """
        import tarry, torch
        kept = torch.ones(2, device="tarry") + 1
        gone = torch.randn(3, device="tarry").requires_grad_().sum().backward()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr


def test_shared_module_evaluated_from_threads() -> None:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    inputs = [torch.randn(3, 4) for _ in range(6)]
    with torch.no_grad():
        expected = [host(x) for x in inputs]
        here = host.to(DEVICE)

        def evaluate(x: Tensor) -> Tensor:
            with torch.no_grad():
                out: Tensor = here(x.to(DEVICE))
                return out

        with ThreadPoolExecutor(3) as pool:
            actual = list(pool.map(evaluate, inputs))
    assert_same(actual, expected)
