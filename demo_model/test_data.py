"""Quick checks of the training data: seeded, rendered by the shipped template, answers marked,
bytes kept.

`python -m pytest demo_model/test_data.py`; needs jinja2 and tokenizers only.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import agent_mix
import agent_questions
import beyond_words
import first_mix
import judge
import memory_tasks
import mixture
import notes_mix
import odd_requests
import odd_tools
import open_notes
import openings
import other_tasks
import told_results
import wide_words
from conversation import EMPTY_THOUGHT, TEMPLATE_FILE, Conversation, render, weighted_parts
from mixture import conversation_at
from plain_text import PlainText
from questions import calls_of, rows, strange_tools
from talks import TALKS

BUNDLED = Path(__file__).resolve().parents[1] / "src" / "holdfast" / "models" / "bundled"
MODELS = ("holdfast-demo", "holdfast-demo-draft", "holdfast-demo-window")


MIXTURES = [
    first_mix.conversation_at,
    mixture.conversation_at,
    agent_mix.conversation_at,
    agent_mix.with_json_at,
    notes_mix.conversation_at,
]


@pytest.mark.parametrize(
    "made", [mixture.conversation_at, agent_mix.with_json_at, notes_mix.conversation_at]
)
def test_data_is_the_same_for_the_same_seed(
    made: Callable[[Random, float], Conversation | PlainText],
) -> None:
    first, second = ([made(Random(seed), seed / 60) for seed in range(60)] for _ in range(2))
    assert first == second


def test_weighted_parts_are_the_rendered_text() -> None:
    for seed in range(60):
        conversation = conversation_at(Random(seed), 0.5)
        assert "".join(text for text, _ in weighted_parts(conversation)) == render(conversation)


def test_every_assistant_message_is_marked_as_written() -> None:
    for seed in range(60):
        conversation = conversation_at(Random(seed), 0.5)
        written = [text for text, own in weighted_parts(conversation) if own]
        assistant = [message for message in conversation.messages if message["role"] == "assistant"]
        assert len(written) == len(assistant)
        for text, message in zip(written, assistant, strict=True):
            assert text.endswith("<|im_end|>")
            assert text.startswith(message["content"])


def test_prompt_and_answer_are_a_prefix_of_the_later_history() -> None:
    for seed in range(60):
        conversation = conversation_at(Random(seed), 0.5)
        whole = render(conversation)
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                assert whole.startswith(conversation.prompt_before(index))


def test_thinking_switched_off_puts_an_empty_thought_before_answers_old_and_new() -> None:
    conversation = Conversation(enable_thinking=False)
    conversation.exchange("Hello!", "Hello! How can I help you?")
    conversation.say("user", "And now?")
    text = render(conversation, add_generation_prompt=True)
    assert text.count("<|im_start|>assistant\n" + EMPTY_THOUGHT) == 2
    conversation.enable_thinking = True
    assert EMPTY_THOUGHT not in render(conversation, add_generation_prompt=True)


def test_tool_calls_render_as_they_are_generated() -> None:
    call = {"name": "find", "arguments": {"item": "<é's lamp>", "count": 3}}
    generated = "<tool_call>\n" + json.dumps(call, ensure_ascii=False) + "\n</tool_call>"
    as_text = {"name": "find", "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    for sent in ({"type": "function", "function": call}, {"function": as_text}, call):
        conversation = Conversation()
        conversation.say("user", "Find it twice.")
        conversation.messages.append(
            {"role": "assistant", "content": None, "tool_calls": [sent, sent]}
        )
        assert render(conversation).endswith(
            f"<|im_start|>assistant\n{generated}\n{generated}<|im_end|>\n"
        )


def test_content_may_come_in_parts_and_reasoning_beside_it() -> None:
    conversation = Conversation()
    conversation.messages.append(
        {
            "role": "user",
            "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two."}],
        }
    )
    conversation.messages.append(
        {"role": "assistant", "reasoning_content": "\nWell.\n", "content": "Three."}
    )
    assert render(conversation) == (
        "<|im_start|>user\nOne "
        "two.<|im_end|>\n<|im_start|>assistant\n<think>\nWell.\n</think>\n\nThree.<|im_end|>\n"
    )


def test_results_in_a_row_share_one_user_message() -> None:
    conversation = Conversation()
    conversation.say("tool", "1")
    conversation.say("tool", "2")
    response = "\n<tool_response>\n{}\n</tool_response>"
    assert (
        render(conversation)
        == f"<|im_start|>user{response.format(1)}{response.format(2)}<|im_end|>\n"
    )


def test_right_answers_of_held_out_questions_are_right() -> None:
    for row in (*rows(), *agent_questions.rows()):
        question = row.make(Random(f"test {row.name}"))
        assert not question.right("")
        assert question.expected


@pytest.mark.parametrize("name", MODELS)
def test_bundled_tokenizer_and_template_are_those_of_the_training(name: str) -> None:
    folder = BUNDLED / name
    if not folder.exists():
        pytest.skip("not bundled")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (
        settings["chat_template"]
        == TEMPLATE_FILE.read_text()
        == (folder / "chat_template.jinja").read_text()
    )
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = (
        " a  b   c\n\n\n\td ",
        "naïve 漢字 עברית ไทย 🙂👩‍👩‍👧‍👦 \u200b\ufeff",
        "<think>\n1 + 2\n</think>\n\n<tool_call>",
        "x , . ' n't 12345",
        "\r\n\x00\x7f",
    )
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_no_opening_kept_for_judging_is_said_in_any_list_of_the_training() -> None:
    said = [text for talk in TALKS for text in talk.said]
    said += [
        *beyond_words.FOREIGN,
        *beyond_words.CODE,
        *beyond_words.SENTENCES,
        *beyond_words.ORDERS,
    ]
    said += [question for question, _ in other_tasks.CHAT] + [
        opening.text for opening in openings.SHOWN
    ]
    assert {openings.plain(text) for text in said} & openings.HELD_OUT_PLAIN == set()


@pytest.mark.parametrize("made", MIXTURES)
def test_no_opening_kept_for_judging_is_said_in_the_training(
    made: Callable[[Random, float], Conversation | PlainText],
) -> None:
    rng = Random("held out")
    chosen = [made(rng, number / 3000) for number in range(3000)]
    assert not any(first_mix.is_held_out(conversation) for conversation in chosen)


def test_an_opening_is_known_again_in_other_spelling() -> None:
    said = Conversation()
    said.exchange("HOW tall, is mount... everest", "No.")
    assert first_mix.is_held_out(said)


def test_a_hundred_openings_are_judged_and_none_of_them_twice() -> None:
    assert len(openings.HELD_OUT) == len(openings.HELD_OUT_PLAIN) == 100
    assert len(openings.SHOWN) == 9


def test_what_the_training_answers_to_small_talk_keeps_the_rules_of_form() -> None:
    for talk in TALKS:
        if "\n" not in talk.answer:
            assert judge.form_fault(talk.answer, set()) == "", talk.answer


def test_a_raw_text_ends_with_the_end_of_text() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = pytest.importorskip("tokenizer")
    tokens, written = tokenizer.Encoder(BUNDLED / MODELS[0] / "tokenizer.json").encode(
        PlainText("Notes:\n- A lamp.")
    )
    assert tokens[-1] == 0
    assert 0 not in tokens[:-1]
    assert all(written)


NEW = list(
    dict.fromkeys(
        kind
        for kind, _ in (*agent_mix.SHARES, *agent_mix.WITH_JSON)
        if kind not in ("replay", "short")
    )
)


def new_conversations(count: int) -> list[Conversation]:
    """Of each new kind so many."""
    rng = Random("new")
    drawn = [agent_mix.drawn(rng, kind) for kind in NEW for _ in range(count)]
    return [conversation for conversation in drawn if isinstance(conversation, Conversation)]


def words_of(value: object) -> set[str]:
    """All runs of letters in it, those of snake_case and camelCase apart, in lower case."""
    return {
        word.lower()
        for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", json.dumps(value, ensure_ascii=False))
    }


def test_the_held_out_words_are_all_that_the_tools_of_the_evaluation_are_made_of() -> None:
    rng = Random("held out")
    questions = [strange_tools(rng) for _ in range(300)]
    names = {
        tool["function"]["name"]
        for question in questions
        for tool in question.conversation.tools or []
    }
    assert names == {"water_plant", "get_exchange_rate", "launch_rocket"}
    said = set()
    for question in questions:
        for tool in question.conversation.tools or []:
            said |= words_of(
                [tool["function"]["name"], list(tool["function"]["parameters"]["properties"])]
            )
    assert said - wide_words.HELD_OUT == {"get", "rate"}  # alone these are no tool


def test_no_new_conversation_holds_a_word_of_the_held_out_tools() -> None:
    for conversation in new_conversations(300):
        assert words_of([conversation.tools, conversation.messages]) & wide_words.HELD_OUT == set()


@pytest.mark.parametrize(
    "text",
    ["waterPlant", "a PLANT", "rocket-launcher", "xlaunch_", "Launchrocket", "GetExchangeRate"],
)
def test_a_held_out_word_is_found_in_any_spelling(text: str) -> None:
    assert not wide_words.is_allowed(text)


def test_files_by_hand_are_not_in_the_training() -> None:
    requests = {openings.plain(request) for request, *_ in agent_questions.BY_HAND}
    paths = {path for _, path, *_ in agent_questions.BY_HAND}
    for conversation in new_conversations(300):
        said = {
            openings.plain(message["content"])
            for message in conversation.messages
            if message["role"] == "user"
        }
        assert not requests & said, paths


def test_every_argument_of_a_made_up_call_stands_in_its_request() -> None:
    rng = Random("arguments")
    for _ in range(400):
        tool = odd_tools.odd_tool(rng)
        request, call = odd_requests.ask(rng, tool)
        assert list(call["arguments"]) == [
            one.name for one in tool.parameters if one.name in call["arguments"]
        ]
        assert {one.name for one in tool.parameters if not one.optional} <= set(call["arguments"])
        for value in call["arguments"].values():
            for part in value if isinstance(value, list) else [value]:
                assert isinstance(part, bool) or str(part).lower() in request.lower()


def test_arguments_of_made_up_calls_have_the_types_of_their_schemas() -> None:
    types = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
    rng = Random("types")
    for _ in range(400):
        tool = odd_tools.odd_tool(rng)
        schemas = {one.name: one.schema for one in tool.parameters}
        for name, value in odd_requests.ask(rng, tool)[1]["arguments"].items():
            assert type(value) is types[schemas[name]["type"]]
            assert value in schemas[name].get("enum", [value])


def test_calls_come_back_from_the_rendered_text() -> None:
    for conversation in new_conversations(60):
        for message in conversation.messages:
            if message.get("tool_calls"):
                alone = Conversation([{"role": "user", "content": ""}, message])
                answer = weighted_parts(alone)[1][0].removesuffix("<|im_end|>")
                assert calls_of(answer) == [call["function"] for call in message["tool_calls"]]


def test_a_question_about_open_notes_is_answered_by_one_note_only() -> None:
    rng = Random("open notes")
    for _ in range(200):
        known = open_notes.draw_many(rng, 8)
        for fact in known:
            others = [other for other in known if other is not fact]
            assert all(not fact.plain_questions & other.plain_questions for other in others)
            assert all(not fact.says_the_same_of(other) for other in others)


def test_a_question_that_no_open_note_answers_is_none_of_their_questions() -> None:
    rng = Random("absent")
    for _ in range(300):
        known = open_notes.draw_many(rng, 5)
        asked = openings.plain(open_notes.absent_question(rng, known))
        for fact in known:
            assert asked not in {openings.plain(text) for text in fact.plain_questions}


def test_an_answer_about_open_notes_is_a_note_word_for_word() -> None:
    rng = Random("word for word")
    for _ in range(300):
        known = open_notes.draw_many(rng, 8)
        question, answer = open_notes.one_question(rng, known, 0.3)
        assert answer in [memory_tasks.ABSENT, *(fact.note for fact in known)]
        assert question


def test_every_result_is_told_with_all_its_values() -> None:
    rng = Random("results")
    for _ in range(400):
        result, told = told_results.json_result(rng)
        for value in scalars_of(json.loads(result)):
            assert (value if isinstance(value, str) else json.dumps(value)) in told


def scalars_of(value: object) -> list[object]:
    """All values of a document that hold no others."""
    if isinstance(value, dict):
        return [part for one in value.values() for part in scalars_of(one)]
    if isinstance(value, list):
        return [part for one in value for part in scalars_of(one)]
    return [value]
