"""Reads a model folder's configuration: which model it is, whether mlx-lm supports it, and its
context window.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import errno
import importlib.util
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

from holdfast.errors import DamagedModel, ModelLoadError, UnusableModel
from holdfast.files import open_regular
from holdfast.models.quantization import HOW_TO_CONVERT

WEIGHT_FILES = "model*.safetensors"  # the files that mlx-lm reads
_CONFIG = "config.json"
_EXPLANATION = (
    f"a model is a folder with {_CONFIG} and {WEIGHT_FILES}, or an id on the Hub (owner/name)"
)
_LARGEST_JSON_BYTES = 64 << 20
# errors caused by the file itself; others, such as EMFILE or EIO, say nothing about it
_ABOUT_THE_FILE = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.ENXIO, errno.EINVAL),
)
# in mlx-lm's utils.py: a table from `model_type` to the name of another module
_REMAPPINGS = re.compile(r"^MODEL_\w*REMAPPING = (\{.*?^\})", re.MULTILINE | re.DOTALL)
# the keys of the context length that model families use, the most common one first
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
_NESTED_KEYS = ("text_config", "llm_config", "language_config")  # of text models in a configuration
_EXTENDING_ROPE = ("yarn", "longrope", "su", "dynamic", "linear")  # types that extend the context
_ABSURD_TOKENS = 1 << 31  # tokenizers write 1e30 for an unknown length
LONGEST_ANSWER_TOKENS = 32_000  # agents should reserve at most this much for an answer
UNKNOWN_CONTEXT_TOKENS = 32768  # used for recurrent models, which have no limit

# For models that recommend nothing. At temperature 1, small models get simple questions wrong that
# they can answer (measured in docs/guides/models.md).
DEFAULT_SAMPLING: Final[Mapping[str, float]] = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
}


def checked_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the model in the folder.

    Raises UnusableModel with a message of one line.
    """
    check_is_folder(folder)
    config = read_json(folder / _CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise DamagedModel(f"{folder / _CONFIG} has no model_type")
    return config


def check_is_folder(folder: Path) -> None:
    """Raise UnusableModel if this is not a model's folder. The message says what to do instead."""
    try:
        _check_is_folder(folder)
    except OSError as error:  # for example no permission, or a name that is too long
        raise _unreadable(folder, error) from None


def _check_is_folder(folder: Path) -> None:
    """As `check_is_folder`, but also raises OSError if the folder cannot be read."""
    if not folder.exists():
        raise UnusableModel(f"there is no model folder {folder}{_similar_folder(folder)}")
    if folder.is_dir():
        if not os.path.lexists(folder / _CONFIG):
            raise DamagedModel(
                f"{folder} has no {_CONFIG}: it is not a model folder{_found_instead(folder)}"
            )
        _refuse_special_files(folder)
    elif folder.suffix.lower() == ".gguf":
        raise UnusableModel(
            f"{folder} is a GGUF file, the format of llama.cpp; {_EXPLANATION}. {HOW_TO_CONVERT}"
        )
    elif (folder.parent / _CONFIG).is_file():
        raise UnusableModel(
            f"{folder} is one file of a model; use its folder instead: {folder.parent}"
        )
    else:
        raise UnusableModel(f"{folder} is a file; {_EXPLANATION}")


def _refuse_special_files(folder: Path) -> None:
    """Raise UnusableModel if a folder, or a folder in it, contains a file that may block when
    opened. The libraries that read models open any file with the right name.
    """
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        try:
            mode = path.stat().st_mode
        except OSError:  # a dangling link, or no permission: reading it will report that
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UnusableModel(f"{path} is not a regular file; remove it or download it again")


def _similar_folder(folder: Path) -> str:
    """Suggest the folder with the most similar name, as the end of a sentence; empty if there is
    none.
    """
    try:
        neighbours = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        return ""
    similar_names = difflib.get_close_matches(folder.name, neighbours, n=1)
    return f"; did you mean {folder.parent / similar_names[0]}?" if similar_names else ""


def _found_instead(folder: Path) -> str:
    """Explain why a folder lacks a configuration, as the end of a sentence; empty without an
    explanation.
    """
    inner_models = sorted(
        path.parent
        for pattern in (f"*/{_CONFIG}", f"snapshots/*/{_CONFIG}")
        for path in folder.glob(pattern)
    )
    if inner_models:
        return f"; did you mean {inner_models[0]}?"
    if next(folder.glob("*.gguf"), None) is not None:
        return f", but has GGUF files, the format of llama.cpp. {HOW_TO_CONVERT}"
    if os.path.lexists(folder / "adapter_config.json"):
        return f", but an adapter; to serve it: holdfast serve MODEL --adapter NAME={folder}"
    return ""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file of a model for reading. A pipe or a device, which could block, is not opened.

    Raises UnusableModel if the file is missing or not a regular file, and ModelLoadError if it
    cannot be read at the moment.
    """
    try:
        with open_regular(file) as content:
            yield content
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> ModelLoadError:
    """UnusableModel if the file itself is at fault, ModelLoadError if reading may succeed later."""
    reason = f"{file} cannot be read: {error.strerror or error}"
    if error.errno == errno.ENOENT and os.path.islink(file):
        return DamagedModel(f"{file} is a link to a file that is missing; download the file again")
    return UnusableModel(reason) if error.errno in _ABOUT_THE_FILE else ModelLoadError(reason)


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises UnusableModel if there is none, and ModelLoadError if
    it cannot be read at the moment.
    """
    if not os.path.lexists(file):
        raise UnusableModel(f"{file.parent} has no {file.name}: it is not a model folder")
    with opened(file) as content:
        text = content.read(_LARGEST_JSON_BYTES + 1)
    if len(text) > _LARGEST_JSON_BYTES:
        raise UnusableModel(f"{file} is larger than {_LARGEST_JSON_BYTES:,} bytes")
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise DamagedModel(f"{file} is not valid JSON: it is nested too deep") from None
    except ValueError as error:  # invalid JSON, or not UTF-8
        raise DamagedModel(f"{file} is not valid JSON: {_one_line(error)}") from error
    if not isinstance(parsed, dict):
        raise DamagedModel(f"{file} does not contain a JSON object")
    return parsed


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def is_supported(model_type: str) -> bool:
    """Whether the installed mlx-lm supports a `model_type` of config.json."""
    if not re.fullmatch(r"\w[\w.-]*", model_type):
        return False
    return model_type in _modules() or _remapping().get(model_type) in _modules()


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a model with vision."""
    return bool(config.get("vision_config"))


def can_see(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a model with vision, and the packages for images
    are installed.
    """
    return has_vision(config) and _package("mlx_vlm") is not None


def check_supported(config: Mapping[str, Any]) -> None:
    """Raise UnusableModel if no installed package has models of this type."""
    model_type = str(config["model_type"])
    has_own_code = bool(config.get("model_file"))
    if not (is_supported(model_type) or has_own_code or _is_supported_with_vision(config)):
        raise UnusableModel(f"the installed mlx-lm has no models of the type {model_type}")


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
    """The names of a package's modules with model classes; empty if it is not installed."""
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
    modules: dict[str, str] = {}  # by model type
    folder = _package(package)
    if folder is None:
        return modules
    for table in _REMAPPINGS.findall((folder / "utils.py").read_text(encoding="utf-8")):
        for key, module in ast.literal_eval(table).items():
            modules[key[0] if isinstance(key, tuple) else key] = module
    return modules


def context_tokens(
    config: Mapping[str, Any], *, tokenizer_limit: object = None, requested: int | None = None
) -> int:
    """The length in tokens of the longest sequence that the model can process.

    requested: the setting model.context_tokens. tokenizer_limit: model_max_length, used if the
    configuration has no length. Raises ModelLoadError if `requested` exceeds the model's own
    limit.
    """
    own_tokens = own_context_tokens(config, tokenizer_limit=tokenizer_limit)
    if own_tokens and requested is not None and requested > own_tokens:
        raise ModelLoadError(
            f"model.context_tokens = {requested:,} is more than the model's own {own_tokens:,} tokens"
        )
    return requested or own_tokens or UNKNOWN_CONTEXT_TOKENS


def own_context_tokens(config: Mapping[str, Any], *, tokenizer_limit: object = None) -> int:
    """The context in tokens that the model was trained for; 0 if neither config nor tokenizer tells it.

    tokenizer_limit: model_max_length, used if the configuration lacks a length.
    """
    return known_context_tokens(config) or _plausible_tokens(tokenizer_limit)


def planned_answer_tokens(context_tokens: int) -> int:
    """The number of tokens that an agent should reserve for an answer.

    An answer may fill the rest of the context. But agents reserve this much before each turn, so a
    larger number would leave too little for the conversation.
    """
    return min(LONGEST_ANSWER_TOKENS, context_tokens // 4)


def known_context_tokens(config: Mapping[str, Any]) -> int:
    """The longest sequence in tokens according to config.json; 0 if config.json does not say."""
    return next((value for part in parts_of(config) if (value := _context_of_part(part))), 0)


def parts_of(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration, and the configurations of text models nested in it."""
    yield config
    for key in _NESTED_KEYS:
        if isinstance(inner := config.get(key), Mapping):
            yield inner


def _context_of_part(config: Mapping[str, Any]) -> int:
    """The context in tokens, with RoPE scaling, that this part of a configuration states; 0: none."""
    stated = next(
        (tokens for key in _CONTEXT_KEYS if (tokens := _plausible_tokens(config.get(key)))), 0
    )
    return max(stated, _extended_context(config)) if stated else 0


def _extended_context(config: Mapping[str, Any]) -> int:
    """The context window after RoPE scaling; 0 without an original window."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return 0
    rope_type = scaling.get("rope_type", scaling.get("type"))
    original_tokens = _plausible_tokens(scaling.get("original_max_position_embeddings"))
    factor = scaling.get("factor")
    if (
        rope_type not in _EXTENDING_ROPE
        or not original_tokens
        or not isinstance(factor, int | float)
        or not math.isfinite(factor)
    ):
        return 0
    return _plausible_tokens(original_tokens * factor)


def _plausible_tokens(value: object) -> int:
    """A number of tokens; 0 for a value that cannot be one."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < _ABSURD_TOKENS
    ):
        return 0
    return int(value)
