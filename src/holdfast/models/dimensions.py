"""What a model's configuration and weights say about its sizes: context window and vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from mlx.nn.layers.base import Module

from holdfast.errors import ModelLoadError
from holdfast.models.head_seam import HEAD_NAMES

# Names that families use for the longest context, the common one first.
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
_ABSURD_TOKENS = 1 << 31  # tokenizers write 1e30 where nobody knows
UNKNOWN_CONTEXT_TOKENS = 32768  # recurrent models have no limit of their own


def context_tokens(config: Mapping[str, Any], *, tokenizer_limit: object = None, requested: int | None = None) -> int:
    """Longest sequence in tokens. `tokenizer_limit` (model_max_length) counts only when the configuration says nothing.

    Raises ModelLoadError when more is requested than the model was made for.
    """
    known = next((value for part in _parts(config) if (value := _own_context(part))), 0) or _sane(tokenizer_limit)
    if known and requested is not None and requested > known:
        raise ModelLoadError(f"model.context_tokens = {requested:,} is more than the model's own {known:,}")
    return requested or known or UNKNOWN_CONTEXT_TOKENS


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
    said = next((value for part in _parts(config) if isinstance(value := part.get("vocab_size"), int)), 0)
    rows = heads or embeddings
    # Several (auxiliary heads, embeddings per layer): the one that the configuration knows, else the largest.
    return said if said in rows else max(rows, default=said)


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for key in _NESTED_KEYS:
        if isinstance(inner := config.get(key), Mapping):
            yield inner


def _own_context(config: Mapping[str, Any]) -> int:
    plain = next((value for key in _CONTEXT_KEYS if (value := _sane(config.get(key)))), 0)
    return max(plain, _extended_context(config)) if plain else 0


def _extended_context(config: Mapping[str, Any]) -> int:
    """What RoPE scaling stretches the original window to; most configurations name the stretched window themselves."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return 0
    kind = scaling.get("rope_type", scaling.get("type"))
    original, factor = _sane(scaling.get("original_max_position_embeddings")), scaling.get("factor")
    if kind not in _EXTENDING_ROPE or not original or not isinstance(factor, int | float) or not math.isfinite(factor):
        return 0
    return int(original * factor)


def _sane(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _ABSURD_TOKENS:
        return 0
    return int(value)
