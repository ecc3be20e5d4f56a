"""What a model folder says of how a text's vector is made of hidden states, as sentence-transformers writes it. No MLX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.messages.requests import Pooling

_POOLING = "1_Pooling"
_WITHOUT_EFFECT = ("Transformer", "Normalize", "Pooling")  # vectors are normalized here in any case
_POOLINGS: Final[Mapping[str, Pooling]] = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last", "last": "last"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPooling:
    """How the model was trained to make a vector of a text. `unserved`: what stands in the way of it, in words."""

    pooling: Pooling | None = None  # None: the folder does not say
    unserved: str = ""


def own_pooling(folder: Path) -> OwnPooling:
    """What modules.json and the pooling's own file say. What is damaged in them says nothing."""
    modules = _modules(folder)
    paths = [path for kind, path in modules if kind == "Pooling"] or [_POOLING]
    named = _named_poolings(_read(folder / paths[0] / "config.json"))
    if other := [kind for kind, _ in modules if kind not in _WITHOUT_EFFECT]:
        return OwnPooling(unserved=f"its vectors go through a further layer ({other[0]}), which is not served")
    if not named:
        return OwnPooling()
    if len(named) > 1 or named[0] not in _POOLINGS:
        return OwnPooling(unserved=f"its vectors are pooled in a way that is not served ({', '.join(named)})")
    return OwnPooling(pooling=_POOLINGS[named[0]])


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The kind and the folder's name of each module."""
    listed = _read(folder / "modules.json")
    modules = [module for module in (listed if isinstance(listed, list) else ()) if isinstance(module, dict)]
    return [(str(module.get("type", "")).rsplit(".", 1)[-1], Path(str(module.get("path", ""))).name) for module in modules]


def _named_poolings(config: Any) -> list[str]:
    if not isinstance(config, dict):
        return []
    if isinstance(mode := config.get("pooling_mode"), str | list):
        return [mode] if isinstance(mode, str) else [str(each) for each in mode]
    prefix = "pooling_mode_"
    return [key.removeprefix(prefix) for key, value in config.items() if key.startswith(prefix) and value is True]


def _read(path: Path) -> Any:
    """What a JSON file holds; None where there is none, or it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
