"""Each accepted weight format gives the same logits as the equivalent plain weights.

For every model type in `READ_FORMATS`, compares the logits of a tiny model with quantized weights
to those with the equivalent plain weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from holdfast.config import ModelSettings
from holdfast.errors import UnusableModel
from holdfast.models.foreign_formats import READ_FORMATS
from holdfast.worker.engine.load import load_model
from tests.fakes import foreign_weights as forms
from tests.fakes.adapters import write_tiny_adapter
from tests.fakes.every_config import tiny_config
from tests.fakes.foreign_weights import Array, Quantize, Stored, is_linear, replaced, stored
from tests.fakes.tiny_models import make_model, write_tokenizer

TOKENS = mx.array([[(i * 7) % 90 + 2 for i in range(20)]])
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
INT4_WEIGHTS = {"num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_WEIGHTS}},
}
# so that a weight has several blocks of 128, some of them partial
LARGER = {"hidden_size": 192, "intermediate_size": 256}
# only the first of the two FP8 forms
_MODEL_TYPES = {each.methods[0]: each.model_types for each in reversed(READ_FORMATS)}
_DAILY = {"llama", "qwen3", "deepseek_v3", "minimax"}
_EXPERTS = re.compile(r"(.*)\.switch_mlp\.(\w+)\.weight")
_OF_MINIMAX = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def listed(method: str) -> list[Any]:
    """The model types for which a format is accepted; the daily tests use only a few."""
    types: Collection[str] = _MODEL_TYPES[method]
    return [
        pytest.param(name, marks=[] if name in _DAILY else pytest.mark.slow)
        for name in sorted(types)
    ]


def as_published(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors with one weight per expert, as models are published."""
    found = {}
    for name, array in tensors.items():
        match = _EXPERTS.fullmatch(name)
        if match is None or array.ndim != 3:
            found[name] = array
            continue
        mlp, part = match.groups()
        part = _OF_MINIMAX[part] if mlp.endswith("block_sparse_moe") else part
        for number, expert in enumerate(array):
            found[f"{mlp}.experts.{number}.{part}.weight"] = expert
    return found


def plain_tensors(config: Mapping[str, Any]) -> dict[str, Array]:
    parameters = tree_flatten(make_model(config).parameters())
    return as_published({name: np.array(each.astype(mx.float32)) for name, each in parameters})


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    forms.write_safetensors(folder / "model.safetensors", tensors)
    write_tokenizer(folder)
    return folder


def logits(folder: Path) -> Array:
    loaded = load_model(folder, ModelSettings(dtype="float32"), progress=lambda *_: None)
    return np.array(loaded.model(TOKENS).astype(mx.float32))


def adapted_logits(folder: Path, adapter: Path) -> Array:
    settings = ModelSettings(dtype="float32", adapters=(f"sql={adapter}",))
    loaded = load_model(folder, settings, progress=lambda *_: None)
    assert loaded.adapters is not None
    return np.array(loaded.adapters.call("sql", loaded.model, TOKENS).astype(mx.float32))


