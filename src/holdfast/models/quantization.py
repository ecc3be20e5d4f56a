"""Checks from a model's configuration and headers whether its weights would be read correctly.

mlx-lm looks only at names and shapes. It would load weights of types that it does not know (FP8,
INT8) as integers from 0 to 255, and answers would be noise. So a model is refused unless each of
its tensors is known: plain floating-point numbers, MLX's own quantization, or one of the few
formats of other tools that mlx-lm converts correctly (`foreign_formats`).

Packed layers are those in MLX's format: LAYER.weight has several codes in each integer, LAYER.scales and
LAYER.biases have a number per group. All other quantized tensors are foreign.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.errors import UnusableModel
from holdfast.models.foreign_formats import PLAIN, READ_FORMATS, Declared, Tensors, declared_of

HOW_TO_CONVERT = (
    "Take the model in MLX's format from the Hub (mlx-community has most: holdfast serve "
    "mlx-community/Qwen3-4B-4bit), or convert the original one: mlx_lm.convert --hf-path owner/name"
)
_INTEGER_BUFFERS = ("I64", "BOOL")  # no format packs weights in them
# buffers of models that are integers, of any type
_BUFFERS = ("position_ids", "token_type_ids", "relative_position_index", "masked_bias", "tid2eid")
# the sizes of groups, by mode and bits
_MLX_MODES: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "affine": dict.fromkeys((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": {4: (32,)},
    "nvfp4": {4: (16,)},
    "mxfp8": {8: (32,)},
}
# suffixes of the names of other tools' tensors → the format
_SIGNATURES = {
    "g_idx": "GPTQ",
    "qweight": "AWQ or GPTQ",
    "qzeros": "AWQ or GPTQ",
    "weight_packed": "compressed-tensors",
    "weight_zero_point": "compressed-tensors",
    "weight_global_scale": "compressed-tensors",
    "weight_scale_2": "ModelOpt",
    "SCB": "bitsandbytes (INT8)",
    "absmax": "bitsandbytes (4 bits)",
    "quant_map": "bitsandbytes (4 bits)",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "_blocks": "MXFP4",
    "_scales": "MXFP4",
    "_data": "Quanto",
    "weight_scale_inv": "FP8",
    "weight_scale": "FP8 or INT8",
}
# suffixes of the names of other tools' floating-point tensors
_FOREIGN_SCALES = (
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "SCB", "absmax", "quant_map"),
)
# if config.json declares one of these methods, mlx-lm fails unless weights are quantized with it
_METHODS_OF_QUANTIZED = ("awq", "gptq", "bitnet", "modelopt")


def check_weights(
    config: Mapping[str, Any], tensors: Tensors, beside: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise UnusableModel, with the name of the format, if the weights would be read wrongly.

    beside: the contents of those SETTINGS_FILES that the model has, by name.
    """
    declared = declared_of(config, beside)
    packed_layers = {
        name.removesuffix(".weight")
        for name, entry in tensors.items()
        if name.endswith(".weight")
        and entry["dtype"] == "U32"
        and name.removesuffix("weight") + "scales" in tensors
    }
    if packed_layers:
        _check_mlx_format(config, tensors, packed_layers)
    foreign = {
        name: entry
        for name, entry in tensors.items()
        if _is_foreign(name, entry) and not _is_in_layers(name, packed_layers)
    }
    if not foreign:
        _check_that_plain_weights_are_read(declared, is_packed=bool(packed_layers))
    elif packed_layers or not any(
        each.reads(config, declared, tensors, foreign) for each in READ_FORMATS
    ):
        raise _unknown_format(config, declared, tensors, foreign)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _is_foreign(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether a tensor is not a plain weight."""
    dtype = entry["dtype"]
    if dtype in PLAIN:
        # scales of other tools; any others are weights, such as `layer_scale`
        return _last_part(name) in _FOREIGN_SCALES
    if dtype in _INTEGER_BUFFERS:
        return _last_part(name) == "weight"
    is_causal_mask = len(entry["shape"]) == 4 and entry["shape"][:2] == [1, 1]  # of GPT-2, CodeGen
    return not (is_causal_mask or _last_part(name) in _BUFFERS)


def _is_in_layers(name: str, packed_layers: Collection[str]) -> bool:
    """Whether a tensor is one of a packed layer's in MLX's format."""
    layer, _, part = name.rpartition(".")
    return layer in packed_layers and part in ("weight", "scales", "biases")


# -- MLX's own format


def _check_mlx_format(
    config: Mapping[str, Any], tensors: Tensors, packed_layers: Collection[str]
) -> None:
    """Check that config.json describes the weights that MLX has packed.

    mlx-lm derives the bits and group size of a layer by itself unless config.json has a table for
    it.
    """
    table = config.get("quantization")
    declared = config.get("quantization_config")
    mode = declared.get("quant_method") if isinstance(declared, Mapping) else None
    where = "quantization"
    if table is None and isinstance(mode, str):
        # as other tools write it: mlx-lm knows bits and group size of mxfp4 and mxfp8, and no others
        where = "quantization_config"
        table = {"bits": 8 if mode == "mxfp8" else 4, "group_size": 32, "mode": mode}
    if not isinstance(table, Mapping):
        raise UnusableModel(
            "the weights are quantized in MLX's format, but config.json does not say how: it has "
            "no table `quantization` with bits and group_size. Take config.json from the same place "
            "as the weights"
        )
    _check_table(table, where=where)
    for layer, layer_table in table.items():
        if isinstance(layer_table, Mapping):  # not one of the values for all layers
            _check_table(layer_table, where=f"{where}.{layer}")
            if layer in packed_layers:
                _check_shapes(layer, layer_table, tensors)
    for layer in packed_layers:
        is_affine = tensors[f"{layer}.scales"]["dtype"] in PLAIN
        if is_affine and f"{layer}.biases" not in tensors:
            raise UnusableModel(
                f"the weights are quantized in MLX's format, but {layer}.biases is missing; "
                "download or convert the model again"
            )


def _check_table(table: Mapping[str, Any], *, where: str) -> None:
    """Raise UnusableModel if MLX does not have this mode, these bits or this group size. where: the
    place of the table in config.json, for the message.
    """
    mode = table.get("mode", "affine")
    bits: Any = table.get("bits")
    group_size: Any = table.get("group_size")
    group_sizes = _MLX_MODES.get(mode, {}) if isinstance(mode, str) else {}  # by bits
    if not group_sizes:
        raise UnusableModel(
            f"config.json names the unknown mode {mode!r} in {where}; possible: "
            f"{', '.join(_MLX_MODES)}. {HOW_TO_CONVERT}"
        )
    are_integers = _is_integer(bits) and _is_integer(group_size)
    if not are_integers or group_size not in group_sizes.get(bits, ()):
        raise UnusableModel(
            f"config.json names bits = {bits!r} and group_size = {group_size!r} for the mode {mode} "
            f"in {where}, which MLX does not have. {HOW_TO_CONVERT}"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_shapes(layer: str, settings: Mapping[str, Any], tensors: Tensors) -> None:
    """Raise UnusableModel if a row of a packed layer has another size than its settings say."""
    weight, scales = (tensors[f"{layer}.{part}"]["shape"] for part in ("weight", "scales"))
    if not weight or not scales:
        return
    row_bits = weight[-1] * 32
    if row_bits != scales[-1] * settings["group_size"] * settings["bits"]:
        raise UnusableModel(
            f"config.json says that {layer} has {settings['bits']} bits in groups of "
            f"{settings['group_size']}, but its tensors have other sizes. Take config.json from the "
            "same place as the weights"
        )


def _check_that_plain_weights_are_read(declared: Declared, *, is_packed: bool) -> None:
    """Refuse settings that make mlx-lm fail although there is nothing to convert."""
    if not is_packed and declared.is_read and declared.method in _METHODS_OF_QUANTIZED:
        raise UnusableModel(
            f"config.json says that the weights are quantized as {declared.name}, but they are not; "
            "remove `quantization_config` from config.json"
        )


def _unknown_format(
    config: Mapping[str, Any], declared: Declared, tensors: Tensors, foreign: Tensors
) -> UnusableModel:
    """The error for foreign tensors that mlx-lm would not read correctly."""
    name = declared.name or _name_by_tensors(foreign)
    example = next(
        (each for each, entry in foreign.items() if entry["dtype"] not in PLAIN),
        next(iter(foreign)),
    )
    model_type = config.get("model_type")
    return UnusableModel(
        f"the weights are quantized as {name}, which cannot be read for models of the type "
        f"{model_type} (such as {example}, {foreign[example]['dtype']}"
        f"{_without_scales(example, foreign)}). {HOW_TO_CONVERT}"
    )


def _without_scales(example: str, foreign: Tensors) -> str:
    """A note, for a message, that a foreign weight has no scales; empty if it has, or is no weight."""
    layer = example.rpartition(".")[0]
    has_others = any(name.startswith(f"{layer}.") and name != example for name in foreign)
    return ", without scales" if example.endswith(".weight") and not has_others else ""


def _name_by_tensors(foreign: Tensors) -> str:
    """The display name of a format that no file declares, by the names and dtypes of its tensors."""
    suffixes = {suffix for suffix in _SIGNATURES for name in foreign if name.endswith(suffix)}
    dtypes = sorted({entry["dtype"] for entry in foreign.values()} - {*PLAIN})
    if format_name := next(
        (_SIGNATURES[suffix] for suffix in _SIGNATURES if suffix in suffixes), ""
    ):
        return format_name
    if any(dtype.startswith("F8") for dtype in dtypes):
        return "FP8"
    if "I8" in dtypes:
        return "INT8"
    return f"an unknown format ({', '.join(dtypes)})"
