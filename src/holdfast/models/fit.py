"""The size of a model, how many agents fit into a given memory with it, and which quantization to
use.

Sizes come from config.json and from the headers of the weight files, in a folder or on the Hub. The form
of a model is the original one ("as is"), or a quantization to some bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from holdfast.errors import UnusableModel
from holdfast.models.foreign_formats import SETTINGS_FILES
from holdfast.models.hub import ModelSource, check_reachable, hub_errors
from holdfast.models.loadable import check_loadable
from holdfast.models.model_folder import WEIGHT_FILES
from holdfast.models.quantization import check_weights
from holdfast.models.weight_files import checked_tensors, tensor_bytes

_WEIGHTS_SHARE = 0.75  # share of the memory that macOS lets a GPU use, if system and GPU share it
_KV_SHARE = 0.6  # of the memory that the weights leave free, as in `device_memory`
_GROUP_BITS = 32 / 64  # 16 bits each for scale and bias, per 64 weights
BITS = (8, 6, 4)
AS_IS = "as is"
# (agents, tokens of each), the most ambitious aim first
_AIMS = ((4, 32768), (1, 32768), (4, 8192), (1, 8192), (1, 2048))
_CONFIG = "config.json"
_SCALES = ".scales"
_GROUP_SIZE = 64  # the default of mlx-lm
_CONNECTIONS = 8
# names of the table in config.json: that of MLX, and that of transformers
_QUANTIZATION = ("quantization", "quantization_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The memory that a model needs."""

    weight_bytes: int
    bytes_per_token: int  # of each agent's context
    fixed_bytes: int  # for each agent, whatever the length of its context

    def agents(self, tokens: int, *, memory_bytes: int) -> int:
        """How many agents with that many tokens each fit into the memory; 0 if not even the weights
        fit.
        """
        kv_bytes = int((memory_bytes - self.weight_bytes) * _KV_SHARE)
        return max(kv_bytes, 0) // max(tokens * self.bytes_per_token + self.fixed_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The form of a model (original or quantized) that suits a given memory size."""

    total_bytes: int  # the memory size
    form: str  # "as is", "4 bits" and so on; "none" if no form fits
    need: Need
    agents: int  # how many fit; 0 if no form fits
    tokens: int  # for each agent


def usable_of(total_bytes: int) -> int:
    """How many bytes weights and KV may use, if system and GPU share a memory of this size."""
    return int(total_bytes * _WEIGHTS_SHARE)


