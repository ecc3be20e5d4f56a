"""Steps in C compute the same as mlx-lm's models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from holdfast.config import ModelSettings
from holdfast.worker.cpu import host_decoder
from holdfast.worker.cpu.host_decoder import MOST_TOKENS, HostDecoder
from holdfast.worker.cpu.kernels.build import SWITCH
from holdfast.worker.engine import backend
from holdfast.worker.engine.backend import Backend
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.load import load_model
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.engine.views import RowsView, StepContext
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.window import WindowKV
from tests.fakes.interleaving import FP32_TOLERANCE, assert_batched_is_alone
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny, write_tiny

pytestmark = pytest.mark.skipif(bool(host_decoder.unavailable()), reason=host_decoder.unavailable())
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# models with every optional part of a layer: (name, changes of the configuration)
MODELS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_traditional": True}),
    ("llama", {"rope_scaling": LLAMA3_ROPE}),
    ("qwen2", {}),
    ("qwen3", {}),
]


def attached(name: str, **changes: Any) -> tuple[Any, HostDecoder]:
    """A tiny model, and its decoder in C."""
    model = make_tiny(name, **changes)
    host_decoder.attach(model, mx.float32)
    decoder = host_decoder.decoder_of(model)
    assert decoder is not None
    return model, decoder


def fresh(model: Any) -> list[FullKV]:
    return [FullKV() for _ in model.layers]


def next_positions(states: list[list[FullKV]], tokens: list[int]) -> list[int]:
    """Of these numbers of tokens of each sequence."""
    counts = zip(states, tokens, strict=True)
    return [state[0].tokens + at for state, count in counts for at in range(count)]


def as_mlx_lm(model: Any, states: list[list[FullKV]], ids: mx.array, tokens: list[int]) -> mx.array:
    """The logits of all tokens, [rows, vocabulary], as mlx-lm defines the model. Adds the tokens."""
    offset = mx.array(next_positions(states, tokens))
    views = [
        RowsView(layers, tokens=tokens, offset=offset, context=StepContext())
        for layers in zip(*states, strict=True)
    ]
    logits: mx.array = model(ids[:, None], cache=views)
    return logits[:, 0]


def in_c(
    decoder: HostDecoder, states: list[list[FullKV]], ids: mx.array, tokens: list[int]
) -> mx.array:
    """As `as_mlx_lm`, by the decoder in C."""
    positions = next_positions(states, tokens)
    spans = list(zip(states, tokens, strict=True))
    logits = decoder.compute(
        np.array(ids), spans, positions=positions, wanted_rows=range(len(positions))
    )
    assert logits is not None
    return logits


@pytest.mark.parametrize(
    ("name", "changes", "most_tokens"),
    [*((*model, MOST_TOKENS) for model in MODELS), ("llama", {}, 0), ("qwen3", {}, 0)],
)
def test_steps_compute_what_mlx_lm_defines(
    name: str, changes: dict[str, Any], most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_decoder, "MOST_TOKENS", most_tokens)
    model, decoder = attached(name, **changes)
    rng = random.Random(f"{name} {sorted(changes)}")
    for sequences in (1, 5):
        ways = [[fresh(model) for _ in range(sequences)] for _ in range(2)]
        for number in range(5):
            tokens = [rng.choice([1, 1, 1, 3, 16, 70]) for _ in range(sequences)]
            ids = mx.array([rng.randrange(VOCAB_SIZE) for _ in range(sum(tokens))])
            wanted = as_mlx_lm(model, ways[0], ids, tokens)
            found = in_c(decoder, ways[1], ids, tokens)
            np.testing.assert_allclose(
                np.array(found), np.array(wanted), rtol=2e-4, atol=2e-4, err_msg=f"step {number}"
            )
        for plain, written in zip(*ways, strict=True):
            for one, other in zip(plain, written, strict=True):
                assert one.tokens == other.tokens
                for kept, kept_in_c in zip(
                    one.last(one.tokens), other.last(other.tokens), strict=True
                ):
                    np.testing.assert_allclose(
                        np.array(kept_in_c), np.array(kept), rtol=2e-4, atol=2e-4
                    )


def test_only_the_wanted_rows_are_projected() -> None:
    model, decoder = attached("qwen3")
    ids = np.array([5, 6, 7, 8])
    both = [(fresh(model), 3), (fresh(model), 1)]
    others = [(fresh(model), 3), (fresh(model), 1)]
    positions = [0, 1, 2, 0]
    every = decoder.compute(ids, both, positions=positions, wanted_rows=range(4))
    some = decoder.compute(ids, others, positions=positions, wanted_rows=[2, 3])
    none = decoder.compute(np.array([9]), [(fresh(model), 1)], positions=[0], wanted_rows=[])
    assert every is not None and some is not None and none is not None
    assert mx.array_equal(every[2:], some)
    assert none.shape == (0, VOCAB_SIZE)


def test_sequences_share_the_buffers_of_a_common_prefix() -> None:
    model, decoder = attached("llama")
    prompt = mx.array([3, 1, 4, 1, 5, 9, 2, 6])
    first = fresh(model)
    in_c(decoder, [first], prompt, [8])
    for layer in first:
        layer.freeze()
    second = [layer.fork(6) for layer in first]
    alone = [fresh(model), fresh(model)]
    in_c(decoder, alone, mx.concatenate([prompt, prompt[:6]]), [8, 6])
    for number in range(4):
        ids = mx.array([10 + number, 20 + number])
        together = in_c(decoder, [first, second], ids, [1, 1])
        np.testing.assert_allclose(
            np.array(together), np.array(in_c(decoder, alone, ids, [1, 1])), rtol=1e-4, atol=1e-4
        )
    assert first[0].frozen_parts[0][0] is second[0].frozen_parts[0][0]


def test_earlier_copies_do_not_change() -> None:
    """Tokens are written in place, outside MLX, so that memory must not be shared."""
    model, decoder = attached("llama")
    state = fresh(model)
    in_c(decoder, [state], mx.arange(7), [7])
    for layer in state:
        layer.reserve(7)
    copies = [copy for layer in state for copy in layer.copy_out(0, 7)]
    lasts = [np.array(each) for each in copies]
    for layer in state:
        layer.rewind(3)
    in_c(decoder, [state], mx.array([50, 51, 52]), [3])
    restored = fresh(model)
    for at, layer in enumerate(restored):
        layer.restore(iter(copies[2 * at : 2 * at + 2]), layer.layout(), end=7)
        layer.rewind(3)
    in_c(decoder, [restored], mx.array([60, 61, 62]), [3])
    for copy, last in zip(copies, lasts, strict=True):
        assert (np.array(copy) == last).all()


def test_other_kinds_of_state_and_unknown_tokens_use_mlx() -> None:
    model, decoder = attached("llama")
    state = fresh(model)
    in_c(decoder, [state], mx.arange(4), [4])
    for ids in ([-1], [VOCAB_SIZE]):
        spans = [(state, 1)]
        assert decoder.compute(np.array(ids), spans, positions=[4], wanted_rows=[0]) is None
    window = [WindowKV(8) for _ in model.layers]
    assert decoder.compute(np.array([1]), [(window, 1)], positions=[0], wanted_rows=[0]) is None
    assert [layer.tokens for layer in state] == [4] * len(state)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "quantization", [None, *slow({"group_size": 32, "bits": 8}, {"group_size": 64, "bits": 4})]
)
@pytest.mark.parametrize("kv_bits", ["native", *slow("8", "4")])
def test_each_sequence_draws_the_same_as_alone(
    name: str, quantization: dict[str, int] | None, kv_bits: Any, tmp_path: Path
) -> None:
    write_tiny(tmp_path, name, quantization)
    loaded = load_model(tmp_path, ModelSettings(), progress=lambda *_: None)
    assert host_decoder.decoder_of(loaded.model)
    rng = random.Random(f"{name} fused")
    runner = choose_layout(loaded.model, vocab_size=VOCAB_SIZE)
    assert runner.name == "rows", runner.reason
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    runner.set_form(engine.measure_costs().form)
    tolerance = FP32_TOLERANCE if kv_bits == "native" else 0.5
    # mlx-lm's caches, as in mlx-lm's own layers
    assert_batched_is_alone(
        engine, loaded.model, rng, depth=0, tolerance=tolerance, kv_bits=kv_bits
    )


def test_a_bad_number_reaches_its_own_row_only() -> None:
    model, decoder = attached("qwen3")
    for bad in (float("nan"), float("inf")):
        states = [fresh(model) for _ in range(3)]
        in_c(decoder, states, mx.arange(6), [2, 2, 2])
        keys = state_buffer(states[1][0])
        keys[0, 0, 0, 5] = bad
        found = in_c(decoder, states, mx.arange(3), [1, 1, 1])
        assert not mx.isfinite(found[1]).any()
        assert mx.isfinite(found[0]).all() and mx.isfinite(found[2]).all()


def state_buffer(layer: FullKV) -> Any:
    """A view of a layer's first buffer, for changing it."""
    return np.array(next(layer.arrays()), copy=False)


