"""Reads the text-related files of a model folder, for the front and the worker: the tokenizer, its
special tokens, and the recommended sampling.

A backend is a tokenizer of the `tokenizers` library. Added tokens are those in addition to the trained
vocabulary; special tokens are added tokens that are not text, such as the end of a turn.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from holdfast.errors import ModelLoadError, UnusableModel
from holdfast.models import model_folder
from holdfast.models.loadable import CONVERTIBLE
from holdfast.models.model_folder import DEFAULT_SAMPLING
from holdfast.wire.requests import SAMPLING_RANGES

# the fields of SamplingParams for which a model may recommend a value
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_backend(folder: Path) -> Backend:
    """Return the tokenizer in the folder.

    Converts it if tokenizer.json is missing. Raises ModelLoadError.
    """
    path = folder / "tokenizer.json"
    return _read_backend(path) if path.is_file() else _convert(folder)


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json merged with special_tokens_map.json; the former wins.

    Raises ModelLoadError.
    """
    return {
        **read_json(folder / "special_tokens_map.json"),
        **read_json(folder / "tokenizer_config.json"),
    }


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens (bos_token and others) in tokenizer_config.json."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str) and content:
            texts[name] = content
    return texts


def add_missing_tokens(
    backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add tokens that are only in tokenizer_config.json. Raises ModelLoadError if an id differs, or
    if the tokens are not described as they should be. special_tokens: `named_special_tokens`.
    """
    try:
        _add_missing_tokens(backend, config, special_tokens)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnusableModel(
            f"the tokens in tokenizer_config.json cannot be read: {type(error).__name__}: {error}"
        ) from error


def _add_missing_tokens(
    backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add the tokens that only tokenizer_config.json has, and make its special tokens special."""
    described = config.get("added_tokens_decoder") or {}
    for token_id, token in sorted((int(key), value) for key, value in described.items()):
        if backend.token_to_id(token["content"]) is not None:  # tokenizer.json has it, too
            continue
        flags = {
            flag: bool(token.get(flag))
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        added_token = AddedToken(token["content"], **flags)
        if flags["special"]:
            backend.add_special_tokens([added_token])
        else:
            backend.add_tokens([added_token])
        if backend.token_to_id(token["content"]) != token_id:
            raise UnusableModel(
                f"the tokenizer is inconsistent: the id of {token['content']!r} is {token_id} in "
                f"tokenizer_config.json, and {backend.token_to_id(token['content'])} in "
                "tokenizer.json"
            )
    special_texts = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    for name in ("bos_token", "eos_token"):
        content = special_tokens.get(name)
        if (
            content is not None
            and content not in special_texts
            and backend.token_to_id(content) is not None
        ):
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids of end tokens in generation_config.json, in config.json, and in the text_config of
    config.json.
    """
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    sources = [
        read_json(folder / "generation_config.json"),
        config,
        text_config if isinstance(text_config, dict) else {},
    ]
    token_ids: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        token_ids.update(token_id for token_id in values if isinstance(token_id, int))
    return tuple(sorted(token_ids))


def recommended_sampling(config: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters of a generation_config.json. Unusable values are left out.

    `do_sample: false` means temperature 0. A fractional `top_k` is truncated.
    """
    values = {name: config.get(name) for name in _RECOMMENDED}
    if isinstance(top_k := values["top_k"], float) and 0 <= top_k < math.inf:
        values["top_k"] = int(top_k)
    accepted = {name: SAMPLING_RANGES[name].accepted(value) for name, value in values.items()}
    usable = {name: value for name, value in accepted.items() if value is not None}
    if config.get("do_sample") is False:
        usable["temperature"] = 0.0
    return usable


def default_sampling(recommended: Mapping[str, float]) -> dict[str, float]:
    """The sampling parameters of requests that set none: those that the model or its entry in
    `models.toml` recommends, or else `DEFAULT_SAMPLING`.
    """
    says_nothing = not DEFAULT_SAMPLING.keys() & recommended.keys()
    return {**(DEFAULT_SAMPLING if says_nothing else {}), **recommended}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file does not exist. Raises UnusableModel."""
    return model_folder.read_json(path) if os.path.lexists(path) else {}


def _read_backend(path: Path) -> Backend:
    """Read a tokenizer.json. Raises UnusableModel."""
    try:
        return Backend.from_file(str(path))
    except Exception as error:
        if type(error) is Exception:  # raised by the tokenizers library
            raise UnusableModel(f"{path} cannot be read: {error}") from error
        raise


def _convert(folder: Path) -> Backend:
    """Convert a tokenizer without tokenizer.json. Uses transformers."""
    if not any((folder / name).is_file() for name in CONVERTIBLE):
        raise UnusableModel(
            f"{folder} has no tokenizer: neither tokenizer.json nor {', '.join(CONVERTIBLE)}"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and transformers, which could convert its tokenizer, "
            "is not installed"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise UnusableModel(
            f"the tokenizer in {folder} cannot be read: {' '.join(str(error).split())}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise UnusableModel(
            f"{folder} has no tokenizer.json, and its tokenizer's format "
            f"({type(tokenizer).__name__}) is not supported"
        )
    return backend


def end_token_ids(
    backend: Backend, special_tokens: Mapping[str, str], *, named: Iterable[int]
) -> tuple[int, ...]:
    """Return the ids of end tokens: those in `named`, which files of the model name, and that of the
    tokenizer's eos_token. Ids that are not in the vocabulary are left out.
    """
    eos_text = special_tokens.get("eos_token")
    eos_id = None if eos_text is None else backend.token_to_id(eos_text)
    all_ids = {*named, *(() if eos_id is None else (eos_id,))}
    size = vocabulary_size(backend)
    return tuple(sorted(token_id for token_id in all_ids if 0 <= token_id < size))


def vocabulary_size(backend: Backend) -> int:
    """The number of ids, including those of added tokens."""
    added = backend.get_added_tokens_decoder()
    return max(int(backend.get_vocab_size(with_added_tokens=True)), max(added, default=-1) + 1)
