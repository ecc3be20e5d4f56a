"""Fields of Anthropic's betas: accepted if harmless, otherwise refused by name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from holdfast.front.request import ChatPrompt
from tests.fakes.http_clients import HELLO, MESSAGES, client_of, message_body
from tests.fakes.scripted_gateway import ScriptedGateway, answer

COUNT = "/v1/messages/count_tokens"


async def posted(
    gateway: ScriptedGateway, *, path: str = MESSAGES, **fields: Any
) -> httpx.Response:
    async with client_of(gateway) as client:
        return await client.post(path, json=message_body(**fields))


async def prompt(*turns: dict[str, Any], **fields: Any) -> ChatPrompt:
    gateway = ScriptedGateway(script=answer("x"))
    response = await posted(gateway, messages=[*turns], **fields)
    assert response.status_code == 200, response.text
    read = gateway.request.prompt
    assert isinstance(read, ChatPrompt)
    return read


def said(read: ChatPrompt) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in read.messages]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"thread": {"type": "create"}}, "thread"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        (
            {"messages": [*HELLO, {"role": "system", "output_config": {"format": {}}}]},
            "messages.1.output_config.format",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "output_config": {"effort": "low"}}]},
            "messages.0.output_config",
        ),
        ({"messages": [*HELLO, {"role": "system"}]}, "messages.1.content"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": [*HELLO, {"role": "system", "output_config": {"effort": "odd"}}]},
            "messages.1.output_config.effort",
        ),
        (
            {"messages": [*HELLO, {"role": "system", "content": [{"type": "tool_addition"}]}]},
            "messages.1.content.0.type",
        ),
    ],
)
async def test_beta_fields_that_would_change_the_answer_are_refused(
    fields: dict[str, Any], named: str
) -> None:
    gateway = ScriptedGateway()
    response = await posted(gateway, **fields)
    assert (response.status_code, gateway.requests) == (400, [])
    error = response.json()["error"]
    assert error["message"].startswith(f"`{named}`")
    # with these details, SDKs continue without a thread
    refused = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error.get("details") == (refused if named == "thread" else None)


@pytest.mark.parametrize(
    "fields",
    [
        {"thread": None, "compaction": None},
        {"thinking": {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "error"}}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024, "block_binding": {}}},
        {"output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 5}}},
        {"billing_policy": {"type": "billing_policy"}, "fallback_credit_token": "x"},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        {"diagnostics": {"previous_message_id": None}, "speed": "fast", "user_profile_id": "u"},
    ],
)
async def test_harmless_fields_are_accepted(fields: dict[str, Any]) -> None:
    assert said(await prompt(*HELLO, **fields)) == [("user", "hello")]


async def test_counting_tokens_accepts_a_compaction_request() -> None:
    response = await posted(ScriptedGateway(), path=COUNT, compaction={"type": "summarize"})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("middle", "effort"),
    [
        ([{"role": "system", "output_config": {"effort": "low"}}], "low"),
        ([{"role": "system", "content": "Hm.", "output_config": {"effort": "low"}}], "low"),
        ([{"role": "system", "content": "Hm.", "output_config": {}}], "high"),
        (
            [
                {"role": "system", "output_config": {"effort": "low"}},
                {"role": "assistant", "content": "Hi"},
                {"role": "user", "content": "again"},
            ],
            "high",  # it was for an earlier turn
        ),
    ],
)
async def test_a_system_message_sets_the_effort_of_its_turn(
    middle: list[dict[str, Any]], effort: str
) -> None:
    gateway = ScriptedGateway(script=answer("x"))
    response = await posted(
        gateway,
        messages=[*HELLO, *middle],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
    )
    assert response.status_code == 200, response.text
    assert gateway.request.thinking.effort == effort
    shown = [turn for turn in middle if "content" in turn]
    assert isinstance(gateway.request.prompt, ChatPrompt)
    assert len(gateway.request.prompt.messages) == 1 + len(shown)


async def test_a_system_message_for_one_user_turn_is_removed_afterwards() -> None:
    once = {"role": "system", "content": "Only now.", "clear_at": "next_user_message"}
    always = {"role": "system", "content": "Always.", "clear_at": "never"}
    assert said(await prompt(*HELLO, once, always)) == [
        ("user", "hello"),
        ("system", "Only now."),
        ("system", "Always."),
    ]
    later = await prompt(*HELLO, once, always, {"role": "assistant", "content": "Hi"}, *HELLO)
    assert [content for _, content in said(later)] == ["hello", "Always.", "Hi", "hello"]


async def test_a_compaction_summary_made_elsewhere_is_read() -> None:
    block = {"type": "compaction", "content": "They fixed a.py.", "encrypted_content": "x"}
    failed = {"type": "compaction", "content": None}
    turn = {"role": "assistant", "content": [block, {"type": "text", "text": "Done."}]}
    read = await prompt(turn, *HELLO)
    assert said(read)[0] == ("assistant", "They fixed a.py.\nDone.")
    assert said(await prompt({"role": "user", "content": [block]}))[0][1] == [
        {"type": "text", "text": "They fixed a.py."}
    ]
    empty = {"role": "assistant", "content": [failed, {"type": "text", "text": "Done."}]}
    assert said(await prompt(empty, *HELLO))[0] == ("assistant", "Done.")
