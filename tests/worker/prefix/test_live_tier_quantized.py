"""Quantized live states that other sequences start from."""

from __future__ import annotations

import logging

import pytest

from holdfast.worker.kv.bits import KVBits
from holdfast.worker.prefix.chain import pack_tokens
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.pressed_worker import prompt_of, worker


def windowed() -> CachingWorker:
    """One that can only resume where the states of its windows are saved."""
    return worker("gemma3_text", kv_bits="8", step_tokens=512)


def test_a_claim_never_ends_within_a_quantized_block_with_windows(
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
    assert inbox.finished("later").cache_report.moved_tokens == 301
    assert inbox.finished("fork").cached_tokens == 301
    assert inbox.tokens("fork") == windowed().serve([[greedy("fork", fork)]]).tokens("fork")
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


@pytest.mark.parametrize(
    ("name", "kv_bits"),
    [("llama", "native"), ("llama", "8"), ("gemma3_text", "native"), ("gemma3_text", "8")],
)
def test_cached_tokens_are_those_a_lookup_can_resume(name: str, kv_bits: KVBits) -> None:
    made = worker(name, kv_bits=kv_bits, step_tokens=512)
    first = prompt_of("first", 601)
    answer = made.serve([[greedy("first", first, max_tokens=20)]]).tokens("first")
    stored = (*first, *answer)
    root = made.index.root(form=kv_bits)
    seen: set[bool] = set()
    for cut in (0, 1, 100, 255, 256, 257, 300, 511, 512, 513, 600, 601, 610, len(stored)):
        packed = pack_tokens((*stored[:cut], *prompt_of("other", 50)))
        for may_move in (True, False):
            counted = made.cache.cached_tokens(packed, root=root, may_move=may_move)
            lookup = made.cache.lookup(packed, root=root, may_move=may_move)
            assert counted == lookup.cached_tokens, (cut, may_move)
            lookup.release()
            seen.add(counted == cut)
    assert seen == {True, False} or name == "llama", "some tokens are stored, but not resumable"


def test_a_claim_on_a_state_that_will_be_moved_ends_at_a_quantized_block(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = prompt_of("first", 101)
    begin = greedy("first", first, max_tokens=5)
    answer = tuple(windowed().serve([[begin]]).tokens("first"))
    later = greedy("later", (*first, *answer, *prompt_of("later", 398)))  # takes the state over
    fork = greedy("fork", (*first, *prompt_of("fork", 20)))  # waits until the tokens are quantized
    made = worker("gemma3_text", kv_bits="8", step_tokens=512, max_running=1)
    inbox = made.serve([[begin], [later, fork]], in_turn=True)
    assert inbox.finished("later").cache_report.moved_tokens > 101
    assert inbox.tokens("fork") == windowed().serve([[fork]]).tokens("fork")
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
