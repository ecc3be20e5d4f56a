from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from holdfast.errors import ModelLoadError
from holdfast.worker.cpu import packed_layers
from holdfast.worker.cpu.backend import CpuBackend
from holdfast.worker.engine import backend
from holdfast.worker.engine.backend import Backend
from holdfast.worker.engine.weight_format import (
    UNCHANGED,
    WeightFormat,
    choose_format,
    compute_dtype,
    convert,
    format_bytes,
    parameter_count,
)
from tests.fakes.tiny_models import kept_tiny, make_tiny

UNPACKED = WeightFormat(dtype=mx.float32, unpack=True, unpack_experts=True)
PACKINGS = [
    {"group_size": 32, "bits": 2},
    {"group_size": 64, "bits": 3},
    {"group_size": 32, "bits": 4},
    {"group_size": 64, "bits": 5},
    {"group_size": 64, "bits": 6},
    {"group_size": 64, "bits": 8},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    {"group_size": 32, "bits": 8, "mode": "mxfp8"},
]
TOKENS = mx.array([[(i * 7) % 90 + 2 for i in range(20)]])
ENOUGH = 1 << 40


def packed(name: str, packing: dict[str, Any]) -> nn.Module:
    model = make_tiny(name)
    model.set_dtype(mx.bfloat16)

    def fits(_: str, module: nn.Module) -> bool:
        return (
            hasattr(module, "to_quantized") and module.weight.shape[-1] % packing["group_size"] == 0
        )

    nn.quantize(model, class_predicate=fits, **packing)
    mx.eval(model.parameters())
    return model


def choice(
    model: nn.Module,
    *,
    dtype: str = "auto",
    dequantize: str = "auto",
    on_cpu: bool = True,
    available: int = ENOUGH,
) -> WeightFormat:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_in_use", CpuBackend() if on_cpu else Backend())
        return choose_format(model, dtype=dtype, dequantize=dequantize, available_bytes=available)


# linear layers, an embedding that is also the head, experts; and latent attention
@pytest.mark.parametrize(
    ("name", "packing"),
    [*(("qwen3_moe", packing) for packing in PACKINGS), ("deepseek_v3", PACKINGS[2])],
    ids=str,
)
def test_unpacked_weights_answer_like_packed_ones(name: str, packing: dict[str, Any]) -> None:
    model = packed(name, packing)
    in_float32 = WeightFormat(dtype=mx.float32, unpack=False, unpack_experts=False)
    convert(model, in_float32, read=lambda _: None)
    expected = model(TOKENS)
    convert(model, UNPACKED, read=lambda _: None)
    assert not any(hasattr(module, "bits") for _, module in model.named_modules())
    # An embedding in an mx or nv format gives bf16 while packed.
    assert float(mx.abs(model(TOKENS) - expected).max()) < (1e-4 if "mode" not in packing else 0.1)


def test_a_tensor_scale_per_expert_is_honoured() -> None:
    from mlx_lm.models.switch_layers import SwitchLinear

    plain = SwitchLinear(64, 32, 4, bias=True)
    plain.bias = mx.random.normal((4, 32))
    holder = nn.Module()
    holder.experts = plain.to_quantized(group_size=16, bits=4, mode="nvfp4", global_scale=True)
    scales = holder.experts
    expected = mx.stack(
        [
            mx.dequantize(
                scales.weight[e],
                scales.scales[e],
                None,
                16,
                4,
                "nvfp4",
                global_scale=scales.global_scale[e],
                dtype=mx.float32,
            )
            for e in range(4)
        ]
    )
    convert(holder, UNPACKED, read=lambda _: None)
    assert isinstance(holder.experts, SwitchLinear)
    assert mx.array_equal(holder.experts.weight, expected)
    assert mx.array_equal(holder.experts.bias, plain.bias)
    assert float(mx.abs(holder.experts.weight - plain.weight).max()) < 0.05


def test_everything_is_computed_in_float32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("gemma3_text")
    model.set_dtype(mx.bfloat16)
    monkeypatch.setattr(packed_layers, "unavailable", lambda: "there is no C compiler")
    convert(model, choice(model), read=lambda _: None)
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == {mx.float32}
    assert compute_dtype(model) == mx.float32


@pytest.mark.skipif(bool(packed_layers.unavailable()), reason=packed_layers.unavailable())
def test_supported_16_bit_weights_are_kept() -> None:
    model = make_tiny("gemma3_text")
    model.set_dtype(mx.bfloat16)
    convert(model, choice(model), read=lambda _: None)
    for path, array in tree_flatten(model.parameters()):
        assert array.dtype == (mx.float32 if "norm" in path else mx.bfloat16), path
    assert compute_dtype(model) == mx.float32