def difference(
    folder: Path,
    config: Mapping[str, Any],
    quantize: Quantize,
    method: Mapping[str, Any],
    *,
    is_quantized: Callable[[str], bool],
) -> float:
    """The largest difference of the logits, relative to the largest logit."""
    foreign, plain = replaced(plain_tensors(config), quantize, is_quantized=is_quantized)
    assert len(foreign) > len(plain), "nothing was quantized"
    found = logits(write(folder / "foreign", {**config, "quantization_config": method}, foreign))
    wanted = logits(write(folder / "plain", config, plain))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def rounded(quantize: Quantize) -> Quantize:
    """The same quantization, for models whose weights mlx-lm rounds to bfloat16."""

    def changed(weight: Array) -> tuple[dict[str, Stored], Array]:
        parts, plain = quantize(weight)
        bits = np.ascontiguousarray(plain, np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return parts, nearest.astype(np.uint32).view(np.float32)

    return changed


@pytest.mark.parametrize("model_type", listed("awq"))
def test_autoawq_weights(tmp_path: Path, model_type: str) -> None:
    found = difference(
        tmp_path,
        tiny_config(model_type),
        forms.awq(),
        AWQ,
        is_quantized=lambda name: "proj" in name,
    )
    assert found < 0.02  # all other weights are rounded to the float16 of the scales


@pytest.mark.parametrize("changes", [{}, LARGER], ids=["one block", "several blocks"])
@pytest.mark.parametrize("model_type", listed("fp8"))
def test_fp8_block_weights(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    config = {**tiny_config(model_type), **changes}
    found = difference(
        tmp_path, config, rounded(forms.fp8_blocks()), FP8, is_quantized=_is_linear_or_expert
    )
    assert found == 0.0


@pytest.mark.parametrize("model_type", listed("compressed-tensors"))
def test_packed_4_bit_weights(tmp_path: Path, model_type: str) -> None:
    found = difference(
        tmp_path, tiny_config(model_type), forms.int_packed(), INT4, is_quantized=is_linear
    )
    assert found < 1e-4


def test_mxfp4_experts(tmp_path: Path) -> None:
    """gpt-oss: gate and up projection are interleaved, and blocks have a separate axis."""
    config = tiny_config("gpt_oss")
    tensors = plain_tensors(config)
    plain = {name: stored(array) for name, array in tensors.items()}
    foreign = {name: each for name, each in plain.items() if ".experts." not in name}
    for experts in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        place = f"{experts}.experts"
        gate, up, down = (
            {end: tensors[f"{place}.{part}_proj.{end}"] for end in ("weight", "bias")}
            for part in ("gate", "up", "down")
        )
        both = {end: np.stack([gate[end], up[end]], axis=2) for end in gate}
        together = {
            end: array.reshape(len(array), -1, *array.shape[3:]) for end, array in both.items()
        }
        for part, arrays in (("gate_up_proj", together), ("down_proj", down)):
            parts, stands_for = forms.mxfp4("blocks", "scales")(arrays["weight"])
            codes, scales = parts["blocks"][1], parts["scales"]
            foreign[f"{place}.{part}_blocks"] = ("U8", codes.reshape(*scales[1].shape, 16))
            foreign[f"{place}.{part}_scales"] = scales
            foreign[f"{place}.{part}_bias"] = stored(arrays["bias"])
            if part == "down_proj":
                plain[f"{place}.{part}.weight"] = stored(stands_for)
            else:
                plain[f"{place}.gate_proj.weight"] = stored(stands_for[:, ::2])
                plain[f"{place}.up_proj.weight"] = stored(stands_for[:, 1::2])
    config_of_foreign = {**config, "quantization_config": {"quant_method": "mxfp4"}}
    found = logits(write(tmp_path / "foreign", config_of_foreign, foreign))
    wanted = logits(write(tmp_path / "plain", config, plain))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


# names of mlx-lm → names in the published model
_OF_DEEPSEEK_V41 = {
    "lm_head.weight": "head.weight",
    "model.embed_tokens.weight": "embed.weight",
    "model.": "",
    ".self_attn.": ".attn.",
    ".mlp.": ".ffn.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".attn_hc.": ".hc_attn_",
    ".ffn_hc.": ".hc_ffn_",
    ".sinks": ".attn_sink",
    ".q_a_proj.": ".wq_a.",
    ".q_b_proj.": ".wq_b.",
    ".kv_proj.": ".wkv.",
    ".compressor.gate_proj.": ".compressor.wgate.",
    ".o_a_proj.": ".wo_a.",
    ".o_b_proj.": ".wo_b.",
    ".q_a_norm.": ".q_norm.",
    ".compressor.kv_norm.": ".compressor.norm.",
    ".k_proj.": ".wk.",
    ".gate.e_score_correction_bias": ".gate.bias",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}


def test_the_published_format_of_deepseek_v41(tmp_path: Path) -> None:
    """Its own names, FP8 for most weights, FP4 for experts, and scales that are powers of two."""
    config = tiny_config("deepseek_v41")
    parameters = tree_flatten(make_model(config).parameters())
    tensors = {name: np.array(each.astype(mx.float32)) for name, each in parameters}
    fp4 = forms.mxfp4("weight", "scale")
    foreign: dict[str, Stored] = {}
    plain: dict[str, Stored] = {}
    for name, array in tensors.items():
        published = name
        for mlx_name, own in _OF_DEEPSEEK_V41.items():
            published = published.replace(mlx_name, own)
        layer = published.removesuffix("weight")
        plain[name] = stored(array)
        if ".switch_mlp." in name:
            experts = [fp4(expert) for expert in array]
            for number, (parts, _) in enumerate(experts):
                own = layer.replace("experts.switch_mlp", f"experts.{number}")
                foreign[f"{own}weight"] = ("I8", parts["weight"][1].view(np.int8))
                foreign[f"{own}scale"] = ("F8_E8M0", parts["scale"][1])
            plain[name] = stored(np.stack([stands_for for _, stands_for in experts]))
        elif re.search(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|wk|w[123])\.weight$", published):
            parts, stands_for = forms.fp8_powers(array.reshape(-1, array.shape[-1]))
            foreign |= {layer + part: each for part, each in parts.items()}
            plain[name] = stored(stands_for.reshape(array.shape))
        else:
            foreign[published] = plain[name]
    method = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    config_of_foreign = {**config, "quantization_config": method}
    found = logits(write(tmp_path / "foreign", config_of_foreign, foreign))
    wanted = logits(write(tmp_path / "plain", config, plain))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_an_adapter_works_the_same_over_such_weights(tmp_path: Path, form: str) -> None:
    name, quantize, method = {
        "awq": ("llama", forms.awq(), AWQ),
        "fp8": ("deepseek_v3", rounded(forms.fp8_blocks()), FP8),
    }[form]
    adapter = write_tiny_adapter(tmp_path / "sql", name, seed=1)
    config = tiny_config(name)
    foreign, plain = replaced(plain_tensors(config), quantize, is_quantized=is_linear)
    config_of_foreign = {**config, "quantization_config": method}
    found = adapted_logits(write(tmp_path / "foreign", config_of_foreign, foreign), adapter)
    plain_folder = write(tmp_path / "plain", config, plain)
    wanted = adapted_logits(plain_folder, adapter)
    assert np.abs(wanted - logits(plain_folder)).max() > 0.1 * np.abs(wanted).max()
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


def test_integers_that_reach_the_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.engine.load.checked_tensors", lambda *_: {})
    config = tiny_config("llama")
    for number, quantize in enumerate((forms.bare_fp8, forms.bare("I8", np.int8))):
        foreign, _ = replaced(plain_tensors(config), quantize, is_quantized=is_linear)
        folder = write(tmp_path / str(number), config, foreign)
        with pytest.raises(UnusableModel, match=r"_proj\.weight has numbers of the type mlx\.core"):
            logits(folder)


def _is_linear_or_expert(name: str) -> bool:
    return is_linear(name) or (".experts." in name and name.endswith(".weight"))
