"""Plays sequences through a real engine in random interleavings of chunks, decoding rows, joins and
leaves. Decoding sequences may have drafts that mix right and wrong tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import TokenLogprob
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.plan import Draft, Span, SpanResult, StepPlan
from holdfast.worker.kv.bits import KVBits
from tests.fakes.caching_worker import open_sequences
from tests.fakes.tiny_configs import VOCAB_SIZE

TOP_LOGPROBS = 4
FP32_TOLERANCE = 2e-3  # in log-probability; a wrong mask or position moves it by 0.1 and more
# greedily and at random, with and without penalties; the first is greedy
SAMPLINGS = (
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=9),
    SamplingParams(
        temperature=1.2,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={97: 2.0, 98: -100.0, 9: -100.0},
        seed=4,
    ),
    SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=2
    ),
    SamplingParams(temperature=0.7, min_p=0.05, seed=3),
)


def span(start: int, tokens: int = 1, *, name: str = "a", samples: bool = True) -> Span:
    """These tokens of the sequence `name`."""
    return Span(request_id=name, start=start, tokens=tokens, samples=samples)


def begin(engine: Engine, *spans: Span) -> PendingStep:
    return engine.dispatch(StepPlan(spans=spans))


def step(engine: Engine, *spans: Span) -> list[SpanResult]:
    """The results of one step."""
    return list(engine.collect(begin(engine, *spans)))


@dataclass
class Played:
    """The result of one sequence."""

    prompt: tuple[int, ...]
    wanted_tokens: int
    leaves_after: int  # tokens drawn when it is closed, even if more were wanted
    joins_at: int
    sampling: SamplingParams = SamplingParams(temperature=0.0, seed=0)
    # fields of its request: a grammar, a budget
    constraints: Mapping[str, Any] = field(default_factory=dict)
    # the answer that drafts are made of; empty: no drafts
    plain: Sequence[int] = ()
    drafted: int = 0
    accepted: int = 0
    repeated: int = 0  # tokens of its last span with which the next one must begin
    waits: bool = False  # until it is known which of its drafted tokens are accepted
    read: int = 0
    planned: int = 0  # samples passed to the engine
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_open: bool = False
    is_done: bool = False


def random_sequences(
    rng: random.Random, *, vocab_size: int, count: int, longest_prompt: int
) -> list[Played]:
    """Sequences of random lengths that join and leave at random steps."""
    sequences = []
    for _ in range(count):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, longest_prompt)))
        wanted = rng.randint(1, 8)
        leaves = wanted if rng.random() < 0.7 else rng.randint(1, wanted)
        sequences.append(
            Played(
                prompt=prompt, wanted_tokens=wanted, leaves_after=leaves, joins_at=rng.randint(0, 6)
            )
        )
    return sequences


def play(
    engine: Engine,
    sequences: Sequence[Played],
    rng: random.Random,
    *,
    depth: int,
    kv_bits: KVBits = "native",
    block_tokens: int | None = None,
) -> None:
    """Run all sequences to their end.

    depth: the number of steps in flight while the next one is laid out (0 or 1).
    block_tokens: spans also end at multiples of this number of tokens.
    """
    under_way: list[tuple[PendingStep, StepPlan]] = []
    step = 0
    while under_way or not all(each.is_done for each in sequences):
        spans = _random_spans(engine, sequences, rng, step, kv_bits, block_tokens)
        if spans:
            plan = StepPlan(spans=tuple(spans))
            under_way.append((engine.dispatch(plan), plan))
        if under_way and (len(under_way) > depth or not spans):
            _collect(engine, sequences, *under_way.pop(0))
        step += 1


def _random_spans(
    engine: Engine,
    sequences: Sequence[Played],
    rng: random.Random,
    step: int,
    kv_bits: KVBits,
    block_tokens: int | None,
) -> list[Span]:
    spans = []
    for index, each in enumerate(sequences):
        if each.is_done or each.joins_at > step or each.waits or rng.random() < 0.2:
            continue
        if not each.is_open:
            engine.open(
                _request(index, each),
                capacity_tokens=rng.choice([1, len(each.prompt), len(each.prompt) + 8]),
                form=kv_bits,
            )
            each.is_open = True
        if each.read < len(each.prompt):
            tokens = min(len(each.prompt) - each.read, rng.choice([1, 2, 7, 16]))
            if block_tokens:
                tokens = min(tokens, block_tokens - each.read % block_tokens)
            samples = each.read + tokens == len(each.prompt)
            spans.append(
                Span(request_id=str(index), start=each.read, tokens=tokens, samples=samples)
            )
            each.read += tokens
            each.planned += samples
        elif each.planned < each.wanted_tokens:
            is_known = each.planned == len(each.tokens)  # otherwise a step is under way
            may_draft = each.plain and is_known and not each.repeated
            drafted = _draft(engine, index, each, rng) if may_draft else ()
            spans.append(
                Span(
                    request_id=str(index),
                    start=len(each.prompt) + each.planned - 1 - each.repeated,
                    tokens=each.repeated + 1 + len(drafted),
                    samples=True,
                    draft=Draft(drafted),
                )
            )
            each.repeated = 0
            each.planned += 1 + len(drafted)
            each.drafted += len(drafted)
            each.waits = bool(drafted)
    rng.shuffle(spans)
    return spans


def _draft(engine: Engine, index: int, each: Played, rng: random.Random) -> tuple[int, ...]:
    """Up to 8 tokens, mostly right up to a random position."""
    done = len(each.tokens)
    most = min(rng.randrange(9), each.wanted_tokens - done - 1)
    right = list(each.plain[done : done + most])
    guess = tuple(token if rng.random() < 0.85 else rng.randrange(200) for token in right)
    return engine.draft(str(index), guess)[:most]


def _request(index: int, each: Played) -> SequenceRequest:
    return SequenceRequest(
        request_id=str(index),
        prompt_token_ids=TokenIds.of(each.prompt),
        max_tokens=each.wanted_tokens,
        sampling=each.sampling,
        want_logprobs=True,
        top_logprobs=TOP_LOGPROBS,
        **each.constraints,
    )


def _collect(
    engine: Engine, sequences: Sequence[Played], pending: PendingStep, plan: StepPlan
) -> None:
    for span, result in zip(plan.spans, engine.collect(pending), strict=True):
        each = sequences[int(result.request_id)]
        if each.is_done:
            continue
        if span.drafted:
            each.waits = False
            each.planned -= 1 + len(span.drafted) - len(result.token_ids)
            each.accepted += len(result.token_ids) - 1
            each.repeated = result.repeated
        assert not result.failure
        assert not result.refusal
        each.tokens.extend(result.token_ids)
        each.logprobs.extend(result.logprobs)
        if len(each.tokens) >= min(each.leaves_after, each.wanted_tokens):
            each.is_done = True
            engine.close(result.request_id)


def assert_as_alone(model: Any, each: Played, *, tolerance: float) -> None:
    """Feed the prompt and the sampled tokens to the model alone, in one pass with mlx-lm's caches:
    every sampled token must be its greedy choice.

    Tie-aware: a sampled token may differ from the reference's if both are equally likely within the
    tolerance.
    """
    from mlx_lm.models.cache import make_prompt_cache

    ids = mx.array([[*each.prompt, *each.tokens[:-1]]])
    drawn_from = model(ids, cache=make_prompt_cache(model))[0, len(each.prompt) - 1 :]
    logits = drawn_from.astype(mx.float32)
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for row, token, scored in zip(expected, each.tokens, each.logprobs, strict=True):
        assert row.max() - row[token] <= tolerance, "not the likeliest token"
        assert abs(row[token] - scored.logprob) <= tolerance
        for rival, logprob in scored.top:
            assert abs(row[rival] - logprob) <= tolerance


def assert_batched_is_alone(
    engine: Engine,
    model: Any,
    rng: random.Random,
    *,
    depth: int,
    count: int = 6,
    longest_prompt: int = 40,
    tolerance: float = FP32_TOLERANCE,
    kv_bits: KVBits = "native",
) -> None:
    """Play random sequences; each of them must draw the same as the model alone."""
    sequences = random_sequences(
        rng, vocab_size=VOCAB_SIZE, count=count, longest_prompt=longest_prompt
    )
    play(engine, sequences, rng, depth=depth, kv_bits=kv_bits)
    for each in sequences:
        assert_as_alone(model, each, tolerance=tolerance)
    assert open_sequences(engine) == 0