def test_a_gpu_keeps_the_stored_weights() -> None:
    assert choice(packed("llama", PACKINGS[2]), on_cpu=False) == UNCHANGED
    assert choice(kept_tiny("llama"), on_cpu=False, dtype="float16") == WeightFormat(
        dtype=mx.float16, unpack=False, unpack_experts=False
    )
    assert choice(packed("llama", PACKINGS[2]), on_cpu=False, dequantize="always").unpack


def test_less_memory_unpacks_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_layers, "unavailable", lambda: "there is no C compiler")
    model = packed("qwen3_moe", PACKINGS[2])
    full = format_bytes(model, UNPACKED)
    without_experts = format_bytes(
        model, WeightFormat(dtype=mx.float32, unpack=True, unpack_experts=False)
    )
    stored = format_bytes(model, UNCHANGED)
    assert choice(model, available=2 * full) == replace(
        UNPACKED, note="quantized weights are unpacked: there is no C compiler"
    )
    some = choice(model, available=full)
    assert some.unpack
    assert not some.unpack_experts
    assert "experts stay packed" in some.note
    none = choice(model, available=without_experts)
    assert not none.unpack
    assert none.dtype == mx.float32
    assert choice(model, available=stored).dtype is None
    with pytest.raises(ModelLoadError, match="GiB of memory"):
        choice(model, available=stored - 1)


@pytest.mark.skipif(bool(packed_layers.unavailable()), reason=packed_layers.unavailable())
def test_layers_known_to_the_kernel_stay_packed_with_scales() -> None:
    model = packed("qwen3_moe", PACKINGS[2])
    wish = choice(model)
    assert wish.keep_layers
    assert wish.note == ""
    predicted = format_bytes(model, wish)
    convert(model, wish, read=lambda _: None)
    arrays = dict(tree_flatten(model.parameters()))
    assert sum(array.nbytes for array in arrays.values()) == predicted
    assert predicted == format_bytes(model, UNCHANGED)
    kept = {path.removesuffix(".scales") for path in arrays if path.endswith(".scales")}
    assert kept == {path for path, part in model.named_modules() if packed_layers.is_kept(part)}
    assert any(path.endswith("q_proj") for path in kept)
    for path, array in arrays.items():
        is_scale = path.endswith((".scales", ".biases"))
        expected = mx.bfloat16 if is_scale else mx.float32
        assert array.dtype in (mx.uint32, expected), path
    assert compute_dtype(model) == mx.float32


def test_a_requested_format_is_used_or_refused() -> None:
    model = packed("llama", PACKINGS[2])
    assert not choice(model, dequantize="never").unpack
    full = format_bytes(model, UNPACKED)
    assert choice(model, dequantize="always", available=full) == UNPACKED
    with pytest.raises(ModelLoadError):
        choice(model, dequantize="always", available=full - 1)
    with pytest.raises(ModelLoadError):
        choice(kept_tiny("llama"), dtype="float32", available=1000)


def test_experts_in_a_format_a_cpu_cannot_compute_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="only in float32, not in bfloat16"):
        choice(kept_tiny("qwen3_moe"), dtype="bfloat16")
    assert not choice(packed("qwen3_moe", PACKINGS[2]), dtype="bfloat16").unpack_experts


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "falcon_h1", "rwkv7"])
def test_sizes_are_known_before_anything_is_read(name: str) -> None:
    model = packed(name, PACKINGS[2])
    predicted, counted = format_bytes(model, UNPACKED), parameter_count(model)
    convert(model, UNPACKED, read=lambda _: None)
    assert (
        sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        == predicted
        == format_bytes(model, UNCHANGED)
    )
    assert (
        parameter_count(model)
        == counted
        == sum(array.size for _, array in tree_flatten(kept_tiny(name).parameters()))
    )


def test_progress_counts_every_stored_byte_once() -> None:
    model = packed("llama", PACKINGS[2])
    stored = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    counted: list[int] = []
    convert(model, UNPACKED, read=counted.append)
    assert sum(counted) == stored
    assert all(counted)


def test_memory_stays_near_the_result() -> None:
    model = nn.Sequential(
        *[nn.QuantizedLinear(512, 512, bias=False, group_size=64, bits=4) for _ in range(16)]
    )
    mx.eval(model.parameters())
    one = 512 * 512 * 4
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(model, UNPACKED, read=lambda _: None)
    grown = 16 * one - 16 * (one // 8 + one // 32)  # minus the packed weights, which are gone
    assert mx.get_active_memory() - before <= grown + one // 4
    assert mx.get_peak_memory() - before <= grown + 4 * one
