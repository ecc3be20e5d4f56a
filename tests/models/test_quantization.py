"""Weights in formats that would be read wrongly are refused, with the name of the format.

`REFUSED` has the formats of several tools, some with missing parts.
tests/worker/engine/test_load_foreign_weights.py compares the accepted formats with plain weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.errors import UnusableModel
from holdfast.models.foreign_formats import SETTINGS_FILES
from holdfast.models.loadable import check_loadable
from tests.fakes import foreign_weights as forms
from tests.fakes.foreign_weights import Array, Quantize, Stored, is_linear, replaced, stored
from tests.fakes.model_folders import write_bare_model

LAYER = "model.layers.0.self_attn.q_proj"
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}


def compressed(form: str, bits: int = 4, group_size: int = 32, **weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    group = {"num_bits": bits, "group_size": group_size, "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": group}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def as_it_is(**parts: Stored) -> Quantize:
    """Replaces each weight by these tensors."""
    return lambda weight: (dict(parts), weight)


def with_zero_points(quantize: Quantize) -> Quantize:
    """The same quantization, with an additional tensor of zero points."""

    def changed(weight: Array) -> tuple[dict[str, Stored], Array]:
        parts, plain = quantize(weight)
        return {**parts, "weight_zero_point": ("I32", np.zeros((4, 4), np.int32))}, plain

    return changed


@dataclass(frozen=True, kw_only=True)
class Case:
    """A format of weights, where it is declared, and the name in its refusal."""

    name: str
    quantize: Quantize
    said: str
    config: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)


U8 = stored(np.zeros((64, 32)), "U8")
I8 = stored(np.zeros((64, 64)), "I8")
SCALES = stored(np.ones(64))
NESTED_FP8 = {"model_type": "llama", "text_config": {"quantization_config": FP8_BLOCKS}}


def case(name: str, quantize: Quantize, said: str, method: Any = None, **changes: Any) -> Case:
    files = changes.pop("files", {})
    own = {} if method is None else {"quantization_config": method}
    return Case(name=name, quantize=quantize, said=said, config={**own, **changes}, files=files)


REFUSED = [
    # FP8
    case("fp8 in blocks", forms.fp8_blocks(), "FP8", FP8_BLOCKS),
    case("fp8 in blocks, no config", forms.fp8_blocks(), "FP8"),
    case("fp8 in small blocks", forms.fp8_blocks(64, 64), "FP8", FP8_BLOCKS),
    case("fp8 nested", forms.fp8_blocks(), "FP8", **NESTED_FP8),
    case("fp8 without scales", forms.bare_fp8, "FP8", {"quant_method": "fp8"}),
    case("fp8 without scales or config", forms.bare_fp8, "F8_E4M3, without scales"),
    case("fp8 e5m2", as_it_is(weight=("F8_E5M2", np.zeros((64, 64), np.uint8))), "FP8"),
    case("fp8 fnuz", as_it_is(weight=("F8_E4M3FNUZ", np.zeros((64, 64), np.uint8))), "FP8"),
    case("fp8 for a tensor", forms.fp8_tensor(), "FP8", {"quant_method": "fp8"}),
    case("fp8 of ministral3", forms.fp8_tensor("weight_scale_inv"), "FP8", model_type="ministral3"),
    case("fp8 of deepseek, 64", forms.fp8_blocks(64, 64), "FP8", model_type="deepseek_v3"),
    case("fp8 of deepseek, bare", forms.bare_fp8, "FP8", FP8_BLOCKS, model_type="deepseek_v3"),
    case("fp8, ue8m0", forms.fp8_blocks(32, 32), "FP8", {**FP8_BLOCKS, "scale_fmt": "ue8m0"}),
    case("fbgemm_fp8", forms.fp8_tensor(per_row=True), "FBGEMM FP8", {"quant_method": "fbgemm_fp8"}),
    # compressed-tensors
    case("float-quantized", forms.fp8_tensor(), "compressed-tensors (float-quantized)",
         compressed("float-quantized", bits=8)),
    case("naive-quantized", forms.int8_rows(), "compressed-tensors (naive-quantized)",
         compressed("naive-quantized", bits=8)),
    case("int-quantized", forms.int8_rows(), "compressed-tensors (int-quantized)",
         compressed("int-quantized", bits=8)),
    case("pack-quantized", forms.int_packed(), "compressed-tensors (pack-quantized)",
         compressed("pack-quantized")),
    case("pack-quantized of deepseek, 8 bits", forms.int_packed(bits=8), "pack-quantized",
         compressed("pack-quantized", bits=8), model_type="deepseek_v3"),
    case("pack-quantized of deepseek, said to have 4 bits", forms.int_packed(bits=8),
         "pack-quantized", compressed("pack-quantized"), model_type="deepseek_v3"),
    case("pack-quantized of deepseek, asymmetric", with_zero_points(forms.int_packed()),
         "pack-quantized", compressed("pack-quantized", symmetric=False), model_type="kimi_k2"),
    case("pack-quantized of deepseek, no groups", forms.int_packed(), "pack-quantized",
         {"quant_method": "compressed-tensors", "format": "pack-quantized"}, model_type="kimi_k2"),
    case("mxfp4-pack", forms.mxfp4(), "(mxfp4-pack-quantized)", compressed("mxfp4-pack-quantized")),
    case("nvfp4-pack", forms.nvfp4("weight_packed", "weight_scale", "weight_global_scale", True),
         "(nvfp4-pack-quantized)", compressed("nvfp4-pack-quantized")),
    case("marlin-24", as_it_is(weight_packed=("I32", np.zeros((4, 4), np.int32))), "(marlin-24)",
         compressed("marlin-24")),
    case("compression_config", forms.int8_rows(), "compressed-tensors (int-quantized)",
         compression_config=compressed("int-quantized", bits=8)),
    case("compressed-tensors, no config", forms.int_packed(), "compressed-tensors"),
    # GPTQ and AWQ
    case("gptq", forms.gptq(), "GPTQ", GPTQ),
    case("gptq without g_idx", forms.gptq(has_index=False), "GPTQ", GPTQ),
    case("gptq, 8 bits", forms.gptq(bits=8), "GPTQ", {**GPTQ, "bits": 8}),
    case("gptq in its own file", forms.gptq(), "GPTQ",
         files={"quantize_config.json": {"bits": 4, "group_size": 32}}),
    case("gptq, no config", forms.gptq(), "GPTQ"),
    case("gptqmodel", forms.gptq(), "GPTQ", {**GPTQ, "meta": {"quantizer": ["gptqmodel:2"]}}),
    case("awq of an untested type", forms.awq(), "AWQ", AWQ, model_type="qwen3_moe"),
    case("awq, 8 bits", forms.awq(bits=8), "AWQ", {**AWQ, "bits": 8}),
    case("awq, gemv", forms.awq(), "AWQ", {**AWQ, "version": "gemv"}),
    case("awq in gptq's layout", forms.gptq(has_index=False), "AWQ", AWQ),
    case("awq in its own file", forms.awq(), "AWQ", files={"quant_config.json": {"w_bit": 4}}),
    case("awq, no config", forms.awq(), "AWQ"),
    case("auto-round", forms.gptq(), "AutoRound", {**GPTQ, "quant_method": "auto-round"}),
    # bitsandbytes
    case("bnb 4 bits", as_it_is(weight=stored(np.zeros((2048, 1)), "U8"), **{
        "weight.absmax": U8, "weight.quant_map": SCALES,
        "weight.quant_state.bitsandbytes__nf4": U8}),
        "bitsandbytes (4 bits)", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    case("bnb 8 bits", as_it_is(weight=I8, SCB=SCALES), "bitsandbytes (INT8)",
         {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    case("bnb 8 bits, no config", as_it_is(weight=I8, SCB=SCALES), "bitsandbytes (INT8)"),
    case("bnb without a method", as_it_is(weight=I8, SCB=SCALES), "bitsandbytes (INT8)",
         {"load_in_8bit": True}),
    # the others
    case("int8 without scales", forms.bare("I8", np.int8), "I8, without scales"),
    case("uint8 without scales", forms.bare("U8", np.uint8), "an unknown format (U8)"),
    case("int16 without scales", forms.bare("I16", np.int16), "an unknown format (I16)"),
    case("int32 without scales", forms.bare("I32", np.int32), "an unknown format (I32)"),
    case("int64 without scales", forms.bare("I64", np.int64), "an unknown format (I64)"),
    case("float64", as_it_is(weight=("F64", np.zeros((64, 64)))), "an unknown format (F64)"),
    case("uint32 without scales", forms.bare("U32", np.uint32), "an unknown format (U32)"),
    case("w8a8", forms.int8_rows(), "w8a8_int8", {"quant_method": "w8a8_int8"}),
    case("eetq", forms.int8_rows("weight_scales"), "EETQ", {"quant_method": "eetq"}),
    case("quanto", as_it_is(**{"weight._data": I8, "weight._scale": SCALES}), "Quanto",
         {"quant_method": "quanto"}),
    case("torchao", as_it_is(weight=I8), "torchao", {"quant_method": "torchao"}),
    case("hqq", as_it_is(W_q=U8, meta=SCALES), "HQQ", {"quant_method": "hqq"}),
    case("hqq, no config", as_it_is(W_q=U8, meta=SCALES), "HQQ"),
    case("aqlm", as_it_is(codes=I8, codebooks=SCALES, scales=SCALES), "AQLM",
         {"quant_method": "aqlm"}),
    case("vptq", as_it_is(indices=("I32", np.zeros((4, 4), np.int32))), "VPTQ",
         {"quant_method": "vptq"}),
    case("spqr", as_it_is(dense_weights=("I64", np.zeros((4, 4), np.int64)), weight=I8), "SpQR",
         {"quant_method": "spqr"}),
    case("higgs", as_it_is(weight=("I16", np.zeros((64, 8), np.int16)), scales=SCALES), "HIGGS",
         {"quant_method": "higgs"}),
    case("quark", forms.fp8_tensor(), "Quark", {"quant_method": "quark"}),
    case("modelopt nvfp4", forms.nvfp4("weight", "weight_scale", "weight_scale_2", False),
         "ModelOpt (NVFP4)", NVFP4),
    case("modelopt in its own file",
         forms.nvfp4("weight", "weight_scale", "weight_scale_2", False), "ModelOpt (NVFP4)",
         files={"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4"}}}),
    case("modelopt fp8", forms.fp8_tensor(), "ModelOpt (FP8)",
         {"quant_method": "modelopt", "quant_algo": "FP8"}),
    case("mxfp4 of an untested type", forms.mxfp4("weight_blocks", "weight_scales"), "MXFP4",
         {"quant_method": "mxfp4"}),
    case("bitnet", as_it_is(weight=stored(np.zeros((16, 64)), "U8"), weight_scale=SCALES), "BitNet",
         {"quant_method": "bitnet"}),
    case("a method of tomorrow", as_it_is(weight=I8), "q9000", {"quant_method": "q9000"}),
    case("of a model with vision", forms.fp8_blocks(), "FP8", FP8_BLOCKS, model_type="qwen2_vl",
         vision_config={"depth": 1}),
    case("a method that is no text", as_it_is(weight=I8), "INT8", {"quant_method": ["fp8"]}),
    case("a config that is no table", as_it_is(weight=I8), "INT8", "fp8"),
]  # fmt: skip


@cache
def plain_tensors() -> dict[str, Array]:
    numbers = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (96, 64),
        f"{LAYER}.weight": (64, 64),
        "model.layers.0.mlp.up_proj.weight": (128, 64),
        "model.norm.weight": (64,),
    }
    return {
        name: numbers.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()
    }


def write(folder: Path, tensors: Mapping[str, Stored], **config: Any) -> Path:
    write_bare_model(folder, **config)
    forms.write_safetensors(folder / "model.safetensors", tensors)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(UnusableModel) as caught:
        check_loadable(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("each", REFUSED, ids=lambda each: each.name)
def test_an_unsupported_format_is_refused_with_a_remedy(tmp_path: Path, each: Case) -> None:
    foreign, _ = replaced(plain_tensors(), each.quantize, is_quantized=is_linear)
    folder = write(tmp_path, foreign, **each.config)
    for name, content in each.files.items():
        (folder / name).write_text(json.dumps(content))
    said = refusal(folder)
    assert each.said in said
    assert str(folder) in said
    assert "mlx_lm.convert" in said
    assert "mlx-community" in said


@pytest.mark.parametrize("mixed", [False, True], ids=["all", "one of two"])
@pytest.mark.parametrize("quantize", [forms.bare_fp8, forms.bare("I8", np.int8)])
def test_one_unsupported_weight_is_enough(tmp_path: Path, quantize: Quantize, mixed: bool) -> None:
    def chosen(name: str) -> bool:
        return is_linear(name) and (not mixed or name.startswith(LAYER))

    foreign, _ = replaced(plain_tensors(), quantize, is_quantized=chosen)
    assert "without scales" in refusal(write(tmp_path, foreign))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    "method", [None, {"quant_method": "bitsandbytes", "load_in_4bit": True}, FP8_BLOCKS]
)
def test_plain_weights_are_accepted_despite_declared_quantization_at_load(
    tmp_path: Path, dtype: str, method: dict[str, Any] | None
) -> None:
    tensors = {name: stored(array, dtype) for name, array in plain_tensors().items()}
    config = {} if method is None else {"quantization_config": method}
    assert check_loadable(write(tmp_path, tensors, **config))["model_type"] == "llama"


@pytest.mark.parametrize("method", [AWQ, GPTQ, NVFP4])
def test_plain_weights_declared_as_packed_are_refused(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    tensors = {name: stored(array) for name, array in plain_tensors().items()}
    said = refusal(write(tmp_path, tensors, quantization_config=method))
    assert "but they are not; remove `quantization_config`" in said


def test_integer_buffers_are_not_taken_for_weights(tmp_path: Path) -> None:
    tensors = {name: stored(array) for name, array in plain_tensors().items()}
    tensors |= {
        "model.position_ids": ("I64", np.zeros((1, 8), np.int64)),
        "h.0.attn.bias": ("U8", np.zeros((1, 1, 8, 8), np.uint8)),
        "h.0.attn.masked_bias": ("BOOL", np.zeros(1, np.uint8)),
        "vision.layer_scale.scale": stored(np.ones(4)),
        "vision.embeddings.position_ids": ("I32", np.zeros((1, 8), np.int32)),
        "h.0.attn.causal_mask": ("U8", np.zeros((1, 1, 8, 8), np.uint8)),
        "audio.codebooks": stored(np.ones((4, 4))),
    }
    check_loadable(write(tmp_path, tensors))


# -- MLX's own format


def own_form(bits: int = 4, group_size: int = 32, scales: str = "F32") -> Quantize:
    """Tensors with the shapes of MLX's format."""

    def quantize(weight: Array) -> tuple[dict[str, Stored], Array]:
        rows, columns = weight.shape
        groups = np.ones((rows, columns // group_size))
        parts = {
            "weight": ("U32", np.zeros((rows, columns * bits // 32), np.uint32)),
            "scales": stored(groups, scales),
        }
        if scales != "U8":
            parts["biases"] = stored(groups)
        return parts, weight

    return quantize


@pytest.mark.parametrize(
    ("quantize", "table"),
    [
        (own_form(), {"bits": 4, "group_size": 32}),
        (own_form(), {"bits": 4, "group_size": 32, "mode": "affine", LAYER: False}),
        (own_form(8, 64), {"bits": 8, "group_size": 64}),
        (own_form(8), {"bits": 4, "group_size": 64, LAYER: {"bits": 8, "group_size": 32}}),
        (own_form(4, 32, "U8"), {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
        (own_form(4, 16, "U8"), {"bits": 4, "group_size": 16, "mode": "nvfp4"}),
        (own_form(8, 32, "U8"), {"bits": 8, "group_size": 32, "mode": "mxfp8"}),
    ],
)
def test_weights_in_mlxs_format_are_accepted(
    tmp_path: Path, quantize: Quantize, table: dict[str, Any]
) -> None:
    packed, _ = replaced(plain_tensors(), quantize, is_quantized=is_linear)
    check_loadable(write(tmp_path, packed, quantization=table, quantization_config=table))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (None, "has no table `quantization`"),
        ("4bit", "has no table `quantization`"),
        ({"bits": 4, "group_size": 32, "mode": "nf4"}, "unknown mode 'nf4'"),
        ({"bits": 4, "group_size": 32, "mode": 7}, "unknown mode 7"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp8"}, "bits = 4 and group_size = 32"),
        ({"bits": 7, "group_size": 32}, "bits = 7"),
        ({"bits": "4", "group_size": 32}, "bits = '4'"),
        ({"bits": True, "group_size": 32}, "bits = True"),
        ({"bits": [4], "group_size": 32}, "bits = [4]"),
        ({"bits": 4, "group_size": 48}, "group_size = 48"),
        ({"group_size": 32}, "bits = None"),
        ({"bits": 4, "group_size": 32, LAYER: {"bits": 9, "group_size": 32}}, "bits = 9"),
        ({"bits": 4, "group_size": 32, LAYER: {"bits": 8, "group_size": 32}}, "other sizes"),
    ],
)
def test_a_configuration_that_does_not_describe_mlxs_format_is_refused(
    tmp_path: Path, table: Any, said: str
) -> None:
    packed, _ = replaced(plain_tensors(), own_form(), is_quantized=is_linear)
    config = {} if table is None else {"quantization": table}
    assert said in refusal(write(tmp_path, packed, **config))


def test_a_layer_without_biases_is_refused(tmp_path: Path) -> None:
    packed, _ = replaced(plain_tensors(), own_form(), is_quantized=is_linear)
    del packed[f"{LAYER}.biases"]
    said = refusal(write(tmp_path, packed, quantization={"bits": 4, "group_size": 32}))
    assert f"{LAYER}.biases is missing" in said


def test_mlxs_format_mixed_with_another_is_refused(tmp_path: Path) -> None:
    packed, _ = replaced(plain_tensors(), own_form(), is_quantized=is_linear)
    packed["model.embed_tokens.weight"] = ("F8_E4M3", np.zeros((96, 64), np.uint8))
    said = refusal(write(tmp_path, packed, quantization={"bits": 4, "group_size": 32}))
    assert "quantized as FP8" in said


@pytest.mark.parametrize("name", SETTINGS_FILES)
def test_a_damaged_settings_file_is_refused(tmp_path: Path, name: str) -> None:
    write_bare_model(tmp_path)
    (tmp_path / name).write_text("[" * 100_000)
    assert f"{name} is not valid JSON" in refusal(tmp_path)
