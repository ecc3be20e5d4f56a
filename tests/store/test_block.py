from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.fakes.stored_blocks import make_block


def test_a_block_counts_its_tokens_and_bytes() -> None:
    stored = replace(make_block([1, 2]), parts=(b"abc", memoryview(bytearray(5)), b""))
    assert (stored.block.tokens, stored.nbytes) == (2, 8)
    assert make_block([], kind="state").block.tokens == 0


@pytest.mark.parametrize(
    "changes", [{"key": b"x"}, {"parent_key": b""}, {"kind": "other"}, {"packed_tokens": b"odd"}]
)
def test_keys_and_kinds_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(make_block([1]).block, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "parent_tokens"), [(0, 1), (3, 4), (3, 0), (3, -1), (-1, 0), (2**60, 5)]
)
def test_a_block_follows_a_parents_token_or_the_start(start: int, parent_tokens: int) -> None:
    with pytest.raises(ValueError, match="cannot follow"):
        replace(make_block([1]).block, start=start, parent_tokens=parent_tokens)
