"""One answer with text before and after a call, in each protocol's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.front.anthropic.answer import MessagesAnswer
from holdfast.front.ollama.answer import ChatLines
from holdfast.front.openai.answer import ChatAnswer
from holdfast.front.output import ChoiceFinished, OutputEvent, TokenCounts
from holdfast.front.server.access import Seal
from holdfast.front.server.answers import AnswerFormat
from holdfast.front.toolcalls.call_format import Call
from tests.fakes.family_bundles import bundle_of
from tests.fakes.http_clients import events_of, named_events_of
from tests.fakes.recorded_answers import TOOLS
from tests.fakes.told_answers import by_tokens

COUNTS = TokenCounts(prompt_tokens=9, completion_tokens=9, cached_tokens=0)


@pytest.fixture(scope="module")
def script() -> list[OutputEvent]:
    """The events of `I look.`, a call, and `I answer.`."""
    model = bundle_of("qwen3")
    assert model.dialect.calls is not None
    call = model.dialect.calls.write([Call("get_time", {"tz": "CET"})])
    return by_tokens(model.tokenizer, model.dialect, TOOLS, f"I look.\n{call}\nI answer.")


def whole(form: AnswerFormat, script: list[OutputEvent]) -> Any:
    return json.loads(form.complete_body(script, COUNTS, None))


def streamed(form: AnswerFormat, script: list[OutputEvent]) -> str:
    form.stream_start(prompt_tokens=9)
    return b"".join(
        form.delta_event(event) for event in script if not isinstance(event, ChoiceFinished)
    ).decode()


def test_one_string_has_a_newline_in_place_of_the_call(script: list[OutputEvent]) -> None:
    chat = whole(ChatAnswer(answer_id="a", choices=1, model="m", version="1"), script)
    assert chat["choices"][0]["message"]["content"] == "I look.\nI answer."
    chunks = events_of(
        streamed(ChatAnswer(answer_id="a", choices=1, model="m", version="1"), script)
    )
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        == "I look.\nI answer."
    )
    assert whole(ChatLines(model="m"), script)["message"]["content"] == "I look.\nI answer."
    lines = [json.loads(line) for line in streamed(ChatLines(model="m"), script).splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "I look.\nI answer."


def test_text_blocks_around_a_call_are_unchanged(script: list[OutputEvent]) -> None:
    def form() -> MessagesAnswer:
        return MessagesAnswer(answer_id="a", model="m", seal=Seal(), max_tokens=99)

    blocks = whole(form(), script)["content"]
    assert [block.get("text", block["type"]) for block in blocks] == [
        "I look.",
        "tool_use",
        "I answer.",
    ]
    texts = {0: "", 2: ""}
    for name, data in named_events_of(streamed(form(), script)):
        if name == "content_block_delta" and data["delta"]["type"] == "text_delta":
            texts[data["index"]] += data["delta"]["text"]
    assert texts == {0: "I look.", 2: "I answer."}
