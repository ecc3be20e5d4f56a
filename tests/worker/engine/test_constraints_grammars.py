"""Matchers for one model: over its folder's tokens, each from the beginning, compiled once."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import InvalidRequest
from holdfast.worker.engine import constraints as subject
from holdfast.worker.engine.constraints import (
    KEPT_GRAMMARS,
    GrammarMatcher,
    Grammars,
    GrammarVocabulary,
)
from tests.fakes.tiny_grammars import END, tiny_vocabulary
from tests.fakes.tiny_models import VOCAB_SIZE, write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def allowed(
    grammars: Grammars, grammar: str, text: str = "", *, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    matcher = grammars.matcher(grammar)
    assert all(map(matcher.add, text.encode()))
    return filled(matcher, vocab_size=vocab_size)


def filled(matcher: GrammarMatcher, *, vocab_size: int = VOCAB_SIZE) -> list[int]:
    words = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.fill(words)
    return [
        int(token)
        for token in np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    ]


def test_all_end_ids_of_the_folder_end_an_answer(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 260]}))
    vocabulary = GrammarVocabulary.of_folder(folder)
    assert vocabulary.end_token_ids == (END, 258, 260)
    assert allowed(Grammars(folder, vocab_size=VOCAB_SIZE), 'start: "a"\n', "a") == [END, 258, 260]


def test_end_tokens_are_allowed_where_the_grammar_may_end() -> None:
    grammars = Grammars(tiny_vocabulary(), vocab_size=VOCAB_SIZE)
    matcher = grammars.matcher("start: /a+/\n", stop_token_ids=(END, 255, 258))
    assert filled(matcher) == [ord("a")]
    assert matcher.add(ord("a"))
    assert filled(matcher) == [ord("a"), 255, END, 258]
    assert matcher.add(258)
    assert filled(matcher) == [255, END, 258]
    assert not matcher.error


def test_end_tokens_inside_the_grammar_do_not_end_answers() -> None:
    matcher = Grammars(tiny_vocabulary(), vocab_size=VOCAB_SIZE).matcher(
        'start: "a" <[258]> "b"\n', stop_token_ids=(258,)
    )
    assert matcher.add(ord("a"))
    assert matcher.add(258)
    assert filled(matcher) == [ord("b")]


def test_a_token_known_only_to_the_configuration_can_be_named(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {str(VOCAB_SIZE): {"content": "<late>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = VOCAB_SIZE + 40  # of the logits; more than the number of tokens
    grammars = Grammars(folder, vocab_size=size)
    assert allowed(grammars, f'start: <[{VOCAB_SIZE}]> "a"\n', vocab_size=size) == [VOCAB_SIZE]


def test_unused_columns_are_never_allowed() -> None:
    grammars = Grammars(tiny_vocabulary(), vocab_size=VOCAB_SIZE + 40)
    assert max(allowed(grammars, "start: /(.|\\n)*/\n", vocab_size=VOCAB_SIZE + 40)) < VOCAB_SIZE


def test_only_recent_grammars_are_kept_and_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = Grammars(tiny_vocabulary(), vocab_size=VOCAB_SIZE), []
    real = grammars._compile
    monkeypatch.setattr(
        grammars, "_compile", lambda grammar: compiled.append(grammar) or real(grammar)
    )
    texts = [f'start: "{number}"\n' for number in range(KEPT_GRAMMARS + 1)]
    for text in [*texts, *texts[1:], texts[1]]:
        grammars.matcher(text)
    assert compiled == texts
    grammars.matcher(texts[0])
    assert compiled == [*texts, texts[0]]


def test_a_large_tokenizer_is_built_during_the_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "LARGE_FILE_BYTES", 1000)
    grammars = Grammars(folder, vocab_size=VOCAB_SIZE)
    grammars.prepare()
    for thread in threading.enumerate():
        if thread.name == "holdfast-grammars":
            thread.join()
    (folder / "tokenizer.json").unlink()
    assert allowed(grammars, 'start: "a"\n') == [ord("a")]


def test_a_small_tokenizer_is_built_on_demand(folder: Path) -> None:
    grammars = Grammars(folder, vocab_size=VOCAB_SIZE)
    grammars.prepare()
    assert not [each for each in threading.enumerate() if each.name == "holdfast-grammars"]
    assert allowed(grammars, 'start: "a"\n') == [ord("a")]


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"'])
def test_an_unreadable_tokenizer_fails_only_requests_with_a_grammar(
    folder: Path, content: str
) -> None:
    (folder / "tokenizer.json").write_text(content)
    grammars = Grammars(folder, vocab_size=VOCAB_SIZE)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="this model does not support grammars") as caught:
            grammars.matcher('start: "a"\n')
        assert "\n" not in str(caught.value)


def test_a_markers_text_is_written_with_ordinary_tokens() -> None:
    matcher = Grammars(tiny_vocabulary(), vocab_size=VOCAB_SIZE).matcher('start: "a<|end|>b"\n')
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    drawn = []
    for _ in "a<|end|>b":
        assert matcher.fill(words)
        drawn.append(
            next(
                token_id
                for token_id in range(VOCAB_SIZE)
                if words[token_id // 32] >> token_id % 32 & 1
            )
        )
        assert matcher.add(drawn[-1])
    assert bytes(drawn) == b"a<|end|>b"
