"""A model folder's text side is read whole or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError
from holdfast.intake.text_side import load_text_side
from tests.fakes import toy_tokenizers


def test_everything_that_the_front_needs_is_read(tmp_path: Path) -> None:
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 10, "text_config": {"max_position_embeddings": 4096}})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{ eos_token }}"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9}))
    side = load_text_side(tmp_path)
    assert side.context_tokens == 4096
    assert side.generation_defaults == {"top_p": 0.9}
    assert side.template is not None
    assert side.tokenizer.eos_token_ids == (side.tokenizer.backend.token_to_id("<|im_end|>"),)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    toy_tokenizers.word_pieces().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="came back as"):
        load_text_side(tmp_path)
