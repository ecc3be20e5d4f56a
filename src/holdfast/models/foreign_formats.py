"""Quantization formats of other tools: how they are declared, and which ones mlx-lm converts
correctly when it loads a model.

`READ_FORMATS` lists the latter, with the model types for which the logits were compared with those
of the unquantized weights (`tests/worker/engine/test_load_foreign_weights.py`).

Foreign tensors are those that are neither plain floating-point weights nor in MLX's own format. A
layer's tensors are named LAYER.PART.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

# files next to config.json in which other tools describe their quantization
SETTINGS_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
Tensors: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The tensors of all weight files by name, each with its `dtype` and `shape`."""

PLAIN = ("F32", "F16", "BF16")  # dtypes of weights that are not quantized
_GROUP_SIZES = (32, 64, 128)  # of MLX's 4-bit formats
_NESTED_KEYS = ("text_config", "llm_config", "language_config")
# display names by `quant_method`
_NAMES = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "fp_quant": "FP-Quant",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "spqr": "SpQR",
    "vptq": "VPTQ",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The quantization that a model's files declare.

    method: in lower case; empty if none is declared. is_read: whether mlx-lm reads the place where it
    is declared.
    """

    method: str = ""
    settings: Mapping[str, Any]  # the quantization's section of the file; empty if none is declared
    is_read: bool = True

    @property
    def name(self) -> str:
        """The display name of the format; empty if none is declared."""
        details = (self.settings.get(key) for key in ("format", "quant_algo"))
        stated_details = [each for each in details if isinstance(each, str) and each]
        if self.method == "bitsandbytes":
            stated_details = ["4 bits" if self.settings.get("load_in_4bit") else "INT8"]
        name = _NAMES.get(self.method, self.method)
        return f"{name} ({stated_details[0]})" if name and stated_details else name


def declared_of(config: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]]) -> Declared:
    """The quantization that a model's files declare, besides MLX's own `quantization`.

    beside: the contents of those SETTINGS_FILES that the model has, by name.
    """
    # where it may be declared: an object, the key in it, and whether mlx-lm reads it from there
    places = [(config, "quantization_config", True)]
    places += [
        (inner, "quantization_config", key == "text_config")
        for key in _NESTED_KEYS
        if isinstance(inner := config.get(key), Mapping)
    ]
    places += [(config, "compression_config", False)]
    places += [(beside, file, False) for file in SETTINGS_FILES]
    for container, key, is_read in places:
        settings = container.get(key)
        if isinstance(settings, Mapping):
            inner = settings.get("quantization")
            settings = inner if isinstance(inner, Mapping) else settings
            if method := _method_of(settings, file=key):
                return Declared(method=method, settings=settings, is_read=is_read)
    return Declared(settings={})


def _method_of(settings: Mapping[str, Any], *, file: str) -> str:
    """The quantization method that the settings name or suggest; empty: none. file: the name of the
    settings' file, or their key in config.json.
    """
    method = settings.get("quant_method")
    if isinstance(method, str) and method:
        return method.lower()
    methods_by_key = {
        "quant_algo": "modelopt",
        "config_groups": "compressed-tensors",
        "load_in_4bit": "bitsandbytes",
        "load_in_8bit": "bitsandbytes",
        "w_bit": "awq",
        "desc_act": "gptq",
    }
    suggested = next((method for key, method in methods_by_key.items() if key in settings), "")
    return suggested or ("gptq" if file == "quantize_config.json" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFormat:
    """A format that mlx-lm converts for some model types.

    fits: whether tensors are exactly in this format. Takes what the model declares, all its tensors,
        and the foreign ones.
    """

    methods: tuple[str, ...]  # as in `Declared.method`
    model_types: Collection[str]  # as in config.json
    fits: Callable[[Declared, Tensors, Tensors], bool]

    def reads(
        self, config: Mapping[str, Any], declared: Declared, tensors: Tensors, foreign: Tensors
    ) -> bool:
        """Whether mlx-lm reads the foreign tensors of a model correctly, as this format."""
        if config.get("vision_config"):  # mlx-vlm loads these, and its results were not compared
            return False
        is_declared = declared.method in self.methods and declared.is_read
        has_type = config.get("model_type") in self.model_types
        return is_declared and has_type and self.fits(declared, tensors, foreign)


def _layers(foreign: Tensors, *parts: str) -> dict[str, dict[str, Mapping[str, Any]]] | None:
    """The foreign tensors by layer and part; None unless each layer has exactly these parts."""
    layers: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, entry in foreign.items():
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, {})[part] = entry
    return layers if all(set(each) == set(parts) for each in layers.values()) else None


def _has_dtypes(layer: Mapping[str, Mapping[str, Any]], **dtypes: str) -> bool:
    """Whether the parts of a layer have these dtypes; "float" stands for all of PLAIN."""
    return all(
        layer[part]["dtype"] in (PLAIN if dtype == "float" else (dtype,))
        for part, dtype in dtypes.items()
    )


def _is_awq(declared: Declared, tensors: Tensors, foreign: Tensors) -> bool:
    """AutoAWQ's GEMM layout: `qweight` is [in, out / 8]."""
    scales_of_layers = {
        name: tensors[name]
        for each in foreign
        if (name := each.rpartition(".")[0] + ".scales") in tensors
    }
    layers = _layers({**foreign, **scales_of_layers}, "qweight", "qzeros", "scales")
    version = declared.settings.get("version", "gemm")
    if layers is None or str(version).lower() != "gemm" or declared.settings.get("bits") != 4:
        return False
    for layer in layers.values():
        weight, zeros, scales = (layer[part]["shape"] for part in ("qweight", "qzeros", "scales"))
        if not _has_dtypes(layer, qweight="I32", qzeros="I32", scales="float"):
            return False
        if not len(weight) == len(zeros) == len(scales) == 2:
            return False
        group_size = weight[0] // max(scales[0], 1)
        has_right_shapes = (
            scales == [weight[0] // max(group_size, 1), weight[1] * 8]
            and zeros == [scales[0], weight[1]]
            and group_size in _GROUP_SIZES
            and group_size * scales[0] == weight[0]
        )
        if not has_right_shapes:
            return False
    return True


def _is_fp8_in_blocks(declared: Declared, tensors: Tensors, foreign: Tensors) -> bool:
    """DeepSeek's form: a scale for each block of 128 × 128."""
    blocks = declared.settings.get("weight_block_size", [128, 128])
    layers = _layers(foreign, "weight", "weight_scale_inv")
    if layers is None or blocks != [128, 128]:
        return False
    for layer in layers.values():
        weight, scales = layer["weight"]["shape"], layer["weight_scale_inv"]["shape"]
        if not _has_dtypes(layer, weight="F8_E4M3", weight_scale_inv="float") or len(weight) != 2:
            return False
        if scales != [-(-size // 128) for size in weight]:
            return False
    return True


def _is_of_deepseek_v41(declared: Declared, tensors: Tensors, foreign: Tensors) -> bool:
    """FP8 in blocks of 32 × 32 and FP4 in groups of 32, with powers of two as scales."""
    layers = _layers(foreign, "weight", "scale")
    if layers is None:
        return False
    for layer in layers.values():
        weight, scales = layer["weight"]["shape"], layer["scale"]["shape"]
        if layer["scale"]["dtype"] not in ("F8_E8M0", "U8") or len(weight) != 2:
            return False
        if layer["weight"]["dtype"] == "F8_E4M3":
            expected_shape = [-(-size // 32) for size in weight]
        elif layer["weight"]["dtype"] in ("I8", "U8"):  # two numbers in each byte
            expected_shape = [weight[0], weight[1] // 16]
        else:
            return False
        if scales != expected_shape:
            return False
    return True


def _is_packed_int4(declared: Declared, tensors: Tensors, foreign: Tensors) -> bool:
    """`pack-quantized` of compressed-tensors, with 4 bits and without zero points."""
    layers = _layers(foreign, "weight_packed", "weight_scale")
    if layers is None or declared.settings.get("format") != "pack-quantized":
        return False
    for group in _groups(declared.settings):
        if group.get("num_bits") != 4 or group.get("symmetric") is not True:
            return False
    for name, layer in layers.items():
        weight, scales = layer["weight_packed"]["shape"], layer["weight_scale"]["shape"]
        if not _has_dtypes(layer, weight_packed="I32", weight_scale="float") or len(weight) != 2:
            return False
        if f"{name}.weight_shape" not in tensors or len(scales) != 2 or not scales[1]:
            return False
        # eight 4-bit numbers per integer; with 8 bits, there would be only four
        if weight[1] * 8 // scales[1] not in _group_sizes(declared.settings):
            return False
    return True


def _groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The quantization that compressed-tensors declares for each group of layers."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        yield weights if isinstance(weights, Mapping) else {}


def _group_sizes(settings: Mapping[str, Any]) -> set[int]:
    """The sizes of quantization groups that compressed-tensors declares, as far as MLX has them."""
    declared_sizes = [group.get("group_size") for group in _groups(settings)]
    return {size for size in _GROUP_SIZES if size in declared_sizes}


def _is_mxfp4_of_experts(declared: Declared, tensors: Tensors, foreign: Tensors) -> bool:
    """gpt-oss: blocks of 32 FP4 numbers in 16 bytes, and an exponent for each."""
    for name, entry in foreign.items():
        if entry["dtype"] != "U8" or not name.endswith(("_blocks", "_scales")):
            return False
        layer = name.removesuffix("_blocks").removesuffix("_scales")
        blocks, scales = foreign.get(f"{layer}_blocks"), foreign.get(f"{layer}_scales")
        if blocks is None or scales is None or blocks["shape"] != [*scales["shape"], 16]:
            return False
    return True


def _is_bitnet(declared: Declared, tensors: Tensors, foreign: Tensors) -> bool:
    """2-bit weights packed into bytes; mlx-lm has only a Metal kernel for them."""
    layers = _layers(foreign, "weight", "weight_scale")
    return (
        sys.platform == "darwin"
        and layers is not None
        and all(_has_dtypes(layer, weight="U8", weight_scale="float") for layer in layers.values())
    )


READ_FORMATS = (
    ForeignFormat(
        methods=("awq",),
        model_types=frozenset(
            "cohere2 exaone gemma2 gemma3_text glm4 granite helium llama minicpm mistral olmo2 phi "
            "phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2".split()
        ),
        fits=_is_awq,
    ),
    ForeignFormat(
        methods=("fp8", ""),
        model_types=frozenset(
            "deepseek_v3 deepseek_v32 glm_moe_dsa joyai_llm_flash kimi_k2 mimo_v2_flash minimax "
            "minimax_m2 mistral4".split()
        ),
        fits=_is_fp8_in_blocks,
    ),
    ForeignFormat(
        methods=("fp8",),
        model_types=("deepseek_v41", "deepseek_v41_text"),
        fits=_is_of_deepseek_v41,
    ),
    ForeignFormat(
        methods=("compressed-tensors",),
        model_types=frozenset(("deepseek_v3", "joyai_llm_flash", "kimi_k2", "mistral4")),
        fits=_is_packed_int4,
    ),
    ForeignFormat(methods=("mxfp4",), model_types=("gpt_oss",), fits=_is_mxfp4_of_experts),
    ForeignFormat(methods=("bitnet",), model_types=("bitnet",), fits=_is_bitnet),
)