def choice_for(total_bytes: int, need: Need, *, parameters: int, context_tokens: int) -> Choice:
    """Choose the form of a model for a memory of `total_bytes`.

    Finds the most ambitious aim (a number of agents and tokens) that any form can serve, and
    returns the least quantized form that serves it. need: the needs of the model as stored. Returns
    the form "none" if no form fits.
    """
    quantized_bytes = {f"{bits} bits": int(parameters * (bits + _GROUP_BITS) / 8) for bits in BITS}
    forms = [(AS_IS, need)]
    forms += [
        (form, replace(need, weight_bytes=weight_bytes))
        for form, weight_bytes in quantized_bytes.items()
        if weight_bytes < need.weight_bytes
    ]
    usable_bytes = usable_of(total_bytes)
    for wanted_agents, wanted_tokens in _AIMS:
        tokens = min(wanted_tokens, context_tokens)
        for form, form_need in forms:
            agents = form_need.agents(tokens, memory_bytes=usable_bytes)
            if agents >= wanted_agents:
                return Choice(
                    total_bytes=total_bytes, form=form, need=form_need, agents=agents, tokens=tokens
                )
    return Choice(
        total_bytes=total_bytes,
        form="none",
        need=forms[-1][1],
        agents=0,
        tokens=min(_AIMS[-1][1], context_tokens),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSize:
    """The stored size of a model."""

    config: Mapping[str, Any]  # the content of config.json
    weight_bytes: int
    parameters: int  # scales of quantized weights do not count

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, including the scales and biases of quantized groups."""
        return 8 * self.weight_bytes / max(self.parameters, 1)


def size_of_folder(folder: Path) -> StoredSize:
    """The size of the model in a folder. Raises ModelLoadError if it is incomplete."""
    config = check_loadable(folder)
    tensors = checked_tensors(folder, config)
    return StoredSize(
        config=config,
        weight_bytes=tensor_bytes(tensors),
        parameters=_parameters(_shapes(tensors), config),
    )


def size_on_hub(source: ModelSource) -> StoredSize:
    """The size of a model on the Hub.

    Fetches only file lists and headers. Raises ModelLoadError.
    """
    from huggingface_hub import HfApi

    revision = source.revision or None
    with hub_errors(source):
        check_reachable()
        api = HfApi()
        files = {
            entry.path: entry.size
            for entry in api.list_repo_tree(source.name, revision=revision)
            if hasattr(entry, "size")
        }
        weights = [name for name in files if fnmatchcase(name, WEIGHT_FILES)]
        if _CONFIG not in files or not weights:
            raise UnusableModel(
                f"{source.name} on the Hub has no files of an MLX model ({_CONFIG}, "
                f"{WEIGHT_FILES}){_gguf_note(files)}"
            )
        config = _json_on_hub(source, _CONFIG)
        beside = {name: _json_on_hub(source, name) for name in SETTINGS_FILES if name in files}

        def tensors_of(file_name: str) -> dict[str, dict[str, Any]]:
            """The entries of a weight file's header on the Hub, by name."""
            header = api.parse_safetensors_file_metadata(source.name, file_name, revision=revision)
            return {
                name: {
                    "dtype": str(tensor.dtype),
                    "shape": list(tensor.shape),
                    "bytes": tensor.data_offsets[1] - tensor.data_offsets[0],
                }
                for name, tensor in header.tensors.items()
            }

        tensors = _all_tensors(tensors_of, weights)
    try:
        check_weights(config, tensors, beside)
    except UnusableModel as error:
        raise UnusableModel(f"{source.name} on the Hub: {error}") from None
    return StoredSize(
        config=config,
        weight_bytes=sum(entry["bytes"] for entry in tensors.values()),
        parameters=_parameters(_shapes(tensors), config),
    )


def _json_on_hub(source: ModelSource, name: str) -> dict[str, Any]:
    """The JSON object in a file on the Hub. Raises UnusableModel, and errors that `hub_errors`
    turns into ModelLoadError.
    """
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status

    # this function is public, but untyped
    headers = importlib.import_module("huggingface_hub.utils").build_hf_headers()
    url = hf_hub_url(source.name, name, revision=source.revision or None)
    response = get_session().get(url, headers=headers)
    hf_raise_for_status(response)
    try:
        content = response.json()
    except (ValueError, RecursionError) as error:
        raise UnusableModel(f"{name} of {source.name} on the Hub is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UnusableModel(f"{name} of {source.name} on the Hub does not contain a JSON object")
    return content


def _all_tensors(
    tensors_of: Callable[[str], dict[str, dict[str, Any]]], file_names: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """The tensors of all files, by name. tensors_of: fetches those of one file; run in parallel."""
    with ThreadPoolExecutor(max_workers=_CONNECTIONS) as pool:
        tensors_of_files = pool.map(tensors_of, file_names)
        return {name: entry for tensors in tensors_of_files for name, entry in tensors.items()}


def _shapes(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}


def _gguf_note(files: Iterable[str]) -> str:
    """The end of an error message if there are GGUF files, which this server cannot load."""
    if any(name.endswith(".gguf") for name in files):
        return ", only GGUF files, the format of llama.cpp"
    return ""


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How the weights are quantized, as config.json tells it; empty if they are not."""
    return next((config[key] for key in _QUANTIZATION if isinstance(config.get(key), Mapping)), {})


def _weights_per_item(part: str) -> int | None:
    """The number of weights packed into each element of a tensor in another tool's format; None for
    all other tensors. 0: the tensor has no weights (scales, zero points). part: the last part of the
    tensor's name.
    """
    counts = {"qweight": 8, "weight_packed": 8, "_blocks": 2, "qzeros": 0, "weight_shape": 0}
    counts |= dict.fromkeys(("_scales", "weight_scale", "weight_scale_inv"), 0)
    return next((count for suffix, count in counts.items() if part.endswith(suffix)), None)


def _parameters(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> int:
    """The number of parameters.

    The parameters of a quantized weight are its scales times the group size. shapes: of all tensors.
    """
    table = quantization_of(config)  # may have a table for a layer, by its name
    default_size = table.get("group_size", _GROUP_SIZE)
    parameters = 0
    for name, shape in shapes.items():
        layer, _, part = name.rpartition(".")
        scales = shapes.get(layer + _SCALES)
        if (per_item := _weights_per_item(part)) is not None:
            parameters += prod(shape) * per_item
        elif scales is None:
            parameters += prod(shape)
        elif part == "weight":
            of_layer = table.get(layer)
            group_size = default_size
            if isinstance(of_layer, Mapping):
                group_size = of_layer.get("group_size", default_size)
            parameters += prod(scales) * int(group_size)
        elif part == "bias":
            parameters += prod(shape)
    return parameters
