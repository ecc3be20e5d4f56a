from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.request import Thinking
from tests.fakes.http_clients import CHAT, chat_body, client_of
from tests.fakes.scripted_gateway import ScriptedGateway


async def posted(**fields: Any) -> tuple[Any, ScriptedGateway]:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        return await client.post(CHAT, json=chat_body(**fields)), gateway


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": "none"}, Thinking(effort="off")),
        ({"reasoning_effort": "minimal"}, Thinking(effort="minimal")),
        ({"reasoning_effort": "xhigh"}, Thinking(effort="max")),
        ({"enable_thinking": True}, Thinking(effort="on")),
        ({"enable_thinking": False}, Thinking(effort="off")),
        ({"thinking": True}, Thinking(effort="on")),
        ({"thinking": {"type": "disabled"}}, Thinking(effort="off")),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 512}},
            Thinking(effort="on", budget_tokens=512),
        ),
        ({"thinking": {"budget_tokens": 512}}, Thinking(effort="on", budget_tokens=512)),
        ({"thinking": {}}, Thinking()),
        ({"think": False}, Thinking(effort="off")),
        ({"think": "high"}, Thinking(effort="high")),
        ({"reasoning": {"effort": "low"}}, Thinking(effort="low")),
        (
            {"reasoning": {"max_tokens": 64, "enabled": True}},
            Thinking(effort="on", budget_tokens=64),
        ),
        ({"thinking_budget": 100}, Thinking(budget_tokens=100)),
        ({"thinking_token_budget": 100}, Thinking(budget_tokens=100)),
        ({"thinking_budget": -1}, Thinking()),
        ({"thinking_budget": 0}, Thinking(effort="off")),
        ({"enable_thinking": True, "reasoning_effort": "low"}, Thinking(effort="low")),
        ({"enable_thinking": False, "reasoning_effort": "low"}, Thinking(effort="off")),
        ({"think": False, "thinking_budget": 100}, Thinking(effort="off")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking(effort="off")),
        (
            {"chat_template_kwargs": {"thinking": True, "reasoning_effort": "high"}},
            Thinking(effort="high"),
        ),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            Thinking(effort="on"),
        ),
        ({"chat_template_kwargs": {"reasoning_effort": "as the template likes"}}, Thinking()),
    ],
)
async def test_all_spellings_of_thinking_are_equal(
    fields: dict[str, Any], thinking: Thinking
) -> None:
    response, gateway = await posted(**fields)
    assert response.status_code == 200, response.text
    assert gateway.request.thinking == thinking
