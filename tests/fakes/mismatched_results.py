"""Conversations with mismatched calls and results, each with an orderly one of the same meaning."""

from __future__ import annotations

from typing import Any

from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from tests.fakes.agent_turns import ask

QUESTION = {"role": "user", "content": "both please"}
STEER = {"role": "user", "content": "steer7391"}
FIRST, SECOND = "first8204", "second8204"


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
# pairs of conversations with the same meaning, by the fault of the first
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
