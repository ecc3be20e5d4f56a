"""The runners: their rows of logits, in order, and the models they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from holdfast.worker.cpu.backend import CpuBackend
from holdfast.worker.engine.layouts import (
    LayoutError,
    RowsRunner,
    Runner,
    SoloRunner,
    SplitRunner,
    choose_sharing,
)
from holdfast.worker.engine.mlx_lm_hooks import ProjectionHook, StepLogits
from holdfast.worker.engine.sequence import EngineSequence, SequenceSpan
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.kinds import ForeignState
from holdfast.worker.kv.live import LiveState
from holdfast.worker.kv.window import WINDOW_SLACK_TOKENS, WindowKV
from tests.fakes.caching_worker import greedy
from tests.fakes.interleaving import span
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_tiny

TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


def runner_of(layout: str, model: Any, head: ProjectionHook | None = None) -> Runner:
    made: dict[str, Callable[[], Runner]] = {
        "rows": lambda: RowsRunner(model, head),
        "split": lambda: SplitRunner(model, head, gather_mask_dimensions=None),
        "solo": lambda: SoloRunner(model, head),
    }
    return made[layout]()


def a_sequence(runner: Runner, request_id: str, *, scores_prompt: bool = False) -> EngineSequence:
    request = greedy(request_id, TOKENS, want_prompt_logprobs=scores_prompt)
    live = LiveState(runner.fresh_layers())
    return EngineSequence.begin(request, live=live, vocab_size=VOCAB_SIZE)


def a_span(
    sequence: EngineSequence, start: int, tokens: int, *, samples: bool = True
) -> SequenceSpan:
    return SequenceSpan(
        sequence, span(start, tokens, name=sequence.request.request_id, samples=samples)
    )


def forward(runner: Runner, *spans: SequenceSpan) -> StepLogits:
    return runner.forward(spans, StepContext())


def logits_at(model: Any, positions: list[int], tokens: tuple[int, ...] = TOKENS) -> mx.array:
    expected: mx.array = model(mx.array([tokens]))[0, mx.array(positions)]
    return expected


def assert_close(got: mx.array | None, expected: mx.array) -> None:
    assert got is not None
    assert got.shape == expected.shape
    assert float(mx.abs(got - expected).max()) < 1e-3


@pytest.mark.parametrize(
    ("with_head", "can_project_later"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("layout", ["rows", "split", "solo"])
def test_each_span_gets_its_wanted_rows_in_plan_order(
    layout: str, with_head: bool, can_project_later: bool
) -> None:
    model = make_tiny("llama")
    head = ProjectionHook(model) if with_head else None
    if head is not None:
        head.can_project_later = can_project_later
    runner = runner_of(layout, model, head)
    silent, scoring, drawing, decoding = (
        a_sequence(runner, name, scores_prompt=name == "b") for name in "abcd"
    )
    forward(runner, a_span(decoding, 0, 8))
    decoding.sampled, decoding.sampled_row = mx.array([0, 77]), 1
    got = runner.forward(
        [
            a_span(silent, 0, 3, samples=False),
            a_span(scoring, 0, 4, samples=False),
            a_span(decoding, 8, 1),
            a_span(drawing, 0, 8),
        ],
        StepContext(),
    )
    assert_close(
        got.to_sample, mx.concatenate([logits_at(model, [8], (*TOKENS, 77)), logits_at(model, [7])])
    )
    assert list(got.scored) == ["b"]
    assert got.scored["b"].source.shape[0] == 4
    assert_close(got.scored["b"].of(0, 4), logits_at(model, [0, 1, 2, 3]))
    assert_close(got.scored["b"].of(1, 3), logits_at(model, [1, 2]))


@pytest.mark.parametrize("layout", ["rows", "split", "solo"])
def test_a_step_without_wanted_logits_still_advances(layout: str) -> None:
    model = kept_tiny("llama")
    runner = runner_of(layout, model)
    sequence = a_sequence(runner, "a")
    assert forward(runner, a_span(sequence, 0, 5, samples=False)) == StepLogits()
    assert_close(
        forward(runner, a_span(sequence, 5, 3)).to_sample,
        logits_at(model, [7]),
    )


def test_a_decoding_span_without_a_draw_does_not_shift_others() -> None:
    model = kept_tiny("llama")
    runner = runner_of("split", model)
    quiet, loud, late = (a_sequence(runner, name) for name in "abc")
    for sequence in (quiet, loud):
        forward(runner, a_span(sequence, 0, 8))
    quiet.sampled, loud.sampled = mx.array([70]), mx.array([71])
    got = runner.forward(
        [
            a_span(quiet, 8, 1, samples=False),
            a_span(loud, 8, 1),
            a_span(late, 0, 8),
        ],
        StepContext(),
    )
    assert_close(
        got.to_sample, mx.concatenate([logits_at(model, [8], (*TOKENS, 71)), logits_at(model, [7])])
    )


def test_a_window_stretched_by_a_chunk_shrinks_after_the_step() -> None:
    model = kept_tiny("gemma3_text")
    runner = runner_of("rows", model)
    sequence = a_sequence(runner, "a")
    sequence.known_token_ids = mx.array([index % VOCAB_SIZE for index in range(900)])
    forward(runner, a_span(sequence, 0, 800, samples=False))
    mx.eval(list(sequence.live.arrays()))
    windows = [layer for layer in sequence.live.layers if isinstance(layer, WindowKV)]
    assert windows
    for layer in windows:
        assert layer.window is not None
        assert {array.shape[2] for array in layer.arrays()} == {layer.window + WINDOW_SLACK_TOKENS}
    got = forward(runner, a_span(sequence, 800, 100))
    assert_close(
        got.to_sample, logits_at(model, [899], tuple(index % VOCAB_SIZE for index in range(900)))
    )


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1"])
def test_recurrent_layers_are_refused_as_rows(name: str) -> None:
    runner = runner_of("rows", kept_tiny(name))
    with pytest.raises(LayoutError, match="recurrent layers cannot be read as rows"):
        forward(runner, a_span(a_sequence(runner, "a"), 0, 8))


@pytest.mark.parametrize("layout", ["rows", "split"])
def test_a_kind_known_only_to_mlx_lm_is_refused(layout: str) -> None:
    with pytest.raises(LayoutError, match="only mlx-lm knows"):
        runner_of(layout, kept_tiny("deepseek_v41")).fresh_layers()


def test_solo_keeps_mlx_lms_own_objects() -> None:
    layers = runner_of("solo", kept_tiny("deepseek_v41")).fresh_layers()
    assert all(isinstance(layer, ForeignState) for layer in layers)


def test_experts_give_the_same_for_many_rows_as_for_one() -> None:
    """mlx-lm sorts routed rows by expert if there are 64 or more."""
    model = kept_tiny("qwen3_moe")
    runner = runner_of("rows", model)
    sequences = [a_sequence(runner, str(index), scores_prompt=True) for index in range(9)]
    got = runner.forward([a_span(sequence, 0, 8) for sequence in sequences], StepContext())
    assert_close(got.to_sample, mx.concatenate([logits_at(model, [7])] * 9))
    assert_close(
        mx.concatenate([each.of(0, 7) for each in got.scored.values()]),
        mx.concatenate([logits_at(model, list(range(7)))] * 9),
    )


@pytest.mark.parametrize("host_scores", [0, 1 << 40])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", "rows"), ("gemma3_text", "rows"), ("gpt_oss", "rows"), ("qwen3_next", "split")],
)
def test_parts_frozen_between_spans_are_attended_to_as_one(
    name: str, layout: str, host_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and with another sequence; each layer ends in several parts, as if others held the
    earlier ones.
    """
    monkeypatch.setattr(FullKV, "_merge", lambda self: None)
    model = kept_tiny(name)
    runner = runner_of(layout, model)
    tokens = tuple(index * 7 % VOCAB_SIZE for index in range(40))
    sequences = [a_sequence(runner, request_id) for request_id in "ab"]
    holders: list[FullKV] = []
    start = 0
    for count in (9, 1, 14, 3, 1, 1):
        for each in sequences:
            each.known_token_ids = mx.array(tokens)
            each.sampled = mx.array([tokens[start]])
        spans = [a_span(each, start, count) for each in sequences[: 1 + start % 2]]
        got = runner.forward(
            spans, StepContext(backend=CpuBackend(host_scores=host_scores))
        ).to_sample
        assert_close(
            got, mx.concatenate([logits_at(model, [start + count - 1], tokens)] * len(spans))
        )
        if len(spans) == 1:
            forward(runner, a_span(sequences[1], start, count))
        start += count
        for leaf in (leaf for each in sequences for leaf in each.live.leaves):
            leaf.freeze()
            holders += [leaf.fork(leaf.frozen_tokens)] if isinstance(leaf, FullKV) else []
    assert any(
        isinstance(leaf, FullKV) and len(leaf.parts(leaf.tokens)) == 6
        for leaf in sequences[0].live.leaves
    )