def has_decoder(model: Any, dtype: mx.Dtype = mx.float32) -> bool:
    host_decoder.attach(model, dtype)
    return host_decoder.decoder_of(model) is not None


def test_unsupported_models_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gemma3_text", "qwen3_moe", "gpt_oss"):
        assert not has_decoder(make_tiny(name))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert not has_decoder(make_tiny("llama", rope_scaling=yarn))
    model = make_tiny("llama")
    assert not has_decoder(model, mx.bfloat16)
    monkeypatch.setenv(SWITCH, "products,few_rows")
    assert not has_decoder(model)
    monkeypatch.delenv(SWITCH)
    assert has_decoder(model)


def test_on_a_gpu_no_model_runs_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, products bypass the shim: a stand-in would be read as a matrix."""
    write_tiny(tmp_path, "llama")
    monkeypatch.setattr(backend, "_in_use", Backend())
    loaded = load_model(tmp_path, ModelSettings(), progress=lambda *_: None)
    assert host_decoder.decoder_of(loaded.model) is None
    assert loaded.kept_layers == 0


def test_models_with_deviating_results_use_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_tiny("llama")
    plain = host_decoder._rope_arguments
    monkeypatch.setattr(
        host_decoder, "_rope_arguments", lambda ropes: plain(ropes)._replace(base=20_000.0)
    )
    assert not has_decoder(model)
