"""A model of random weights with the bundled model's tokenizer and chat template: it writes any
allowed text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

from holdfast.library.llm import LLM, Completion, TextStream
from tests.fakes.grammar_walker import DEMO
from tests.fakes.tiny_models import write_tiny

# so that an answer ends on its own: unbounded strings end at one token in 100 or so
MOST_TOKENS = 8000


def write_rambling(folder: Path) -> Path:
    """Write the model's folder, and return it."""
    config = json.loads((DEMO / "config.json").read_text())
    same = {name: config[name] for name in ("vocab_size", "max_position_embeddings")}
    write_tiny(folder, "llama", changes=same)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder / name)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**written, "eos_token_id": config["eos_token_id"]})
    )
    return folder


def ask(llm: LLM, schema: Any, *, seed: int) -> TextStream:
    """Begin an answer constrained by a schema, without a thought, because a random one never ends."""
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return llm.stream_chat(
        "Go!",
        response_format=form,
        temperature=1,
        seed=seed,
        thinking=False,
        max_tokens=MOST_TOKENS,
    )


def fault_of(answer: Completion, schema: Mapping[str, Any] | bool) -> str:
    """The fault of an answer that should fit the schema and end on its own; empty if it is right."""
    if answer.finish_reason != "stop":
        return f"ended by {answer.finish_reason}: {answer.text[-200:]!r}"
    is_old = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    checker = (jsonschema.Draft7Validator if is_old else jsonschema.Draft202012Validator)(
        schema, format_checker=jsonschema.FormatChecker()
    )
    found = next(iter(checker.iter_errors(json.loads(answer.text))), None)
    return "" if found is None else f"{found.message} in {answer.text[:200]!r}"
