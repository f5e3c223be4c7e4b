"""What the native recorder records: one node per leaf operator, nothing for views, the same hash in every process."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import tarry
from tarry.events import expect
from tarry.native import C

USES_DEVICE = True


def _recorded(program) -> int:
    before = C.counters(0)["record"]
    program()
    return C.counters(0)["record"] - before


def test_views_record_nothing() -> None:
    x = torch.ones(4, 6, device="tarry")
    tarry.mark_step()

    def views() -> None:
        x.t().view(2, 3, 4).permute(2, 0, 1)[1:3].unsqueeze(0).expand(2, -1, -1, -1)
        x.split(2, dim=1)
        x.unbind(0)
        x.chunk(3, dim=1)
        x.detach().diagonal().unfold(0, 2, 1)

    assert _recorded(views) == 0


def test_results_of_split_chunk_and_unbind_are_full_lazy_tensors() -> None:
    x = torch.arange(6.0, device="tarry").view(2, 3)
    for parts in (x.split(1), x.chunk(2), x.unbind(0), torch.tensor_split(x, 2)):
        total = sum(part.sum() for part in parts)
        assert total.device.type == "tarry"
        assert total.item() == 15.0


def test_a_write_through_a_view_is_one_node() -> None:
    x = torch.zeros(4, 4, device="tarry")
    tarry.mark_step()
    assert _recorded(lambda: x.t()[1:3].add_(1)) == 1
    assert x.sum().item() == 8.0


def test_composite_operators_record_their_leaves() -> None:
    net = nn.Linear(3, 2).to("tarry")
    x = torch.ones(5, 3, device="tarry")
    tarry.mark_step()
    with torch.no_grad():
        y = net(x)
    assert [node.op for node in tarry.graph(y).nodes if node.op.startswith("aten")] == ["aten::addmm"]


def test_attention_reaches_the_cpu_kernel() -> None:
    q = torch.randn(1, 2, 8, 4).to("tarry")
    out = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in tarry.explain(out)


def test_nodes_of_the_last_step_are_used_again() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to("tarry")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        net(torch.randn(2, 4).to("tarry")).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    before = C.counters(0)
    step()
    after = C.counters(0)
    recorded, reused = after["record"] - before["record"], after["node_reuse"] - before["node_reuse"]
    assert recorded > 10
    assert reused >= recorded  # leaves are used again too


def test_a_reused_node_takes_the_new_numbers_and_data() -> None:
    for step in range(4):
        x = torch.full((2,), float(step)).to("tarry")
        y = x * (step + 0.5)
        assert y.tolist() == [step * (step + 0.5)] * 2


def test_a_tensor_of_the_last_step_keeps_its_value() -> None:
    kept = []
    for step in range(4):
        x = torch.full((2,), float(step)).to("tarry")
        kept.append(x + 1)
        tarry.mark_step()
    assert [k.tolist() for k in kept] == [[s + 1.0] * 2 for s in range(4)]


KEY_PROGRAM = """
import torch, tarry
from tarry.events import record
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Dropout(0.5)).to("tarry")
with record() as seen:
    net(torch.ones(1, 1, 5, 5, device="tarry")).sum().backward()
    tarry.mark_step()
print([event.fields["key"] for event in seen if event.kind == "compile"])
"""


@pytest.mark.process
def test_the_hash_is_the_same_in_every_process() -> None:
    def run() -> str:
        return subprocess.run([sys.executable, "-c", KEY_PROGRAM], check=True, capture_output=True, text=True).stdout

    first = run()
    assert first.startswith("[(")
    assert run() == first


def test_the_hash_tells_programs_apart() -> None:
    x = torch.ones(2, 3, device="tarry")
    tarry.mark_step()
    programs = [
        lambda: x + x,
        lambda: x - x,
        lambda: x + 1,
        lambda: x + 1.0,
        lambda: x.sum(0),
        lambda: x.sum(1),
        lambda: x.t() + 1,
        lambda: x[1:] + 1,
        lambda: x[:1] + 1,
        lambda: x.double(),
        lambda: x.half(),
        lambda: torch.cat([x, x]),
        lambda: torch.cat([x, x, x]),
        lambda: x.softmax(0),
        lambda: x.softmax(1),
    ]
    keys = [C.peek([program()]).key for program in programs]
    assert len(set(keys)) == len(programs)


# ---- provenance


def _site_of(tensor: torch.Tensor) -> tuple[str, int]:
    site = tarry.graph(tensor).nodes[-1].site
    assert site is not None
    return site.file, site.line


def test_a_node_knows_the_users_line() -> None:
    x = torch.ones(3, device="tarry")
    y = x.add(1)
    line = inspect.currentframe().f_lineno - 1
    assert _site_of(y) == (__file__, line)


def test_lines_inside_torch_are_not_the_users() -> None:
    net = nn.Linear(3, 2).to("tarry")
    x = torch.ones(5, 3, device="tarry")
    y = net(x)
    line = inspect.currentframe().f_lineno - 1
    assert _site_of(y) == (__file__, line)


def test_backward_inherits_the_line_of_forward() -> None:
    x = torch.ones(3, device="tarry", requires_grad=True)
    y = x.exp()
    line = inspect.currentframe().f_lineno - 1
    y.sum().backward()
    assert _site_of(x.grad) == (__file__, line)


def test_lines_are_not_part_of_the_hash() -> None:
    x = torch.ones(3, device="tarry")
    tarry.mark_step()
    a = C.peek([x + 1]).key
    b = C.peek([x + 1]).key
    assert a == b


# ---- robustness


@pytest.mark.process
def test_a_long_chain_is_freed_without_overflowing_the_stack() -> None:
    script = """
        import torch, tarry
        x = torch.ones(1, device="tarry")
        for _ in range(300_000):
            x = x + 1
        del x
        print("alive")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "TARRY_MAX_PENDING_NODES": "1000000"},
    )
    assert result.stdout.strip() == "alive", result.stderr


def test_an_error_while_recording_leaves_the_recorder_usable() -> None:
    x, y = torch.ones(2, 3, device="tarry"), torch.ones(4, 5, device="tarry")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            x @ y
    with expect(compiles=1):
        assert (x + 1).sum().item() == 12.0


def test_distinct_storages_have_distinct_addresses() -> None:
    tensors = [torch.empty(n, device="tarry") for n in (1, 100, 1, 7)] + [torch.arange(5, device="tarry")]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.untyped_storage().nbytes()) for t in tensors)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert all(begin > 0 for begin, _ in ranges)
    assert tensors[1][3:].data_ptr() == tensors[1].data_ptr() + 12


def test_updated_parameters_keep_their_buffers() -> None:
    weight = nn.Parameter(torch.randn(64, 64).to("tarry"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    addresses = set()
    for _ in range(5):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        addresses.add(C.materialise(weight.detach()).data_ptr())
    assert len(addresses) == 1
