"""Predictions with quantized keys and values, compared with native ones."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from holdfast.models.quality import Passage
from holdfast.worker.engine import quality
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.engine.quality import Quality, measure
from holdfast.worker.kv.live import ModelForm
from tests.fakes.reference_sampler import log_probabilities
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

TOKENS = tuple(int(token) for token in np.random.default_rng(3).integers(0, 200, 700))


@cache
def tiny(head_dim: int) -> tuple[Runner, ModelForm | None]:
    runner = choose_layout(make_tiny("qwen3", head_dim=head_dim), vocab_size=VOCAB_SIZE)
    return runner, Engine(runner, vocab_size=VOCAB_SIZE).measure_costs().form


def measured(
    *passages: Passage, forms: tuple[str, ...] = ("8", "4"), head_dim: int = 64
) -> Quality:
    return measure(
        *tiny(head_dim), forms, passages, vocab_size=VOCAB_SIZE, progress=lambda fraction: None
    )


TEXT = Passage(token_ids=TOKENS, is_text=True, answers=())


@cache
def of_the_text() -> Quality:
    return measured(TEXT)


def test_fewer_bits_cost_more_and_native_costs_nothing() -> None:
    found = of_the_text()
    native, eight, four = found.forms
    assert [each.form for each in found.forms] == ["native", "8", "4"]
    assert (native.kl_divergence, native.agreement) == (0.0, 1.0)
    assert native.perplexity is not None
    assert native.perplexity > 1
    assert 0 < (eight.kl_divergence or 0) < (four.kl_divergence or 0) < 0.1
    assert (eight.agreement or 0) > 0.95
    sizes = [each.bytes_per_token or 0 for each in found.forms]
    assert sizes == sorted(sizes, reverse=True)


def test_only_tokens_after_the_first_block_count() -> None:
    found = of_the_text()
    assert found.text_tokens == len(TOKENS) - 1 - 256
    # 256 tokens have one quantized block before them, and 187 have two
    assert found.quantized_tokens == round((256 * 256 + 187 * 512) / 443)


def test_chunks_do_not_change_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of_the_text()
    monkeypatch.setattr(quality, "CHUNK_TOKENS", 100)
    for one, other in zip(whole.forms, measured(TEXT).forms, strict=True):
        assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)
        assert one.kl_divergence == pytest.approx(other.kl_divergence, rel=0.05, abs=1e-9)


def test_an_answer_is_right_if_every_token_is_the_likeliest() -> None:
    tokens = list(TOKENS[:400])
    for _ in range(3):
        logits = tiny(64)[0].model(mx.array([tokens]))[0, -1]
        tokens.append(int(logits.argmax().item()))
    other = (tokens[401] + 1) % VOCAB_SIZE
    right = Passage(token_ids=tuple(tokens), is_text=True, answers=((400, 403), (401, 402)))
    wrong = Passage(
        token_ids=(*tokens[:401], other, tokens[402]),
        is_text=False,
        answers=((400, 403), (400, 401)),
    )
    assert measured(right, wrong, forms=()).forms[0].right == 3


def test_a_passage_that_is_not_text_counts_only_for_answers() -> None:
    page = Passage(token_ids=tuple(reversed(TOKENS)), is_text=False, answers=((300, 302),))
    both = measured(TEXT, page)
    alone = of_the_text()
    assert both.text_tokens == alone.text_tokens
    assert both.forms[1].kl_divergence == alone.forms[1].kl_divergence


def test_an_unusable_form_is_refused_with_the_reason() -> None:
    native, eight = measured(TEXT, forms=("8",), head_dim=16).forms
    assert native.perplexity is not None
    assert (eight.perplexity, eight.right) == (None, None)
    assert (eight.refused or "").startswith("its heads have 16 dimensions")


def test_the_divergence_is_the_sum_over_the_vocabulary() -> None:
    logits = mx.random.normal((2, 5, 300), key=mx.random.key(1)) * 3
    near = logits[0] + mx.random.normal((5, 300), key=mx.random.key(2)) * 1e-3
    for other in (near, logits[1]):
        p, q = (
            np.stack([log_probabilities(row) for row in np.array(each, dtype=np.float64)])
            for each in (logits[0], other)
        )
        expected = (np.exp(p) * (p - q)).sum(axis=1)
        found = quality._divergence(*map(quality._log_probabilities, (logits[0], other)))
        assert np.array(found) == pytest.approx(expected, rel=1e-3)


def test_impossible_tokens_do_not_affect_the_divergence() -> None:
    logits = mx.array([[1.0, 2.0, -float("inf"), -200.0]])
    found = quality._divergence(*[quality._log_probabilities(logits)] * 2)
    assert found.tolist() == [0.0]
