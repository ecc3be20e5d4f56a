"""Quantized live states that other sequences start from."""

from __future__ import annotations

import logging

import pytest

from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.pressed_worker import prompt_of, worker


def windowed() -> CachingWorker:
    """One that can only resume where the states of its windows are saved."""
    return worker("gemma3_text", kv_bits="8", step_tokens=512)


def test_a_claim_does_not_end_within_a_quantized_block_where_windows_are_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = prompt_of("first", 301)
    begin = greedy("first", first, max_tokens=1)
    answer = tuple(windowed().serve([[begin]]).tokens("first"))
    # takes over the state of the first one; the windows are saved at its beginning only
    turn = (*first, *answer, *prompt_of("later", 398))
    later = greedy("later", turn)
    fork = (*turn[:600], *prompt_of("fork", 20))
    made = windowed()
    inbox = made.serve([[begin], [later], [greedy("fork", fork)]], in_turn=True)
    assert inbox.finished("later").memory.moved_tokens == 301
    assert inbox.finished("fork").cached_tokens == 301
    assert inbox.tokens("fork") == windowed().serve([[greedy("fork", fork)]]).tokens("fork")
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
