"""Groups of a row, and the largest entries found with them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.worker.cpu.host_sampling import GroupedRow


@settings(max_examples=80)
@given(
    columns=st.sampled_from([1, 5, 31, 32, 33, 1000, 2600, 9001]),
    share=st.floats(0, 1),
    levels=st.sampled_from([1, 3, 10**6]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 9),
)
def test_the_largest_entries_are_those_of_a_stable_sort(
    columns: int, share: float, levels: int, masked: float, seed: int
) -> None:
    count = max(1, min(columns, int(share * share * share * columns)))
    random = np.random.default_rng(seed)
    row = random.integers(0, levels, size=columns).astype(np.float32)
    row[random.random(columns) < masked] = -np.inf
    assert (
        GroupedRow(row).largest(count).tolist() == np.argsort(-row, kind="stable")[:count].tolist()
    )


@given(columns=st.integers(1, 300))
def test_every_token_is_in_one_group_or_in_none(columns: int) -> None:
    row = np.arange(columns, dtype=np.float32)
    groups = GroupedRow(row)
    assert sorted(groups.tokens(np.arange(len(groups.maxima)))) == list(range(columns))
    for group, largest in enumerate(groups.maxima):
        assert row[groups.tokens(np.array([group]))[: groups.size]].max() == largest
