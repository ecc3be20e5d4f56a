"""Cached = fresh for every architecture, with prompts, chunk sizes, joins, tiers and restarts drawn
at random.

Prefilling only the rest of a prompt divides the work differently from prefilling it completely, so
float32 rounds differently: log-probabilities of answers may differ by TOLERANCE, and greedy answers
must be equal, unless two tokens are that close.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import TokenLogprob, TokensGenerated
from holdfast.wire.requests import TokenIds
from tests.fakes.architectures import KEEPABLE, RESUMES_ANYWHERE
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.tiny_models import VOCAB_SIZE

# of log-probabilities; the largest observed over all architectures, with BLAS on a CPU, is 2.4e-6
TOLERANCE = 5e-5
ANSWER_TOKENS = 5
How = Literal["exact", "extend", "diverge", "answer in the middle"]


@dataclass(frozen=True)
class Turn:
    """A request derived from an earlier one, with its number modulo `of`."""

    of: int
    how: How
    cut: float  # where a diverging one leaves it
    more: int  # new tokens
    together: bool  # arrives while the one before it still runs


@dataclass(frozen=True)
class Life:
    """The life of a worker that answers these requests."""

    step_tokens: int
    min_chunk_tokens: int
    tier: Literal["ram", "disk", "both"]
    restart_before: int  # from this turn on, another worker; beyond the last one: never


turns = st.builds(
    Turn,
    of=st.integers(0, 5),
    how=st.sampled_from(How.__args__),  # type: ignore[attr-defined]
    cut=st.floats(0.05, 1.0),
    more=st.integers(1, 40),
    together=st.booleans(),
)
lives = st.builds(
    Life,
    step_tokens=st.sampled_from([16, 64, 300]),
    min_chunk_tokens=st.sampled_from([1, 4, 16]),
    tier=st.sampled_from(["ram", "disk", "both"]),
    restart_before=st.integers(1, 6),
)
lengths = st.sampled_from([2, 37, 130, 255, 256, 257, 300])


def check(name: str, length: int, asked: list[Turn], life: Life, seed: int) -> None:
    rng = random.Random(seed)
    alone = Reference(name)
    requests = [request("0", tokens(rng, length), rng)]
    for number, turn in enumerate(asked, start=1):
        requests.append(request(str(number), derived(turn, requests, alone, rng), rng))
    with tempfile.TemporaryDirectory() as folder:
        answers = live(name, life, requests, asked, Path(folder))
    for number, each in enumerate(requests):
        inbox = answers[number]
        same_answer(drawn(inbox, each.request_id), alone.answer(each), each.request_id)
        if number and name in RESUMES_ANYWHERE and must_be_there(asked[number - 1], number, life):
            assert inbox.finished(each.request_id).cached_tokens == len(each.prompt_token_ids) - 1


def must_be_there(turn: Turn, number: int, life: Life) -> bool:
    """Whether this request's whole prompt was prefilled before and cannot have been evicted since."""
    if turn.how != "exact" or turn.together or life.tier == "disk":
        return False
    same_life = (turn.of % number < life.restart_before) == (number < life.restart_before)
    return same_life or life.tier == "both"


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(count))


def request(name: str, prompt: tuple[int, ...], rng: random.Random) -> SequenceRequest:
    branch_points = tuple(sorted({rng.randrange(len(prompt)) for _ in range(2)}))
    scored = {"want_logprobs": True, "top_logprobs": 2}
    return greedy(name, prompt, max_tokens=ANSWER_TOKENS, branch_points=branch_points, **scored)


def derived(
    turn: Turn, requests: list[SequenceRequest], alone: Reference, rng: random.Random
) -> tuple[int, ...]:
    before = requests[turn.of % len(requests)]
    prompt, own = tuple(before.prompt_token_ids), tokens(rng, turn.more)
    answered = prompt + tuple(token.token_id for token in alone.answer(before))
    match turn.how:
        case "exact":
            return prompt
        case "extend":
            return answered + own
        case "diverge":
            return prompt[: max(1, int(turn.cut * len(prompt)))] + own
        case "answer in the middle":
            return answered[:-2] + own


class Reference:
    """Answers of workers without a cache."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._answers: dict[TokenIds, list[TokenLogprob]] = {}

    def answer(self, asked: SequenceRequest) -> list[TokenLogprob]:
        prompt = asked.prompt_token_ids
        if prompt not in self._answers:
            scored = {"want_logprobs": True, "top_logprobs": 2}
            alone = greedy("fresh", prompt, max_tokens=ANSWER_TOKENS, **scored)
            inbox = worker(self._name).serve([[alone]])
            self._answers[prompt] = drawn(inbox, "fresh")
        return self._answers[prompt]


def worker(name: str, **more: object) -> CachingWorker:
    return CachingWorker(name, **more)  # type: ignore[arg-type]


def live(
    name: str, life: Life, requests: list[SequenceRequest], asked: list[Turn], folder: Path
) -> list[ScriptInbox]:
    """For each request, the inbox of the worker that answered it."""
    answers: list[ScriptInbox] = []
    for first, last in ((0, life.restart_before), (life.restart_before, len(requests))):
        script: list[list[SequenceRequest]] = []
        for number in range(first, min(last, len(requests))):
            if script and asked[number - 1].together:
                script[-1].append(requests[number])
            else:
                script.append([requests[number]])
        if not script:
            continue
        subject = worker(
            name,
            folder=None if life.tier == "ram" else folder,
            ram_bytes=1 if life.tier == "disk" else 1 << 28,
            step_tokens=life.step_tokens,
            min_chunk_tokens=life.min_chunk_tokens,
        )
        inbox = subject.serve(script, in_turn=True)
        answers += [inbox] * (min(last, len(requests)) - first)
    return answers


def drawn(inbox: ScriptInbox, request_id: str) -> list[TokenLogprob]:
    return [
        each
        for event in inbox.of(request_id)
        if isinstance(event, TokensGenerated)
        for each in event.logprobs
    ]


def same_answer(found: list[TokenLogprob], expected: list[TokenLogprob], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        first, second = (score for _, score in other.top[:2])
        if one.token_id != other.token_id:
            assert first - second <= 2 * TOLERANCE, f"request {what} has another answer"
            return  # either may be taken; the rest then concerns another text
        assert abs(one.logprob - other.logprob) <= TOLERANCE, (
            f"request {what}: {one.logprob} and {other.logprob}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPABLE)
@settings(max_examples=40)
@given(
    length=lengths,
    asked=st.lists(turns, min_size=1, max_size=6),
    life=lives,
    seed=st.integers(0, 1 << 20),
)
def test_a_cached_prompt_is_answered_like_a_fresh_one(
    name: str, length: int, asked: list[Turn], life: Life, seed: int
) -> None:
    check(name, length, asked, life, seed)
