"""A worker that verifies drafts: with the cache, in crowds, short of memory, cancelled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.wire.commands import Command, SequenceRequest
from holdfast.wire.events import Finished, FinishReason, TokensGenerated
from holdfast.wire.requests import RequestId, SamplingParams, TokenIds
from holdfast.worker.drafting.suffix import MOST_DRAFTED
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import Draft
from holdfast.worker.scheduler import scheduler
from holdfast.worker.scheduler.draft_gain import DraftGain, Offers
from tests.fakes import forced_drafts
from tests.fakes.caching_worker import (
    CachingWorker,
    RunningAhead,
    greedy,
    make_blocks_small,
    one_after_the_other,
    random_prompt,
)
from tests.fakes.draft_requests import plain_answers, requests
from tests.fakes.script_inbox import ScriptInbox, cancel
from tests.fakes.slow import slow


def assert_same(inbox: ScriptInbox, answers: dict[str, list[int]]) -> None:
    assert {name: inbox.tokens(name) for name in answers} == answers
    ends = [event for event in inbox.events if isinstance(event, Finished)]
    assert sum(end.accepted_tokens for end in ends) > 0
    assert sum(end.rejected_tokens for end in ends) > 0
    longest = max(len(each.token_ids) for each in inbox.events if isinstance(each, TokensGenerated))
    assert longest > 2


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", RunningAhead),
        ("gemma3_text", Engine),
        ("qwen3_next", RunningAhead),
        *slow(("llama", Engine), ("gemma3_text", RunningAhead), ("qwen3_next", Engine)),
    ],
)
def test_drafts_do_not_change_concurrent_answers(
    name: str, engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Sequence[Command]] = [requests()]
    answers = plain_answers(script, name=name)
    forced_drafts.force(monkeypatch, answers, seed=name)
    inbox = CachingWorker(name, engine=engine, speculates=True).serve(script)
    assert_same(inbox, answers)
    scored = [event for event in inbox.of("c") if isinstance(event, TokensGenerated)]
    assert all(
        [entry.token_id for entry in each.logprobs] == list(each.token_ids) for each in scored
    )


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", RunningAhead),
        ("qwen3_next", Engine),
        *slow(("llama", Engine), ("qwen3_next", RunningAhead)),
    ],
)
def test_verified_answers_are_cached_correctly(
    name: str, engine: type[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_blocks_small(monkeypatch)
    prompt = random_prompt(60)
    first = greedy("first", prompt, max_tokens=20)
    answer = plain_answers([[first]], name=name)["first"]
    following = greedy("next", (*prompt, *answer, 7, 8, 9), max_tokens=14)
    answers = plain_answers(one_after_the_other(first, following), name=name)
    forced_drafts.force(monkeypatch, answers, seed="cache")
    for _ in range(2):
        worker = CachingWorker(name, tmp_path, engine=engine, speculates=True)
        inbox = worker.serve([[first], [following]], in_turn=True)
        assert_same(inbox, answers)
        # a recurrent state may have returned to the token before its last draft
        missing = MOST_DRAFTED + 1 if name == "qwen3_next" else 1
        assert inbox.finished("next").cached_tokens >= len(prompt) + len(answer) - missing


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", Engine),
        ("qwen3_next", RunningAhead),
        *slow(("llama", RunningAhead), ("qwen3_next", Engine)),
    ],
)
def test_preempted_sequences_continue_with_their_drafts(
    name: str, engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Sequence[Command]] = [
        [greedy(name, random_prompt(10, name), max_tokens=40) for name in "abcd"]
    ]
    answers = plain_answers(script, name=name)
    forced_drafts.force(monkeypatch, answers, seed="preempted")
    worker = CachingWorker(name, engine=engine, speculates=True, budget_tokens=90)
    assert_same(worker.serve(script), answers)
    assert worker.scheduler.statistics().preemptions > 0


@pytest.mark.parametrize("engine", [Engine, RunningAhead])
def test_a_request_can_be_cancelled_during_verification(
    engine: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Sequence[Command]] = [requests(longer=10)]
    answers = plain_answers(script)
    forced_drafts.force(monkeypatch, answers, seed="cancelled")
    for steps in (3, 5):
        cancelled = [*script, *[[]] * steps, [cancel("a")], [], [cancel("d")]]
        inbox = CachingWorker(engine=engine, speculates=True).serve(cancelled)
        for name in "ad":
            assert inbox.finished(name).reason is FinishReason.CANCELLED
            tokens = inbox.tokens(name)
            assert tokens == answers[name][: len(tokens)]
        for name in "bc":
            assert inbox.tokens(name) == answers[name]


def test_stop_tokens_end_answers_at_the_same_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = plain_answers([requests()])
    rng = random.Random(3)
    stops = tuple(rng.choice(tokens[6:]) for tokens in answers.values())
    script: list[Sequence[Command]] = [requests(stop_token_ids=stops)]
    stopped = plain_answers(script)
    forced_drafts.force(monkeypatch, answers, seed="stops")
    inbox = CachingWorker(speculates=True).serve(script)
    assert_same(inbox, stopped)
    assert {inbox.finished(name).reason for name in stopped} == {FinishReason.STOP}


def test_earlier_answers_are_drafted_only_within_a_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "DraftGain", forced_drafts.EagerGain)
    prompt = random_prompt(30)

    def request(name: str, tenant: str) -> SequenceRequest:
        sampling = SamplingParams(temperature=1.0, seed=3)  # an answer without repetitions
        return SequenceRequest(
            request_id=name,
            prompt_token_ids=TokenIds.of(prompt),
            max_tokens=40,
            sampling=sampling,
            tenant=tenant,
        )

    asked = [request("first", "a"), request("again", "a"), request("stranger", "b")]
    inbox = CachingWorker(speculates=True).serve([[each] for each in asked], in_turn=True)
    assert inbox.tokens("first") == inbox.tokens("again") == inbox.tokens("stranger")
    assert inbox.finished("again").accepted_tokens > 25
    assert inbox.finished("stranger").accepted_tokens == inbox.finished("first").accepted_tokens < 5


def test_repetitions_are_drafted_by_the_worker_itself() -> None:
    """A tiny model's greedy answer soon repeats itself."""
    request = greedy("a", random_prompt(20), max_tokens=120)
    answer = plain_answers([[request]])["a"]
    inbox = CachingWorker(speculates=True).serve([[request]])
    assert inbox.tokens("a") == answer
    end = inbox.finished("a")
    assert end.accepted_tokens + end.rejected_tokens > 0


@pytest.mark.parametrize(("engine", "least", "most"), [(Engine, 60, 100), (RunningAhead, 200, 300)])
def test_unprofitable_drafts_are_made_for_few_steps(
    engine: type[Engine], least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Offers] = []

    class NeverWorthIt(DraftGain):
        def choose(self, offers: Offers, *, rows: int, most: int) -> dict[RequestId, Draft]:
            made.append(offers)
            return {}

    monkeypatch.setattr(scheduler, "DraftGain", NeverWorthIt)
    request = greedy("a", random_prompt(20), max_tokens=300)
    CachingWorker(engine=engine, speculates=True).serve([[request]])
    assert least < len(made) < most
