"""The table of families in docs/tools.md: what is found of a chat template in the shape of each, when it is loaded.

`python -m tools.tool_table` writes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from holdfast.intake.dialects import DialectReport, find_dialect
from tests.fakes.family_templates import FAMILY_TEMPLATES

PAGE = Path(__file__).parents[1] / "docs" / "tools.md"
BEGIN, END = "<!-- table: python -m tools.tool_table -->", "<!-- end of table -->"
_COLUMNS = (
    "template",
    "family",
    "round trip",
    "past calls",
    "calls in one answer",
    "ids",
    "thoughts",
    "begins in a thought",
    "off",
)
_IDS = {
    "random": "any",
    "client": "any",
    "alnum9": "9 letters and digits",
    "function_number": "`functions.NAME:N`",
    "number": "numbers",
}


def table() -> str:
    """The table, as Markdown."""
    return "\n".join(["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|", *_rows()])


def _rows() -> Iterator[str]:
    for name, family in sorted(FAMILY_TEMPLATES.items()):
        report = find_dialect(family.template(), family.tokenizer(), config={}).report
        cells = (name, report.family, "proven" if report.proven and report.tools == "template" else report.why, *_facts(report))
        yield "| " + " | ".join(cells) + " |"


def _facts(report: DialectReport) -> Iterator[str]:
    yield "by the template" if report.calls_kept else "written into the text"
    yield "several" if report.parallel else "one: pairs"
    yield _IDS[report.ids]
    thinking = report.thinking
    if thinking is None:
        yield from ("", "", "")
        return
    yield f"`{_cell(thinking.start)}` `{_cell(thinking.end)}`"
    yield "yes" if thinking.opened_by_prompt else "no"
    off = thinking.efforts.get("off", {})
    yield ", ".join(f"`{option}: {json.dumps(value)}`" for option, value in off.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_table(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{behind}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
