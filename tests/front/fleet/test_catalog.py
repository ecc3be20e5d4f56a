from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ModelSettings
from holdfast.front.fleet.catalog import (
    Catalog,
    CatalogChange,
    CatalogEntry,
    ExcludedModel,
    change_between,
)


def entry(name: str, *aliases: str) -> CatalogEntry:
    return CatalogEntry(name=name, model=ModelSettings(), origin="", aliases=aliases)


CATALOG = Catalog(entries=(entry("mlx-community/Qwen3-Coder-30B-4bit", "coder"), entry("kelp")))


def test_a_model_is_found_by_name_and_by_alias() -> None:
    first, second = CATALOG.entries
    assert CATALOG.find("coder") is CATALOG.find(first.name) is first
    assert CATALOG.find("kelp") is second
    assert CATALOG.find("Kelp") is None


def test_an_unknown_name_is_answered_with_similar_names_and_aliases() -> None:
    error = CATALOG.unknown("codre")
    assert error.available == ("mlx-community/Qwen3-Coder-30B-4bit", "kelp", "coder")
    assert str(error).endswith("kelp, coder; did you mean coder?")


def test_a_change_is_one_log_line_with_names() -> None:
    bad = ExcludedModel(
        name="bad", origin="models.toml", reason="unknown key contxt", is_asked_for=True
    )
    found = ExcludedModel(name="found", origin="cache", reason="no weights", is_asked_for=False)
    after = Catalog(entries=(entry("new"), entry("kelp", "k")), excluded=(bad, found))
    change = change_between(CATALOG, after)
    assert change == CatalogChange(
        added=("new",), removed=(CATALOG.entries[0].name,), changed=("kelp",), excluded=(bad,)
    )
    assert str(change) == (
        "added: new; removed: mlx-community/Qwen3-Coder-30B-4bit; changed, effective at the next "
        "load: kelp; left out: bad (unknown key contxt)"
    )
    assert str(change_between(after, after)) == "no changes"


@given(
    before=st.lists(st.sampled_from("abcd"), unique=True),
    after=st.lists(st.sampled_from("abcd"), unique=True),
)
def test_each_name_is_listed_once(before: list[str], after: list[str]) -> None:
    change = change_between(
        *(Catalog(entries=tuple(map(entry, names))) for names in (before, after))
    )
    assert (set(change.added), set(change.removed)) == (
        set(after) - set(before),
        set(before) - set(after),
    )
    assert change.changed == ()