# -- whether common prefixes are held once


def chosen(runner: Runner, *, composes_attention: bool = True) -> Runner:
    choose_sharing(runner, composes_attention=composes_attention)
    return runner


def can_share(runner: Runner) -> set[bool]:
    return {
        leaf.can_share for layer in runner.fresh_layers() for leaf in layer.leaves() if leaf.grows
    }


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_with_composed_attention_prefixes_are_held_once(name: str) -> None:
    runner = chosen(RowsRunner(kept_tiny(name), None))
    assert runner.shares
    assert can_share(runner) == {True}
    assert runner.reason.endswith(
        "common prefixes are held once: attention takes several buffers as they are"
    )


def test_with_a_fused_kernel_only_parked_sequences_share() -> None:
    runner = chosen(RowsRunner(kept_tiny("llama"), None), composes_attention=False)
    assert not runner.shares
    assert can_share(runner) == {False}
    assert runner.reason.endswith(
        "held once while parked, and copied for each running sequence: "
        "fused attention takes one buffer"
    )


def test_gathered_copies_are_made_from_one_buffer() -> None:
    runner = chosen(SplitRunner(kept_tiny("llama"), None, gather_mask_dimensions=4))
    assert can_share(runner) == {False}
    assert runner.reason.endswith(
        "running sequence: mlx-lm's attention, which is not replaced, takes one buffer"
    )


def test_models_without_anything_to_share_give_no_reason() -> None:
    for runner in (
        SplitRunner(kept_tiny("mamba2"), None, gather_mask_dimensions=None),
        SoloRunner(kept_tiny("deepseek_v41"), None),
    ):
        assert chosen(runner).reason == ""
