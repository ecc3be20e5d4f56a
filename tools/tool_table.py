"""Writes the table of tool-call families: the detected family of each template.

`python -m tools.tool_table` rewrites the table in docs/reference/tool-call-families.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from holdfast.front.prompt.dialects import DialectReport
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from tests.fakes.family_answers import (
    is_read_however_cut,
    right_answers,
    streams_as_whole,
    turns_go_on,
    wrong_answers,
)
from tests.fakes.family_bundles import bundle_of
from tests.fakes.family_templates import FAMILY_TEMPLATES

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "tool-call-families.md"
BEGIN, END = "<!-- table: python -m tools.tool_table -->", "<!-- end of table -->"
FOUND = (
    "template",
    "family",
    "round trip",
    "past calls",
    "calls per answer",
    "ids",
    "reasoning",
    "starts in reasoning",
    "reasoning off",
)
_BETWEEN_CELLS = re.compile(r"(?<!\\)\|")
_IDS = {
    "random": "any",
    "client": "any",
    "alnum9": "9 letters and digits",
    "function_number": "`functions.NAME:N`",
    "number": "numbers",
}


def table() -> str:
    """The table, as Markdown."""
    rows = (found(name, bundle_of(name)) for name in sorted(FAMILY_TEMPLATES))
    lines = ("| " + " | ".join(row[column] for column in FOUND) + " |" for row in rows)
    return "\n".join(["| " + " | ".join(FOUND) + " |", "|---" * len(FOUND) + "|", *lines])


def found(name: str, model: TokenizerBundle) -> dict[str, str]:
    """What loading a model detects, by the columns of `FOUND`."""
    report = model.dialect_report
    proof = "proven" if report.proven and report.tools == "template" else report.why
    return dict(zip(FOUND, (name, report.family, proof, *_facts(report)), strict=True))


def failures(model: TokenizerBundle) -> list[str]:
    """The promises of the page that do not hold for this model."""
    right = tuple(right_answers(model))
    wrong = tuple(wrong_answers(model))
    failed = [
        repr(answer)
        for answer in (*right, *wrong)
        if not is_read_however_cut(model.dialect, answer)
    ]
    failed += [
        f"streamed: {answer!r}"
        for answer in (*right, *wrong)
        if not streams_as_whole(model, answer)
    ]
    if not turns_go_on(model):
        failed.append("the prompt of the next turn does not begin with this turn")
    return failed


def _facts(report: DialectReport) -> Iterator[str]:
    yield "template" if report.calls_kept else "as text"
    yield "several" if report.parallel else "one"
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
    """The page with the current table."""
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{behind}"


def rows_of(page: str) -> list[dict[str, str]]:
    """The rows of the page's table, by column."""
    lines = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    columns, _, *rows = (
        [cell.strip() for cell in _BETWEEN_CELLS.split(line)[1:-1]] for line in lines
    )
    return [dict(zip(columns, row, strict=True)) for row in rows]


def main() -> None:
    """Write the page."""
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
