from __future__ import annotations

from holdfast.prefix.figures import figures_of
from holdfast.prefix.index import PrefixIndex


def test_without_a_store_there_are_no_figures_of_one() -> None:
    figures = figures_of(PrefixIndex(fingerprint="a model", ram_budget_bytes=7).statistics(), None)
    assert (figures.ram_budget_bytes, figures.ram_bytes, figures.kept_tokens, figures.store) == (7, 0, 0, None)
