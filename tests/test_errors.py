"""What errors say, where clients look at the words."""

from __future__ import annotations

from typing import Literal

import pytest

from holdfast.errors import PromptTooLong, UnknownModel


@pytest.mark.parametrize(
    ("field", "noun"),
    [("messages", "messages"), ("messages.2.content", "messages"), ("prompt", "prompt")],
)
def test_a_prompt_too_long_has_the_message_agents_look_for(field: str, noun: str) -> None:
    assert str(PromptTooLong(prompt_tokens=9000, context_tokens=4096, field=field)) == (
        f"This model's maximum context length is 4096 tokens. However, your {noun} resulted in "
        "9000 tokens. "
        f"Please reduce the length of the {noun}."
    )


def test_a_prompt_without_room_for_an_answer_is_refused() -> None:
    assert str(PromptTooLong(prompt_tokens=8, context_tokens=8)).endswith(
        "An answer needs room for at least one token."
    )


@pytest.mark.parametrize(
    ("truncation", "field", "end"),
    [
        ("disabled", "messages", 'With "truncation": "middle", the server leaves out the middle.'),
        (
            "middle",
            "messages",
            '"truncation": "middle" cannot shorten it enough: tools and the messages that must stay '
            "are too long.",
        ),
        (
            "middle",
            "input",
            '"truncation": "middle" cannot shorten it enough: tools and the messages that must stay '
            "are too long.",
        ),
        ("middle", "prompt", '"truncation": "middle" cannot shorten it enough.'),
    ],
)
def test_a_prompt_too_long_is_refused_with_truncation_advice(
    truncation: Literal["disabled", "middle"], field: str, end: str
) -> None:
    error = PromptTooLong(prompt_tokens=9, context_tokens=4, field=field, truncation=truncation)
    assert str(error).endswith(f" {end}")


def test_a_prompt_too_long_is_told_if_other_bits_help() -> None:
    error = PromptTooLong(prompt_tokens=9, context_tokens=4, auto_context_tokens=20)
    assert str(error).endswith(' With "kv_bits": "auto", the maximum is 20 tokens.')
    error = PromptTooLong(prompt_tokens=9, context_tokens=4, auto_context_tokens=4)
    assert "kv_bits" not in str(error)


def test_an_endless_name_is_shortened() -> None:
    assert len(str(UnknownModel(model="m" * 1_000_000, available=("demo",)))) < 200
