"""What a model's configuration and weights say about the size of its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mlx.nn.layers.base import Module

from holdfast.models.context_window import parts_of
from holdfast.worker.engine.head_seam import HEAD_NAMES


def vocabulary_size(model: Module, config: Mapping[str, Any]) -> int:
    """Number of logits: rows of the head, else of the embedding, else what the configuration says."""
    heads, embeddings = [], []
    modules: list[tuple[str, Any]] = cast("Any", model).named_modules()
    for path, module in modules:
        if "weight" not in module:
            continue
        if path.rsplit(".", 1)[-1] in HEAD_NAMES and module.weight.ndim == 2:
            heads.append(module.weight.shape[0])
        elif hasattr(module, "as_linear"):
            embeddings.append(module.weight.shape[0])
    said = next(
        (value for part in parts_of(config) if isinstance(value := part.get("vocab_size"), int)), 0
    )
    rows = heads or embeddings
    # Several (auxiliary heads, embeddings per layer): the one that the configuration knows, else
    # the largest.
    return said if said in rows else max(rows, default=said)
