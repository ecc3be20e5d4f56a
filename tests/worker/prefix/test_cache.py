"""Blocks on disk with a right checksum that do not fit the model are never used, but dropped and
prefilled again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from holdfast.store.store import BlockStore
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import Span, StepPlan
from holdfast.worker.engine.sequence import copy_everything
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.codec import check_values, to_bytes
from holdfast.worker.kv.layer import ArrayForm, SnapshotMismatch
from holdfast.worker.kv.live import Snapshot
from holdfast.worker.kv.quantized import quantized
from holdfast.worker.prefix import cache
from holdfast.worker.prefix.chain import Cursor, pack_tokens
from holdfast.worker.prefix.lookup import CachedStart
from tests.fakes.architectures import KEEPABLE, each_of, probed
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.poison import Change, rewrite
from tests.fakes.pressed_worker import worker as wide_worker
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE


def worker(name: str, folder: Path | None = None, **more: Any) -> CachingWorker:
    return CachingWorker(probed(name), vocab_size=VOCAB_SIZE, folder=folder, **more)


def prompt(tokens: int) -> tuple[int, ...]:
    rng = random.Random(tokens)
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))


def shorter(parts: Sequence[bytes]) -> tuple[bytes, ...]:
    return (*parts[:-1], parts[-1][:-4])


def longer(parts: Sequence[bytes]) -> tuple[bytes, ...]:
    return (parts[0] * 2, *parts[1:])


def fewer(parts: Sequence[bytes]) -> tuple[bytes, ...]:
    return tuple(parts[1:])


def more(parts: Sequence[bytes]) -> tuple[bytes, ...]:
    return (*parts, parts[0])


CASES: list[Any] = [
    ("llama", "kv", shorter), ("llama", "kv", longer), ("llama", "kv", fewer), ("llama", "kv", more),
    ("gemma3_text", "state", shorter), ("qwen3_next", "state", more), ("falcon_h1", "state", longer),
    *slow(("gemma3_text", "state", fewer), ("qwen3_next", "kv", fewer)),
    *slow(("rwkv7", "state", shorter), ("deepseek_v3", "kv", longer)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "forge"), CASES)
def test_stored_blocks_of_other_shapes_are_dropped(
    name: str, kind: str, forge: Change, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = greedy("a", prompt(40))
    right = worker(name, tmp_path).serve([[asked]]).tokens("a")
    assert rewrite(tmp_path, forge, kind=kind)
    inbox = worker(name, tmp_path).serve([[asked], [greedy("b", prompt(40))]], in_turn=True)
    assert inbox.tokens("a") == inbox.tokens("b") == right
    assert (inbox.finished("a").cached_tokens, inbox.finished("b").cached_tokens) == (0, 39)
    after = worker(name, tmp_path).serve([[asked]])
    assert (after.tokens("a"), after.finished("a").cached_tokens) == (right, 39)
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(("stated", "cached_tokens"), [("8", 0), ("none", 0), (None, 39)])
def test_a_stored_block_that_states_another_form_than_its_chain_has_is_dropped(
    stated: str | None, cached_tokens: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parts have the right sizes. A header of an earlier version that states no form is read."""
    asked = greedy("a", prompt(40))
    right = worker("llama", tmp_path).serve([[asked]]).tokens("a")
    assert rewrite(tmp_path, form=stated)
    inbox = worker("llama", tmp_path).serve([[asked], [greedy("b", prompt(40))]], in_turn=True)
    assert inbox.tokens("a") == inbox.tokens("b") == right
    assert inbox.finished("a").cached_tokens == cached_tokens
    assert inbox.finished("b").cached_tokens == 39
    refusals = [line for line in caplog.messages if f"is in the form {stated!r}" in line]
    assert len(refusals) == (cached_tokens == 0)
    after = worker("llama", tmp_path).serve([[asked]])
    assert (after.tokens("a"), after.finished("a").cached_tokens) == (right, 39)


@pytest.mark.parametrize("kv_bits", ["8", "4"])
def test_headers_state_the_form_of_quantized_blocks(kv_bits: KVBits, tmp_path: Path) -> None:
    wide_worker("llama", tmp_path, kv_bits=kv_bits).serve([[greedy("a", prompt(300))]])
    with BlockStore(tmp_path, fingerprint="a model") as store:
        found = [store.read(entry.block.key).result() for entry in store.entries()]
    stated = {each.block.start + each.block.tokens: each.form for each in found}
    assert stated[256] == kv_bits
    assert {form for end, form in stated.items() if end % 256} == {"native"}


