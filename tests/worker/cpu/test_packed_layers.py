"""Layers with packed weights compute the same as in float32."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import SwitchLinear

from holdfast.config import ModelSettings
from holdfast.worker.cpu import packed_layers
from holdfast.worker.cpu.kernels import packed_products
from holdfast.worker.cpu.kernels.packed_products import MOST_ROWS, PackedWeights
from holdfast.worker.cpu.packed_layers import keep_stored, supports
from holdfast.worker.engine import probe, weight_format
from holdfast.worker.engine.load import LoadedModel, load_model
from holdfast.worker.engine.mlx_lm_hooks import ProjectionHook, only_graph
from holdfast.worker.engine.weight_format import choose_format, convert
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny, write_tiny

pytestmark = pytest.mark.skipif(
    bool(packed_layers.unavailable()), reason=packed_layers.unavailable()
)
ROWS = [1, 5, MOST_ROWS, MOST_ROWS + 1]


def quantized(layer: Any, *, bits: int = 4, dtype: mx.Dtype = mx.bfloat16) -> Any:
    made = layer.to_quantized(group_size=32, bits=bits)
    made.scales = made.scales.astype(dtype)
    made.biases = made.biases.astype(dtype)
    mx.eval(made.parameters())
    return made


def in_mlx(layer: Any, x: mx.array) -> mx.array:
    return mx.quantized_matmul(
        x,
        layer.weight,
        layer.scales.astype(mx.float32),
        layer.biases.astype(mx.float32),
        group_size=layer.group_size,
        bits=layer.bits,
    )


def assert_close(got: mx.array, wanted: mx.array, *, tolerance: float = 1e-4) -> None:
    assert got.shape == wanted.shape
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)), np.array(wanted), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_linear_layer_equals_mlxs(rows: int, bits: int) -> None:
    plain = nn.Linear(96, 40)
    plain.bias = mx.random.normal((40,))
    layer = quantized(plain, bits=bits)
    keep_stored(layer, mx.float32)
    x = mx.random.normal((1, rows, 96))
    assert_close(layer(x), in_mlx(layer, x) + plain.bias)
    assert_close(mx.compile(lambda given: layer(given) + 1)(x), layer(x) + 1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_layers_with_16_bits_equal_those_in_float32(rows: int, dtype: mx.Dtype) -> None:
    linear, head = nn.Linear(96, 40), nn.Embedding(50, 64)
    wanted = []
    for layer in (linear, head):
        layer.weight = layer.weight.astype(dtype)
        wanted.append(layer.weight.astype(mx.float32))
        keep_stored(layer, mx.float32)
        assert layer.weight.dtype == dtype
    x = mx.random.normal((1, rows, 96))
    assert_close(linear(x), x @ wanted[0].T + linear.bias)
    linear.bias = linear.bias.astype(dtype)
    half = x.astype(dtype)
    assert linear(half).dtype == dtype
    assert_close(linear(half), linear(half.astype(mx.float32)), tolerance=2e-2)
    assert_close(head.as_linear(x[..., :64]), x[..., :64] @ wanted[1].T)
    ids = mx.array([[3, 49, 0], [3, 3, 1]])
    assert mx.array_equal(head(ids), wanted[1][ids])
    assert head(ids).dtype == mx.float32


@pytest.mark.parametrize("rows", ROWS)
def test_inputs_of_any_layout_and_format_are_accepted(rows: int) -> None:
    layer = quantized(nn.Linear(96, 40, bias=False))
    keep_stored(layer, mx.float32)
    across = mx.random.normal((96, rows)).T
    assert_close(layer(across), in_mlx(layer, across))
    half = across.astype(mx.bfloat16)
    got = layer(half)
    assert got.dtype == mx.bfloat16
    assert_close(got, in_mlx(layer, half.astype(mx.float32)), tolerance=2e-2)


@pytest.mark.parametrize("rows", ROWS)
def test_an_embedding_is_a_head_too(rows: int) -> None:
    layer = quantized(nn.Embedding(50, 64))
    exact = mx.dequantize(
        layer.weight,
        layer.scales.astype(mx.float32),
        layer.biases.astype(mx.float32),
        group_size=32,
        bits=4,
    )
    keep_stored(layer, mx.float32)
    ids = mx.array([[3, 49, 0], [3, 3, 1]])
    assert mx.array_equal(layer(ids), exact[ids])
    x = mx.random.normal((rows, 64))
    assert_close(layer.as_linear(x), in_mlx(layer, x))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_experts_equal_mlxs(dtype: mx.Dtype) -> None:
    plain = SwitchLinear(64, 24, 5, bias=True)
    plain.bias = mx.random.normal((5, 24))
    layer = quantized(plain, dtype=mx.float32)
    chosen = mx.array([[[0, 3], [3, 4], [0, 1]], [[2, 0], [3, 0], [4, 3]]])
    sorted_rows = mx.sort(chosen.flatten())
    shared = mx.random.normal((2, 3, 1, 1, 64))  # a token's row for all of its experts
    own = mx.random.normal((2, 3, 2, 1, 64))
    in_order = mx.random.normal((12, 1, 64))
    cases = [(shared, chosen), (own, chosen), (in_order, sorted_rows)]
    wanted = [layer(x, indices) for x, indices in cases]
    mx.eval(wanted)
    keep_stored(layer, mx.float32)
    for (x, indices), expected in zip(cases, wanted, strict=True):
        got = layer(x.astype(dtype), indices)
        assert_close(got, expected, tolerance=1e-4 if dtype == mx.float32 else 5e-2)
    compiled = mx.compile(lambda x: layer(x, chosen))
    assert_close(compiled(shared), wanted[0])


def test_a_layer_larger_than_the_scratch_memory_is_split() -> None:
    for plain in (nn.Linear(1024, 2500, bias=False), nn.Linear((1 << 20) + 32, 3, bias=False)):
        layer = quantized(plain)
        keep_stored(layer, mx.float32)
        x = mx.random.normal((1, layer.scales.shape[1] * 32)) * mx.random.normal((MOST_ROWS + 1, 1))
        assert_close(layer(x), in_mlx(layer, x), tolerance=1e-3)


def test_unwanted_experts_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = quantized(SwitchLinear(64, 24, 5), dtype=mx.float32)
    keep_stored(layer, mx.float32)
    products: list[Any] = []
    plain = PackedWeights.multiply
    monkeypatch.setattr(
        PackedWeights,
        "multiply",
        lambda *args, **more: products.append(args) or plain(*args, **more),
    )
    x, chosen = mx.random.normal((2, 1, 1, 64)), mx.array([[0, 3], [3, 4]])
    with only_graph():
        later = layer(x, chosen)
    assert not products
    assert_close(later, layer(x, chosen))
    assert len(products) == 3


def loaded_tiny(folder: Path, name: str, **settings: Any) -> LoadedModel:
    write_tiny(folder, name, {"group_size": 32, "bits": 4}, dtype=mx.bfloat16)
    return load_model(folder, ModelSettings(**settings), progress=lambda *_: None)


def test_hidden_states_are_projected_without_another_pass(tmp_path: Path) -> None:
    model: Any = loaded_tiny(tmp_path, "llama").model
    head = ProjectionHook(model)
    tokens = mx.array([[1, 2, 3, 4]])
    with head.selecting(None, deferred=mx.array([0, 1, 2])):
        model(tokens)
    hidden = head.take_deferred()
    assert hidden is not None
    assert_close(head.project(hidden), model(tokens)[0, :3])


def test_a_model_with_16_bits_answers_like_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "gemma3_text", None, dtype=mx.bfloat16)
    kept = load_model(folder, ModelSettings(), progress=lambda *_: None)
    monkeypatch.setattr(packed_layers, "unavailable", lambda: "there is no C compiler")
    converted = load_model(folder, ModelSettings(), progress=lambda *_: None)
    assert kept.compute_dtype == converted.compute_dtype == mx.float32
    assert kept.kept_layers > converted.kept_layers == 0
    assert kept.weight_bytes < 0.6 * converted.weight_bytes
    tokens = mx.array([[(i * 7) % 90 + 2 for i in range(MOST_ROWS + 6)]])
    for count in (1, 5, tokens.size):
        assert_close(
            kept.model(tokens[:, :count]), converted.model(tokens[:, :count]), tolerance=2e-3
        )


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_a_loaded_model_answers_like_its_unpacked_self(name: str, tmp_path: Path) -> None:
    packed = loaded_tiny(tmp_path, name)
    unpacked = loaded_tiny(tmp_path, name, dequantize="always")
    assert packed.compute_dtype == unpacked.compute_dtype == mx.float32
    assert packed.computed_as != unpacked.computed_as
    assert packed.weight_bytes < unpacked.weight_bytes
    assert packed.kept_layers
    assert packed.weight_format.note == unpacked.weight_format.note == ""
    tokens = mx.array([[(i * 7) % 90 + 2 for i in range(MOST_ROWS + 6)]])
    for count in (1, 5, tokens.size):
        got, wanted = (each.model(tokens[:, :count]) for each in (packed, unpacked))
        assert_close(got, wanted, tolerance=2e-3)


@pytest.mark.parametrize("quantization", [{"group_size": 64, "bits": 4}, None])
def test_a_model_takes_about_its_own_size(tmp_path: Path, quantization: Any) -> None:
    gc.collect()
    changes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    folder = write_tiny(tmp_path, "llama", quantization, dtype=mx.bfloat16, changes=changes)
    stored = (folder / "model.safetensors").stat().st_size
    before = mx.get_active_memory()
    loaded = load_model(folder, ModelSettings(), progress=lambda *_: None)
    assert loaded.weight_bytes < 1.1 * stored
    assert mx.get_active_memory() - before < 1.1 * stored
    assert loaded.parameters * 4 > (6 if quantization else 1.9) * stored


def test_without_the_kernel_weights_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_layers, "unavailable", lambda: "there is no C compiler")
    loaded = loaded_tiny(tmp_path, "llama")
    assert not any(hasattr(module, "bits") for module in loaded.model.modules())
    assert loaded.weight_format.note == "quantized weights are unpacked: there is no C compiler"
    assert loaded.kept_layers == 0


def test_weights_in_another_memory_order_are_reordered(tmp_path: Path) -> None:
    model: Any = make_tiny("llama")
    projection = model.layers[0].mlp.down_proj
    turned = mx.contiguous(projection.weight.astype(mx.bfloat16).T)
    model.set_dtype(mx.bfloat16)
    projection.weight = turned.T  # like a model that transposes what it loads
    tokens = mx.array([[3, 7, 9]])
    wanted = model(tokens)
    wish = choose_format(model, dtype="auto", dequantize="auto", available_bytes=1 << 34)
    convert(model, wish, read=lambda _: None)
    assert packed_layers.is_kept(model.layers[0].mlp.down_proj)
    assert_close(model(tokens), wanted.astype(mx.float32), tolerance=5e-2)


@pytest.mark.parametrize(("name", "uses"), [("llama", False), ("minicpm", True)])
def test_models_that_use_weights_directly_are_detected(name: str, uses: bool) -> None:
    """Their 16-bit weights are converted, because MLX's products with them are slow."""
    importlib.import_module(f"mlx_lm.models.{name}")
    assert weight_format._uses_weights_itself(f"mlx_lm.models.{name}") == uses


