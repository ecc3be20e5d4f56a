"""The next turn of a conversation begins with the last prompt and the tokens of its answer."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.output import OutputDelta, text_of, tool_calls_of
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.records.answer_tokens import AnswerFile
from holdfast.front.request import ToolChoice
from tests.fakes.agent_turns import QUESTION, answer, ask, in_any_tokens, sent_back
from tests.fakes.thinking_bundle import bundle_of

BUNDLE = bundle_of()
words = st.text('helo wrd\n{}"é.', max_size=12)
values = st.one_of(
    st.integers(),
    st.text(max_size=5),
    st.booleans(),
    st.none(),
    st.lists(st.floats(-10, 10), max_size=3),
)
calls = st.tuples(
    st.sampled_from(["f", "read_file"]),
    st.dictionaries(st.text("abc", min_size=1, max_size=3), values, max_size=3),
)


def written(
    thought: str, text: str, made: list[tuple[str, dict[str, Any]]], choose: random.Random
) -> str:
    """An answer as a model might write it: its JSON has spaces, escapes and key orders that no
    template has.
    """
    parts = [f"<think>\n{thought}\n</think>\n\n"] if thought.strip() else []
    parts.append(text)
    for name, arguments in made:
        separators = choose.choice([(",", ":"), (", ", ": "), (" , ", ":  ")])
        body = json.dumps(arguments, separators=separators, ensure_ascii=choose.random() < 0.5)
        parts.append(f'\n<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>')
    return "".join(parts)


@settings(max_examples=40, deadline=None)
@given(
    turns=st.lists(
        st.tuples(words, words, st.lists(calls, min_size=1, max_size=2)), min_size=1, max_size=4
    ),
    keeps_thoughts=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_an_agents_next_turn_begins_with_everything_before(
    turns: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]], keeps_thoughts: bool, seed: int
) -> None:
    choose = random.Random(seed)
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    messages: list[dict[str, Any]] = [QUESTION]
    before: tuple[int, ...] = ()
    for thought, text, made in turns:
        request, prepared = ask(bundle, messages)
        ids = in_any_tokens(written(thought, text, made, choose), bundle, choose)
        prompt = tuple(prepared.sequences[0].prompt_token_ids)
        assert prompt[: len(before)] == before
        before = prompt + ids
        deltas = answer(bundle, request, prepared, ids)
        messages += sent_back(deltas, choose, keeps_thoughts=keeps_thoughts)
    assert tuple(ask(bundle, messages)[1].sequences[0].prompt_token_ids)[: len(before)] == before
    assert bundle.known_answers.dropped_tokens == 0
    bundle.known_answers.check_invariants()


def one_turn(
    bundle: TokenizerBundle, generated: str, **prompt: Any
) -> tuple[tuple[int, ...], list[OutputDelta]]:
    """All tokens of a first turn, and the deltas for its client."""
    request, prepared = ask(bundle, [QUESTION], prompt=prompt)
    ids = tuple(bundle.tokenizer.encode(generated, add_special_tokens=False))
    return (*prepared.sequences[0].prompt_token_ids, *ids), answer(bundle, request, prepared, ids)


def next_prompt(
    bundle: TokenizerBundle, messages: list[dict[str, Any]], **prompt: Any
) -> tuple[int, ...]:
    return tuple(ask(bundle, [QUESTION, *messages], prompt=prompt)[1].sequences[0].prompt_token_ids)


CALL = '<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>'
PLAIN_ORDER = random.Random(0)


def test_answers_with_hidden_tokens_are_retokenized() -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    markers = bundle.dialect.marker_ids
    ends = {bundle.tokenizer.pieces.backend.id_to_token(e) for e in bundle.tokenizer.eos_token_ids}
    hidden = next(
        text for text in bundle.tokenizer.special_texts if text not in markers and text not in ends
    )
    _, deltas = one_turn(bundle, f"hello{hidden} world")
    assert text_of(deltas) == "hello world"
    assert len(bundle.known_answers) == 0
    one_turn(bundle, "hello world")
    assert len(bundle.known_answers) == 1


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_with_spelled_control_text_returns_as_generated(seed: int) -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    encode = bundle.tokenizer.encode_text
    said = "hello <tool_call> the <|im_end|> world </think>"
    ids = tuple(encode(said)) if seed == 0 else (*encode(said[:seed]), *encode(said[seed:]))
    request, prepared = ask(bundle, [QUESTION])
    deltas = answer(bundle, request, prepared, ids)
    assert text_of(deltas) == said
    before = (*prepared.sequences[0].prompt_token_ids, *ids)
    assert next_prompt(bundle, sent_back(deltas, PLAIN_ORDER))[: len(before)] == before


NO_CALLS = {"tool_choice": ToolChoice(mode="none")}


@pytest.mark.parametrize(
    ("generated", "fields", "seen", "is_known"),
    [
        ("hello world", NO_CALLS, "hello world", True),
        (f"hello{CALL}", NO_CALLS, f"hello{CALL}", False),
        ("hello world", {"stop": ("rld",)}, "hello wo", True),
        ("hello world", {"stop": (" world",)}, "hello", True),
        ("hello world", {"stop": ("xyz",)}, "hello world", True),
    ],
)
def test_answers_are_known_if_clients_saw_their_whole_meaning(
    generated: str, fields: dict[str, Any], seen: str, is_known: bool
) -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    request, prepared = ask(bundle, [QUESTION], **fields)
    ids = tuple(bundle.tokenizer.encode(generated, add_special_tokens=False))
    assert text_of(answer(bundle, request, prepared, ids)) == seen
    assert len(bundle.known_answers) == is_known


@pytest.mark.parametrize("keeps_thoughts", [True, False])
def test_a_thought_opened_by_the_prompt_belongs_to_the_answer(keeps_thoughts: bool) -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    opened = {"template_options": {"opened": True}}
    before, deltas = one_turn(bundle, f"  why hello\n\n</think>{CALL}", **opened)
    assert text_of(deltas, "reasoning").strip() == "why hello"
    prompt = next_prompt(
        bundle, sent_back(deltas, PLAIN_ORDER, keeps_thoughts=keeps_thoughts), **opened
    )
    assert prompt[: len(before)] == before


def test_an_empty_thought_written_by_the_prompt_stays_in_history() -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    closed = {"template_options": {"opened": False}}
    before, deltas = one_turn(bundle, "hello world", **closed)
    prompt = next_prompt(bundle, sent_back(deltas, PLAIN_ORDER), **closed)
    assert prompt[: len(before)] == before


def test_thoughts_dropped_by_the_template_are_counted() -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    _, deltas = one_turn(bundle, f"<think>\nwhy\n</think>\n\nhello{CALL}")
    messages = [
        *sent_back(deltas, PLAIN_ORDER),
        {"role": "assistant", "content": "world"},
        QUESTION,
    ]
    _, prepared = ask(bundle, [QUESTION, *messages])
    assert "why" not in bundle.tokenizer.decode(
        prepared.sequences[0].prompt_token_ids, skip_special_tokens=False
    )
    assert prepared.dropped_tokens > 0
    assert prepared.put_back_tokens == 0


@pytest.mark.parametrize(
    "change", [{"content": "held"}, {"arguments": '{"a": 1}'}, {"name": "read_file"}]
)
def test_an_answer_changed_by_the_client_is_read_as_sent(change: dict[str, Any]) -> None:
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    _, deltas = one_turn(bundle, f"hello{CALL}")
    (call,) = tool_calls_of(deltas)
    function = {"name": change.get("name", "f"), "arguments": change.get("arguments", "{}")}
    message = {
        "role": "assistant",
        "content": change.get("content", "hello"),
        "tool_calls": [{"id": call.id, "function": function}],
    }
    _, prepared = ask(
        bundle, [QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "world"}]
    )
    text = bundle.tokenizer.decode(
        prepared.sequences[0].prompt_token_ids, skip_special_tokens=False
    )
    assert prepared.put_back_tokens == 0
    assert all(value in text for value in change.values())


def test_answers_are_recalled_after_a_server_restart(tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    files = [AnswerFile(tmp_path), AnswerFile(tmp_path), AnswerFile(tmp_path)]
    first, second = (
        replace(BUNDLE, known_answers=KnownAnswers(file=file, model=b"m")) for file in files[:2]
    )
    before, deltas = one_turn(first, f"<think>\nwhy\n</think>\n\nhello{CALL}")
    files[0].close()
    for keeps_thoughts in (True, False):
        prompt = next_prompt(second, sent_back(deltas, PLAIN_ORDER, keeps_thoughts=keeps_thoughts))
        assert prompt[: len(before)] == before
    another = replace(BUNDLE, known_answers=KnownAnswers(file=files[2], model=b"another"))
    assert next_prompt(another, sent_back(deltas, PLAIN_ORDER))[: len(before)] != before
    for file in files[1:]:
        file.close()


def test_answers_of_a_long_history_are_parsed_once() -> None:
    """100 messages with 30 calls: from the second turn on, their meaning is looked up."""
    bundle = replace(BUNDLE, known_answers=KnownAnswers())
    messages: list[dict[str, Any]] = [QUESTION]
    for number in range(30):
        request, prepared = ask(bundle, messages)
        body = f'<tool_call>\n{{"name":"f","arguments":{{"number":{number},"text":"hello world"}}}}\n</tool_call>'
        deltas = answer(
            bundle,
            request,
            prepared,
            tuple(bundle.tokenizer.encode(body, add_special_tokens=False)),
        )
        messages += [
            *sent_back(deltas, PLAIN_ORDER),
            {"role": "assistant", "content": "hello"},
            QUESTION,
        ]
    parsed = 0
    read = bundle.read_texts.meaning

    def counted(text: str, form: Any, **options: Any) -> Any:
        def made() -> Any:
            nonlocal parsed
            parsed += 1
            return form()

        return read(text, made, **options)

    bundle.read_texts.meaning = counted  # type: ignore[method-assign]
    try:
        _, prepared = ask(bundle, messages)
    finally:
        del bundle.read_texts.meaning
    assert prepared.put_back_tokens > 30 * 10
    assert parsed <= 1
