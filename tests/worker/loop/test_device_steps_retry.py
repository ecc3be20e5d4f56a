"""A sequence that is retried alone after a failed step gives the results of the step."""

from __future__ import annotations

import pytest

from holdfast.wire.events import FinishReason
from holdfast.worker.engine.layouts import SoloCachedRunner
from holdfast.worker.engine.plan import Span
from holdfast.worker.loop.device_steps import prefill_alone
from tests.fakes.caching_worker import CachingWorker, FailingOnce, greedy
from tests.fakes.fake_engine import FAILS_ALONE, RAISES_AT_COLLECT, FakeEngine, expected_tokens
from tests.fakes.looped_worker import request
from tests.fakes.pressed_worker import prompt_of
from tests.fakes.tiny_models import make_tiny


def opened(*prompt: int, **more: object) -> FakeEngine:
    engine = FakeEngine()
    engine.open(request("a", *prompt, **more), capacity_tokens=100)
    return engine


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_a_retry_prefills_up_to_the_span_and_draws_there(chunk_tokens: int) -> None:
    prompt = tuple(range(1, 21))
    engine = opened(*prompt)
    result = prefill_alone(
        engine, Span(request_id="a", start=15, tokens=5, samples=True), chunk_tokens=chunk_tokens
    )
    assert list(result.token_ids) == expected_tokens(request("a", *prompt, max_tokens=1))
    spans = [span for plan in engine.plans for span in plan.spans]
    assert [span.start for span in spans] == list(range(0, 20, chunk_tokens))
    assert [span.samples for span in spans] == [False] * (len(spans) - 1) + [True]


def test_a_span_within_the_prompt_draws_nothing() -> None:
    result = prefill_alone(
        opened(*range(1, 21)),
        Span(request_id="a", start=5, tokens=5, samples=False),
        chunk_tokens=4,
    )
    assert (result.token_ids, result.failure) == ((), "")


def test_a_retry_returns_the_scores_of_all_its_chunks() -> None:
    engine = opened(*range(1, 11), want_prompt_logprobs=True)
    result = prefill_alone(
        engine, Span(request_id="a", start=8, tokens=2, samples=True), chunk_tokens=3
    )
    assert [score.token_id for score in result.prompt_logprobs] == list(range(2, 11))


def test_a_failure_of_the_sequence_itself_is_the_result() -> None:
    result = prefill_alone(
        opened(1, FAILS_ALONE),
        Span(request_id="a", start=0, tokens=2, samples=True),
        chunk_tokens=1,
    )
    assert result.failure


def test_exceptions_of_the_engine_reach_the_caller() -> None:
    with pytest.raises(RuntimeError):
        prefill_alone(
            opened(1, RAISES_AT_COLLECT),
            Span(request_id="a", start=0, tokens=2, samples=True),
            chunk_tokens=2,
        )


def test_a_retry_of_a_quantized_sequence_gives_the_same_answer() -> None:
    """In this layout, all tokens of a span see the same keys, so a span must not cross a quantized
    block's edge.
    """
    prompt = prompt_of("a", 600)
    runner = SoloCachedRunner(make_tiny("llama", head_dim=64), None)
    runner.shares = False
    answers = []
    for fails_at in (0, 5):  # while it generates tokens
        made = CachingWorker(runner, kv_bits="8", engine=FailingOnce, step_tokens=512)
        assert isinstance(made.engine, FailingOnce)
        made.engine.collected = 0
        made.engine.fails_at = fails_at
        inbox = made.serve([[greedy("a", prompt, max_tokens=6)]])
        assert made.engine.ends_spans_at_blocks
        assert inbox.finished("a").reason is FinishReason.LENGTH
        answers.append(inbox.tokens("a"))
    assert answers[0] == answers[1]
