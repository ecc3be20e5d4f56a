"""The backend for CPUs against MLX itself, which is the way of a GPU."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import pytest

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.cpu import host_decoder
from holdfast.worker.cpu.backend import CpuBackend
from holdfast.worker.engine import backend
from holdfast.worker.engine.backend import Backend, in_use
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.probe import choose_layout, probe_kv_forms
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.loop.device import use_device
from tests.fakes.interleaving import span, step
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

PROMPT = tuple(index * 7 % 90 + 2 for index in range(300))  # longer than a block
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3)


@cache
def engine_of(kind: type[Backend]) -> Engine:
    """Of a tiny model prepared by this backend, which is in use."""
    model = make_tiny("llama", head_dim=64)
    in_use().prepare(model, mx.float32)
    runner = choose_layout(model, vocab_size=VOCAB_SIZE)
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    probe_kv_forms(engine, runner, vocab_size=VOCAB_SIZE)
    return engine


def tokens_by(
    kind: type[Backend],
    monkeypatch: pytest.MonkeyPatch,
    *,
    kv_bits: KVBits,
    sampling: SamplingParams,
) -> list[int]:
    """What a sequence generates after a prompt in two chunks."""
    monkeypatch.setattr(backend, "_in_use", kind())
    engine = engine_of(kind)
    request = SequenceRequest(
        request_id="a", prompt_token_ids=TokenIds.of(PROMPT), max_tokens=30, sampling=sampling
    )
    engine.open(request, capacity_tokens=400, form=kv_bits)
    spans = [(0, 200), (200, 100), *((300 + at, 1) for at in range(20))]
    found: list[int] = []
    for start, tokens in spans:
        (result,) = step(engine, span(start, tokens, samples=start > 0))
        found.extend(result.token_ids)
    engine.close("a")
    return found


@pytest.mark.parametrize("kv_bits", ["native", "8", "4"])
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0, seed=0), SAMPLED])
def test_it_gives_the_same_tokens_as_mlx(
    kv_bits: KVBits, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    got, expected = (
        tokens_by(kind, monkeypatch, kv_bits=kv_bits, sampling=sampling)
        for kind in (CpuBackend, Backend)
    )
    assert got == expected
    assert len(got) == 21


def test_mlx_itself_runs_no_step_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_in_use", Backend())
    model = make_tiny("llama")
    in_use().prepare(model, mx.float32)
    assert host_decoder.decoder_of(model) is None
    assert in_use().whole_steps(model) is None
    runner = choose_layout(model, vocab_size=VOCAB_SIZE)
    assert not runner.backend.composes_attention
    assert runner.name == "rows"


def test_a_worker_on_a_cpu_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_in_use", Backend())
    before = mx.default_device()
    try:
        use_device("cpu")
    finally:
        mx.set_default_device(before)
    assert isinstance(in_use(), CpuBackend)
