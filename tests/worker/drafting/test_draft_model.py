"""Drafts of a model whose state follows a sequence that accepts only some drafted tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.drafting.draft_model import DraftModel, DraftState
from holdfast.worker.drafting.suffix import MOST_DRAFTED
from tests.fakes.draft_models import draft_model
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE

SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.9, top_p=0.9, seed=4),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, logit_bias={5: -3.0}, seed=2),
)


def a_request(prompt: Sequence[int], *, name: str = "a", **more: object) -> SequenceRequest:
    fields = {"sampling": SAMPLINGS[0], "max_tokens": 200, **more}
    return SequenceRequest(request_id=name, prompt_token_ids=TokenIds.of(prompt), **fields)  # type: ignore[arg-type]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE - 8) for _ in range(count)]


def opened(model: DraftModel, request: SequenceRequest, generated: Sequence[int]) -> DraftState:
    draft = model.open(request, generated)
    assert draft is not None
    while not model.catch_up(draft, generated):
        model.begin_step()
    return draft


@cache
def forgetful(name: str) -> DraftModel:
    """A draft model that keeps no states."""
    return draft_model(name, most_cached_bytes=0)


def fresh_draft(
    name: str, request: SequenceRequest, generated: Sequence[int], *, depth: int
) -> list[int]:
    model = forgetful(name)
    draft = opened(model, request, generated)
    model.extend([(draft, generated)], depth=depth)
    model.retain_only(())
    assert model.states == 0
    return draft.drafted


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "qwen3_next", *slow("deepseek_v3", "mamba2", "llama4")]
)
def test_drafts_do_not_depend_on_earlier_drafts(name: str) -> None:
    rng = random.Random(name)
    model = draft_model(name)
    answers: list[tuple[DraftState, SequenceRequest, list[int]]] = []
    for sampling in SAMPLINGS:
        request = a_request(tokens(rng, rng.randint(3, 90)), sampling=sampling)
        answers.append((opened(model, request, ()), request, []))
    for _ in range(4):
        asked = [each for each in answers if rng.random() < 0.8] or answers
        depth = rng.randint(1, MOST_DRAFTED)
        model.extend([(draft, generated) for draft, _, generated in asked], depth=depth)
        for draft, request, generated in asked:
            drafted = draft.drafted
            assert drafted == fresh_draft(name, request, generated, depth=depth)
            generated += [*drafted[: rng.randint(0, depth)], *tokens(rng, rng.choice([1, 1, 5]))]
            model.learn(draft, generated)


def test_a_model_drafts_its_own_continuation() -> None:
    model = draft_model(noise=0.0)
    request = a_request(range(40))
    draft = opened(model, request, ())
    model.extend([(draft, ())], depth=8)
    generated = draft.drafted
    again = draft_model(noise=0.0)
    one_by_one: list[int] = []
    for _ in range(8):
        other = opened(again, request, one_by_one)
        again.extend([(other, one_by_one)], depth=1)
        one_by_one += other.drafted
    assert generated == one_by_one


def test_chances_follow_the_acceptance_of_earlier_drafts() -> None:
    model = draft_model()
    request = a_request(range(30))
    draft = opened(model, request, ())
    before = model.chances(draft)
    assert list(before) == sorted(before, reverse=True)
    generated: list[int] = []
    for _ in range(20):
        model.extend([(draft, generated)], depth=4)
        generated += [*draft.drafted, 1]
        model.learn(draft, generated)
    assert model.chances(draft)[0] > before[0]
    assert model.chances(None)[0] > before[0]  # of future sequences
    for _ in range(40):
        model.extend([(draft, generated)], depth=1)
        generated.append((draft.drafted[0] + 1) % 200)
        model.learn(draft, generated)
    assert model.chances(draft)[0] < 0.2


def test_the_next_turn_takes_over_the_last_turns_state() -> None:
    model = draft_model()
    model.seconds_per_token = 1e-6  # so that a prompt is prefilled in one piece
    rng = random.Random("turns")
    prompt = tokens(rng, 300)
    first = a_request(prompt)
    opened(model, first, ())
    model.retain_only(())
    following = a_request([*prompt, *tokens(rng, 20)], name="b")
    stranger = a_request(tokens(rng, 320), name="c")
    assert (
        model.seconds_behind(following, (), None) == 0.0 < model.seconds_behind(stranger, (), None)
    )
    draft = model.open(following, ())
    assert draft is not None
    assert draft.live.tokens >= len(prompt) - 1
    model.extend([(draft, ())], depth=4)
    assert draft.drafted == fresh_draft("llama", following, (), depth=4)


@pytest.mark.parametrize("how", ["another tenant", "not kept", "no memory"])
def test_a_state_is_not_taken_over(how: str) -> None:
    model = draft_model(most_cached_bytes=0 if how == "no memory" else 1 << 30)
    prompt = range(100)
    opened(model, a_request(prompt, tenant="a", is_kept=how != "not kept"), ())
    model.retain_only(())
    tenant = "b" if how == "another tenant" else "a"
    draft = model.open(a_request(prompt, tenant=tenant, name="b"), ())
    assert draft is not None
    assert draft.live.tokens == 0


def test_long_prompts_are_prefilled_in_pieces() -> None:
    model = draft_model()
    model.seconds_per_token = 0.001  # so that pieces are short
    rng = random.Random("pieces")
    request = a_request(tokens(rng, 400))
    draft = model.open(request, ())
    assert draft is not None
    pieces = 1
    while not model.catch_up(draft, ()):
        assert draft.is_catching_up
        model.begin_step()
        pieces += 1
    assert pieces > 1
    model.extend([(draft, ())], depth=3)
    assert draft.drafted == fresh_draft("llama", request, (), depth=3)


def test_a_sequence_beyond_the_context_gets_no_drafts() -> None:
    model = draft_model(context_tokens=64)
    assert model.open(a_request(range(60)), ()) is None
    assert model.open(a_request(range(50)), ()) is not None
    assert not model.can_draft(57)


def test_biases_on_tokens_unknown_to_drafts_are_ignored() -> None:
    model = draft_model()
    sampling = SamplingParams(temperature=0.0, seed=0, logit_bias={VOCAB_SIZE + 5: 3.0, 7: 100.0})
    draft = opened(model, a_request(range(20), sampling=sampling), ())
    model.extend([(draft, ())], depth=3)
    assert draft.drafted == [7, 7, 7]
