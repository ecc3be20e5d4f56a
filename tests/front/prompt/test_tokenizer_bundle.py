"""A model folder's text bundle is read completely or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError
from holdfast.front.prompt.tokenizer_bundle import load_tokenizer_bundle
from tests.fakes import toy_tokenizers
from tests.fakes.family_templates import FAMILY_TEMPLATES, tokenizer_for


def test_everything_the_front_needs_is_read(tmp_path: Path) -> None:
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{ eos_token }}"})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9}))
    bundle = load_tokenizer_bundle(tmp_path)
    assert bundle.generation_defaults == {"top_p": 0.9}
    assert bundle.template is not None
    assert bundle.tokenizer.eos_token_ids == (bundle.tokenizer.backend.token_to_id("<|im_end|>"),)


def test_the_catalogs_defaults_override_the_models(tmp_path: Path) -> None:
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.9, "top_k": 20}))
    bundle = load_tokenizer_bundle(
        tmp_path,
        sampling={"top_p": 0.5, "presence_penalty": 1.0},
        template_arguments={"enable_thinking": False},
    )
    assert bundle.generation_defaults == {"top_p": 0.5, "top_k": 20, "presence_penalty": 1.0}
    assert bundle.template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}",
            "<|im_end|>",
        ),
        ("{% for m in messages %}{{ m.content }} <|im_end|>{% endfor %}", "<|im_end|>"),
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor "
            "%}<|im_start|>{% endfor %}",
            "<|im_start|>",
        ),
        # known as an end already
        ("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}", ""),
        ("{% for m in messages %}{{ m.content }}\nUser:{% endfor %}", ""),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", ""),
        ("{{ raise_exception('no') }}<|im_end|>", ""),
    ],
)
def test_the_token_after_an_answer_in_the_template_ends_answers(
    tmp_path: Path, template: str, token: str
) -> None:
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": template})
    )
    bundle = load_tokenizer_bundle(tmp_path)
    assert bundle.turn_end_token_ids == (
        (bundle.tokenizer.backend.token_to_id(token),) if token else ()
    )


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    toy_tokenizers.word_pieces().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="is decoded as"):
        load_tokenizer_bundle(tmp_path)


@pytest.mark.parametrize(
    ("name", "ends"),
    [("gpt_oss", {"<|call|>"}), ("gemma4", {"<turn|>", "<|tool_response>"})],
)
def test_undeclared_call_ends_end_the_answer_too(tmp_path: Path, name: str, ends: set[str]) -> None:
    family = FAMILY_TEMPLATES[name]
    backend = tokenizer_for(family.source).backend
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": family.source})
    )
    bundle = load_tokenizer_bundle(tmp_path)
    assert bundle.dialect.family == family.family
    assert {backend.id_to_token(end) for end in bundle.turn_end_token_ids} == ends
