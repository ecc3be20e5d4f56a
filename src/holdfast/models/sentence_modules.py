"""How a model embeds texts or ranks documents, according to the files of sentence-transformers.

modules.json lists the modules through which a text passes: each has a kind, such as Pooling, and a folder
with its config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.files import read_text
from holdfast.wire.requests import Pooling

_POOLING_FOLDER = "1_Pooling"  # of the pooling module if modules.json is missing
_SUPPORTED_KINDS = ("Transformer", "Normalize", "Pooling")
# supported poolings by the names in config.json
_POOLINGS: Final[Mapping[str, Pooling]] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "last": "last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPooling:
    """How the model was trained to pool hidden states into one vector."""

    pooling: Pooling | None = None  # None: unknown
    unserved: str = ""  # why that pooling is not supported; empty if it is


def own_pooling(folder: Path) -> OwnPooling:
    """Read the pooling from modules.json and the pooling module's config.json.

    Ignores damaged files.
    """
    modules = _modules(folder)
    pooling_folders = [name for kind, name in modules if kind == "Pooling"] or [_POOLING_FOLDER]
    names = _pooling_names(_read(folder / pooling_folders[0] / "config.json"))
    if unsupported := [kind for kind, _ in modules if kind not in _SUPPORTED_KINDS]:
        return OwnPooling(
            unserved=f"its vectors pass through another layer ({unsupported[0]}), which is not "
            "supported"
        )
    if not names:
        return OwnPooling()
    if len(names) > 1 or names[0] not in _POOLINGS:
        return OwnPooling(
            unserved=f"its vectors use a pooling that is not supported ({', '.join(names)})"
        )
    return OwnPooling(pooling=_POOLINGS[names[0]])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTokens:
    """The tokens with which a reranker says whether a document is relevant."""

    yes: int  # token id
    no: int | None  # None: only the logit of `yes` was trained


def answer_tokens(folder: Path, *, token_id: Callable[[str], int | None]) -> AnswerTokens | None:
    """Read the answer tokens from a module of sentence-transformers, or from config.json in vLLM's
    form.

    token_id: maps a token's text to its id. Returns None if the files do not describe a reranker.
    """
    for kind, name in _modules(folder):
        config = _read(folder / name / "config.json")
        if kind == "LogitScore" and isinstance(config, dict):
            yes = config.get("true_token_id")
            no = config.get("false_token_id")
            if isinstance(yes, int):
                return AnswerTokens(yes=yes, no=no if isinstance(no, int) else None)
    config = _read(folder / "config.json")
    match config.get("classifier_from_token") if isinstance(config, dict) else None:
        case [str(no_text), str(yes_text)]:
            no = token_id(no_text)
            yes = token_id(yes_text)
            if no is not None and yes is not None:
                return AnswerTokens(yes=yes, no=no)
    return None


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder name of each module in modules.json."""
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list):
        return []
    return [
        (str(module.get("type", "")).rsplit(".", 1)[-1], Path(str(module.get("path", ""))).name)
        for module in modules
        if isinstance(module, dict)
    ]


def _pooling_names(config: Any) -> list[str]:
    """The poolings that the config.json of a pooling module turns on, in either of its two forms."""
    if not isinstance(config, dict):
        return []
    if isinstance(mode := config.get("pooling_mode"), str | list):
        return [mode] if isinstance(mode, str) else [str(each) for each in mode]
    prefix = "pooling_mode_"
    return [
        key.removeprefix(prefix)
        for key, value in config.items()
        if key.startswith(prefix) and value is True
    ]


def _read(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or damaged."""
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None
