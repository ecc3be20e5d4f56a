"""Checks and reads a model folder before MLX does: configuration, weight files, context window.

MLX reads lazily, and evaluating a truncated file can abort the whole process. So the header of each
file is compared with the file's size first. These checks read only headers and JSON files.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.errors import ModelLoadError
from holdfast.files import open_regular, read_regular

WEIGHT_FILES = "model*.safetensors"  # the files that mlx-lm reads
_CONFIG = "config.json"
_WANTED = f"a model is a folder with {_CONFIG} and {WEIGHT_FILES}, or an id on the Hub (owner/name)"
_MLX_FORMAT = (
    "Take the model in MLX's format from the Hub (mlx-community has most: holdfast serve "
    "mlx-community/Qwen3-4B-4bit), or convert the original one: mlx_lm.convert --hf-path owner/name"
)
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER_BYTES = 256 << 20
_LFS_POINTER = b"version https://git-lfs"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
_REMAPPINGS = re.compile(r"^MODEL_\w*REMAPPING = (\{.*?^\})", re.MULTILINE | re.DOTALL)
# the keys that model families use, the most common one first
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "model_max_length",
    "max_context_length",
)
_NESTED_KEYS = ("text_config", "llm_config", "language_config")
_EXTENDING_ROPE = ("yarn", "longrope", "su", "dynamic", "linear")
_ABSURD_TOKENS = 1 << 31  # tokenizers write 1e30 for an unknown length
LONGEST_ANSWER_TOKENS = 32_000  # agents should reserve at most this much for an answer
UNKNOWN_CONTEXT_TOKENS = 32768  # used for recurrent models, which have no limit of their own


def checked_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the model in the folder.

    Raises ModelLoadError with a message of one line.
    """
    check_is_folder(folder)
    config = read_json(folder / _CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{folder / _CONFIG} has no model_type")
    return config


def checked_tensor_bytes(folder: Path) -> int:
    """The total size of the tensors in all weight files.

    Raises ModelLoadError with a message of one line if a file is missing or truncated.
    """
    files = sorted(folder.glob(WEIGHT_FILES))
    _check_shards(folder)
    if not files:
        raise _no_weights(folder)
    return sum(_end_of_tensors(read_header(file)) for file in files)


def check_is_folder(folder: Path) -> None:
    """Raise ModelLoadError if this is not a model's folder. The message says what to do instead."""
    if not folder.exists():
        raise ModelLoadError(f"there is no model folder {folder}{_likely_meant(folder)}")
    if folder.is_dir():
        if not (folder / _CONFIG).is_file():
            raise ModelLoadError(
                f"{folder} has no {_CONFIG}: it is not a model folder{_found_instead(folder)}"
            )
        _refuse_special_files(folder)
    elif folder.suffix.lower() == ".gguf":
        raise ModelLoadError(
            f"{folder} is a GGUF file, the format of llama.cpp; {_WANTED}. {_MLX_FORMAT}"
        )
    elif (folder.parent / _CONFIG).is_file():
        raise ModelLoadError(
            f"{folder} is one file of a model; use its folder instead: {folder.parent}"
        )
    else:
        raise ModelLoadError(f"{folder} is a file; {_WANTED}")


def _refuse_special_files(folder: Path) -> None:
    """Raise ModelLoadError if a folder, or a folder in it, has a file whose opening may never end.
    The libraries that read a model's files open whatever has the right name.
    """
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        try:
            kind = path.stat().st_mode
        except OSError:  # a link without a target, or no permission: reading it will say so
            continue
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise ModelLoadError(f"{path} is not a regular file; remove it or download it again")


def _likely_meant(folder: Path) -> str:
    """Suggest the folder with the most similar name, as the end of a sentence; empty if there is
    none.
    """
    try:
        neighbours = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(folder.name, neighbours, n=1)
    return f"; did you mean {folder.parent / near[0]}?" if near else ""


def _found_instead(folder: Path) -> str:
    """Explain why a folder has no configuration, as the end of a sentence; empty without an
    explanation.
    """
    inner = sorted(
        path.parent
        for pattern in (f"*/{_CONFIG}", f"snapshots/*/{_CONFIG}")
        for path in folder.glob(pattern)
    )
    if inner:
        return f"; did you mean {inner[0]}?"
    if next(folder.glob("*.gguf"), None) is not None:
        return f", but has GGUF files, the format of llama.cpp. {_MLX_FORMAT}"
    return ""


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelLoadError if there is none."""
    try:
        content = json.loads(read_regular(file))
    except FileNotFoundError:
        raise ModelLoadError(
            f"{file.parent} has no {file.name}: it is not a model folder"
        ) from None
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # invalid JSON, not UTF-8, or too deep
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} does not contain a JSON object")
    return content


def _check_shards(folder: Path) -> None:
    index = folder / _INDEX
    if not index.exists():
        return
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict):
        raise ModelLoadError(f"{index} has no weight_map")
    named = {str(name) for name in mapping.values()}
    missing = sorted(name for name in named if not (folder / name).exists())
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of {len(named)} weight files: {_some(missing)}; "
            "download the model again"
        )


def _no_weights(folder: Path) -> ModelLoadError:
    others = sorted(name for name in os.listdir(folder) if name.endswith(_OTHER_WEIGHTS))
    if not others:
        return ModelLoadError(f"{folder} has no weights ({WEIGHT_FILES})")
    return ModelLoadError(
        f"{folder} has no {WEIGHT_FILES}, only {_some(others)}; convert the model first: "
        f"mlx_lm.convert --hf-path {folder} --mlx-path NEW_FOLDER"
    )


def read_header(file: Path) -> dict[str, Any]:
    """Return the header of a weight file: the entry of each tensor, by name.

    Raises ModelLoadError if the file is truncated. Source:
    https://github.com/huggingface/safetensors#format.
    """
    try:
        size = file.stat().st_size
        with open_regular(file) as opened:
            start = opened.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise ModelLoadError(
                    f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its "
                    "folder"
                )
            header_bytes = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
            if not 2 <= header_bytes <= min(_LARGEST_HEADER_BYTES, size - 8):
                raise ModelLoadError(
                    f"{file} ({size:,} bytes) is damaged or cut short, because its header does "
                    "not fit into the file; download the file again"
                )
            opened.seek(8)
            header: dict[str, Any] = json.loads(opened.read(header_bytes))
        header.pop("__metadata__", None)
        expected = _end_of_tensors(header)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelLoadError(
            f"{file} is damaged: its header is not that of a safetensors file; download the file "
            "again"
        ) from error
    if 8 + header_bytes + expected != size:
        raise ModelLoadError(
            f"{file} is damaged or cut short: {8 + header_bytes + expected:,} bytes expected, "
            f"{size:,} found; download the file again"
        )
    return header


def _end_of_tensors(header: Mapping[str, Any]) -> int:
    """Return the end of the last tensor, relative to the header.

    Raises ValueError and other errors if the header is invalid.
    """
    last = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end:
            raise ValueError(name)
        last = max(last, end)
    return last


def _some(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def check_loadable(folder: Path) -> Mapping[str, Any]:
    """Return the configuration if mlx-lm can load the model.

    Checks only file names and config.json, which takes 0.1 ms; truncated files are noticed when the
    model is loaded. Raises ModelLoadError with the reason.
    """
    try:
        return _checked(folder)
    except OSError as error:  # for example no permission, or a name that is too long
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror or error}") from None


def _checked(folder: Path) -> Mapping[str, Any]:
    check_is_folder(folder)
    config = checked_config(folder)
    model_type = str(config["model_type"])
    if not (
        is_supported(model_type) or config.get("model_file") or _is_supported_with_vision(config)
    ):
        raise ModelLoadError(f"the installed mlx-lm has no models of the type {model_type}")
    weights = [name for name in os.listdir(folder) if fnmatchcase(name, WEIGHT_FILES)]
    if not weights:
        raise _no_weights(folder)
    shards = [match for name in weights if (match := _SHARD.fullmatch(name))]
    if shards and len(shards) < (wanted := int(shards[0][2])):
        raise ModelLoadError(f"only {len(shards)} of {wanted} weight files are in {folder}")
    return config


def is_supported(model_type: str) -> bool:
    """Whether the installed mlx-lm supports a `model_type` of config.json."""
    if not re.fullmatch(r"\w[\w.-]*", model_type):
        return False
    return model_type in _modules() or _remapping().get(model_type) in _modules()


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a model with vision."""
    return bool(config.get("vision_config"))


def can_see(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a model with vision, and what its images need is
    installed.
    """
    return has_vision(config) and _package("mlx_vlm") is not None


def _is_supported_with_vision(config: Mapping[str, Any]) -> bool:
    """Whether only mlx-vlm supports a model, and is installed."""
    model_type = str(config["model_type"])
    return has_vision(config) and (
        _remapping("mlx_vlm").get(model_type, model_type) in _modules("mlx_vlm")
    )


def _package(name: str) -> Path | None:
    """The folder of mlx-lm or mlx-vlm, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def _modules(package: str = "mlx_lm") -> frozenset[str]:
    folder = _package(package)
    return (
        frozenset()
        if folder is None
        else frozenset(each.stem for each in (folder / "models").iterdir())
    )


@cache
def _remapping(package: str = "mlx_lm") -> dict[str, str]:
    """Return the model types that a package maps to another module.

    Read from its source, because importing it would import MLX.
    """
    found: dict[str, str] = {}
    folder = _package(package)
    if folder is None:
        return found
    for table in _REMAPPINGS.findall((folder / "utils.py").read_text(encoding="utf-8")):
        for key, module in ast.literal_eval(table).items():
            found[key[0] if isinstance(key, tuple) else key] = module
    return found


def context_tokens(
    config: Mapping[str, Any], *, tokenizer_limit: object = None, requested: int | None = None
) -> int:
    """The length in tokens of the longest sequence that the model can process.

    requested: the setting model.context_tokens. tokenizer_limit: model_max_length, used if the
    configuration has no length. Raises ModelLoadError if `requested` exceeds the model's own limit.
    """
    known = own_context_tokens(config, tokenizer_limit=tokenizer_limit)
    if known and requested is not None and requested > known:
        raise ModelLoadError(
            f"model.context_tokens = {requested:,} is more than the model's own {known:,} tokens"
        )
    return requested or known or UNKNOWN_CONTEXT_TOKENS


def own_context_tokens(config: Mapping[str, Any], *, tokenizer_limit: object = None) -> int:
    """The context that the model was trained for; 0 if neither config nor tokenizer tells it.

    tokenizer_limit: as for `context_tokens`.
    """
    return known_context_tokens(config) or _sane(tokenizer_limit)


def planned_answer_tokens(context_tokens: int) -> int:
    """The number of tokens that an agent should reserve for an answer.

    An answer may fill the rest of the context. But agents reserve this much before each turn, so a
    larger number would leave too little for the conversation.
    """
    return min(LONGEST_ANSWER_TOKENS, context_tokens // 4)


def known_context_tokens(config: Mapping[str, Any]) -> int:
    """The longest sequence in tokens according to config.json; 0 if config.json does not say."""
    return next((value for part in parts_of(config) if (value := _own_context(part))), 0)


def parts_of(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration, and the configurations of text models nested in it."""
    yield config
    for key in _NESTED_KEYS:
        if isinstance(inner := config.get(key), Mapping):
            yield inner


def _own_context(config: Mapping[str, Any]) -> int:
    plain = next((value for key in _CONTEXT_KEYS if (value := _sane(config.get(key)))), 0)
    return max(plain, _extended_context(config)) if plain else 0


def _extended_context(config: Mapping[str, Any]) -> int:
    """The context window after RoPE scaling; 0 if the configuration has no original window."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return 0
    kind = scaling.get("rope_type", scaling.get("type"))
    original, factor = _sane(scaling.get("original_max_position_embeddings")), scaling.get("factor")
    if (
        kind not in _EXTENDING_ROPE
        or not original
        or not isinstance(factor, int | float)
        or not math.isfinite(factor)
    ):
        return 0
    return int(original * factor)


def _sane(value: object) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < _ABSURD_TOKENS
    ):
        return 0
    return int(value)
