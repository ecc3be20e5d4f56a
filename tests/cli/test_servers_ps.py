"""How `holdfast ps` shows requests and durations."""

from __future__ import annotations

import pytest

from holdfast.cli.servers import duration_text, progress_text, request_rows


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


@pytest.mark.parametrize(("count", "last"), [(20, "    /v1/19"), (100, "    … and 80 more")])
def test_of_many_requests_the_first_are_shown(count: int, last: str) -> None:
    requests = [
        {"path": f"/v1/{number}", "age_seconds": 1, "state": "queued"} for number in range(count)
    ]
    rows = request_rows(
        [dict.fromkeys(("answer_tokens", "prefilled_tokens"), 0) | each for each in requests]
    )
    assert len(rows) == min(count, 21)
    assert rows[19] == ("    /v1/19", "1 s", "queued")
    assert rows[-1][0] == last
