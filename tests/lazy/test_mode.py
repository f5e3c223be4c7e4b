"""`tarry.lazy_mode`: what a program that names another device sees, and that nothing is left of it afterwards."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import tarry
from tarry.errors import TarryError
from tarry.lazy.devices import Devices
from tarry.lazy.mode import replacing
from tarry.lazy.table import entries, find

USES_DEVICE = True


@pytest.fixture(autouse=True)
def _reference() -> None:
    tarry.set_backend("eager", "cpu")


@pytest.fixture
def cuda() -> Any:
    with tarry.lazy_mode("cuda"):
        yield


@pytest.fixture
def cpu() -> Any:
    with tarry.lazy_mode("cpu"):
        yield


PLACES: dict[str, Callable[[], Any]] = {
    "string": lambda: torch.ones(2, device="cuda"),
    "index": lambda: torch.ones(2, device="cuda:0"),
    "device": lambda: torch.ones(2, device=torch.device("cuda")),
    "number": lambda: torch.ones(2, device=0),
    "like": lambda: torch.zeros_like(torch.ones(2), device="cuda"),
    "new": lambda: torch.ones(2).new_zeros(2, device="cuda"),
    "to": lambda: torch.ones(2).to("cuda"),
    "to keyword": lambda: torch.ones(2).to(device="cuda", non_blocking=True),
    "to with dtype": lambda: torch.ones(2).to(torch.device("cuda", 0), torch.float16),
    "cuda": lambda: torch.ones(2).cuda(),
    "cuda index": lambda: torch.ones(2).cuda(0, non_blocking=True),
    "pinned": lambda: torch.ones(2).pin_memory().cuda(),
    "module": lambda: nn.Linear(2, 2).cuda().weight,
    "module to": lambda: nn.Linear(2, 2).to("cuda").weight,
    "module made there": lambda: nn.Linear(2, 2, device="cuda").weight,
    "parameter": lambda: nn.Parameter(torch.ones(2)).cuda(),
    "legacy class": lambda: torch.cuda.FloatTensor([1.0, 2.0]),
    "legacy type": lambda: torch.ones(2).type("torch.cuda.HalfTensor"),
    "packed": lambda: nn.utils.rnn.pack_padded_sequence(torch.ones(3, 1, 1), [3]).to("cuda").data,
    "storage": lambda: torch.ones(2).untyped_storage().cuda(),
    "as_tensor": lambda: torch.as_tensor([1.0], device="cuda"),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.usefixtures("cuda")
def test_what_is_put_on_cuda_is_recorded(name: str) -> None:
    assert PLACES[name]().device == torch.device("tarry", 0)


@pytest.mark.usefixtures("cuda")
def test_a_default_device() -> None:
    with torch.device("cuda"):
        assert torch.zeros(2).device.type == "tarry"
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


@pytest.mark.usefixtures("cuda")
def test_the_host_stays_the_host() -> None:
    assert torch.ones(2).device.type == torch.ones(2, device="cpu").device.type == "cpu"
    assert torch.ones(2).cuda().cpu().numpy().tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2).cuda() + torch.ones(2)
    with pytest.raises(TypeError, match="convert"):
        torch.ones(2).cuda().numpy()


@pytest.mark.usefixtures("cuda")
def test_torch_cuda() -> None:
    assert torch.cuda.is_available()
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert torch.cuda.get_device_name("cuda:0") == "tarry"
    x = torch.ones(1000, device="cuda")
    assert torch.cuda.max_memory_allocated("cuda") >= torch.cuda.memory_allocated() >= x.nbytes
    assert "tarry:0" in torch.cuda.memory_summary()
    torch.cuda.manual_seed_all(3)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state("cuda"), "cuda")
    torch.cuda.random.set_rng_state_all(torch.cuda.random.get_rng_state_all())
    assert torch.cuda.memory.memory_allocated() >= x.nbytes
    torch.cuda.empty_cache()
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().synchronize()
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    x = torch.ones(2, device="cuda")
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x.cpu(), torch.cuda.FloatTensor)


@pytest.mark.usefixtures("cuda")
def test_mixed_precision() -> None:
    x = torch.ones(4, 4, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled("cuda")
        assert torch.is_autocast_enabled()
        assert (x @ x).dtype == torch.float16  # what CUDA has by default
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD([x], lr=1.0)
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert x.tolist() == torch.zeros(4, 4).tolist()

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, value: Any) -> Any:
            return value * 2

    with torch.autocast("cuda"):
        assert Double.apply(torch.ones(2, device="cuda", dtype=torch.float16)).dtype == torch.float32


@pytest.mark.usefixtures("cuda")
def test_files_say_cuda() -> None:
    file = io.BytesIO()
    torch.save({"x": torch.ones(2, device="cuda")}, file)
    for given, expected in (None, "tarry"), ("cpu", "cpu"), ("cuda:0", "tarry"), (torch.device("cuda"), "tarry"):
        file.seek(0)
        assert torch.load(file, map_location=given)["x"].device.type == expected
    assert b"cuda:0" in file.getvalue()
    assert b"tarry" not in file.getvalue()


@pytest.mark.parametrize(
    ("refused", "remedy"),
    [
        (lambda: torch.cuda.CUDAGraph(), "take the capture out"),
        (lambda: torch.cuda.make_graphed_callables(None, ()), "take the capture out"),
        (lambda: torch.cuda.nccl.all_reduce([]), "one device"),
        (lambda: torch.distributed.init_process_group("nccl"), "one process"),
    ],
)
@pytest.mark.usefixtures("cuda")
def test_what_cannot_be_mapped_is_refused(refused: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(TarryError, match=remedy):
        refused()


def program(device: str | None) -> list[Any]:
    """All kinds of random numbers, and training."""
    torch.manual_seed(3)
    place = {} if device is None else {"device": device}
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3)).to(device or "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator(**place).manual_seed(7)
    seen: list[Any] = []
    for _ in range(3):
        x = torch.randn(5, 8, **place)
        x = x + torch.randn_like(x) + torch.rand(5, 8, generator=generator, **place)
        loss = F.cross_entropy(model(x), torch.randint(0, 3, (5,), **place))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.item(), torch.randperm(5, **place).tolist()]
        seen.append(torch.distributions.Categorical(logits=model(x)).sample().tolist())
        seen.append(torch.bernoulli(torch.full((3,), 0.5, **place)).tolist())
        seen.append(torch.empty(3, 2, **place).t().exponential_().tolist())
        nn.init.trunc_normal_(model[0].bias)
        with torch.autocast(device or "cpu", dtype=torch.bfloat16):
            seen.append(F.dropout(x.bfloat16(), 0.3).float().tolist())
    return seen


@pytest.mark.parametrize("source", ["cuda", "cpu"])
def test_results_are_those_of_the_cpu(source: str) -> None:
    expected = program(None)
    with tarry.lazy_mode(source):  # type: ignore[arg-type]
        assert program("cuda" if source == "cuda" else None) == expected


@pytest.mark.usefixtures("cpu")
def test_a_program_without_devices() -> None:
    x = torch.ones(3)
    assert x.device.type == torch.ones(3, device="cpu").device.type == nn.Linear(2, 2).weight.device.type == "tarry"
    assert repr(x) == "tensor([1., 1., 1.])"
    assert x.cpu() is x
    assert x.to("cpu") is x
    array = (x * 2).numpy()
    assert array.tolist() == np.asarray(x * 2).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="read-only"):
        array += 1  # on the CPU, the tensor would see it
    shared = np.zeros(3, dtype=np.float32)
    tensor = torch.from_numpy(shared)
    shared += 1
    assert (x + tensor).tolist() == [2, 2, 2]  # a tensor of the host is copied when it is used
    file = io.BytesIO()
    torch.save(x, file)
    assert b"tarry" not in file.getvalue()
    lengths = torch.tensor([2, 1])
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 2, 1), lengths)
    assert nn.LSTM(1, 1)(packed)[0].data.shape == (3, 1)
    assert torch.randperm(4, generator=torch.Generator().manual_seed(0)).tolist() == [0, 1, 3, 2]
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.usefixtures("cpu")
def test_loaders(workers: int, pinned: bool) -> None:
    x = torch.arange(6.0).reshape(6, 1)
    data = torch.utils.data.TensorDataset(x, x * 2)
    subset = torch.utils.data.Subset(data, range(6))
    loader = torch.utils.data.DataLoader(subset, batch_size=3, num_workers=workers, pin_memory=pinned)
    model = nn.Linear(1, 1)
    assert [(model(a) * 0 + b).flatten().tolist() for a, b in loader] == [[0, 2, 4], [6, 8, 10]]
    assert data.tensors[0] is x


@pytest.mark.parametrize("source", ["cuda", "cpu"])
def test_safetensors(source: Any, tmp_path: Path) -> None:
    """Which reads a tensor by its address, once it has moved it to the CPU."""
    with tarry.lazy_mode(source):
        model = nn.Linear(3, 2).to(source)
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
        expected = model.weight.tolist()
        loaded = safetensors.torch.load_file(tmp_path / "model.safetensors", device=source)
        assert loaded["weight"].device.type == ("tarry" if source == "cuda" else "cpu")
        model.load_state_dict(loaded)
        assert model.weight.tolist() == expected
        assert model.weight.device.type == "tarry"
    assert safetensors.torch.load_file(tmp_path / "model.safetensors")["weight"].tolist() == expected


@pytest.mark.usefixtures("cpu")
def test_a_model_from_outside_is_refused_where_it_would_be_trained() -> None:
    with replacing(Devices("cpu")):  # the same mode again is no other
        inside = torch.ones(2, 2)
    weight = nn.Parameter(torch.from_numpy(np.ones((2, 2), dtype=np.float32)))
    with pytest.raises(RuntimeError, match="move it there first"):
        inside @ weight
    with torch.no_grad():
        assert (inside @ weight).sum().item() == 8


def test_all_is_taken_back() -> None:
    for source in ("cuda", "cpu"):
        names = [(find(e.owner), name) for e in entries(Devices(source)) for name in e.names]
        before = [(owner, name, vars(owner).get(name)) for owner, name in names if owner is not None]
        with pytest.raises(KeyError), tarry.lazy_mode(source):
            {}["an error in the block"]
        with tarry.lazy_mode(source):
            assert any(vars(owner).get(name) is not value for owner, name, value in before)
        assert [vars(owner).get(name) for owner, name, _ in before] == [value for _, _, value in before]
    assert torch.ones(1).device.type == "cpu"
    with tarry.lazy_mode("cuda"), pytest.raises(TarryError, match="two devices"), tarry.lazy_mode("cpu"):
        pass
    with pytest.raises(ValueError, match='"cuda" or "cpu"'), tarry.lazy_mode("mps"):  # type: ignore[arg-type]
        pass


def test_the_table_names_what_torch_has() -> None:
    missing = [
        f"{entry.owner}.{name}"
        for source in ("cuda", "cpu")
        for entry in entries(Devices(source))
        for name in entry.names
        if not hasattr(find(entry.owner), name)
    ]
    assert missing == []


@pytest.mark.usefixtures("cuda")
def test_other_threads_see_it() -> None:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(1, device="cuda").device.type))
    thread.start()
    thread.join()
    assert seen == ["tarry"]


def test_a_compiler_means_the_real_device() -> None:
    tarry.set_backend("torchscript", "cpu", compile="wait")
    with tarry.lazy_mode("cpu"):
        x = torch.ones(3)
        assert (x * 2 + 1).relu().tolist() == [3, 3, 3]


@pytest.mark.parametrize("source", ["cuda", "cpu"])
def test_a_compiled_module_is_known_as_one(source: Any) -> None:
    with tarry.lazy_mode(source):
        model = nn.Linear(2, 2).to("cuda" if source == "cuda" else "cpu")
        compiled = torch.compile(model, mode="reduce-overhead")
        assert compiled._orig_mod is model
        assert list(compiled.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
        x = torch.ones(3, 2, device=model.weight.device)
        assert torch.equal(compiled(x).cpu(), model(x).cpu())
        assert type(copy.deepcopy(compiled)) is type(compiled)
        assert torch.compile(len) is len
        assert torch.compile(fullgraph=True)(len) is len


def _positions(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x + torch.arange(x.size(0)), 0.5, False) + torch.ones(2) + torch.tensor(1.0)


@pytest.mark.parametrize("source", ["cuda", "cpu"])
def test_torchscript_compiles_what_calls_replaced_functions(source: Any) -> None:
    for block in (tarry.lazy_mode(source), contextlib.nullcontext()):
        with block:
            scripted = torch.jit.script(types.FunctionType(_positions.__code__, globals(), "_positions"))
            layers = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
            assert torch.equal(scripted(torch.ones(2)).cpu(), torch.tensor([3.0, 4.0]))
            assert layers(torch.ones(2)).shape == (2,)
    table = torch.jit._builtins._get_builtin_table()
    assert table[id(torch.arange)] == "aten::arange"
