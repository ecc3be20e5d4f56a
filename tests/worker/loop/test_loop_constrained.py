"""Constrained answers of a whole worker with a tiny model are not affected by changes of their
state, and end alone.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.wire.commands import SequenceRequest, ThinkingBudget, ThoughtLimit
from holdfast.wire.events import FinishReason
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine
from tests.fakes.caching_worker import (
    CachingWorker,
    FailingOnce,
    RunningAhead,
    greedy,
    one_after_the_other,
    random_prompt,
)
from tests.fakes.script_inbox import ScriptInbox, pause, resume
from tests.fakes.slow import slow
from tests.fakes.tiny_grammars import END, SCHEMA, json_grammar, text_of, tiny_constraints

DIGITS = json_grammar(
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "minItems": 8,
        "maxItems": 10,
    }
)
# a character that does not exist, so that nothing can follow "ab"
DEAD_END = 'start: "ab" /[^\\x00-\\x{10FFFF}]/\n'
THOUGHT = "start: /[a-z]*/ <[261]> /[0-9]*/\n"
BUDGET = ThinkingBudget(tokens=20, end_token_ids=(261,))


class FailingAhead(FailingOnce, RunningAhead):
    """Runs ahead, and fails once."""


def constrained(
    request_id: str, grammar: str, *, max_tokens: int = 64, **more: Any
) -> SequenceRequest:
    return SequenceRequest(
        request_id=request_id,
        prompt_token_ids=TokenIds.of(random_prompt(60, request_id)),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=1.0, seed=7),
        stop_token_ids=(END,),
        grammar=grammar,
        **more,
    )


ASKED = (
    constrained("digits", DIGITS),
    constrained("thought", THOUGHT, thinking_budget=BUDGET),
    constrained("object", json_grammar(SCHEMA)),
    greedy("plain", random_prompt(60, "plain"), max_tokens=30),
)


def a_worker(folder: Path | None = None, *, name: str = "llama", **more: Any) -> CachingWorker:
    return CachingWorker(name, folder, constraints=tiny_constraints(), **more)


@cache
def all_alone(name: str) -> dict[str, list[int]]:
    return {
        request.request_id: a_worker(name=name).serve([[request]]).tokens(request.request_id)
        for request in ASKED
    }


def answers(inbox: ScriptInbox) -> dict[str, list[int]]:
    return {request.request_id: inbox.tokens(request.request_id) for request in ASKED}


def test_an_answer_follows_its_grammar_and_ends_with_it() -> None:
    inbox = a_worker().serve([ASKED])
    assert all(isinstance(number, int) for number in json.loads(text_of(inbox.tokens("digits"))))
    assert set(json.loads(text_of(inbox.tokens("object")))) == set(SCHEMA["properties"])
    assert inbox.finished("object").reason is FinishReason.STOP
    assert 261 in inbox.tokens("thought")[:21]


@pytest.mark.parametrize(
    ("name", "engine"),
    [("llama", RunningAhead), *slow(("llama", Engine), ("qwen3_next", RunningAhead))],
)
def test_preempted_answers_are_unchanged(name: str, engine: type[Engine]) -> None:
    subject = a_worker(name=name, engine=engine, budget_tokens=230, expected_output_tokens=4)
    inbox = subject.serve([ASKED])
    assert subject.scheduler.statistics().preemptions > 0
    assert answers(inbox) == all_alone(name)


@pytest.mark.parametrize(
    ("failing", "engine"),
    [(4, FailingAhead), (20, FailingOnce), *slow((4, FailingOnce), (20, FailingAhead))],
)
def test_answers_retried_alone_after_a_failed_step_are_unchanged(
    failing: int, engine: type[FailingOnce]
) -> None:
    subject = a_worker(engine=engine)
    assert isinstance(subject.engine, FailingOnce)
    subject.engine.fails_at = subject.engine.collected + failing
    inbox = subject.serve([ASKED])
    assert subject.engine.collected > subject.engine.fails_at
    assert answers(inbox) == all_alone("llama")


def test_paused_answers_are_unchanged() -> None:
    script = [
        [*ASKED],
        *[[]] * 9,
        [pause("digits"), pause("thought")],
        *[[]] * 20,
        [resume("digits"), resume("thought")],
    ]
    inbox = a_worker(budget_tokens=300).serve(script)
    assert answers(inbox) == all_alone("llama")


def test_a_prefix_restored_after_a_restart_gives_the_same_answer(tmp_path: Path) -> None:
    request = constrained("digits", DIGITS)
    before = a_worker(tmp_path).serve([[request]])
    subject = a_worker(tmp_path)
    after = subject.serve([[request]])
    assert after.started("digits").cache_report.cached_tokens > 0
    assert after.tokens("digits") == before.tokens("digits")


def end_thought(request_id: str) -> ThoughtLimit:
    return ThoughtLimit(request_id=request_id, budget=replace(BUDGET, tokens=0))


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("plain", RunningAhead),
        ("thought", Engine),
        *slow(("plain", Engine), ("thought", RunningAhead)),
    ],
)
def test_ending_a_running_thought_leaves_others_alone(name: str, engine: type[Engine]) -> None:
    alone = all_alone("llama")
    inbox = a_worker(engine=engine).serve(
        [[*ASKED], *[[]] * 12, [end_thought(name), end_thought("nobody")]]
    )
    said = inbox.tokens(name)
    ended_at = said.index(261)
    assert 0 < ended_at < 20
    assert said[:ended_at] == alone[name][:ended_at], "what was generated before it stays"
    others = [each for each in alone if each != name]
    assert [inbox.tokens(each) for each in others] == [alone[each] for each in others]


@pytest.mark.parametrize("engine", [RunningAhead, *slow(Engine)])
def test_an_ended_thought_stays_ended_after_preemption(engine: type[Engine]) -> None:
    subject = a_worker(engine=engine, budget_tokens=230, expected_output_tokens=4)
    inbox = subject.serve([[*ASKED], [end_thought("plain")]])
    assert subject.scheduler.statistics().preemptions > 0
    assert 261 in inbox.tokens("plain")[:3]


@pytest.mark.parametrize(
    ("engine", "grammar", "bias"),
    [
        (Engine, DEAD_END, {}),
        (RunningAhead, 'start: "abc"\n', {ord("c"): -100.0}),
        *slow((RunningAhead, DEAD_END, {}), (Engine, 'start: "abc"\n', {ord("c"): -100.0})),
    ],
)
def test_an_answer_without_allowed_tokens_ends_alone_with_the_reason(
    engine: type[Engine], grammar: str, bias: dict[int, float]
) -> None:
    shared = random_prompt(300)
    first, beside = greedy("first", shared), greedy("beside", shared, max_tokens=20)
    stuck = replace(
        first,
        request_id="stuck",
        grammar=grammar,
        sampling=SamplingParams(temperature=0.0, logit_bias=bias, seed=0),
    )
    subject = a_worker(engine=engine)
    inbox = subject.serve([*one_after_the_other(first, stuck), [beside]])
    end = inbox.finished("stuck")
    assert end.reason is FinishReason.REFUSED
    assert text_of(inbox.tokens("stuck")) == "ab"
    assert "the grammar" in end.error
    assert inbox.tokens("beside") == CachingWorker().serve([[beside]]).tokens("beside")
    assert inbox.started("beside").cache_report.cached_tokens > 0, (
        "what it began from is not to blame"
    )


def test_an_invalid_grammar_ends_its_request_without_blaming_the_cache() -> None:
    first = greedy("first", random_prompt(300))
    wrong, again = (
        replace(first, request_id="wrong", grammar="nonsense ("),
        replace(first, request_id="again"),
    )
    inbox = a_worker().serve(one_after_the_other(first, wrong, again))
    assert "the grammar cannot be used" in inbox.finished("wrong").error
    assert inbox.started("again").cache_report.cached_tokens > 256
    assert inbox.tokens("again") == inbox.tokens("first")
