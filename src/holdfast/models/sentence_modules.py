"""What a model folder says of how a text's vector is made of hidden states, as
sentence-transformers writes it. No MLX.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.wire.requests import Pooling

_POOLING = "1_Pooling"
_WITHOUT_EFFECT = ("Transformer", "Normalize", "Pooling")  # vectors are normalized here in any case
_POOLINGS: Final[Mapping[str, Pooling]] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "last": "last",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPooling:
    """How the model was trained to make a vector of a text.

    `unserved`: what stands in the way of it, in words.
    """

    pooling: Pooling | None = None  # None: the folder does not say
    unserved: str = ""


def own_pooling(folder: Path) -> OwnPooling:
    """What modules.json and the pooling's own file say. What is damaged in them says nothing."""
    modules = _modules(folder)
    paths = [path for kind, path in modules if kind == "Pooling"] or [_POOLING]
    named = _named_poolings(_read(folder / paths[0] / "config.json"))
    if other := [kind for kind, _ in modules if kind not in _WITHOUT_EFFECT]:
        return OwnPooling(
            unserved=f"its vectors go through a further layer ({other[0]}), which is not served"
        )
    if not named:
        return OwnPooling()
    if len(named) > 1 or named[0] not in _POOLINGS:
        return OwnPooling(
            unserved=f"its vectors are pooled in a way that is not served ({', '.join(named)})"
        )
    return OwnPooling(pooling=_POOLINGS[named[0]])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTokens:
    """The tokens by which a model was trained to say whether a document is relevant.

    Only of a model that was.
    """

    yes: int
    no: int | None  # None: the logit of the other alone was trained


def answer_tokens(folder: Path, *, token_id: Callable[[str], int | None]) -> AnswerTokens | None:
    """What the folder says: the module that sentence-transformers has for it, or the key of
    config.json that vLLM reads.

    token_id: of a token by its text. None: the model was not trained so, as far as its files tell.
    """
    for kind, name in _modules(folder):
        config = _read(folder / name / "config.json")
        if (
            kind == "LogitScore"
            and isinstance(config, dict)
            and isinstance(yes := config.get("true_token_id"), int)
        ):
            no = config.get("false_token_id")
            return AnswerTokens(yes=yes, no=no if isinstance(no, int) else None)
    config = _read(folder / "config.json")
    match config.get("classifier_from_token") if isinstance(config, dict) else None:
        case [str(no_text), str(yes_text)]:
            found_no, found_yes = token_id(no_text), token_id(yes_text)
            return (
                None
                if found_no is None or found_yes is None
                else AnswerTokens(yes=found_yes, no=found_no)
            )
    return None


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The kind and the folder's name of each module."""
    listed = _read(folder / "modules.json")
    modules = [
        module
        for module in (listed if isinstance(listed, list) else ())
        if isinstance(module, dict)
    ]
    return [
        (str(module.get("type", "")).rsplit(".", 1)[-1], Path(str(module.get("path", ""))).name)
        for module in modules
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
    """What a JSON file holds; None where there is none, or it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
