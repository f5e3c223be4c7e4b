"""docs/report.md has the tables of the format as they are."""

from __future__ import annotations

from pathlib import Path

from tarry.reports.format import COMMON, HEADER, OWN, Field

PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def table(fields: dict[str, Field]) -> str:
    rows = [f"| `{name}` | {_type(field)} | {field.meaning} |" for name, field in fields.items()]
    return "\n".join(["| field | JSON | meaning |", "| --- | --- | --- |", *rows])


def _type(field: Field) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true or false", list: "array", dict: "object"}
    types = field.type if isinstance(field.type, tuple) else (field.type,)
    words = [names.get(each, "null") for each in types if not (each is int and float in types)]
    return " or ".join(words)


OWN_TABLES = "\n\n".join(f"`{kind}`:\n\n{table(fields)}" for kind, fields in OWN.items())


def test_the_page_describes_the_format() -> None:
    text = PAGE.read_text()
    for part in (table(HEADER), table(COMMON), OWN_TABLES):
        assert part in text, f"docs/report.md should have:\n{part}"