def test_if_mlx_refuses_stand_ins_weights_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any) -> Any:
        raise ValueError("the view is too large")

    monkeypatch.setattr(packed_layers, "stand_in_views", refusing)
    reason = packed_layers.why_no_stand_ins.__wrapped__()
    assert reason == "MLX refuses it: the view is too large"


def test_products_that_disagree_with_mlx_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not packed_layers._disagreement()
    # as if MLX did not call the shim: the stand-in is multiplied as the matrix that it resembles
    monkeypatch.setattr(PackedWeights, "stand_in", lambda _: np.zeros(1, np.uint32))
    assert packed_layers._disagreement() == "it disagrees with MLX on this machine"


def test_only_forms_known_to_the_kernel_are_supported() -> None:
    plain = nn.Linear(128, 64)
    assert all(
        supports(plain.to_quantized(group_size=group, bits=bits))
        for group in packed_products.GROUP_SIZES
        for bits in packed_products.BITS
    )
    assert not supports(plain)  # float32
    plain.weight = plain.weight.astype(mx.bfloat16)
    assert supports(plain)
    assert not supports(nn.Linear(100, 64).apply(lambda each: each.astype(mx.bfloat16)))
    assert not supports(plain.to_quantized(group_size=64, bits=6))
    assert not supports(plain.to_quantized(group_size=32, bits=4, mode="mxfp4"))


def test_the_probe_accepts_a_packed_model(tmp_path: Path) -> None:
    loaded = loaded_tiny(tmp_path, "qwen3")
    runner = probe.choose_layout(loaded.model, vocab_size=VOCAB_SIZE)
    assert runner.name == "rows"
    plain = probe.choose_layout(make_tiny("qwen3"), vocab_size=VOCAB_SIZE)
    assert plain.hidden_size == runner.hidden_size > 0
