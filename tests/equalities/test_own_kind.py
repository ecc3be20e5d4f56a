"""A kind of layer state defined only in this file works everywhere: it registers itself, and no
other module knows it.

It keeps every token in one growing array, with transposed keys followed by values.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from holdfast.wire.commands import SequenceRequest
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import RowsRunner, Runner, SplitRunner
from holdfast.worker.engine.plan import CopyPolicy
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.kv.codec import PayloadFormat, to_bytes
from holdfast.worker.kv.kinds import KINDS
from holdfast.worker.kv.layer import CheckpointLayout, HeadsForm, LayerKV, keys_and_values
from holdfast.worker.kv.live import Snapshot
from tests.fakes.caching_worker import CachingWorker, greedy, one_after_the_other
from tests.fakes.interleaving import assert_batched_is_alone, begin, span, step
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

LAYOUTS = ["rows", "split"]


class TransposedKV(LayerKV):
    """[1, kv_heads, key dimensions + value dimensions, tokens]: transposed keys, then values."""

    kind = "transposed"
    grows = True

    def __init__(self) -> None:
        super().__init__()
        self._columns: mx.array | None = None
        self._key_dimension = 0

    def append_arrays(self, arrays: Sequence[mx.array]) -> None:
        keys, values = keys_and_values(arrays)
        self._key_dimension = keys.shape[3]
        added = mx.concatenate([keys, values], axis=3).swapaxes(2, 3)
        self._columns = (
            added if self._columns is None else mx.concatenate([self._columns, added], axis=3)
        )
        self.tokens += keys.shape[2]

    def kept_tokens(self) -> int:
        return self.tokens

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        rows = self._rows(self.tokens - count, self.tokens)
        return rows[..., : self._key_dimension], rows[..., self._key_dimension :]

    def can_rewind(self, tokens: int) -> bool:
        return tokens <= self.tokens

    def rewind(self, tokens: int) -> None:
        super().rewind(tokens)
        self._columns = None if self._columns is None else self._columns[..., : self.tokens]

    def form(self) -> tuple[HeadsForm, ...]:
        return tuple(HeadsForm.of_array(each) for each in self.last(1))

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        rows = self._rows(start, end)
        keys, values = rows[..., : self._key_dimension], rows[..., self._key_dimension :]
        return keys * mx.ones((), keys.dtype), values * mx.ones((), values.dtype)

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        self.append(next(arrays), next(arrays))
        assert self.tokens == end

    def arrays(self) -> Iterator[mx.array]:
        if self._columns is not None:
            yield self._columns

    def bytes_per_token(self) -> int:
        return sum(array.nbytes // array.shape[3] for array in self.arrays())

    def _rows(self, start: int, end: int) -> mx.array:
        assert self._columns is not None
        return self._columns[..., start:end].swapaxes(2, 3)


@cache
def model() -> nn.Module:
    """A tiny model that requests the cache class for which the kind is registered; for mlx-lm, it
    is an ordinary one.
    """
    tiny: Any = make_tiny("llama")
    plain = importlib.import_module("mlx_lm.models.cache").KVCache
    ours = type("TransposedKVCache", (plain,), {})
    KINDS[ours.__name__] = lambda cache: TransposedKV()
    tiny.make_cache = lambda: [ours() for _ in tiny.layers]
    return tiny  # type: ignore[no-any-return]


def runner_of(layout: str) -> Runner:
    return (
        RowsRunner(model(), None)
        if layout == "rows"
        else SplitRunner(model(), None, gather_mask_dimensions=4)
    )


def a_prompt(tokens: int, name: str) -> tuple[int, ...]:
    rng = random.Random(name)
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))


def drawn(
    engine: Engine, request: SequenceRequest, *, prefix: Sequence[Snapshot], count: int = 6
) -> list[int]:
    """The answer that is drawn when the sequence starts from `prefix`."""
    prompt = len(request.prompt_token_ids)
    start = engine.open(request, capacity_tokens=prompt + count, snapshots=prefix).tokens
    spans = [(start, prompt - start), *((at, 1) for at in range(prompt, prompt + count - 1))]
    drawn = [step(engine, span(*each, name=request.request_id))[0] for each in spans]
    engine.close(request.request_id)
    return [result.token_ids[0] for result in drawn]


def test_the_probe_chooses_the_fastest_layout_with_this_kind() -> None:
    runner = choose_layout(model(), vocab_size=VOCAB_SIZE)
    assert runner.name == "rows"
    assert {type(layer) for layer in runner.fresh_layers()} == {TransposedKV}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_is_alone(layout: str) -> None:
    rng = random.Random(layout)
    engine = Engine(runner_of(layout), vocab_size=VOCAB_SIZE)
    for depth in (0, 1):
        assert_batched_is_alone(engine, model(), rng, depth=depth)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cached_is_fresh_and_a_restart_loses_nothing(layout: str, tmp_path: Path) -> None:
    """Through the whole worker: prefix cache, bytes on disk, and back."""
    prompt = a_prompt(300, "prompt")
    fork = prompt[:270] + a_prompt(20, "fork")
    fresh = {name: CachingWorker(runner_of(layout)).serve([[greedy("a", tokens)]]).tokens("a")
             for name, tokens in (("prompt", prompt), ("fork", fork))}  # fmt: skip
    script = one_after_the_other(
        greedy("first", prompt), greedy("exact", prompt), greedy("fork", fork)
    )
    inbox = CachingWorker(runner_of(layout), folder=tmp_path).serve(script)
    assert inbox.tokens("first") == inbox.tokens("exact") == fresh["prompt"]
    assert inbox.tokens("fork") == fresh["fork"]
    assert [inbox.finished(name).cached_tokens for name in ("first", "exact", "fork")] == [
        0,
        299,
        270,
    ]
    after = CachingWorker(runner_of(layout), folder=tmp_path)
    inbox = after.serve(one_after_the_other(greedy("exact", prompt), greedy("fork", fork)))
    assert (inbox.tokens("exact"), inbox.tokens("fork")) == (fresh["prompt"], fresh["fork"])
    assert [inbox.finished(name).cached_tokens for name in ("exact", "fork")] == [299, 289]


def test_restored_is_kept_through_bytes() -> None:
    engine = Engine(runner_of("rows"), vocab_size=VOCAB_SIZE)
    request = greedy("a", a_prompt(40, "kept"))
    keep = CopyPolicy(block_tokens=16, boundaries=frozenset({40}))
    engine.open(request, capacity_tokens=48, copy_policy=keep)
    pending = begin(engine, span(0, 40))
    engine.collect(pending)
    (kept,) = engine.take_copies(pending).values()
    engine.close("a")
    assert all(run.tokens for run in kept), "there is no state"
    form = engine.measure_costs().form
    assert form is not None
    payloads = PayloadFormat(model=form)
    blocks = tuple(
        payloads.snapshot(to_bytes(run), start=run.start, tokens=run.tokens, form="native")
        for run in kept
    )
    assert [block.tokens for block in blocks] == [16, 16, 8]
    restored = drawn(engine, request, prefix=(*blocks[:2], blocks[2].cut(7)))
    assert restored == drawn(engine, request, prefix=(*kept[:2], kept[2].cut(7)))
    assert restored == drawn(engine, request, prefix=())


def test_dropped_tokens_leave_no_trace() -> None:
    once, again = TransposedKV(), TransposedKV()
    keys, values = mx.random.normal((1, 2, 9, 4)), mx.random.normal((1, 2, 9, 6))
    again.append(keys, values)
    again.append(keys[:, :, :3] + 1, values[:, :, :3])
    again.rewind(5)
    once.append(keys[:, :, :7], values[:, :, :7])
    for kept, expected in zip(again.last(7), once.last(7), strict=True):
        assert mx.array_equal(kept, expected)
