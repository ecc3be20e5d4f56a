from __future__ import annotations

from holdfast.config import ModelSettings, StoreSettings
from holdfast.residency.catalog import Catalog, CatalogEntry


def entry(name: str, *aliases: str) -> CatalogEntry:
    return CatalogEntry(name=name, model=ModelSettings(), store=StoreSettings(), origin="", aliases=aliases)


CATALOG = Catalog(entries=(entry("mlx-community/Qwen3-Coder-30B-4bit", "coder"), entry("kelp")))


def test_a_model_is_found_by_name_and_by_alias() -> None:
    first, second = CATALOG.entries
    assert CATALOG.find("coder") is CATALOG.find(first.name) is first
    assert CATALOG.find("kelp") is second
    assert CATALOG.find("Kelp") is None


def test_a_name_that_is_none_is_answered_with_the_nearest_names_and_aliases() -> None:
    error = CATALOG.unknown("codre")
    assert error.available == ("mlx-community/Qwen3-Coder-30B-4bit", "kelp", "coder")
    assert str(error).endswith("kelp, coder; did you mean coder?")
