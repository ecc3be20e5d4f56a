"""Finds a draft model for a model: one that has the same vocabulary.

Drafts are token ids, so both models must mean the same by each id: their tokenizers must have the
same vocabulary and the same added tokens. The contents are compared, since names tell little: models
of one family often differ in a few special tokens. Never imports MLX.

Listed models are those of `models.toml` or of the command line, in addition to the model itself. The
setting `model.speculation` is "off", "auto", or names the draft model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError
from holdfast.models.download import (
    DEMO_IDS,
    cached_models,
    check_present,
    demo_folder,
    hub_cache_folder,
    resolve_model,
    source_of,
)
from holdfast.models.tokenizer_files import (
    add_missing_tokens,
    named_special_tokens,
    read_backend,
    tokenizer_config,
)
from holdfast.models.weight_files import checked_tensor_bytes

logger = logging.getLogger(__name__)

# A draft model is only looked for where it pays: for models that are not so small that a step takes
# as long as the work around a draft, and only among models that are much smaller.
_LEAST_MODEL_BYTES = 64 << 20
_LARGEST_DRAFT_SHARE = 0.125  # of the bytes of the model
_ITSELF = "a model cannot draft for itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine: one that may draft, or one to draft for."""

    name: str
    folder: Path


def draft_of(
    model: LocalModel,
    speculation: str,
    *,
    listed: Iterable[ModelSettings] = (),
    environ: Mapping[str, str],
) -> LocalModel | None:
    """The draft model that the setting `model.speculation` asks for; None: no model drafts.

    listed: further models, which the setting may name, or which may be found. Blocks, as long as a
    download takes. Raises ModelLoadError if the model that the setting names cannot draft.
    """
    if speculation == "off":
        return None
    if speculation == "auto":
        return found_draft(model, _candidates(model, listed, environ))
    try:
        folder = resolve_model(
            named_draft(speculation, listed), progress=lambda stage, fraction: None
        )
    except ModelLoadError as error:
        raise _unusable(speculation, str(error)) from None
    draft = LocalModel(name=speculation, folder=folder)
    if folder.resolve() == model.folder.resolve():
        raise _unusable(speculation, _ITSELF)
    check_pair(model, draft)
    return draft


def check_speculation(model: ModelSettings, *, listed: Iterable[ModelSettings] = ()) -> None:
    """Raise ModelLoadError if `model.speculation` names no model, or the model itself.

    Reads no weights and uses no network: whether the two models are a pair, `draft_of` says.
    """
    if model.speculation in ("auto", "off"):
        return
    draft = named_draft(model.speculation, listed)
    try:
        check_present(draft)
    except ModelLoadError as error:
        raise _unusable(model.speculation, str(error)) from None
    if drafts_for_itself(model, listed=listed):
        raise _unusable(model.speculation, _ITSELF)


def drafts_for_itself(model: ModelSettings, *, listed: Iterable[ModelSettings] = ()) -> bool:
    """Whether `model.speculation` names the model itself. Raises ModelLoadError for a name that is
    not that of a model.
    """
    if model.speculation in ("auto", "off"):
        return False
    source = source_of(model)
    draft_source = source_of(named_draft(model.speculation, listed))
    return (source.place, source.revision) == (draft_source.place, draft_source.revision)


def named_draft(speculation: str, listed: Iterable[ModelSettings]) -> ModelSettings:
    """The model that `model.speculation` names: one that is listed, a folder or a Hub id."""
    return next(
        (each for each in listed if speculation in (each.name, each.path)),
        ModelSettings(path=speculation),
    )


def _unusable(speculation: str, reason: str) -> ModelLoadError:
    """The error for a setting whose model cannot draft."""
    return ModelLoadError(
        f"speculation = {speculation}: {reason}. Allowed: auto, off, or a model (its name, folder "
        "or Hub id)"
    )


def _candidates(
    model: LocalModel, listed: Iterable[ModelSettings], environ: Mapping[str, str]
) -> Iterator[LocalModel]:
    """The models on this machine, each once, except `model`. Downloads nothing."""
    excluded_places = {model.folder.resolve()}
    folders = [LocalModel(name=name, folder=demo_folder(name)) for name in DEMO_IDS]
    folders += [
        LocalModel(name=each.name or each.path, folder=Path(each.path).expanduser())
        for each in listed
    ]
    cached = cached_models(hub_cache_folder(environ))
    folders += [LocalModel(name=name, folder=folder) for name, folder in cached.items()]
    for each in folders:
        try:
            place = each.folder.resolve() if each.folder.is_dir() else None
        except OSError as error:
            logger.debug("%s is no draft model: %s", each.name, error)
            continue
        if place is not None and place not in excluded_places:
            excluded_places.add(place)
            yield each


def check_pair(model: LocalModel, draft: LocalModel) -> None:
    """Raise ModelLoadError, which names both models, if their tokens differ."""
    model_tokens = _tokens_of(model.folder)
    draft_tokens = _tokens_of(draft.folder)
    if model_tokens.digest == draft_tokens.digest:
        return
    reason = "the same token ids mean different texts"
    if model_tokens.count != draft_tokens.count:
        reason = f"{model_tokens.count:,} and {draft_tokens.count:,} tokens"
    raise ModelLoadError(
        f"{draft.name} cannot draft for {model.name}, because their tokenizers differ: {reason}"
    )


def found_draft(model: LocalModel, candidates: Iterable[LocalModel]) -> LocalModel | None:
    """The smallest of the candidates that can draft for a model and is much smaller; None if there
    is none, if the model is too small to gain anything, or if its files are damaged.
    """
    try:
        model_bytes = checked_tensor_bytes(model.folder)
    except (ModelLoadError, OSError):
        return None  # the model's worker reports damaged files
    if model_bytes < _LEAST_MODEL_BYTES:
        return None
    most_bytes = model_bytes * _LARGEST_DRAFT_SHARE
    sizes: list[tuple[int, LocalModel]] = []
    for each in candidates:
        try:
            size = checked_tensor_bytes(each.folder)
        except (ModelLoadError, OSError) as error:
            logger.debug("%s is no draft model: %s", each.name, error)
            continue
        if size <= most_bytes:
            sizes.append((size, each))
    for _, each in sorted(sizes, key=lambda pair: pair[0]):
        try:
            check_pair(model, each)
        except ModelLoadError as error:
            logger.debug("%s", error)
        else:
            return each
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """What the token ids of a model mean."""

    digest: str  # of the vocabulary, and of which tokens are special
    count: int  # size of the vocabulary


def _tokens_of(folder: Path) -> _Tokens:
    """The tokens of a model. Raises ModelLoadError."""
    files = (folder / "tokenizer.json", folder / "tokenizer_config.json")
    try:
        modified_ns = tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
        return _read_tokens(folder, modified_ns)
    except OSError as error:
        raise ModelLoadError(f"the tokenizer in {folder} cannot be read: {error}") from error


@lru_cache(maxsize=64)  # a large tokenizer takes half a second
def _read_tokens(folder: Path, modified_ns: tuple[int, ...]) -> _Tokens:
    """modified_ns: of the files that are read; a part of the key of this function's cache."""
    backend = read_backend(folder)
    config = tokenizer_config(folder)
    add_missing_tokens(backend, config, named_special_tokens(config))
    digest = hashlib.blake2b(digest_size=16)
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    for text, token_id in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        is_special = token_id in added and added[token_id].special
        part = f"{token_id} {is_special} {text}".encode("utf-8", "surrogatepass")
        digest.update(len(part).to_bytes(4, "little") + part)
    return _Tokens(digest=digest.hexdigest(), count=len(vocabulary))
