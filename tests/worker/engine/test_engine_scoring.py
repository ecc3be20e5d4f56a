"""Log-probabilities of a prompt in chunks: the same numbers as for the whole, in little memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from holdfast.worker.engine.engine import SCORED_PIECE_BYTES, Engine, prompt_logprobs
from holdfast.worker.engine.mlx_lm_hooks import DeferredLogits
from holdfast.worker.engine.plan import SpanResult
from holdfast.worker.engine.probe import choose_layout
from tests.fakes.architectures import probed
from tests.fakes.caching_worker import greedy
from tests.fakes.interleaving import span, step
from tests.fakes.reference_sampler import log_probabilities
from tests.fakes.slow import slow
from tests.fakes.tiny_models import make_tiny

LARGE_VOCAB = 32_000


def some_tokens(*, rows: int, vocab: int) -> tuple[tuple[int, ...], mx.array]:
    logits = mx.random.normal((rows, vocab), key=mx.random.key(4)) * 4
    token_ids = tuple(int(token) for token in np.random.default_rng(4).integers(0, vocab, rows))
    return token_ids, logits


@pytest.mark.parametrize(
    ("vocab", "piece_rows", "top_logprobs"),
    [(50, 1, 4), (50, 3, 0), (50, 20, 4), (9001, 1, 0), (9001, 3, 4), (9001, 7, 4)],
)
def test_chunks_of_any_size_give_the_reference(
    vocab: int, piece_rows: int, top_logprobs: int
) -> None:
    token_ids, logits = some_tokens(rows=7, vocab=vocab)
    piece_bytes = 4 * vocab * piece_rows
    got = prompt_logprobs(
        DeferredLogits(logits),
        token_ids,
        top_logprobs=top_logprobs,
        vocab_size=vocab,
        piece_bytes=piece_bytes,
    )
    assert tuple(entry.token_id for entry in got) == token_ids
    for row, entry in enumerate(got):
        expected = log_probabilities(np.array(logits[row], dtype=np.float64))
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
        assert [token for token, _ in entry.top] == np.argsort(-expected, kind="stable")[
            :top_logprobs
        ].tolist()
        assert [value for _, value in entry.top] == pytest.approx(
            np.sort(expected)[::-1][:top_logprobs].tolist(), abs=1e-5
        )


def test_a_chunks_logits_fit_the_limit_or_are_one_row() -> None:
    asked: list[int] = []
    source = mx.zeros((10, 100))

    def project(rows: mx.array) -> mx.array:
        asked.append(rows.shape[0])
        return rows

    logits = DeferredLogits(source, project)
    prompt_logprobs(logits, (1,) * 10, top_logprobs=0, vocab_size=100, piece_bytes=1200)
    assert asked == [3, 3, 3, 1]
    asked.clear()
    prompt_logprobs(logits, (1,) * 10, top_logprobs=0, vocab_size=100, piece_bytes=1)
    assert asked == [1] * 10


def read(engine: Engine, prompt: tuple[int, ...], **changes: Any) -> SpanResult:
    request = greedy("a", prompt, max_tokens=1, **changes)
    engine.open(request, capacity_tokens=len(prompt) + 1)
    (result,) = step(engine, span(0, len(prompt)))
    engine.close("a")
    return result


def test_scoring_a_long_prompt_needs_the_memory_of_one_chunk() -> None:
    """Measured on a model with 32,000 tokens (2.5 s, mostly products with the head); it used to
    take 144 MB.
    """
    tokens = 600
    whole_bytes = 4 * LARGE_VOCAB * tokens
    assert whole_bytes > 2 * SCORED_PIECE_BYTES
    model: Any = make_tiny("llama", vocab_size=LARGE_VOCAB)
    engine = Engine(choose_layout(model, vocab_size=LARGE_VOCAB), vocab_size=LARGE_VOCAB)
    prompt = tuple(index * 37 % LARGE_VOCAB for index in range(tokens))
    read(engine, prompt)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = read(engine, prompt, want_prompt_logprobs=True, top_logprobs=3)
    assert mx.get_peak_memory() - before < SCORED_PIECE_BYTES * 1.25
    logits = model(mx.array([prompt[:40]]))[0]
    for position in (0, 17, 38):
        expected = log_probabilities(np.array(logits[position], dtype=np.float64))
        entry = result.prompt_logprobs[position]
        assert entry.logprob == pytest.approx(expected[prompt[position + 1]], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-expected)[:3].tolist()
    assert len(result.prompt_logprobs) == tokens - 1


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "qwen3_next", *slow("gemma2", "llama4", "mamba2", "deepseek_v3")],
)
def test_the_probe_detects_that_heads_can_be_applied_later(name: str) -> None:
    assert probed(name)._head.can_project_later  # type: ignore[attr-defined]


def test_an_inconsistent_head_is_scored_from_all_its_logits() -> None:
    model: Any = make_tiny("llama")
    plain = type(model)

    def call(self: Any, ids: mx.array, cache: Any = None) -> mx.array:
        return plain.__call__(self, ids, cache=cache) * (
            1.0 if ids.size > 1 or cache is not None else 2.0
        )

    model.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    runner = choose_layout(model, vocab_size=264)
    assert not runner._head.can_project_later  # type: ignore[attr-defined]
    prompt = (5, 17, 3, 99, 42)
    result = read(Engine(runner, vocab_size=264), prompt, want_prompt_logprobs=True)
    logits = np.array(model(mx.array([prompt]))[0], dtype=np.float64)
    expected = [log_probabilities(logits[at])[prompt[at + 1]] for at in range(4)]
    assert [entry.logprob for entry in result.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
