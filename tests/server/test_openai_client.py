from __future__ import annotations

import asyncio
import random

import openai
import pytest

from tests.fakes.server_process import ServerProcess, until

HELLO = [{"role": "user", "content": "Hello"}]


def test_a_streamed_chat_gives_the_text_of_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=30)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=HELLO, temperature=0, max_tokens=30, stream=True, stream_options={"include_usage": True}
        )
    )
    assert whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason


def test_completions_take_several_prompts_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="demo", prompt=["one", "two"], n=2, max_tokens=4, temperature=1, seed=7)
    again = client.completions.create(model="demo", prompt=["one", "two"], n=2, max_tokens=4, temperature=1, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [choice.text for choice in again.choices]


def test_a_stop_string_ends_the_answer_and_is_not_in_it(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=30)
    text = plain.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:2]
    stopped = client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=30, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_an_unknown_model_is_a_404_and_a_bad_value_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)


async def test_sixteen_clients_with_random_disconnects_leave_nothing_behind(server: ServerProcess) -> None:
    dice = random.Random(5)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> int:
            prompt = " ".join(["word"] * dice.randrange(1, 200))
            leave_after = dice.randrange(1, 10) if dice.random() < 0.3 else None
            stream = await client.completions.create(
                model="demo",
                prompt=prompt,
                max_tokens=24,
                stream=True,
                seed=number,
                extra_body={"ignore_eos": True},
                stream_options={"include_usage": True},
            )
            pieces = 0
            async for chunk in stream:
                if chunk.usage is not None:
                    assert chunk.usage.completion_tokens == 24
                    return 24
                pieces += 1
                if pieces == leave_after:
                    await stream.close()
                    return 0
            return 0

        finished = 0
        for _ in range(3):
            finished += sum(await asyncio.gather(*(one(number) for number in range(16)))) // 24
    assert finished > 24
    until(lambda: server.model()["running"] == server.model()["queued"] == 0, "no request is left in the worker")
