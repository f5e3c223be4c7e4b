"""Buffers that are written piece by piece."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry.ir import evaluate, parse, to_text, verify
from tarry.passes import concatenate_pieces
from tests.passes.check import body


def result_of(text: str) -> list[str]:
    graph = parse(text)
    changed = concatenate_pieces(graph)
    verify(changed, "views")
    types = [value.type for value in graph.inputs]
    inputs = [torch.randn(one.sizes).mul(9).to(one.dtype).as_strided(one.sizes, one.strides) for one in types]
    for expected, actual in zip(evaluate(graph, inputs), evaluate(changed, inputs), strict=True):
        assert torch.equal(expected, actual)
    return body(changed) if changed is not graph else []


def test_pieces_in_any_order_and_size() -> None:
    graph = parse("""
graph(%0: f32[12], %1: f32[4], %2: f32[2, 4]):
  %3: f32[4] = aten::neg(%1)  # a.py:1
  %4: f32[12] = aten::slice_scatter(%0, %3, 0, 8, 12, 1)  # a.py:1
  %5: f32[3, 4] = aten::view(%4, [3, 4])
  %6: f32[3, 4] = aten::slice_scatter(%5, %2, 0, 0, 2, 1)  # a.py:2
  %7: f32[12] = aten::view(%6, [12])
  return %7
""")
    result = concatenate_pieces(graph)
    verify(result, "views")
    assert (
        to_text(result)
        == """\
graph(%0: f32[12], %1: f32[4], %2: f32[2, 4]):
  %3: f32[4] = aten::neg(%1)  # a.py:1
  %4: f32[8] = aten::view(%2, [8])  # a.py:2
  %5: f32[12] = aten::cat([%4, %3], 0)  # a.py:2
  %6: f32[3, 4] = aten::view(%5, [3, 4])  # a.py:2
  %7: f32[12] = aten::view(%6, [12])
  return %7"""
    )


def test_a_piece_that_is_not_contiguous_is_packed() -> None:
    assert result_of("""
graph(%0: f32[6], %1: f32[2], %2: f32[2, 2]{1, 2}):
  %3: f32[6] = aten::slice_scatter(%0, %1, 0, 0, 2, 1)
  %4: f32[3, 2] = aten::view(%3, [3, 2])
  %5: f32[3, 2] = aten::slice_scatter(%4, %2, 0, 1, 3, 1)
  return %5
""")[0].startswith("aten::clone(%2")


def chain(first: str, second: str, after: str = "return %4") -> str:
    return f"""
graph(%0: f32[6], %1: f32[3], %2: f32[4]):
  %3: f32[6] = aten::slice_scatter(%0, {first}, 1)
  %4: f32[6] = aten::slice_scatter(%3, {second}, 1)
  {after}
"""


def test_what_is_not_written_or_twice_stays() -> None:
    assert result_of(chain("%1, 0, 0, 3", "%1, 0, 3, 6"))
    assert not result_of(chain("%1, 0, 0, 3", "%2, 0, 2, 6"))
    assert not result_of(chain("%1, 0, 0, 3", "%1, 0, 2, 5"))
    assert not result_of(chain("%1, 0, 3, 6", "%1, 0, 3, 6"))


def test_a_buffer_that_is_read_in_between_stays() -> None:
    assert not result_of(chain("%1, 0, 0, 3", "%1, 0, 3, 6", "return %3, %4"))
    assert not result_of(
        chain("%1, 0, 0, 3", "%1, 0, 3, 6", "%5: f32[6] = aten::neg(%3)\n  return %4, %5"),
    )


def test_a_part_that_is_read_is_written_whole() -> None:
    """FSDP writes its shard into the buffer that it gathers in, and reads that shard only."""
    read = "%5: f32[5] = aten::slice.Tensor(%4, 0, 1, 6, 1)"
    rows = chain("%1, 0, 1, 4", "%2, 0, 4, 6", f"{read}\n  return %5").replace("%2: f32[4]", "%2: f32[2]")
    assert result_of(rows) == ["aten::cat([%1, %2], 0)"]
    assert not result_of(rows.replace("f32[5]", "f32[6]").replace("1, 6, 1)", "0, 6, 1)"))
    assert not result_of(rows.replace("f32[5]", "f32[4]").replace("1, 6, 1)", "1, 5, 1)"))
    assert not result_of(rows.replace("return %5", "return %4, %5"))


def test_every_other_element_stays() -> None:
    assert not result_of("""
graph(%0: f32[6], %1: f32[3]):
  %2: f32[6] = aten::slice_scatter(%0, %1, 0, 0, 6, 2)
  %3: f32[6] = aten::slice_scatter(%2, %1, 0, 1, 6, 2)
  return %3
""")


def filled(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, bucket = torch.ones(3, 4).to(device), torch.arange(5.0).to(device), torch.zeros(22).to(device)
    torch.mul(x, 0.5, out=bucket[5:17].view(3, 4))
    torch.mul(y, 0.5, out=bucket[:5])
    bucket[17:].copy_(y.neg())
    return bucket, bucket[5:17].view(3, 4) * 2


def test_buckets_as_ddp_fills_them(device: str) -> None:
    bucket, part = filled(device)
    text = str(tarry.explain(bucket, stage="optimized"))
    assert "aten::cat" in text
    assert "scatter" not in text
    for expected, actual in zip(filled("cpu"), (bucket, part), strict=True):
        assert torch.equal(expected, actual.cpu())


ends = st.none() | st.integers(-8, 8)


@given(st.lists(st.tuples(ends, ends), min_size=1, max_size=4), st.none() | st.tuples(ends, ends))
def test_ends_of_slices_anywhere(pieces: list[tuple[int | None, int | None]], read: tuple[int, int] | None) -> None:
    """Negative ends count from the back, and both stop where the buffer does."""

    def length(start: int | None, end: int | None) -> int:
        return len(range(6)[start:end])

    inputs = ", ".join(f"%{k + 1}: f32[{length(*piece)}]" for k, piece in enumerate(pieces))
    lines, last = [], 0
    for k, (start, end) in enumerate(pieces):
        made = len(pieces) + k + 1
        lines.append(f"%{made}: f32[6] = aten::slice_scatter(%{last}, %{k + 1}, 0, {start}, {end}, 1)")
        last = made
    if read is not None:
        lines.append(f"%{last + 1}: f32[{length(*read)}] = aten::slice.Tensor(%{last}, 0, {read[0]}, {read[1]}, 1)")
        lines.append(f"%{last + 2}: f32[{length(*read)}] = aten::neg(%{last + 1})")
        last += 2
    text = "\n  ".join(lines)
    result_of(f"\ngraph(%0: f32[6], {inputs}):\n  {text}\n  return %{last}\n")


def test_pieces_of_another_dtype_stay_as_the_scatter_converts_them() -> None:
    assert not result_of("""
graph(%0: f32[4], %1: i64[2], %2: i64[2]):
  %3: f32[4] = aten::slice_scatter(%0, %1, 0, 0, 2, 1)
  %4: f32[4] = aten::slice_scatter(%3, %2, 0, 2, 4, 1)
  return %4
""")
