"""How `holdfast ps` shows requests and durations."""

from __future__ import annotations

import pytest

from holdfast.cli.servers import duration_text, progress_text


@pytest.mark.parametrize(
    ("prefilled", "answered", "words"),
    [
        (0, 0, "reading"),
        (8192, 0, "prefill 8,192 of 17,403"),
        (17_403, 1200, "1,200 tokens generated"),
    ],
)
def test_a_request_is_shown_with_its_progress(prefilled: int, answered: int, words: str) -> None:
    request = {
        "state": "reading",
        "prompt_tokens": 17_403,
        "prefilled_tokens": prefilled,
        "answer_tokens": answered,
    }
    assert progress_text(request) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3605, "1 h"),
        (3660, "1 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, words: str) -> None:
    assert duration_text(seconds) == words
