"""A prompt that is too long is shortened with few tokenizations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.front.prompt.prepare import Prepared, prepare
from holdfast.front.prompt.tokenize import EncodedText, Tokenizer, TokenMemory
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.front.request import ChatPrompt, GenerationRequest, Prompt
from tests.fakes import toy_tokenizers
from tests.fakes.scripted_client import model_info

CONTEXT = 32_768
NOTE = "the ferry to the island leaves at noon and comes back when the sun goes down "


class CountingTokenizer(Tokenizer):
    """Counts the characters that it tokenizes."""

    characters = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return super().encode_all(texts)

    def encode_in_place(self, texts: Sequence[str]) -> list[EncodedText]:
        self.characters += sum(map(len, texts))
        return super().encode_in_place(texts)


@pytest.fixture
def counting(bundle: TokenizerBundle) -> TokenizerBundle:
    tokenizer = CountingTokenizer(toy_tokenizers.byte_level(), config={"eos_token": "<|im_end|>"})
    return replace(bundle, tokenizer=tokenizer, token_memory=TokenMemory())


def short(bundle: TokenizerBundle, prompt: Prompt) -> Prepared:
    request = GenerationRequest(
        request_id="r", model="m", prompt=prompt, max_tokens=64, truncation="middle"
    )
    return prepare(
        request, bundle, info=model_info(context_tokens=CONTEXT), limits=LimitsSettings()
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(turns: int, notes: int) -> list[dict[str, Any]]:
    told = [{"role": "system", "content": NOTE * 10}]
    for turn in range(turns):
        told += [user(f"{turn}: {NOTE * notes}"), {"role": "assistant", "content": NOTE * notes}]
    return [*told, user("what now?")]


@pytest.mark.parametrize(
    "messages",
    [
        conversation(500, 3),
        conversation(20, 80),
        [user(NOTE * 3000)],
        [user((NOTE * 3000).replace(" ", "_"))],  # cannot be cut into pieces
        [*conversation(2, 2), user(NOTE * 3000), {"role": "assistant", "content": "ok"}, user("?")],
    ],
    ids=["many", "fewer", "one", "one piece", "one of several"],
)
def test_the_next_turn_of_a_shortened_conversation_tokenizes_little(
    counting: TokenizerBundle, messages: list[dict[str, Any]]
) -> None:
    tokenizer = counting.tokenizer
    assert isinstance(tokenizer, CountingTokenizer)
    characters = sum(len(message["content"]) for message in messages)
    first = short(counting, ChatPrompt(messages=tuple(messages)))
    assert first.left_out is not None
    assert first.prompt_tokens <= CONTEXT - 64
    assert tokenizer.characters < 4.5 * characters
    tokenizer.characters = 0
    told = [*messages, {"role": "assistant", "content": "go"}, user("and then?")]
    later = short(counting, ChatPrompt(messages=tuple(told)))
    assert later.left_out is not None
    assert tokenizer.characters < characters
    # everything except the end of the prompt is the same, so it is cached
    assert first.left_out is not None
    assert later.left_out is not None
    assert isinstance(first.prompt, ChatPrompt)
    assert isinstance(later.prompt, ChatPrompt)
    kept = first.prompt.messages
    assert later.prompt.messages[: len(kept)] == kept


@pytest.mark.parametrize(
    "text", ["\ufdd5" * 300_000 + NOTE * 3000, NOTE * 3000 + "\ufdd5" * 300_000]
)
def test_characters_without_tokens_are_harmless(counting: TokenizerBundle, text: str) -> None:
    prepared = short(counting, ChatPrompt(messages=(user(text),)))
    assert prepared.left_out is not None
    assert prepared.prompt_tokens <= CONTEXT - 64
