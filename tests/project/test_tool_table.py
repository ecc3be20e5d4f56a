"""The page of tool-call families agrees with detection, and its promises hold for every family."""

from __future__ import annotations

import pytest

from tests.fakes.family_bundles import bundle_of
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tools.tool_table import FOUND, PAGE, failures, found, rows_of

REMAKE = "run python -m tools.tool_table"


def test_the_table_of_families_matches_detection() -> None:
    rows = [
        {column: row[column] for column in FOUND}
        for row in rows_of(PAGE.read_text(encoding="utf-8"))
    ]
    assert rows == [found(name, bundle_of(name)) for name in sorted(FAMILY_TEMPLATES)], REMAKE


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_a_familys_answers_are_parsed_equally_from_any_pieces(name: str) -> None:
    assert failures(bundle_of(name)) == []
