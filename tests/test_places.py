"""Lines of events: the user's, and the library's between it and torch; and what errors show when they leave tarry."""

from __future__ import annotations

import copy
import io
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import tarry
from tarry import places
from tarry.events import record

USES_DEVICE = True


def _library(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "site-packages" / "library.py"
    names: dict[str, Any] = {}
    exec(compile("def read(x):\n    return x.item()\n", str(file), "exec"), names)
    return names | {"file": str(file)}


def test_a_sync_has_the_users_line_and_the_librarys(device: str, tmp_path: Path) -> None:
    library = _library(tmp_path)
    x = torch.ones(1, device=device)
    with record() as seen:
        library["read"](x + 1)
    (sync,) = [event for event in seen if event.kind == "sync"]
    assert sync.fields["file"] == __file__
    assert "library" in Path(__file__).read_text().splitlines()[sync.fields["line"] - 1]
    assert sync.fields["library"] == f"{library['file']}:2"


def test_without_a_subscriber_no_line_is_looked_for(device: str) -> None:
    assert places.of_caller() == {}
    with record():
        assert places.of_caller()["file"] == __file__


def test_a_fallback_has_a_line_and_a_cost(device: str) -> None:
    x = torch.ones(3, device=device)
    with record() as seen:
        torch.nonzero(x)
    (fallback,) = [event for event in seen if event.kind == "fallback"]
    assert fallback.fields["file"] == __file__
    assert fallback.fields["seconds"] > 0


def test_a_compile_has_the_line_at_which_its_step_ends(device: str) -> None:
    tarry.set_backend("torchscript", compile="wait")
    with record() as seen:
        (torch.ones(3, device=device).sin() + 7).tolist()
    kinds = [event.kind for event in seen]
    assert kinds.index("compiling") < kinds.index("compile")
    (made,) = [event for event in seen if event.kind == "compile"]
    assert made.fields["file"] == __file__


def _failing(device: str) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.tensor([7], device=device), torch.ones(3, 2, device=device))


@pytest.mark.parametrize("backend", ["eager", "torchscript"])
def test_an_error_of_a_read_has_no_frames_of_ours(device: str, backend: str) -> None:
    tarry.set_backend(backend, compile="wait")
    value = _failing(device).sum()
    with pytest.raises(IndexError) as caught:
        value.item()
    assert [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)] == [__file__]
    assert caught.value.__context__ is None


def test_what_the_program_handles_is_still_said(device: str) -> None:
    tarry.set_backend("torchscript", compile="wait")
    value = _failing(device).sum()
    try:
        {}["mine"]
    except KeyError:
        with pytest.raises(IndexError) as caught:
            value.item()
    assert isinstance(caught.value.__context__, KeyError)


def test_all_frames_on_request(device: str) -> None:
    value = _failing(device).sum()
    with tarry.config.override(full_tracebacks=True), pytest.raises(IndexError) as caught:
        value.item()
    assert any("tarry/runtime" in frame.filename for frame in traceback.extract_tb(caught.value.__traceback__))


def _in_a_generator(value: torch.Tensor) -> Any:
    def values() -> Any:
        yield value.item()

    return next(values())


def _in_a_class(value: torch.Tensor) -> Any:
    class Holder:
        held = value.item()

    return Holder


def _by_a_thread(value: torch.Tensor) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(value.item).result()


WAYS = {
    "item": lambda value: value.item(),
    "bool": lambda value: bool(value),
    "print": lambda value: repr(value),
    "format": lambda value: f"{value:.2f}",
    "numpy": lambda value: value.numpy(force=True),
    "copy": lambda value: torch.empty(()).copy_(value),
    "deepcopy": lambda value: copy.deepcopy(value.detach()).item(),
    "another operator": lambda value: (value * 2 + 1).item(),
    "mark_step": lambda value: tarry.mark_step(wait=True),
    "sync": lambda value: tarry.sync(value),
    "fallback": lambda value: torch.nonzero(value),
    "save": lambda value: torch.save(value, io.BytesIO()),
    "exec": lambda value: exec("value.item()", {"value": value}),
    "generator": _in_a_generator,
    "class": _in_a_class,
    "thread": _by_a_thread,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("backend", ["eager", "torchscript"])
def test_whatever_reads_it_the_error_is_the_operators(device: str, backend: str, way: Any) -> None:
    tarry.set_backend(backend, compile="wait")
    value = _failing(device).sum()
    with pytest.raises(IndexError) as caught:
        way(value)
    text = "".join(traceback.format_exception(caught.value))
    # A function of tarry's in Python that the program has called itself cannot leave its own frame out.
    ours = sum(places.is_ours(frame.filename) for frame in traceback.extract_tb(caught.value.__traceback__))
    assert ours <= (way in (WAYS["mark_step"], WAYS["sync"], WAYS["print"]))
    assert "During handling" not in text
    assert "direct cause" not in text
    line = next(k for k, source in enumerate(Path(__file__).read_text().splitlines(), 1) if "embedding(" in source)
    assert f"recorded at {__file__}:{line}" in text
