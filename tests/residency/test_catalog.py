from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ModelSettings, StoreSettings
from holdfast.residency.catalog import Catalog, CatalogEntry, nearest_names


def entry(name: str, *aliases: str) -> CatalogEntry:
    return CatalogEntry(name=name, model=ModelSettings(), store=StoreSettings(), origin="", aliases=aliases)


CATALOG = Catalog(entries=(entry("mlx-community/Qwen3-Coder-30B-4bit", "coder"), entry("kelp")))


def test_a_model_is_found_by_name_and_by_alias() -> None:
    first, second = CATALOG.entries
    assert CATALOG.find("coder") is CATALOG.find(first.name) is first
    assert CATALOG.find("kelp") is second
    assert CATALOG.find("Kelp") is None


def test_a_name_that_is_none_is_told_the_nearest() -> None:
    assert CATALOG.nearest("codre") == ("coder",)
    assert CATALOG.nearest("KELP") == ("kelp",)
    assert CATALOG.nearest("qwen3-coder-30b")[0] == "mlx-community/Qwen3-Coder-30B-4bit"
    assert CATALOG.nearest("zzzz") == ()


@given(known=st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=12).map(tuple), name=st.text(max_size=8))
def test_the_nearest_are_known_few_and_begin_with_the_name_itself(known: tuple[str, ...], name: str) -> None:
    near = nearest_names(name, known)
    assert set(near) <= set(known)
    assert len(near) <= 3
    if name in known and name.isascii():
        assert any(other.lower() == name.lower() for other in near)
