"""Equality one: in any batch and with any chunks, a sequence generates the same as alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from holdfast.config import ModelSettings
from holdfast.worker.cpu import packed_layers
from holdfast.worker.cpu.kernels import packed_products, products
from holdfast.worker.engine import engine as engine_module
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import SoloRunner
from holdfast.worker.engine.load import load_model
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.engine.views import StepContext
from tests.fakes.architectures import each_of, probed
from tests.fakes.interleaving import (
    SAMPLINGS,
    Played,
    assert_batched_is_alone,
    play,
    random_sequences,
)
from tests.fakes.slow import slow
from tests.fakes.tiny_models import TINY, VOCAB_SIZE, kept_tiny, write_tiny

EXPECTED_LAYOUT = {
    "rows": [
        "llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss",
        "phi3", "cohere2", "deepseek_v2", "olmo2", "minicpm3", "llama4_text", "llama4",
    ],
    "split": [
        "gemma2", "stablelm", "deepseek_v3", "glm4_moe_lite", "kimi_linear",
        "qwen3_next", "qwen3_5", "lfm2", "mamba2", "rwkv7", "nemotron_h", "falcon_h1", "recurrent_gemma",
        "mamba",
    ],
    "solo": ["deepseek_v41"],
}  # fmt: skip


@pytest.mark.parametrize("name", each_of(TINY))
def test_the_probe_finds_the_layout_of_each_architecture(name: str) -> None:
    expected = [layout for layout, names in EXPECTED_LAYOUT.items() if name in names]
    assert [probed(name).name] == expected, probed(name).reason


@pytest.mark.parametrize("name", each_of(TINY))
def test_random_interleavings_draw_the_same_as_alone(name: str) -> None:
    model, rng = kept_tiny(name), random.Random(name)
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    for depth in (0, 1):
        assert_batched_is_alone(engine, model, rng, depth=depth, count=4)


@pytest.mark.parametrize(
    "name", ["llama", "gpt_oss", "deepseek_v3", *slow("gemma3_text", "qwen3_next")]
)
def test_with_gpu_paths_each_sequence_draws_the_same_as_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused attention over one buffer per sequence, and a step laid out before the last one is
    collected.
    """
    monkeypatch.setattr(
        engine_module, "StepContext", partial(StepContext, composes_attention=False)
    )
    monkeypatch.setattr(probed(name), "shares", False)
    model, rng = kept_tiny(name), random.Random(f"{name} as on a GPU")
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    assert_batched_is_alone(engine, model, rng, depth=1, count=8)


@pytest.fixture
def blas_from_13_rows() -> Iterator[None]:
    """Products with stored weights go to BLAS if they have more than 12 rows."""
    products.library().holdfast_set_most_packed_rows(12)
    yield
    products.library().holdfast_set_most_packed_rows(packed_products.MOST_ROWS)


_4_BITS, _8_BITS = ({"group_size": size, "bits": bits} for size, bits in ((64, 4), (32, 8)))


@pytest.mark.skipif(bool(packed_layers.unavailable()), reason=packed_layers.unavailable())
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("llama", _4_BITS),
        ("gemma3_text", None),
        *slow(("llama", _8_BITS), ("qwen3_moe", _4_BITS), ("qwen3_next", _8_BITS)),
    ],
)
@pytest.mark.usefixtures("blas_from_13_rows")
def test_with_packed_weights_each_sequence_draws_the_same_as_alone(
    name: str, quantization: dict[str, int] | None, tmp_path: Path
) -> None:
    """The products of a step are computed by the C kernel or by BLAS, depending on its rows."""
    write_tiny(tmp_path, name, quantization, dtype=mx.bfloat16)
    loaded = load_model(tmp_path, ModelSettings(), progress=lambda *_: None)
    assert loaded.kept_layers
    rng = random.Random(f"{name} packed")
    engine = Engine(choose_layout(loaded.model, vocab_size=VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    assert_batched_is_alone(engine, loaded.model, rng, depth=0)


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "qwen3_next", *slow("mamba2", "llama4", "qwen3_moe", "gemma2")],
)
def test_sampled_tokens_do_not_depend_on_the_batch(name: str) -> None:
    rng = random.Random(f"{name} sampled")
    engine = Engine(probed(name), vocab_size=VOCAB_SIZE)
    together = random_sequences(rng, vocab_size=VOCAB_SIZE, count=6, longest_prompt=20)
    for index, each in enumerate(together):
        each.sampling = SAMPLINGS[index % len(SAMPLINGS)]
    play(engine, together, rng, depth=1)
    for each in together:
        alone = Played(
            prompt=each.prompt,
            wanted_tokens=each.wanted_tokens,
            leaves_after=each.leaves_after,
            joins_at=0,
            sampling=each.sampling,
        )
        play(engine, [alone], rng, depth=0)
        assert each.tokens == alone.tokens


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", *slow("deepseek_v3")])
def test_solo_is_correct_where_a_faster_layout_is_chosen(name: str) -> None:
    model, rng = kept_tiny(name), random.Random(name)
    engine = Engine(SoloRunner(model, None), vocab_size=VOCAB_SIZE)
    assert_batched_is_alone(engine, model, rng, depth=1, count=3, longest_prompt=30)
