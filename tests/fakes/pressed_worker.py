"""A worker whose sequences are quantized while they run, on tiny models with wide heads, and the
answer of each sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.plan import BLOCK_TOKENS, Span, StepPlan
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.live import StateBytes
from tests.fakes.caching_worker import SMALL_BLOCK, CachingWorker, greedy, random_prompt
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny


@cache
def wide(name: str) -> Runner:
    """A probed tiny model with heads that can be quantized."""
    return choose_layout(make_tiny(name, head_dim=64), vocab_size=VOCAB_SIZE)


@cache
def wide_in_small_blocks(name: str) -> Runner:
    """As `wide`, but with quantized blocks of `SMALL_BLOCK` tokens."""
    runner = copy(wide(name))
    fresh_layers = partial(type(runner).fresh_layers, runner, block_tokens=SMALL_BLOCK)
    runner.fresh_layers = fresh_layers  # type: ignore[method-assign]
    return runner


class RecordingEngine(Engine):
    """Records each sequence's number of tokens when it was quantized."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.quantized_at: dict[str, int] = {}

    def quantize(self, request_id: str) -> StateBytes:
        self.quantized_at[request_id] = self._sequences[request_id].live.tokens
        sizes = super().quantize(request_id)
        assert sizes.after < sizes.before
        return sizes


def worker(name: str, folder: Path | None = None, **more: Any) -> CachingWorker:
    return CachingWorker(
        wide(name),
        folder,
        has_measured_costs=True,
        **{"kv_bits": "auto", "engine": RecordingEngine, **more},
    )


def prompt_of(seed: str, tokens: int) -> tuple[int, ...]:
    return random_prompt(tokens, seed)


@cache
def _kept_engine(name: str) -> Engine:
    """An engine with the forms."""
    return worker(name).engine


def alone(
    name: str, prompt: Sequence[int], *, max_tokens: int, quantized_at: int | None = None
) -> list[int]:
    """A sequence's answer alone, quantized when it has this many tokens."""
    return answer_of(_kept_engine(name), prompt, max_tokens=max_tokens, quantized_at=quantized_at)


def answer_of(
    engine: Engine,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    kv_bits: KVBits = "native",
    quantized_at: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> list[int]:
    """Like `alone`, on an engine without other sequences."""
    capacity = len(prompt) + max_tokens
    request = greedy("alone", prompt, max_tokens=max_tokens)
    engine.open(request, capacity_tokens=capacity, form=kv_bits)
    answer: list[int] = []
    at = 0
    is_cut = kv_bits != "native" and engine.ends_spans_at_blocks
    while len(answer) < max_tokens:
        if at == quantized_at:
            Engine.quantize(engine, "alone")
            is_cut = engine.ends_spans_at_blocks
        end = len(prompt) if at < len(prompt) else at + 1
        if quantized_at is not None and at < quantized_at < end:
            end = quantized_at
        if is_cut:
            end = min(end, at - at % block_tokens + block_tokens)
        samples = end >= len(prompt)
        span = Span(request_id="alone", start=at, tokens=end - at, samples=samples)
        (result,) = engine.collect(engine.dispatch(StepPlan(spans=(span,))))
        answer += result.token_ids
        at = end
    engine.close("alone")
    return answer


def lengths(made: CachingWorker) -> dict[str, int]:
    """The number of tokens in each open sequence's state."""
    return {name: each.live.tokens for name, each in made.engine._sequences.items()}


def quantized_in(made: CachingWorker) -> dict[str, int]:
    assert isinstance(made.engine, RecordingEngine)
    return made.engine.quantized_at
