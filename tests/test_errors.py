"""What errors say, where clients look at the words."""

from __future__ import annotations

import pytest

from holdfast.errors import PromptTooLong, UnknownModel


@pytest.mark.parametrize(
    ("field", "noun"),
    [("messages", "messages"), ("messages.2.content", "messages"), ("prompt", "prompt")],
)
def test_a_too_long_prompt_is_refused_with_the_message_that_agents_look_for(
    field: str, noun: str
) -> None:
    assert str(PromptTooLong(prompt_tokens=9000, context_tokens=4096, field=field)) == (
        f"This model's maximum context length is 4096 tokens. However, your {noun} resulted in "
        "9000 tokens. "
        f"Please reduce the length of the {noun}."
    )


def test_a_prompt_without_room_for_an_answer_is_refused_too() -> None:
    assert str(PromptTooLong(prompt_tokens=8, context_tokens=8)).endswith(
        "An answer needs room for at least one token."
    )


def test_an_endless_name_is_shortened() -> None:
    assert len(str(UnknownModel(model="m" * 1_000_000, available=("demo",)))) < 200
