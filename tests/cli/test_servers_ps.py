"""What `holdfast ps` says of the requests that a model is answering."""

from __future__ import annotations

import pytest

from holdfast.cli.servers import RequestAtWork


@pytest.mark.parametrize(
    ("prefilled", "answered", "words"),
    [
        (0, 0, "reading"),
        (8192, 0, "prefill 8,192 of 17,403"),
        (17_403, 1200, "1,200 tokens written"),
    ],
)
def test_a_request_is_shown_with_how_far_it_is(prefilled: int, answered: int, words: str) -> None:
    request = RequestAtWork(
        id="a",
        path="/v1/chat/completions",
        state="reading",
        age_seconds=3.0,
        prompt_tokens=17_403,
        prefilled_tokens=prefilled,
        answer_tokens=answered,
    )
    assert request.progress == words
