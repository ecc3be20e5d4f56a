"""A worker with a draft model gives the same answers in crowds, with the cache, short of memory,
cancelled, and when the draft model fails.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.wire.commands import Command, SequenceRequest, ThinkingBudget
from holdfast.wire.events import FinishReason
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.drafting.draft_model import DraftModel
from holdfast.worker.drafting.suffix import MOST_DRAFTED
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import SpanResult
from holdfast.worker.engine.probe import choose_layout
from tests.fakes import distributions
from tests.fakes.caching_worker import (
    CachingWorker,
    RunningAhead,
    greedy,
    make_blocks_small,
    one_after_the_other,
    random_prompt,
)
from tests.fakes.draft_models import ask_always, draft_model
from tests.fakes.draft_requests import plain_answers, requests
from tests.fakes.script_inbox import ScriptInbox, cancel
from tests.fakes.slow import slow
from tests.fakes.tiny_grammars import SCHEMA, json_grammar, tiny_constraints
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_tiny

PENALTIES = SamplingParams(
    temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, seed=2
)


def drafting(name: str = "llama", **more: Any) -> CachingWorker:
    return CachingWorker(name, speculates=True, draft_model=draft_model(name), **more)


def assert_same(worker: CachingWorker, inbox: ScriptInbox, answers: dict[str, list[int]]) -> None:
    assert {name: inbox.tokens(name) for name in answers} == answers
    counted = worker.counters
    assert 0 < counted.model_accepted_tokens < counted.model_drafted_tokens
    assert_no_states_left(worker)


def assert_no_states_left(worker: CachingWorker) -> None:
    model = worker.draft_model
    assert model is not None
    model.retain_only(())
    model.evict_cached(0)
    assert model.states == 0


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", Engine),
        ("gemma3_text", RunningAhead),
        ("qwen3_next", Engine),
        *slow(("llama", RunningAhead), ("gemma3_text", Engine), ("qwen3_next", RunningAhead)),
        *slow(*itertools.product(["deepseek_v3", "mamba2", "gpt_oss"], [Engine, RunningAhead])),
    ],
)
def test_drafts_do_not_change_concurrent_answers(
    name: str, engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Sequence[Command]] = [requests()]
    answers = plain_answers(script, name=name)
    ask_always(monkeypatch, seed=name)
    worker = drafting(name, engine=engine)
    assert_same(worker, worker.serve(script), answers)


@pytest.mark.parametrize("engine", [RunningAhead, *slow(Engine)])
def test_drafts_change_nothing_with_grammars_budgets_and_penalties(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    constrained: dict[str, dict[str, Any]] = {
        "a": {"grammar": json_grammar(SCHEMA)},
        "b": {"grammar": 'start: /[a-z]+/ "." \n'},
        "c": {"thinking_budget": ThinkingBudget(tokens=4, end_token_ids=(7, 8))},
        "d": {},
    }
    script: list[Sequence[Command]] = [
        [
            SequenceRequest(
                request_id=name,
                prompt_token_ids=greedy(name, random_prompt(40, name)).prompt_token_ids,
                max_tokens=20,
                sampling=PENALTIES,
                **more,
            )
            for name, more in constrained.items()
        ]
    ]
    answers = plain_answers(script, constraints=tiny_constraints())
    ask_always(monkeypatch, seed="constrained")
    worker = drafting(engine=engine, constraints=tiny_constraints())
    assert_same(worker, worker.serve(script), answers)


@pytest.mark.parametrize("kv_bits", ["8/4", *slow("8")])
def test_drafts_change_nothing_with_quantized_kv(
    kv_bits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Sequence[Command]] = [
        [greedy(name, random_prompt(245, name), max_tokens=24, kv_bits=kv_bits) for name in "ab"]
    ]
    runner = choose_layout(make_tiny("llama", head_dim=64), vocab_size=VOCAB_SIZE)
    plain = CachingWorker(runner, kv_bits="auto").serve(script)
    ask_always(monkeypatch, seed="quantized")
    worker = CachingWorker(
        runner,
        kv_bits="auto",
        speculates=True,
        draft_model=draft_model(head_dimensions=64),
    )
    assert_same(worker, worker.serve(script), {name: plain.tokens(name) for name in "ab"})


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", Engine),
        ("qwen3_next", RunningAhead),
        *slow(("llama", RunningAhead), ("qwen3_next", Engine)),
    ],
)
def test_the_cache_is_the_same_before_and_after_a_restart(
    name: str, engine: type[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_blocks_small(monkeypatch)
    prompt = random_prompt(90)
    first = greedy("first", prompt, max_tokens=20)
    answer = plain_answers([[first]], name=name)["first"]
    following = greedy("next", (*prompt, *answer, 7, 8, 9), max_tokens=14)
    answers = plain_answers(one_after_the_other(first, following), name=name)
    ask_always(monkeypatch, seed="cache")
    for _ in range(2):
        worker = drafting(name, engine=engine, folder=tmp_path)
        inbox = worker.serve([[first], [following]], in_turn=True)
        assert_same(worker, inbox, answers)
        # a recurrent state may have returned to the token before its last draft
        missing = MOST_DRAFTED + 1 if name == "qwen3_next" else 1
        assert inbox.finished("next").cached_tokens >= len(prompt) + len(answer) - missing


@pytest.mark.parametrize("engine", [Engine, *slow(RunningAhead)])
def test_preempted_sequences_continue_with_their_drafts(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Sequence[Command]] = [
        [greedy(name, random_prompt(10, name), max_tokens=40) for name in "abcd"]
    ]
    answers = plain_answers(script)
    ask_always(monkeypatch, seed="preempted")
    worker = drafting(engine=engine, budget_tokens=90)
    assert_same(worker, worker.serve(script), answers)
    assert worker.scheduler.statistics().preemptions > 0


@pytest.mark.parametrize("engine", [RunningAhead, *slow(Engine)])
def test_a_request_can_be_cancelled_at_any_time(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Sequence[Command]] = [requests(longer=10)]
    answers = plain_answers(script)
    ask_always(monkeypatch, seed="cancelled")
    for steps in (3, 5):
        cancelled = [*script, *[[]] * steps, [cancel("a")], [], [cancel("d")]]
        worker = drafting(engine=engine)
        inbox = worker.serve(cancelled)
        for name in "ad":
            assert inbox.finished(name).reason is FinishReason.CANCELLED
            assert inbox.tokens(name) == answers[name][: len(inbox.tokens(name))]
        for name in "bc":
            assert inbox.tokens(name) == answers[name]
        assert_no_states_left(worker)


class Failing(Engine):
    """Fails in one of its steps."""

    fails_at = 30
    reason = ""  # empty: raises an exception

    def collect(self, pending: Any) -> tuple[SpanResult, ...]:
        self.fails_at -= 1
        if self.fails_at < 0:
            if not self.reason:
                raise MemoryError("no memory for the draft model")
            return tuple(
                SpanResult(request_id=each.span.request_id, failure=self.reason)
                for each in pending.spans
            )
        return super().collect(pending)


@pytest.mark.parametrize("reason", ["", "not a number"])
def test_a_failing_draft_model_is_disabled_and_harms_no_request(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script: list[Sequence[Command]] = [requests()]
    answers = plain_answers(script)
    ask_always(monkeypatch, seed="failing")
    model: DraftModel = draft_model(engine=Failing)
    monkeypatch.setattr(Failing, "reason", reason)
    worker = CachingWorker(speculates=True, draft_model=model)
    with caplog.at_level(logging.ERROR):
        inbox = worker.serve(script)
    assert {name: inbox.tokens(name) for name in answers} == answers
    assert caplog.text.count("the draft model noisy llama failed, and is not used any more") == 1
    assert (reason or "no memory for the draft model") in caplog.text
    assert worker.counters.model_drafted_tokens > 0


@pytest.mark.parametrize("name", slow(*distributions.SAMPLINGS))
def test_sampled_tokens_follow_the_models_distribution(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chi-square test on the first three tokens of 800 answers, most of which follow drafts."""
    sampling = msgspec.structs.replace(distributions.PLAIN, **distributions.SAMPLINGS[name])
    ask_always(monkeypatch, seed=f"chi-square {name}")
    script: list[Sequence[Command]] = [
        [
            SequenceRequest(
                request_id=str(seed),
                prompt_token_ids=TokenIds.of(distributions.PROMPT),
                max_tokens=6,
                sampling=msgspec.structs.replace(sampling, seed=seed),
            )
            for seed in range(distributions.ANSWERS)
        ]
    ]
    worker = drafting(max_running=64, max_queued=distributions.ANSWERS, step_tokens=600)
    inbox = worker.serve(script)
    assert worker.counters.model_accepted_tokens > 500
    assert worker.counters.model_accepted_tokens < worker.counters.model_drafted_tokens
    chances = distributions.chances_of_outcomes(kept_tiny("llama"), sampling)
    outcomes = [tuple(inbox.tokens(str(seed))[:3]) for seed in range(distributions.ANSWERS)]
    distributions.assert_drawn_from(chances, outcomes)
