"""Tests of the training data: `python -m pytest demo_model/test_data.py`. Needs jinja2 and tokenizers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fact_notes
import judge
import mixtures
import odd_tools
import open_notes
import openings
import tasks
import told_results
import words
from conversation import (
    EMPTY_THOUGHT,
    TEMPLATE_FILE,
    Conversation,
    Encoder,
    PlainText,
    render,
    weighted_parts,
)
from rules import texts
from talk import TALKS
from words import BUNDLED

MODELS = ("holdfast-demo", "holdfast-demo-draft")
MIXTURES = [mixtures.written_at, mixtures.evened_at]


@pytest.mark.parametrize("made", MIXTURES)
def test_equal_seeds_give_equal_data(
    made: Callable[[Random, float], mixtures.Drawn],
) -> None:
    first, second = ([made(Random(seed), seed / 60) for seed in range(60)] for _ in range(2))
    assert first == second


def test_every_assistant_message_counts_fully() -> None:
    for seed in range(60):
        conversation = mixtures.task(Random(seed), 40)
        assert "".join(text for text, _ in weighted_parts(conversation)) == render(conversation)
        written = [text for text, own in weighted_parts(conversation) if own]
        assistant = [message for message in conversation.messages if message["role"] == "assistant"]
        assert len(written) == len(assistant)
        for text, message in zip(written, assistant, strict=True):
            assert text.endswith("<|im_end|>")
            assert text.startswith(message["content"])


def test_prompt_and_answer_are_a_prefix_of_the_next_prompt() -> None:
    for seed in range(60):
        conversation = mixtures.task(Random(seed), 40)
        whole = render(conversation)
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                assert whole.startswith(conversation.prompt_before(index))


def test_without_thinking_answers_begin_with_empty_reasoning() -> None:
    conversation = Conversation(enable_thinking=False)
    conversation.exchange("Hello!", "Hello! How can I help you?")
    conversation.say("user", "And now?")
    text = render(conversation, add_generation_prompt=True)
    assert text.count("<|im_start|>assistant\n" + EMPTY_THOUGHT) == 2
    conversation.enable_thinking = True
    assert EMPTY_THOUGHT not in render(conversation, add_generation_prompt=True)


def test_tool_calls_are_rendered_as_generated() -> None:
    call = {"name": "find", "arguments": {"item": "<é's lamp>", "count": 3}}
    generated = "<tool_call>\n" + json.dumps(call, ensure_ascii=False) + "\n</tool_call>"
    as_text = {"name": "find", "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    for sent in ({"type": "function", "function": call}, {"function": as_text}, call):
        answer = {"role": "assistant", "content": None, "tool_calls": [sent, sent]}
        expected = f"<|im_start|>assistant\n{generated}\n{generated}<|im_end|>\n"
        assert render(Conversation([answer])) == expected


def test_content_in_parts_and_separate_reasoning_are_rendered() -> None:
    parts = [{"type": "text", "text": "One "}, {"type": "text", "text": "two."}]
    answer = {"role": "assistant", "reasoning_content": "\nWell.\n", "content": "Three."}
    assert render(Conversation([{"role": "user", "content": parts}, answer])) == (
        "<|im_start|>user\nOne two.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nWell.\n</think>\n\nThree.<|im_end|>\n"
    )


def test_consecutive_results_share_a_user_message() -> None:
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    both = "".join(f"\n<tool_response>\n{number}\n</tool_response>" for number in (1, 2))
    assert render(Conversation(results)) == f"<|im_start|>user{both}<|im_end|>\n"


@pytest.mark.parametrize("name", MODELS)
def test_the_bundled_template_and_tokenizer_are_those_of_training(name: str) -> None:
    folder = BUNDLED / name
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = TEMPLATE_FILE.read_text()
    assert settings["chat_template"] == template == (folder / "chat_template.jinja").read_text()
    tokenizer = Encoder(folder / "tokenizer.json").tokenizer
    samples = (
        " a  b   c\n\n\n\td ",
        "naïve 漢字 עברית ไทย 🙂👩‍👩‍👧‍👦 \u200b\ufeff",
        "<think>\n1 + 2\n</think>\n\n<tool_call>",
        "x , . ' n't 12345",
        "\r\n\x00\x7f",
    )
    for text in samples:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_word_lists_contain_no_held_out_opening() -> None:
    said = [text for talk in TALKS for text in talk["say"]]
    said += [question for question, _ in tasks.CHAT]
    said += [opening.text for opening in openings.SHOWN]
    for name in ("foreign", "beyond_code", "beyond_sentence", "beyond_order"):
        said += texts(name)
    assert {openings.plain(text) for text in said} & openings.HELD_OUT_PLAIN == set()


@pytest.mark.parametrize("made", MIXTURES)
def test_conversations_contain_no_held_out_opening(
    made: Callable[[Random, float], mixtures.Drawn],
) -> None:
    rng = Random("held out")
    chosen = [made(rng, number / 3000) for number in range(3000)]
    assert not any(mixtures.is_held_out(conversation) for conversation in chosen)


def test_openings_are_recognized_in_other_spellings() -> None:
    said = Conversation()
    said.exchange("HOW tall, is mount... everest", "No.")
    assert mixtures.is_held_out(said)


def test_there_are_a_hundred_different_held_out_openings() -> None:
    assert len(openings.HELD_OUT) == len(openings.HELD_OUT_PLAIN) == 100
    assert len(openings.SHOWN) == 9


def test_answers_to_small_talk_follow_the_rules_of_form() -> None:
    for answer in (talk["answer"][0] for talk in TALKS):
        if "\n" not in answer:
            assert judge.form_fault(answer, set()) == "", answer


def test_a_raw_text_ends_with_the_end_token() -> None:
    encoder = Encoder(BUNDLED / MODELS[0] / "tokenizer.json")
    tokens, written = encoder.encode(PlainText("Notes:\n- A lamp."))
    assert tokens[-1] == 0
    assert 0 not in tokens[:-1]
    assert all(written)


def words_of(value: object) -> set[str]:
    """All words in lower case; snake_case and camelCase are split."""
    found = re.findall("[A-Z]?[a-z]+|[A-Z]+", json.dumps(value, ensure_ascii=False))
    return {word.lower() for word in found}


def test_conversations_contain_no_held_out_word() -> None:
    rng = Random("new")
    for name in ("odd_tools_talk", "several_calls", "files", "unusual_words", "json_talk"):
        for _ in range(300):
            talk = mixtures.checked(rng, name)
            assert isinstance(talk, Conversation)
            assert words_of([talk.tools, talk.messages]) & words.HELD_OUT == set()


@pytest.mark.parametrize(
    "text",
    ["waterPlant", "a PLANT", "rocket-launcher", "xlaunch_", "Launchrocket", "GetExchangeRate"],
)
def test_held_out_words_are_found_in_any_spelling(text: str) -> None:
    assert not words.is_allowed(text)


def test_requests_contain_every_argument_of_their_call() -> None:
    rng = Random("arguments")
    for _ in range(400):
        tool = odd_tools.family(rng, 1)[0]
        request, call = odd_tools.ask(rng, tool)
        assert {one.name for one in tool.parameters if not one.optional} <= set(call["arguments"])
        for value in call["arguments"].values():
            for part in value if isinstance(value, list) else [value]:
                assert isinstance(part, bool) or str(part).lower() in request.lower()


def test_arguments_match_their_schemas() -> None:
    types = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
    rng = Random("types")
    for _ in range(400):
        tool = odd_tools.family(rng, 1)[0]
        schemas = {one.name: one.schema for one in tool.parameters}
        for name, value in odd_tools.ask(rng, tool)[1]["arguments"].items():
            assert type(value) is types[schemas[name]["type"]]
            assert value in schemas[name].get("enum", [value])


def test_a_generated_question_is_answered_by_one_note_only() -> None:
    rng = Random("open notes")
    for _ in range(200):
        known = [fact for fact in open_notes.draw_many(rng, 8) if not fact.is_written]
        for fact in known:
            others = [other for other in known if other is not fact]
            assert all(not fact.plain_questions & other.plain_questions for other in others)
            assert all(not fact.says_the_same_of(other) for other in others)


def test_an_unanswerable_question_asks_for_no_note() -> None:
    rng = Random("absent")
    for _ in range(300):
        known = open_notes.draw_many(rng, 5)
        asked = openings.plain(open_notes.absent_question(rng, known))
        for fact in known:
            assert asked not in {openings.plain(text) for text in fact.plain_questions}


def test_an_answer_is_a_note_word_for_word() -> None:
    rng = Random("word for word")
    for _ in range(300):
        known = open_notes.draw_many(rng, 8)
        question, answer = open_notes.one_question(rng, known, 0.3)
        assert answer in [fact_notes.ABSENT, *(fact.note for fact in known)]
        assert question


def test_answers_state_all_values_of_a_result() -> None:
    rng = Random("results")
    for _ in range(400):
        result, told = told_results.json_result(rng)
        for value in scalars_of(json.loads(result)):
            assert (value if isinstance(value, str) else json.dumps(value)) in told


def scalars_of(value: object) -> list[object]:
    """All scalars of a document."""
    if isinstance(value, dict):
        return [part for one in value.values() for part in scalars_of(one)]
    if isinstance(value, list):
        return [part for one in value for part in scalars_of(one)]
    return [value]
