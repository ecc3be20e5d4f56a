"""Strategies for JSON values."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def json_values(*more: st.SearchStrategy[Any], longest_text: int, most: int) -> Any:
    """Null, booleans, integers, texts and `more`, and lists and objects of at most `most` of them."""
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(), st.text(max_size=longest_text), *more
    )
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=most,
    )
