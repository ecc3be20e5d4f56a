from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.request import ChatPrompt
from tests.fakes.http_clients import accepted_chat, refused_chat


async def test_a_minimal_request_gets_one_answer_of_maximal_length() -> None:
    request = await accepted_chat()
    assert (request.choices, request.max_tokens, request.stop, request.want_logprobs) == (
        1,
        None,
        (),
        False,
    )
    assert request.prompt == ChatPrompt(
        messages=({"role": "user", "content": "hello"},), has_images=False
    )
    assert request.request_id.startswith("chatcmpl-")
    assert request.prompt_field == "messages"


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
)
async def test_the_newer_name_of_max_tokens_wins(fields: dict[str, int], tokens: int) -> None:
    assert (await accepted_chat(**fields)).max_tokens == tokens


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_may_be_zero_but_not_negative(field: str) -> None:
    assert (await accepted_chat(**{field: 0})).max_tokens == 0
    status = 422 if field == "max_tokens" else 400  # see tests/front/server/test_problem.py
    assert await refused_chat(**{field: -1}) == (status, field)


async def test_logprobs_are_requested() -> None:
    request = await accepted_chat(logprobs=True, top_logprobs=4)
    assert (request.want_logprobs, request.top_logprobs) == (True, 4)


@pytest.mark.parametrize("value", [-1, 21, "3", True])
async def test_bad_top_logprobs_are_refused(value: Any) -> None:
    assert await refused_chat(logprobs=True, top_logprobs=value) == (400, "top_logprobs")


async def test_top_logprobs_need_logprobs_unless_none_are_asked_for() -> None:
    assert await refused_chat(top_logprobs=2) == (400, "top_logprobs")
    assert not (await accepted_chat(top_logprobs=0)).want_logprobs


async def test_a_number_for_logprobs_is_refused_in_chat() -> None:
    assert await refused_chat(logprobs=2) == (400, "logprobs")


async def test_template_options_reach_the_template() -> None:
    request = await accepted_chat(
        enable_thinking=False, chat_template_kwargs={"language": "fr", "enable_thinking": True}
    )
    assert request.prompt.template_options == {"language": "fr", "enable_thinking": True}


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
async def test_clients_cannot_set_the_servers_template_variables(name: str) -> None:
    assert await refused_chat(chat_template_kwargs={name: []}) == (
        400,
        f"chat_template_kwargs.{name}",
    )


async def test_the_last_assistant_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer"}]
    request = await accepted_chat(
        messages=messages, continue_final_message=True, add_generation_prompt=False
    )
    assert request.prompt.continue_last is True


async def test_only_an_assistant_message_can_be_continued() -> None:
    assert await refused_chat(continue_final_message=True) == (400, "continue_final_message")
    assert await refused_chat(add_generation_prompt=False) == (400, "add_generation_prompt")
