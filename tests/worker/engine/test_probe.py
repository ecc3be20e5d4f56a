"""The probe chooses the fastest correct layout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from holdfast.errors import ModelLoadError
from holdfast.worker.cpu import host_attention
from holdfast.worker.engine import probe, views
from holdfast.worker.engine.backend import AttentionSpan
from holdfast.worker.engine.layouts import Runner, SoloRunner
from holdfast.worker.engine.probe import choose_layout, warnings_about
from holdfast.worker.engine.views import RowsView, StepContext
from holdfast.worker.kv.layer import joined
from tests.fakes.architectures import probed
from tests.fakes.every_config import tiny_config
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_model, make_tiny


def chosen(model: nn.Module, wanted: str = "auto") -> Runner:
    return choose_layout(model, vocab_size=VOCAB_SIZE, wanted=wanted)


def refusal(model: nn.Module, wanted: str = "auto") -> str:
    with pytest.raises(ModelLoadError) as caught:
        chosen(model, wanted)
    return str(caught.value)


def calling(model: nn.Module, call: Callable[..., mx.array]) -> nn.Module:
    """The model with another `__call__`: call(plain call, model, ids, cache)."""
    plain = type(model)

    def forward(self: nn.Module, ids: mx.array, cache: Any = None) -> mx.array:
        return call(lambda: plain.__call__(self, ids, cache=cache), self, ids, cache)

    model.__class__ = type(plain.__name__, (plain,), {"__call__": forward})
    return model


def in_batches(model: nn.Module, change: Callable[[nn.Module, bool], None]) -> nn.Module:
    """A model that becomes another one with more than one row."""

    def call(plain: Callable[[], mx.array], self: nn.Module, ids: mx.array, _: Any) -> mx.array:
        change(self, ids.shape[0] > 1)
        return plain()

    return calling(model, call)


def test_a_correct_layout_is_chosen_and_named() -> None:
    result = chosen(kept_tiny("llama"))
    assert result.name == "rows"
    assert result.reason.startswith("rows: relative error")
    assert ";" not in result.reason, "no other one is tried"


@pytest.mark.parametrize("wanted", ["split", "solo"])
def test_a_requested_layout_precedes_a_faster_one(wanted: str) -> None:
    result = chosen(kept_tiny("llama"), wanted=wanted)
    assert result.name == wanted
    assert "rows is right too" in result.reason
    assert "fails" not in result.reason.split(";")[0]


def test_a_requested_layout_that_is_wrong_is_an_error() -> None:
    said = refusal(kept_tiny("mamba2"), wanted="rows")
    assert "no layout 'rows' runs this model correctly: rows fails" in said


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [
        ("llama", "rows", mx.bfloat16),
        ("gemma3_text", "rows", mx.float16),
        ("falcon_h1", "split", mx.bfloat16),
        ("lfm2", "split", mx.float16),
        *slow(
            ("llama", "rows", mx.float16),
            ("gemma3_text", "rows", mx.bfloat16),
            ("falcon_h1", "split", mx.float16),
            ("lfm2", "split", mx.bfloat16),
        ),
    ],
)
def test_half_precision_does_not_disqualify_a_layout(
    name: str, layout: str, dtype: mx.Dtype
) -> None:
    model = make_tiny(name)
    model.set_dtype(dtype)
    result = chosen(model)
    assert result.name == layout, result.reason
    assert "attention replaced" in result.reason.rsplit(";", 1)[-1] or layout == "rows"


def without_sinks(model: Any, is_wrong: bool) -> None:
    for layer in model.model.layers:
        layer.self_attn.sinks = (
            mx.full(layer.self_attn.sinks.shape, -math.inf) if is_wrong else mx.zeros((4,))
        )


def narrow_window(model: Any, is_wrong: bool) -> None:
    model.model.window_size = 8 - is_wrong


def other_rope(model: Any, is_wrong: bool) -> None:
    for layer in model.model.layers:
        layer.self_attn.rope.scale = 0.9 if is_wrong else 1.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("name", "change"),
    [("gpt_oss", without_sinks), ("gemma3_text", narrow_window), ("llama", other_rope)],
)
def test_faults_that_occur_only_in_batches_are_detected(
    name: str, change: Callable[[Any, bool], None], dtype: mx.Dtype
) -> None:
    model = in_batches(make_tiny(name), change)
    if name != "gpt_oss":  # experts can only be computed in fp32 on a CPU
        model.set_dtype(dtype)
    result = chosen(model)
    assert result.name == "solo", result.reason
    assert "is right too" not in result.reason


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v2": {},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
}


def mixture_in_bf16(name: str, *, seed: int = 0, **more: Any) -> nn.Module:
    """A mixture of experts in bf16; its experts have 8 bits, since a CPU multiplies others only in
    fp32.
    """
    changes = MIXTURES[name]
    model = make_tiny("llama" if changes else name, seed, **changes, **more)

    def is_expert(_: str, part: nn.Module) -> bool:
        return type(part).__name__ == "SwitchLinear"

    nn.quantize(model, group_size=32, bits=8, class_predicate=is_expert)
    model.set_dtype(mx.bfloat16)
    return model


def with_other_kernels_for_rows(model: nn.Module) -> nn.Module:
    """As on a GPU: with several rows, every product adds in another order and rounds in between."""
    batched = [False]

    def other_order(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def product(part: nn.Module, x: mx.array) -> mx.array:
            if not batched[0]:
                return plain(part, x)
            is_first_half = mx.arange(x.shape[-1]) < x.shape[-1] // 2
            nothing = mx.zeros((), x.dtype)
            halves = plain(part, mx.where(is_first_half, x, nothing)) + plain(
                part, mx.where(is_first_half, nothing, x)
            )
            return halves - part.bias if "bias" in part else halves

        return product

    for _, part in model.named_modules():
        if type(part) is nn.Linear:
            part.__class__ = type(
                "Linear", (nn.Linear,), {"__call__": other_order(nn.Linear.__call__)}
            )

    def call(plain: Callable[[], mx.array], self: nn.Module, ids: mx.array, _: Any) -> mx.array:
        batched[0] = ids.shape[0] > 1
        return plain()

    return calling(model, call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [("qwen3_moe", 0), ("qwen3_moe", 1), *((name, 0) for name in sorted(MIXTURES)[:-1])],
)
def test_rounding_that_changes_an_expert_does_not_disqualify_a_layout(name: str, seed: int) -> None:
    result = chosen(with_other_kernels_for_rows(mixture_in_bf16(name, seed=seed)))
    assert result.name == "rows", result.reason


def test_the_reason_has_the_figures_of_several_prompts() -> None:
    model = in_batches(mixture_in_bf16("qwen3_moe", num_hidden_layers=1), other_rope)
    result = chosen(model)
    assert re.search(
        r"rows fails \(relative error \d\.\de[-+]\d\d, divergence \d\.\d\d \(median of 5 prompts",
        result.reason,
    )
    assert re.search(r"allowed 0\.1\d\), the most probable token agrees in \d+%", result.reason)


def next_ones_kv(view: RowsView) -> None:
    view._layers = [*view._layers[1:], view._layers[0]]


def one_position_too_far(view: RowsView) -> None:
    if len(view._tokens) > 2:  # the last sequence alone
        view.offset = view.offset + (
            mx.arange(view.offset.size) >= view.offset.size - view._tokens[-1]
        )


def without_mask(
    span: AttentionSpan, scale: float, sinks: mx.array | None, context: StepContext
) -> mx.array:
    keys, values = joined(span.parts)
    return mx.fast.scaled_dot_product_attention(
        span.queries, keys, values, scale=scale, sinks=sinks
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("fault", ["mask", "kv", "position"])
def test_faults_are_found_despite_changing_experts(
    fault: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixture_in_bf16("qwen3_moe") if dtype == mx.bfloat16 else make_tiny("qwen3_moe")
    plain_update, plain_init = RowsView.update_and_fetch, RowsView.__init__

    def update(view: RowsView, keys: mx.array, values: mx.array) -> tuple[RowsView, RowsView]:
        plain_update(view, keys, values)
        next_ones_kv(view)
        return view, view

    def begin(view: RowsView, *args: Any, **more: Any) -> None:
        plain_init(view, *args, **more)
        one_position_too_far(view)

    if fault == "mask":
        monkeypatch.setattr(views, "_attend_alone", without_mask)
        monkeypatch.setattr(host_attention, "pays", lambda *_, **more: False)
    elif fault == "kv":
        monkeypatch.setattr(RowsView, "update_and_fetch", update)
    else:
        monkeypatch.setattr(RowsView, "__init__", begin)
    result = chosen(with_other_kernels_for_rows(model))
    assert "rows fails" in result.reason, result.reason
    assert result.name != "rows"


class ScalarRope(nn.Module):
    """Positions as one number for all rows, as in older models."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        turned: mx.array = self.rope(x, offset=int(offset))
        return turned


