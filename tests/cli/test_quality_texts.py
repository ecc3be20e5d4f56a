"""Texts that measure a model's quality: windows of a text, and pages of notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.quality_texts import PAGES, QUESTIONS_ON_A_PAGE, built_in_text, passages_for
from holdfast.errors import ConfigError
from holdfast.front.prompt.tokenize import load_tokenizer
from holdfast.models.download import demo_folder
from holdfast.models.quality import Passage
from tests.fakes.tiny_models import write_tiny

DEMO = demo_folder()


def pages_of(folder: Path, *, context_tokens: int = 8192) -> tuple[Passage, ...]:
    return passages_for(folder, text="", context_tokens=context_tokens)


def change(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file; None removes a field."""
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_every_answer_repeats_the_value_of_a_note() -> None:
    tokenizer = load_tokenizer(DEMO)
    pages = pages_of(DEMO)
    assert len(pages) == PAGES
    for page in pages:
        assert page.is_text
        assert len(page.answers) == QUESTIONS_ON_A_PAGE
        text = tokenizer.decode(page.token_ids, skip_special_tokens=False)
        notes, *turns = text.split("<|im_start|>assistant\n")
        for turn, (first, end) in zip(turns, page.answers, strict=True):
            value = tokenizer.decode(page.token_ids[first:end], skip_special_tokens=False)
            answer = turn.split("<|im_end|>")[0].removeprefix("<think>\n\n</think>\n\n")
            assert value.strip() in answer
            assert answer in notes


def test_pages_are_reproducible_and_differ_from_each_other() -> None:
    pages = pages_of(DEMO)
    assert pages == pages_of(DEMO)
    assert len({page.token_ids for page in pages}) == PAGES


def test_questions_need_no_chat_template(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    change(tmp_path / "tokenizer_config.json", chat_template=None)
    tokenizer = load_tokenizer(tmp_path)
    (first, *_) = pages_of(tmp_path)
    start, end = first.answers[-1]
    assert end == len(first.token_ids)
    text = tokenizer.decode(first.token_ids, skip_special_tokens=False)
    value = tokenizer.decode(first.token_ids[start:end], skip_special_tokens=False)
    assert text.splitlines()[-1].startswith("Answer: ")
    assert text.splitlines()[-1].endswith(f" {value}")
    assert text.startswith("Notes:\n- ")
    assert text.count("\nQuestion: ") == QUESTIONS_ON_A_PAGE
    assert len(first.answers) == QUESTIONS_ON_A_PAGE


def test_texts_begin_as_the_tokenizer_begins_them(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    start = {"SpecialToken": {"id": "<|start|>", "type_id": 0}}
    one, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    token = {"id": "<|start|>", "ids": [262], "tokens": ["<|start|>"]}
    change(
        tmp_path / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [start, one],
            "pair": [start, one, other],
            "special_tokens": {"<|start|>": token},
        },
    )
    change(tmp_path / "tokenizer_config.json", bos_token="<|start|>", chat_template=None)
    tokenizer = load_tokenizer(tmp_path)
    passages = passages_for(tmp_path, text=built_in_text(), context_tokens=8192)
    assert {passage.token_ids[0] for passage in passages} == {262}
    assert not any(262 in passage.token_ids[1:] for passage in passages)
    for page in passages[-PAGES:]:
        first, end = page.answers[0]
        answer = tokenizer.decode(page.token_ids[first : end + 6], skip_special_tokens=False)
        assert answer[: end - first].strip() == answer[: end - first]
        assert answer[end - first] in ". "


def test_a_template_that_changes_messages_is_not_used(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    shouted = "{% for message in messages %}{{ message['content'] | upper }}{% endfor %}"
    change(tmp_path / "tokenizer_config.json", chat_template=shouted)
    tokenizer = load_tokenizer(tmp_path)
    (first, *_) = pages_of(tmp_path)
    assert tokenizer.decode(first.token_ids, skip_special_tokens=False).startswith("Notes:\n- ")


def test_a_short_context_gets_pages_with_fewer_notes() -> None:
    long, short = (pages_of(DEMO, context_tokens=tokens) for tokens in (4096, 1400))
    assert max(len(page.token_ids) for page in short) <= 1400
    assert max(len(page.token_ids) for page in long) > 1400
    with pytest.raises(ConfigError, match="the built-in questions need a context of"):
        pages_of(DEMO, context_tokens=300)


def test_a_text_is_cut_into_windows_and_only_these_count() -> None:
    story = built_in_text()
    windows = [
        passage
        for passage in passages_for(DEMO, text=story, context_tokens=1400)
        if passage.is_text
    ]
    tokens = load_tokenizer(DEMO).encode(story, add_special_tokens=False)
    assert tuple(tokens[:1400]) == windows[0].token_ids
    assert len(windows) == len(tokens) // 1400 + (len(tokens) % 1400 >= 512)
    assert not any(window.answers for window in windows)


def test_a_short_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the text has \d+ tokens; at least 512 are needed"):
        passages_for(DEMO, text="too short", context_tokens=4096)