@pytest.mark.parametrize("name", each_of(KEEPABLE))
def test_stored_blocks_have_the_measured_form_at_any_length(
    name: str,
) -> None:
    """Otherwise, it would be refused as another model's."""
    subject = worker(name)
    for tokens in (1, 2, 9, 40):
        request = greedy("a", prompt(tokens))
        subject.engine.open(request, capacity_tokens=tokens + 8)
        spans = [Span(request_id="a", start=0, tokens=tokens, samples=True)]
        spans += [
            Span(request_id="a", start=tokens + step, tokens=1, samples=True) for step in range(3)
        ]
        for span in spans:
            subject.engine.collect(subject.engine.dispatch(StepPlan(spans=(span,))))
            kept = left_by(subject.engine)
            cursor = Cursor(subject.index.root(tenant=f"{tokens} {span.start}"))
            assert subject.cache.store_snapshots(cursor, sequence_of(subject.engine), kept)
        subject.engine.close("a")
    for key in tuple(subject.index.tree):
        start = CachedStart(cursor=Cursor(subject.index.root()), blocks=(key,))
        subject.cache.distrust(start, ())
    assert subject.index.take_forgotten() == set()


def left_by(engine: Engine) -> tuple[Snapshot, ...]:
    sequence = engine._sequences["a"]
    sequence.copied_tokens = 0
    kept = copy_everything(sequence)
    mx.eval([each.outputs for each in kept])
    return kept


def sequence_of(engine: Engine) -> bytes:
    sequence = engine._sequences["a"]
    return pack_tokens([*sequence.request.prompt_token_ids, *range(8)][: sequence.live.tokens])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_non_finite_value_is_detected(dtype: mx.Dtype, value: float) -> None:
    keys = mx.random.normal((1, 2, 9, 16)).astype(dtype)
    values = mx.random.normal((1, 2, 9, 16)).astype(dtype)
    run = Snapshot(start=0, tokens=9, arrays=(keys, values))
    forms = [ArrayForm(str(dtype).removeprefix("mlx.core."), (1, 2, 9, 16))] * 2
    check_values(forms, to_bytes(run))
    assert run.checked().is_finite
    values[0, 1, 3, 5] = value
    with pytest.raises(SnapshotMismatch, match="not finite"):
        check_values(forms, to_bytes(run))
    assert not run.checked().is_finite


def test_quantized_values_that_exceed_the_type_of_their_scales_are_not_stored() -> None:
    """The scales of float32 values are float16, whose largest value is 65504."""
    made = wide_worker("llama", kv_bits="8")
    chain = prompt(512)
    made.engine.open(greedy("a", chain), capacity_tokens=512, form="8")
    for start in (0, 256):
        span = Span(request_id="a", start=start, tokens=256, samples=False)
        made.engine.collect(made.engine.dispatch(StepPlan(spans=(span,))))
    kept = made.engine.copy_remaining("a")
    assert kept is not None
    first = kept[0]
    assert first.is_quantized
    large = quantized(mx.full((1, 2, 256, 64), 1e9) * mx.random.normal((1, 2, 256, 64)), 8)
    beyond = replace(first, arrays=(*large, *first.arrays[3:])).checked()
    packed = pack_tokens(chain)
    cursor = Cursor(made.index.root(form="8"))
    assert made.cache.store_snapshots(cursor, packed, [beyond]) == ()
    assert made.cache.cached_tokens(packed, root=made.index.root(form="8")) == 0
    assert made.cache.store_snapshots(cursor, packed, [first])
    made.engine.close("a")


@pytest.mark.parametrize("known", [200, 400])
def test_a_quantized_block_longer_than_its_chain_is_not_stored(known: int) -> None:
    """No sequence could continue within it."""
    made = wide_worker("llama", kv_bits="8")
    chain = prompt(512)
    made.engine.open(greedy("a", chain), capacity_tokens=512, form="8")
    span = Span(request_id="a", start=0, tokens=512, samples=False)
    made.engine.collect(made.engine.dispatch(StepPlan(spans=(span,))))
    kept = made.engine.copy_remaining("a")
    assert kept is not None
    packed = pack_tokens(chain[:known])
    made.cache.store_snapshots(Cursor(made.index.root(form="8")), packed, kept)
    assert made.cache.cached_tokens(packed, root=made.index.root(form="8")) == known // 256 * 256
    made.engine.close("a")
    inbox = made.serve([[greedy("b", (*chain[:known], 1, 2, 3))]])
    fresh = wide_worker("llama", kv_bits="8").serve([[greedy("b", (*chain[:known], 1, 2, 3))]])
    assert inbox.tokens("b") == fresh.tokens("b")


def test_a_block_that_could_not_be_copied_for_the_store_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [RuntimeError("[malloc] Unable to allocate 4096 bytes.")]

    def copied(payload: Snapshot) -> tuple[Any, ...]:
        if failures:
            raise failures.pop()
        return to_bytes(payload)

    monkeypatch.setattr(cache, "to_bytes", copied)
    worker("llama", tmp_path).serve([[greedy("a", prompt(600))]])
    assert not failures
    inbox = worker("llama", tmp_path).serve([[greedy("b", prompt(600))]])
    assert inbox.finished("b").cached_tokens == 599