class DeafRope(ScalarRope):
    """Ignores positions before the chunk."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        turned: mx.array = self.rope(x)
        return turned


def with_rope(kind: type[ScalarRope]) -> nn.Module:
    model: Any = make_tiny("llama", num_hidden_layers=1)
    for layer in model.model.layers:
        layer.self_attn.rope = kind(layer.self_attn.rope)
    return model  # type: ignore[no-any-return]


@cache
def runner_of_scalar_rope() -> Runner:
    return chosen(with_rope(ScalarRope))


def test_a_model_with_one_position_for_all_rows_runs_solo() -> None:
    result = runner_of_scalar_rope()
    assert result.name == "solo", result.reason


@pytest.fixture
def fewer_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROMPTS", 2)


def with_nan() -> nn.Module:
    return calling(make_tiny("llama"), lambda plain, *_: plain() * math.nan)


@pytest.mark.parametrize("made", [lambda: with_rope(DeafRope), with_nan], ids=["start", "NaN"])
def test_a_model_that_ignores_a_chunks_start_or_outputs_nan_is_refused(
    made: Callable[[], nn.Module], fewer_prompts: None
) -> None:
    assert "no layout runs this model correctly" in refusal(made())


def test_in_16_bits_solo_is_the_last_resort(fewer_prompts: None) -> None:
    model = with_rope(DeafRope)
    model.set_dtype(mx.bfloat16)
    result = chosen(model)
    assert result.name == "solo"
    assert result.reason.startswith("the last resort")


def test_logits_of_minus_infinity_in_both_are_equal() -> None:
    banned = mx.where(mx.arange(VOCAB_SIZE) == 3, -math.inf, 0.0)
    model = calling(make_tiny("llama"), lambda plain, *_: plain() + banned)
    result = chosen(model)
    assert result.name == "rows", result.reason


def test_the_warning_about_solo_has_costs_reason_and_remedy() -> None:
    mlx_lm_caches = SoloRunner(kept_tiny("llama"), None)
    mlx_lm_caches.reason = "rows fails (as in this test)"
    for runner, memory in (
        (runner_of_scalar_rope(), "cached prefixes are reused"),
        (mlx_lm_caches, "no prefix cache"),
    ):
        (warning,) = warnings_about(runner)
        for part in ("one at a time", memory, "Why: rows fails (", "What to do: "):
            assert part in warning
    assert warnings_about(probed("llama")) == ()


def failing(plain: Callable[[], mx.array], self: nn.Module, ids: mx.array, cache: Any) -> mx.array:
    raise RuntimeError("this machine cannot multiply\nat all")


def asserting(
    plain: Callable[[], mx.array], self: nn.Module, ids: mx.array, cache: Any
) -> mx.array:
    assert ids.shape[0] == 1
    return plain()


def test_a_model_that_mlx_lm_cannot_run_is_refused_in_one_line() -> None:
    said = refusal(calling(make_tiny("llama"), failing))
    assert said.endswith("cannot run this model here: RuntimeError: this machine cannot multiply")


def test_a_model_whose_assertion_a_layout_violates_falls_back() -> None:
    assert chosen(calling(make_tiny("llama"), asserting)).name == "solo"


def test_the_reason_names_every_tried_layout() -> None:
    reason = chosen(kept_tiny("gemma2"), wanted="solo").reason
    parts = re.split("; (?=rows|split|solo)", reason)
    assert [part.split(" fails")[0].split(" is right")[0] for part in parts[:4]] == [
        "rows",
        "split, mlx-lm's attention replaced",
        "split, attention over gathered copies",
        "split, attention over gathered copies with grouped masks",
    ]
    assert [" fails (" in part for part in parts] == [True, True, True, False, False]


@pytest.mark.slow
def test_code_for_long_contexts_is_probed_with_short_ones() -> None:
    """This model selects blocks of keys from 2,048 tokens on; padded copies would then be wrong."""
    config = tiny_config("minimax_m3_vl")
    sizes = {"index_block_size": 128, "index_topk_blocks": 16}
    model: Any = make_model({**config, "text_config": {**config["text_config"], **sizes}})
    result = chosen(model)
    assert "split, attention over gathered copies fails (relative error" in result.reason
    assert result.name == "solo"
    attention = model.layers[1].self_attn
    assert {name: getattr(attention, name) for name in sizes} == sizes, "as it was before"
