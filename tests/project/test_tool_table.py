"""The table of families in the documentation is what is found of them."""

from __future__ import annotations

from tools.tool_table import PAGE, with_table


def test_the_table_of_families_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run python -m tools.tool_table"
