from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import nearest_names

KNOWN = ("mlx-community/Qwen3-Coder-30B-4bit", "coder", "kelp")


def test_similar_names_are_found_in_any_case_without_the_owner() -> None:
    assert nearest_names("codre", KNOWN) == ("coder",)
    assert nearest_names("KELP", KNOWN) == ("kelp",)
    assert nearest_names("qwen3-coder-30b", KNOWN)[0] == "mlx-community/Qwen3-Coder-30B-4bit"
    assert nearest_names("other/kelp", KNOWN) == ("kelp",)
    assert nearest_names("zzzz", KNOWN) == ()
    assert nearest_names("", KNOWN) == ()


@given(
    known=st.lists(st.text(min_size=1, max_size=8), unique_by=str.lower, max_size=12).map(tuple),
    name=st.text(max_size=8),
)
def test_similar_names_are_few_and_include_a_known_name(known: tuple[str, ...], name: str) -> None:
    near = nearest_names(name, known)
    assert set(near) <= set(known)
    assert len(near) <= 3
    for other in known:
        assert nearest_names(other, known)[0].rpartition("/")[2].lower() in (
            other.rpartition("/")[2].lower(),
            other.lower(),
        )
