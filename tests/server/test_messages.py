"""Tools, thoughts, stops and prefilled answers through Anthropic's client, on the bundled model,
streamed and whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.fakes.server_process import ServerProcess

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo?"}]
SUM: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 + 25?"}]
THINK = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def options(messages: Any, **more: Any) -> Any:
    max_tokens = more.pop("max_tokens", 200)
    return {
        "model": "demo",
        "max_tokens": max_tokens,
        "messages": messages,
        "extra_body": {"temperature": 0, **more},
    }


def whole(client: anthropic.Anthropic, messages: Any, **more: Any) -> anthropic.types.Message:
    return client.messages.create(**options(messages, **more))


def streamed(client: anthropic.Anthropic, messages: Any, **more: Any) -> anthropic.types.Message:
    with client.messages.stream(**options(messages, **more)) as stream:
        return stream.get_final_message()


def content(message: anthropic.types.Message) -> list[dict[str, Any]]:
    """The content without ids, which differ between answers."""
    return [{**block.to_dict(), "id": ""} for block in message.content]


def test_deferred_tools_keep_the_cached_prefix(claude: anthropic.Anthropic) -> None:
    names = [f"lighthouse_{number}" for number in range(10)]
    deferred = [
        {**WEATHER, "name": name, "description": f"Get {name}", "defer_loading": True}
        for name in names
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the lighthouses."}]
    known = 0
    for number, name in enumerate(names):
        usage = whole(claude, messages, max_tokens=1, tools=[WEATHER, *deferred]).usage
        cached = usage.cache_read_input_tokens or 0
        assert cached >= known - 4, f"search {number} made what was before it be read again"
        known = usage.input_tokens + cached
        search = {
            "type": "tool_use",
            "id": f"call_{number}",
            "name": "get_weather",
            "input": {"city": name},
        }
        found = [{"type": "tool_reference", "tool_name": name}]
        result = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": found}
        messages = [
            *messages,
            {"role": "assistant", "content": [search]},
            {"role": "user", "content": [result]},
        ]
    assert known > 500


@pytest.mark.parametrize("ask", [whole, streamed])
def test_a_tool_call_and_its_result_are_exchanged(claude: anthropic.Anthropic, ask: Any) -> None:
    message = ask(claude, ASKED, tools=[WEATHER])
    (call,) = message.content
    assert (message.stop_reason, call.name, call.input) == (
        "tool_use",
        "get_weather",
        {"city": "Oslo"},
    )
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
    answer = {"role": "assistant", "content": [block.to_dict() for block in message.content]}
    after = ask(claude, [*ASKED, answer, {"role": "user", "content": [result]}], tools=[WEATHER])
    assert "21 degrees" in after.content[0].text
    assert after.usage.cache_read_input_tokens > 100, "the first turn was read again"


@pytest.mark.parametrize("thinking", [{**THINK}, {**THINK, "display": "omitted"}])
def test_a_thought_comes_first_and_can_be_sent_back(
    claude: anthropic.Anthropic, thinking: dict[str, Any]
) -> None:
    message = whole(claude, SUM, thinking=thinking)
    assert content(streamed(claude, SUM, thinking=thinking)) == content(message)
    thought, text = message.content
    assert (thought.type, text.type, bool(getattr(thought, "thinking", ""))) == (
        "thinking",
        "text",
        "display" not in thinking,
    )
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    answer = {"role": "assistant", "content": [block.to_dict() for block in message.content]}
    after = whole(
        claude, [*SUM, answer, {"role": "user", "content": "Thank you!"}], thinking=thinking
    )
    known = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (after.usage.cache_read_input_tokens or 0) >= known - 4, (
        "all up to the answer was read before"
    )


def test_thinking_is_off_by_default(claude: anthropic.Anthropic) -> None:
    assert [block.type for block in whole(claude, SUM).content] == ["text"]


def test_the_matched_stop_sequence_is_reported(claude: anthropic.Anthropic) -> None:
    for ask in (whole, streamed):
        message = ask(claude, [{"role": "user", "content": "Hello"}], stop_sequences=["zz", "help"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "help")
        assert "help" not in content(message)[0]["text"]


def test_a_limited_answer_stops_for_max_tokens(
    claude: anthropic.Anthropic,
) -> None:
    assert claude.messages.create(**{**options(ASKED), "max_tokens": 1}).stop_reason == "max_tokens"


def test_a_prefilled_answer_is_continued(claude: anthropic.Anthropic) -> None:
    began = {"role": "assistant", "content": "The answer is 4"}
    text = content(whole(claude, [*SUM, began]))[0]["text"]
    assert not text.startswith("The answer")


def test_an_answer_follows_the_requested_schema(claude: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    message = whole(
        claude, SUM, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert set(json.loads(content(message)[0]["text"])) == {"sum"}


def test_counted_tokens_equal_the_usage_of_the_answer(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(
        model="demo", messages=ASKED, tools=[WEATHER], system="Be brief."
    )  # type: ignore[list-item, arg-type]
    usage = whole(claude, ASKED, tools=[WEATHER], system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


BILLING = "x-anthropic-billing-header: cc_version=2.1.{0}; cc_entrypoint=cli; cch={0};"


def test_the_changing_parts_of_claude_codes_requests_cost_nothing(
    claude: anthropic.Anthropic,
) -> None:
    """The accounting header, and a system message in the middle: blocks the first time, text the
    next.
    """
    reminder, usages = "Remember to be brief. " * 8, []
    for number, said in enumerate(
        ([{"type": "text", "text": reminder, "cache_control": {"type": "ephemeral"}}], reminder)
    ):
        system = [
            {"type": "text", "text": BILLING.format(number)},
            {"type": "text", "text": "You help with code."},
        ]
        usages.append(
            whole(
                claude, [*ASKED, {"role": "system", "content": said}], system=system, metadata={}
            ).usage
        )
    assert usages[0].cache_creation_input_tokens
    assert (usages[1].cache_read_input_tokens, usages[1].input_tokens) == (
        usages[0].input_tokens
        + usages[0].cache_creation_input_tokens
        + (usages[0].cache_read_input_tokens or 0)
        - 1,
        1,
    )


def test_an_unsupported_schema_is_reported_under_the_clients_name(
    claude: anthropic.Anthropic,
) -> None:
    strict = {
        **WEATHER,
        "strict": True,
        "input_schema": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
    }
    with pytest.raises(anthropic.BadRequestError, match=r"`tools\.0\.input_schema`"):
        whole(claude, ASKED, tools=[strict])
    with pytest.raises(anthropic.BadRequestError, match=r"`output_config\.format\.schema`"):
        whole(
            claude,
            ASKED,
            output_config={"format": {"type": "json_schema", "schema": {"type": "nothing"}}},
        )


def test_an_overlong_conversation_is_refused_with_its_numbers(
    claude: anthropic.Anthropic,
) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"
    ):
        whole(claude, [{"role": "user", "content": "many words " * 40_000}])


def test_the_signature_key_is_in_the_store(claude: anthropic.Anthropic, store_folder: Path) -> None:
    whole(claude, SUM, thinking=THINK)
    assert (store_folder / "answers" / "seal.key").stat().st_mode & 0o777 == 0o600
