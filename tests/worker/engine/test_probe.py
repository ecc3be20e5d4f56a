"""The probe takes the fastest layout that is right, and no other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from holdfast.errors import ModelLoadError
from holdfast.worker.engine.probe import choose_layout, trial_of_each_layout
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_tiny


def calling(model: nn.Module, call: Callable[..., mx.array]) -> nn.Module:
    """The model with another `__call__`: call(plain call, model, ids, cache)."""
    plain = type(model)

    def forward(self: nn.Module, ids: mx.array, cache: Any = None) -> mx.array:
        return call(lambda: plain.__call__(self, ids, cache=cache), self, ids, cache)

    model.__class__ = type(plain.__name__, (plain,), {"__call__": forward})
    return model


def in_batches(model: nn.Module, change: Callable[[nn.Module, bool], None]) -> nn.Module:
    """A model that is another one whenever it sees more than one row."""

    def call(plain: Callable[[], mx.array], self: nn.Module, ids: mx.array, _: Any) -> mx.array:
        change(self, ids.shape[0] > 1)
        return plain()

    return calling(model, call)


def test_a_right_layout_is_taken_and_named() -> None:
    result = choose_layout(kept_tiny("llama"), vocab_size=VOCAB_SIZE)
    assert result.name == "rows"
    assert result.reason.startswith("rows: relative error")
    assert ";" not in result.reason, "no other one is tried"


@pytest.mark.parametrize("wanted", ["split", "solo"])
def test_the_layout_that_is_wanted_is_taken_though_a_faster_one_is_right(wanted: str) -> None:
    result = choose_layout(kept_tiny("llama"), vocab_size=VOCAB_SIZE, wanted=wanted)
    assert result.name == wanted
    assert "rows is right too" in result.reason
    assert "fails" not in result.reason.split(";")[0]


def test_a_wanted_layout_that_is_not_right_is_an_error_with_the_reason() -> None:
    with pytest.raises(ModelLoadError, match="no layout 'rows' runs this model rightly: rows fails"):
        choose_layout(kept_tiny("mamba2"), vocab_size=VOCAB_SIZE, wanted="rows")


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("name", "layout"), [("llama", "rows"), ("gemma3_text", "rows"), ("falcon_h1", "split"), ("lfm2", "split")]
)
def test_half_precision_does_not_cost_a_model_its_layout(name: str, layout: str, dtype: mx.Dtype) -> None:
    model = make_tiny(name)
    model.set_dtype(dtype)
    result = choose_layout(model, vocab_size=VOCAB_SIZE)
    assert result.name == layout, result.reason
    assert "through the seam" in result.reason.rsplit(";", 1)[-1] or layout == "rows"


def without_sinks(model: Any, is_wrong: bool) -> None:
    for layer in model.model.layers:
        layer.self_attn.sinks = mx.full(layer.self_attn.sinks.shape, -math.inf) if is_wrong else mx.zeros((4,))


def narrow_window(model: Any, is_wrong: bool) -> None:
    model.model.window_size = 8 - is_wrong


def other_rope(model: Any, is_wrong: bool) -> None:
    for layer in model.model.layers:
        layer.self_attn.rope.scale = 0.9 if is_wrong else 1.0


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("name", "change"), [("gpt_oss", without_sinks), ("gemma3_text", narrow_window), ("llama", other_rope)])
def test_what_goes_wrong_in_batches_only_is_noticed(name: str, change: Callable[[Any, bool], None], dtype: mx.Dtype) -> None:
    model = in_batches(make_tiny(name), change)
    if name != "gpt_oss":  # experts can only be computed in fp32 on a CPU
        model.set_dtype(dtype)
    result = choose_layout(model, vocab_size=VOCAB_SIZE)
    assert result.name == "solo", result.reason
    assert "is right too" not in result.reason


class ScalarRope(nn.Module):
    """Positions as one number for all rows, as older models take them."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        turned: mx.array = self.rope(x, offset=int(offset))
        return turned


class DeafRope(ScalarRope):
    """No positions beyond the chunk at all."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        turned: mx.array = self.rope(x)
        return turned


def with_rope(kind: type[ScalarRope]) -> nn.Module:
    model: Any = make_tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.rope = kind(layer.self_attn.rope)
    return model  # type: ignore[no-any-return]


def test_a_model_that_takes_one_position_for_all_rows_runs_solo() -> None:
    result = choose_layout(with_rope(ScalarRope), vocab_size=VOCAB_SIZE)
    assert result.name == "solo", result.reason


def test_a_model_that_does_not_know_where_a_chunk_begins_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="no layout runs this model rightly"):
        choose_layout(with_rope(DeafRope), vocab_size=VOCAB_SIZE)


def test_in_16_bits_solo_is_the_last_resort() -> None:
    model = with_rope(DeafRope)
    model.set_dtype(mx.bfloat16)
    result = choose_layout(model, vocab_size=VOCAB_SIZE)
    assert result.name == "solo"
    assert result.reason.startswith("the last resort")


def test_logits_that_are_minus_infinity_in_both_ways_are_equal() -> None:
    banned = mx.where(mx.arange(VOCAB_SIZE) == 3, -math.inf, 0.0)
    model = calling(make_tiny("llama"), lambda plain, *_: plain() + banned)
    result = choose_layout(model, vocab_size=VOCAB_SIZE)
    assert result.name == "rows", result.reason


def test_a_model_whose_output_is_not_a_number_is_refused() -> None:
    model = calling(make_tiny("llama"), lambda plain, *_: plain() * math.nan)
    with pytest.raises(ModelLoadError, match="no layout runs this model rightly"):
        choose_layout(model, vocab_size=VOCAB_SIZE)


def failing(plain: Callable[[], mx.array], self: nn.Module, ids: mx.array, cache: Any) -> mx.array:
    raise RuntimeError("this machine cannot multiply\nat all")


def asserting(plain: Callable[[], mx.array], self: nn.Module, ids: mx.array, cache: Any) -> mx.array:
    assert ids.shape[0] == 1
    return plain()


def test_a_model_that_mlx_lm_cannot_run_is_refused_in_one_line() -> None:
    with pytest.raises(ModelLoadError, match=r"cannot run this model here: RuntimeError: this machine cannot multiply$"):
        choose_layout(calling(make_tiny("llama"), failing), vocab_size=VOCAB_SIZE)


def test_a_model_that_asserts_what_a_layout_breaks_falls_back() -> None:
    assert choose_layout(calling(make_tiny("llama"), asserting), vocab_size=VOCAB_SIZE).name == "solo"


def test_the_table_tries_every_layout() -> None:
    trials = trial_of_each_layout(kept_tiny("gemma2"), vocab_size=VOCAB_SIZE)
    assert [trial.variant.split(",")[0] for trial in trials] == ["rows", "split", "split", "split", "solo"]
    assert [trial.is_right for trial in trials] == [False, False, False, True, True]
