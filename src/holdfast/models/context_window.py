"""The context window in a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import ModelLoadError

# the names that model families use, the most common one first
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
LONGEST_ANSWER_TOKENS = 32_000  # that an agent should plan for
UNKNOWN_CONTEXT_TOKENS = 32768  # recurrent models have no limit of their own


def context_tokens(
    config: Mapping[str, Any], *, tokenizer_limit: object = None, requested: int | None = None
) -> int:
    """The longest sequence in tokens.

    tokenizer_limit: model_max_length, for a configuration without a length. Raises ModelLoadError if
    the request exceeds the model's own limit.
    """
    known = known_context_tokens(config) or _sane(tokenizer_limit)
    if known and requested is not None and requested > known:
        raise ModelLoadError(
            f"model.context_tokens = {requested:,} is more than the model's own {known:,}"
        )
    return requested or known or UNKNOWN_CONTEXT_TOKENS


def planned_answer_tokens(context_tokens: int) -> int:
    """The longest answer that an agent should plan for.

    An answer may fill the whole remaining context. But agents keep this many tokens free before each
    turn, and the whole context would leave no room for a conversation.
    """
    return min(LONGEST_ANSWER_TOKENS, context_tokens // 4)


def known_context_tokens(config: Mapping[str, Any]) -> int:
    """The longest sequence in tokens according to config.json; 0 if it does not say."""
    return next((value for part in parts_of(config) if (value := _own_context(part))), 0)


def parts_of(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration and its nested configurations of text models."""
    yield config
    for key in _NESTED_KEYS:
        if isinstance(inner := config.get(key), Mapping):
            yield inner


def _own_context(config: Mapping[str, Any]) -> int:
    plain = next((value for key in _CONTEXT_KEYS if (value := _sane(config.get(key)))), 0)
    return max(plain, _extended_context(config)) if plain else 0


def _extended_context(config: Mapping[str, Any]) -> int:
    """The window after RoPE scaling, which most configurations name themselves; else 0."""
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
