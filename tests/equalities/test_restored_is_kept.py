"""Equalities two and three: a sequence that starts from snapshots continues bit for bit like the
original.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import TokenLogprob
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import KeepPolicy, Span, StepPlan
from holdfast.worker.engine.sequence import Kept, Prefix
from holdfast.worker.kv.live import LiveState, Snapshot
from tests.fakes.architectures import KEEPABLE, each_of, probed
from tests.fakes.tiny_models import TINY, VOCAB_SIZE

KEPT_BLOCK_TOKENS = 8
HAVE_WINDOWS_OR_STATES = {
    "cohere2", "falcon_h1", "gemma3_text", "gpt_oss", "kimi_linear", "lfm2",
    "llama4", "mamba", "mamba2", "nemotron_h", "qwen3_5", "qwen3_next", "recurrent_gemma", "rwkv7",
}  # fmt: skip
CUT_ANYWHERE = [name for name in KEEPABLE if name not in HAVE_WINDOWS_OR_STATES]


@dataclass
class Shelf:
    """All snapshots of one sequence."""

    runs: list[Snapshot] = field(default_factory=list)
    states: dict[int, Snapshot] = field(default_factory=dict)

    def put(self, kept: list[Kept]) -> None:
        for each in kept:
            self.runs.extend(each.blocks)
            if each.state is not None:
                self.states[each.state.start] = each.state

    def prefix(self, tokens: int) -> Prefix:
        """The snapshots from which a sequence with `tokens` common tokens can start."""
        runs, end = [], 0
        for run in self.runs:
            if end < tokens:
                runs.append(run.cut(min(run.tokens, tokens - end)))
                end += run.tokens
        return Prefix(blocks=tuple(runs), state=self.states.get(tokens))


def request_for(name: str, prompt: tuple[int, ...]) -> SequenceRequest:
    return SequenceRequest(
        request_id=name,
        prompt_token_ids=TokenIds.of(prompt),
        max_tokens=64,
        sampling=SamplingParams(temperature=0.0, seed=0),
        want_logprobs=True,
        top_logprobs=3,
    )


def run(engine: Engine, shelf: Shelf, spans: list[Span]) -> list[TokenLogprob]:
    drawn: list[TokenLogprob] = []
    for span in spans:
        pending = engine.dispatch(StepPlan(spans=(span,)))
        drawn.extend(engine.collect(pending)[0].logprobs)
        shelf.put(engine.take_kept(pending))
    return drawn


def chunks(name: str, start: int, end: int, cuts: list[int]) -> list[Span]:
    edges = [start, *sorted(cut for cut in cuts if start < cut < end), end]
    return [
        Span(request_id=name, start=a, tokens=b - a, draws=b == end)
        for a, b in itertools.pairwise(edges)
    ]


def decoding(name: str, start: int, count: int) -> list[Span]:
    return [
        Span(request_id=name, start=start + index, tokens=1, draws=True) for index in range(count)
    ]


@pytest.mark.parametrize("name", each_of(KEEPABLE))
def test_a_restored_sequence_draws_the_same_bits(name: str) -> None:
    rng = random.Random(name)
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(45))
    boundary, shelf = 29, Shelf()
    policy = KeepPolicy(block_tokens=KEPT_BLOCK_TOKENS, boundaries=frozenset({boundary}))
    engine.open(request_for("kept", prompt), capacity_tokens=64, keep=policy)
    first = run(engine, shelf, chunks("kept", 0, 45, [10, boundary, 40]) + decoding("kept", 45, 6))
    assert (
        engine.open(
            request_for("restored", prompt), capacity_tokens=64, prefix=shelf.prefix(boundary)
        ).tokens
        == boundary
    )
    second = run(
        engine, Shelf(), chunks("restored", boundary, 45, [40]) + decoding("restored", 45, 6)
    )
    assert second == first


@pytest.mark.parametrize("name", each_of(KEEPABLE))
def test_a_sequence_may_start_from_the_end_of_an_answer(name: str) -> None:
    rng = random.Random(f"{name} end")
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(20))
    shelf = Shelf()
    engine.open(
        request_for("first", prompt),
        capacity_tokens=32,
        keep=KeepPolicy(block_tokens=KEPT_BLOCK_TOKENS),
    )
    drawn = run(engine, shelf, chunks("first", 0, 20, []) + decoding("first", 20, 5))
    rest = engine.keep_rest("first")
    assert rest is not None
    shelf.put([rest])
    engine.close("first")
    fed = 25  # the last drawn token has not been read
    turn = (*prompt, *(entry.token_id for entry in drawn), 7, 8, 9)
    engine.open(request_for("fresh", turn), capacity_tokens=64)
    expected = run(
        engine, Shelf(), chunks("fresh", 0, len(turn), [fed]) + decoding("fresh", len(turn), 3)
    )
    assert (
        engine.open(
            request_for("second", turn), capacity_tokens=64, prefix=shelf.prefix(fed)
        ).tokens
        == fed
    )
    got = run(
        engine, Shelf(), chunks("second", fed, len(turn), []) + decoding("second", len(turn), 3)
    )
    assert [entry.token_id for entry in got] == [entry.token_id for entry in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("name", each_of(KEEPABLE))
def test_kinds_with_windows_or_states_are_known(name: str) -> None:
    leaves = [leaf for layer in probed(name).fresh_layers() for leaf in layer.leaves()]
    assert all(leaf.grows for leaf in leaves) == (name in CUT_ANYWHERE)


@pytest.mark.parametrize("name", each_of(CUT_ANYWHERE))
def test_full_attention_can_be_cut_at_any_token(name: str) -> None:
    rng = random.Random(f"{name} cut")
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(30))
    shelf = Shelf()
    engine.open(
        request_for("whole", prompt),
        capacity_tokens=40,
        keep=KeepPolicy(block_tokens=KEPT_BLOCK_TOKENS, boundaries=frozenset({30})),
    )
    run(engine, shelf, chunks("whole", 0, 30, []))
    for shared in (1, 7, 8, 9, 23, 29):
        other = (*prompt[:shared], *(rng.randrange(VOCAB_SIZE) for _ in range(9)))
        names = f"fresh {shared}", f"cached {shared}"
        engine.open(request_for(names[0], other), capacity_tokens=48)
        fresh = run(
            engine, Shelf(), chunks(names[0], 0, len(other), []) + decoding(names[0], len(other), 3)
        )
        assert (
            engine.open(
                request_for(names[1], other), capacity_tokens=48, prefix=shelf.prefix(shared)
            ).tokens
            == shared
        )
        cached = run(
            engine,
            Shelf(),
            chunks(names[1], shared, len(other), []) + decoding(names[1], len(other), 3),
        )
        assert [entry.token_id for entry in cached] == [entry.token_id for entry in fresh]
        for one, other_one in zip(cached, fresh, strict=True):
            assert one.logprob == pytest.approx(other_one.logprob, abs=1e-4)


@pytest.mark.parametrize("name", each_of(TINY))
def test_only_the_solo_layout_cannot_be_kept(name: str) -> None:
    assert LiveState(probed(name).fresh_layers()).is_foreign == (name not in KEEPABLE)
