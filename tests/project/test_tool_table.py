"""The table of families in the documentation is what is found and measured of them."""

from __future__ import annotations

import re

import pytest

from tests.fakes.family_bundles import bundle
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tools.tool_table import FOUND, MEASURED, PAGE, found, rows_of, with_table

REMAKE = "run python -m tools.tool_table"


def test_the_table_of_families_says_what_is_found_of_each() -> None:
    rows = [{column: row[column] for column in FOUND} for row in rows_of(PAGE.read_text(encoding="utf-8"))]
    assert rows == [found(name, bundle(family)) for name, family in sorted(FAMILY_TEMPLATES.items())], REMAKE


def test_all_that_is_measured_of_the_families_holds() -> None:
    for row in rows_of(PAGE.read_text(encoding="utf-8")):
        for column in MEASURED:
            assert row[column] == "yes" or re.fullmatch(r"([1-9]\d*) of \1", row[column]), (row["template"], column)


@pytest.mark.slow
def test_the_table_of_families_is_measured_as_it_stands() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, REMAKE
