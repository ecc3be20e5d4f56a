"""Grammars for the tiny models: of the tokenizer that their folders have, a token per byte."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from holdfast.worker.engine.constraints import Constraints, Grammars, GrammarVocabulary
from tests.fakes.tiny_models import VOCAB_SIZE, write_tokenizer

END = VOCAB_SIZE - 8  # the id of <|end|>
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog", "bird"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 4, "pattern": "^[a-z]*$"},
        "tame": {"type": "boolean"},
    },
    "required": ["kind", "age", "name", "tame"],
    "additionalProperties": False,
}


@cache
def tiny_vocabulary() -> GrammarVocabulary:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return GrammarVocabulary.of_folder(Path(folder))


def tiny_constraints() -> Constraints:
    """Those of a model with the tiny tokenizer."""
    return Constraints(Grammars(tiny_vocabulary(), vocab_size=VOCAB_SIZE), vocab_size=VOCAB_SIZE)


def json_grammar(schema: dict[str, Any]) -> str:
    """For a JSON value without white space, so that it ends."""
    options = {"whitespace_flexible": False}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))  # type: ignore[arg-type]


def text_of(token_ids: list[int] | tuple[int, ...]) -> str:
    """The text of tokens of the tiny tokenizer, without special ones."""
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")
