"""How a model embeds texts or ranks documents, according to the files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.files import read_text
from holdfast.wire.requests import Pooling

_POOLING = "1_Pooling"
_WITHOUT_EFFECT = ("Transformer", "Normalize", "Pooling")  # layers that Holdfast supports
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
    paths = [path for kind, path in modules if kind == "Pooling"] or [_POOLING]
    named = _named_poolings(_read(folder / paths[0] / "config.json"))
    if other := [kind for kind, _ in modules if kind not in _WITHOUT_EFFECT]:
        return OwnPooling(
            unserved=f"its vectors pass through another layer ({other[0]}), which is not supported"
        )
    if not named:
        return OwnPooling()
    if len(named) > 1 or named[0] not in _POOLINGS:
        return OwnPooling(
            unserved=f"its vectors use a pooling that is not supported ({', '.join(named)})"
        )
    return OwnPooling(pooling=_POOLINGS[named[0]])


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
    listed = _read(folder / "modules.json")
    if not isinstance(listed, list):
        return []
    return [
        (str(module.get("type", "")).rsplit(".", 1)[-1], Path(str(module.get("path", ""))).name)
        for module in listed
        if isinstance(module, dict)
    ]


def _named_poolings(config: Any) -> list[str]:
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
