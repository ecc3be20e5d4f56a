from __future__ import annotations

import pytest

from holdfast.cli.output import count_text, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 52, "4,096.0 TiB"),
    ],
)
def test_a_size_is_shown_in_the_unit_that_fits(size: int, text: str) -> None:
    assert size_text(size) == text


def test_counts_have_singular_and_plural() -> None:
    assert [count_text(number, "block") for number in (0, 1, 2, 1500)] == [
        "0 blocks",
        "1 block",
        "2 blocks",
        "1,500 blocks",
    ]
    assert count_text(2, "branch", "branches") == "2 branches"
