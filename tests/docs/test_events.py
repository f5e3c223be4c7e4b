"""docs/events.md has the tables of kinds and fields as they are."""

from __future__ import annotations

from pathlib import Path

from tarry.events import FIELDS, KINDS

PAGE = (Path(__file__).parent.parent.parent / "docs" / "events.md").read_text()


def _text(words: str) -> str:
    return words.replace("|", "\\|") or "-"


def _rows(first: str) -> list[str]:
    table = PAGE.partition(f"| {first} |")[2].partition("\n\n")[0]
    return table.splitlines()[2:]


def test_kinds() -> None:
    expected = []
    for kind in KINDS.values():
        fields = ", ".join(f"`{name}`" for name in kind.fields) or "-"
        row = f"| `{kind.name}` | {kind.topic or '-'} | {_text(kind.meaning)} | {fields} | {_text(kind.remedy)} |"
        expected.append(row)
    assert _rows("kind") == expected


def test_fields() -> None:
    expected = [f"| `{field.name}` | `{field.default!r}` | {_text(field.meaning)} |" for field in FIELDS.values()]
    assert _rows("field") == expected


def test_every_field_is_some_kinds() -> None:
    used = {name for kind in KINDS.values() for name in kind.fields}
    assert used <= FIELDS.keys()
    assert FIELDS.keys() - used == {"file", "line", "library", "module", "reason", "seconds", "remedy"}
