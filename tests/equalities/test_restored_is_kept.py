"""Equalities two and three: a sequence that starts from snapshots continues bit for bit like the
original.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.wire.events import TokenLogprob
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import CopyPolicy, Span
from holdfast.worker.kv.live import LiveState, Snapshot
from tests.fakes.architectures import KEEPABLE, each_of, probed
from tests.fakes.caching_worker import greedy
from tests.fakes.interleaving import begin, span
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

    def put(self, kept: Iterable[Snapshot]) -> None:
        for each in kept:
            if each.tokens:
                self.runs.append(each)
            else:
                self.states[each.start] = each

    def prefix(self, tokens: int) -> list[Snapshot]:
        """The snapshots from which a sequence with `tokens` common tokens can start."""
        runs, end = [], 0
        for run in self.runs:
            if end < tokens:
                runs.append(run.cut(min(run.tokens, tokens - end)))
                end += run.tokens
        return [*runs, *([self.states[tokens]] if tokens in self.states else ())]


def opened(
    engine: Engine,
    name: str,
    prompt: tuple[int, ...],
    *,
    shelf: Shelf | None = None,
    start: int = 0,
    **more: Any,
) -> None:
    """Open a sequence that starts after its first `start` tokens, from the shelf."""
    request = greedy(name, prompt, max_tokens=64, want_logprobs=True, top_logprobs=3)
    prefix = [] if shelf is None or not start else shelf.prefix(start)
    state = engine.open(request, capacity_tokens=64, snapshots=prefix, **more)
    assert state.tokens == start


def run(engine: Engine, shelf: Shelf, spans: list[Span]) -> list[TokenLogprob]:
    drawn: list[TokenLogprob] = []
    for each in spans:
        pending = begin(engine, each)
        drawn.extend(engine.collect(pending)[0].logprobs)
        shelf.put(engine.take_copies(pending).get(each.request_id, ()))
    return drawn


def assert_close(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [entry.token_id for entry in found] == [entry.token_id for entry in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def chunks(name: str, start: int, end: int, cuts: list[int]) -> list[Span]:
    edges = [start, *sorted(cut for cut in cuts if start < cut < end), end]
    return [span(a, b - a, name=name, samples=b == end) for a, b in itertools.pairwise(edges)]


def decoding(name: str, start: int, count: int) -> list[Span]:
    return [span(start + index, name=name) for index in range(count)]


@pytest.mark.parametrize("name", each_of(KEEPABLE))
def test_a_restored_sequence_draws_the_same_bits(name: str) -> None:
    rng = random.Random(name)
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(45))
    boundary, shelf = 29, Shelf()
    policy = CopyPolicy(block_tokens=KEPT_BLOCK_TOKENS, boundaries=frozenset({boundary}))
    opened(engine, "kept", prompt, copy_policy=policy)
    first = run(engine, shelf, chunks("kept", 0, 45, [10, boundary, 40]) + decoding("kept", 45, 6))
    opened(engine, "restored", prompt, shelf=shelf, start=boundary)
    spans = chunks("restored", boundary, 45, [40]) + decoding("restored", 45, 6)
    assert run(engine, Shelf(), spans) == first


@pytest.mark.parametrize("name", each_of(KEEPABLE))
def test_a_sequence_may_start_from_the_end_of_an_answer(name: str) -> None:
    rng = random.Random(f"{name} end")
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(20))
    shelf = Shelf()
    opened(engine, "first", prompt, copy_policy=CopyPolicy(block_tokens=KEPT_BLOCK_TOKENS))
    drawn = run(engine, shelf, chunks("first", 0, 20, []) + decoding("first", 20, 5))
    rest = engine.copy_remaining("first")
    assert rest is not None
    shelf.put(rest)
    engine.close("first")
    fed = 25  # the last sampled token has not been read
    turn = (*prompt, *(entry.token_id for entry in drawn), 7, 8, 9)
    end = len(turn)
    opened(engine, "fresh", turn)
    expected = run(engine, Shelf(), chunks("fresh", 0, end, [fed]) + decoding("fresh", end, 3))
    opened(engine, "second", turn, shelf=shelf, start=fed)
    assert_close(
        run(engine, Shelf(), chunks("second", fed, end, []) + decoding("second", end, 3)), expected
    )


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
    boundaries = frozenset({30})
    policy = CopyPolicy(block_tokens=KEPT_BLOCK_TOKENS, boundaries=boundaries)
    opened(engine, "whole", prompt, copy_policy=policy)
    run(engine, shelf, chunks("whole", 0, 30, []))
    for shared in (1, 7, 8, 9, 23, 29):
        other = (*prompt[:shared], *(rng.randrange(VOCAB_SIZE) for _ in range(9)))
        end = len(other)
        answers = []
        for start in (0, shared):
            own_name = f"{shared} from {start}"
            opened(engine, own_name, other, shelf=shelf, start=start)
            spans = chunks(own_name, start, end, []) + decoding(own_name, end, 3)
            answers.append(run(engine, Shelf(), spans))
        assert_close(answers[1], answers[0])


@pytest.mark.parametrize("name", each_of(TINY))
def test_only_the_solo_layout_cannot_be_kept(name: str) -> None:
    assert LiveState(probed(name).fresh_layers()).is_foreign == (name not in KEEPABLE)
