"""Everything about a model that the front process knows: its text side. No weights, no MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.intake.defaults import generation_defaults
from holdfast.intake.round_trip import check_round_trip
from holdfast.intake.template import ChatTemplate, load_template
from holdfast.intake.tokenize import Tokenizer, load_tokenizer, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSide:
    """Tokenizer, chat template and recommendations of one model. Read-only; shared by all its requests."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none and cannot chat
    generation_defaults: Mapping[str, float]
    context_tokens: int  # according to config.json; 0 when it does not say


def load_text_side(folder: Path) -> TextSide:
    """Read a model folder. Raises ModelLoadError when something is missing or damaged, or when the tokenizer is broken."""
    tokenizer = load_tokenizer(folder)
    check_round_trip(tokenizer)
    return TextSide(
        tokenizer=tokenizer,
        template=load_template(folder),
        generation_defaults=generation_defaults(folder),
        context_tokens=_context_tokens(folder),
    )


def _context_tokens(folder: Path) -> int:
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    for source in (text_config if isinstance(text_config, dict) else {}, config):
        for name in ("max_position_embeddings", "max_sequence_length", "n_positions", "n_ctx"):
            value = source.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return 0
