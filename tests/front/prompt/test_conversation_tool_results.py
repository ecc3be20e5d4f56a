"""Each result stands under its own call, whatever a client sends and in whatever order, and the
prompt of the next turn begins as the one before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from tests.fakes.agent_turns import ask
from tests.fakes.family_bundles import bundle
from tests.fakes.family_templates import FAMILY_TEMPLATES

QUESTION = {"role": "user", "content": "both please"}
STEER = {"role": "user", "content": "steer7391"}
FIRST, SECOND = "first8204", "second8204"


@cache
def bundle_of(name: str) -> TokenizerBundle:
    return bundle(FAMILY_TEMPLATES[name])


def answer(*ids: str, text: str = "") -> dict[str, Any]:
    calls = [
        {"id": each, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for each, name in zip(ids, ("f", "read_file"), strict=False)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


A, B = "call_a", "call_b"
SORTED = [QUESTION, answer(A, B), result(A, FIRST), result(B, SECOND)]
# conversations that mean the same, by what is odd about the first one
SAME: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "swapped": ([*SORTED[:2], SORTED[3], SORTED[2]], SORTED),
    "late, behind a text": (
        [QUESTION, answer(A), STEER, result(A, FIRST)],
        [QUESTION, answer(A), result(A, FIRST), STEER],
    ),
    "one of two late": ([*SORTED[:2], SORTED[3], STEER, SORTED[2]], [*SORTED, STEER]),
    "calls in two answers": (
        [QUESTION, answer(A), answer(B), result(A, FIRST), result(B, SECOND)],
        [QUESTION, answer(A), result(A, FIRST), answer(B), result(B, SECOND)],
    ),
    "only the second": (
        [*SORTED[:2], SORTED[3]],
        [*SORTED[:2], result(A, ""), SORTED[3]],
    ),
    "only the first": ([*SORTED[:3]], [*SORTED[:3], result(B, "")]),
    "none, and a text": (
        [*SORTED[:2], STEER],
        [*SORTED[:2], result(A, ""), result(B, ""), STEER],
    ),
    "none, and an answer": (
        [*SORTED[:2], answer(text="done"), STEER],
        [*SORTED[:2], result(A, ""), result(B, ""), answer(text="done"), STEER],
    ),
    "reused ids": (
        [*SORTED, answer(A, B), result(B, "4"), result(A, "3")],
        [*SORTED, answer(A, B), result(A, "3"), result(B, "4")],
    ),
    "the same id twice": (
        [QUESTION, answer(A, A), result(A, FIRST), result(A, SECOND)],
        [QUESTION, answer(A, A), result(A, FIRST), result(A, SECOND)],
    ),
    "two results of one call": (
        [*SORTED[:3], result(A, "more"), SORTED[3]],
        [*SORTED[:2], result(A, f"{FIRST}\n\nmore"), SORTED[3]],
    ),
}


def text_of(bundle: TokenizerBundle, messages: list[dict[str, Any]]) -> str:
    tokens = ask(bundle, messages)[1].sequences[0].prompt_token_ids
    return bundle.tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_each_result_stands_under_its_call(name: str, case: str) -> None:
    sent, expected = SAME[case]
    assert text_of(bundle_of(name), sent) == text_of(bundle_of(name), expected)


@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_a_result_of_an_unknown_call_is_read_and_moves_no_other(name: str) -> None:
    strange = result("call_z", "strange8204")
    for place in (2, 3, 4):
        text = text_of(bundle_of(name), [*SORTED[:place], strange, *SORTED[place:], STEER])
        places = [text.rindex(each) for each in (FIRST, SECOND, "strange8204", "steer7391")]
        assert places == sorted(places)
        before = text_of(bundle_of(name), SORTED)
        common = len(before) - before.index(SECOND)
        assert text[: len(before) - common] == before[:-common]
    for messages in ([QUESTION, strange, STEER], [strange, QUESTION]):
        assert "strange8204" in text_of(bundle_of(name), messages)


@pytest.mark.parametrize("name", sorted(FAMILY_TEMPLATES))
def test_every_turn_of_a_conversation_in_disorder_begins_as_the_turn_before(name: str) -> None:
    """A result that comes after the next answer changes nothing before that answer."""
    conversation = [
        *SORTED[:2],
        SORTED[3],
        answer(text="one"),
        result(A, FIRST),
        STEER,
        answer("call_c"),
        STEER,
        answer(text="two"),
        result("call_c", "third8204"),
    ]
    ends = [3, 6, 8, 10]
    texts = [text_of(bundle_of(name), conversation[:end]) for end in ends]
    for (end, before), after in zip(zip(ends, texts, strict=True), texts[1:], strict=False):
        history = before.rpartition(conversation[end - 1]["content"])
        assert after.startswith(history[0] + history[1])
    assert all(each in texts[-1] for each in (FIRST, SECOND, "third8204"))
