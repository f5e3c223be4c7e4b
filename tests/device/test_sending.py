"""Tensors that leave the process: to other processes, and into files that are read without tarry."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

import tarry
from tests.support import tarry_only

USES_DEVICE = True
pytestmark = tarry_only


def _double(receive: Any, send: Any) -> None:
    x, parameter = receive.get()
    assert isinstance(parameter, torch.nn.Parameter)
    assert x.device == parameter.device == torch.device("tarry:0")
    answer = x * 2 + parameter.detach()
    x.zero_()  # this process's own copy
    send.put(answer)
    receive.get()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_are_sent_copies(method: str) -> None:
    context = mp.get_context(method)
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=_double, args=(there, back), daemon=True)
    process.start()
    x = torch.arange(3.0, device="tarry") + 1
    there.put((x, torch.nn.Parameter(torch.ones(3, device="tarry"))))
    assert back.get(timeout=120).tolist() == [3.0, 5.0, 7.0]
    there.put(None)
    process.join(60)
    assert process.exitcode == 0
    assert x.tolist() == [1.0, 2.0, 3.0]


def test_what_is_sent_and_what_is_not() -> None:
    from multiprocessing.reduction import ForkingPickler

    x = torch.arange(6.0, device="tarry").reshape(2, 3).t()
    for tensor in (x, torch.nn.Parameter(x.clone()), x.clone().requires_grad_(), x.to(torch.bfloat16), x[:0]):
        got = ForkingPickler.loads(ForkingPickler.dumps(tensor))
        assert type(got) is type(tensor)
        assert (got.device, got.dtype, got.requires_grad) == (tensor.device, tensor.dtype, tensor.requires_grad)
        assert torch.equal(got.cpu(), tensor.cpu())
    storage = ForkingPickler.loads(ForkingPickler.dumps(x.untyped_storage()))
    assert storage.cpu().tolist() == x.untyped_storage().cpu().tolist()
    with pytest.raises(RuntimeError, match="detach"):
        ForkingPickler.dumps(x.clone().requires_grad_() * 2)


class _OnTheDevice(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)).to("tarry") + 1


@pytest.mark.slow
@pytest.mark.process
def test_workers_that_return_tensors_of_the_device() -> None:
    torch.ones(1, device="tarry").add(1).item()
    with pytest.raises(RuntimeError, match="spawn"):
        list(DataLoader(_OnTheDevice(), num_workers=1, multiprocessing_context="fork"))
    batches = list(DataLoader(_OnTheDevice(), num_workers=1, multiprocessing_context="spawn"))
    assert [batch.tolist() for batch in batches] == [[[1.0, 1.0]], [[2.0, 2.0]]]
    assert all(batch.device.type == "tarry" for batch in batches)


def test_share_memory_says_that_it_does_nothing() -> None:
    x = torch.ones(2, device="tarry")
    with pytest.warns(UserWarning, match="by copy"):
        assert x.share_memory_() is x
    model = torch.nn.Linear(2, 2).to("tarry")
    with pytest.warns(UserWarning, match="by copy"):
        model.share_memory()
    assert torch.ones(2).share_memory_().is_shared()


WITHOUT_TARRY = """
import sys, torch
assert "tarry" not in sys.modules
loaded = torch.load(sys.argv[1], **({"map_location": "cpu"} if sys.argv[2] == "map" else {}))
assert loaded["x"].device.type == "cpu" and loaded["x"].tolist() == [1.0, 2.0, 3.0]
loaded["x"][1] = 9
assert loaded["part"].tolist() == [9.0, 3.0]
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("portable", [True, False])
def test_files_are_read_without_tarry(tmp_path: Path, portable: bool, new_format: bool) -> None:
    x = torch.arange(3.0, device="tarry") + 1
    path = tmp_path / "checkpoint.pt"
    tarry.config.portable_checkpoints = portable
    try:
        torch.save({"x": x, "part": x[1:]}, path, _use_new_zipfile_serialization=new_format)
    finally:
        tarry.config.portable_checkpoints = False
    command = [sys.executable, "-c", WITHOUT_TARRY, str(path), "as it is" if portable else "map"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    )
    assert done.returncode == 0, done.stderr
    where = "tarry" if not portable else "cpu"
    assert torch.load(path)["x"].device.type == where


def test_a_file_that_needs_tarry_says_how_to_read_it_without() -> None:
    x = torch.ones(2, device="tarry")
    with pytest.warns(UserWarning, match="map_location='cpu'.*portable_checkpoints"):
        torch.save(x, io.BytesIO())


def test_legacy_files_and_attributes() -> None:
    x = torch.arange(4.0, device="tarry")
    parameter = torch.nn.Parameter(x.clone())
    for new_format in (True, False):
        file = io.BytesIO()
        torch.save([x, x[1:], parameter], file, _use_new_zipfile_serialization=new_format)
        file.seek(0)
        whole, part, again = torch.load(file)
        assert isinstance(again, torch.nn.Parameter)
        whole[1] = 7
        assert part.tolist() == [7, 2, 3]
        assert whole.device.type == part.device.type == again.device.type == "tarry"
