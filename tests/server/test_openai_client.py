from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.server_process import ServerProcess, until

HELLO = [{"role": "user", "content": "Hello"}]


def test_a_streamed_chat_has_the_text_of_a_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, max_tokens=30
    )
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=HELLO,
            temperature=0,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert whole.choices[0].message.content
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason


def test_completions_take_several_prompts_and_several_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["one", "two"], n=2, max_tokens=4, temperature=1, seed=7
    )
    again = client.completions.create(
        model="demo", prompt=["one", "two"], n=2, max_tokens=4, temperature=1, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [choice.text for choice in again.choices]


def test_a_stop_string_ends_the_answer_and_is_left_out(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, max_tokens=30
    )
    text = plain.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:2]
    stopped = client.chat.completions.create(
        model="demo", messages=HELLO, temperature=0, max_tokens=30, stop=[stop]
    )
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_an_unknown_model_is_404_and_a_bad_value_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=HELLO, temperature=-1)


@pytest.mark.slow
async def test_sixteen_clients_with_random_disconnects_leave_nothing_behind(
    server: ServerProcess,
) -> None:
    dice = random.Random(5)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:

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
    until(
        lambda: server.model()["running"] == server.model()["queued"] == 0,
        "no request is left in the worker",
    )


RULES = (
    "You are one of four agents that keep a harbour. Answer in one short sentence, and never say "
    "what the others have said. " * 12
)
TURNS = ("What is 2 + 3?", "And what is 4 + 4?", "Say hello.")


def test_four_concurrent_agents_answer_as_alone_and_share_their_prefix(
    server: ServerProcess,
) -> None:
    def hold(tenant: str, number: int, together: threading.Barrier | None = None) -> list[Any]:
        """All turns of an agent; returns the answers."""
        messages: list[Any] = [{"role": "system", "content": RULES}]
        answers = []
        headers = {"X-Holdfast-Tenant": tenant, "X-Holdfast-Explain": "1"}
        with openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, default_headers=headers
        ) as client:
            for turn in TURNS:
                if together is not None:
                    together.wait(60)
                messages.append({"role": "user", "content": f"Agent {number}: {turn}"})
                answer = client.chat.completions.create(
                    model="demo",
                    messages=messages,
                    temperature=0,
                    max_tokens=16,
                    reasoning_effort="none",
                )
                messages.append(
                    {"role": "assistant", "content": answer.choices[0].message.content or ""}
                )
                answers.append(answer)
        return answers

    agents = range(4)
    alone = [hold(f"agent {number}", number) for number in agents]
    before, barrier = reused(server), threading.Barrier(len(agents))
    with ThreadPoolExecutor(len(agents)) as threads:
        together = list(threads.map(lambda number: hold("four agents", number, barrier), agents))
    said = [[each.choices[0].message.content for each in answers] for answers in together]
    assert said == [[each.choices[0].message.content for each in answers] for answers in alone]
    assert all(all(texts) for texts in said)
    rules = httpx.post(f"{server.url}/tokenize", json={"prompt": RULES}, timeout=60).json()["count"]
    own = sum(answers[-1].usage.prompt_tokens - rules for answers in together)
    explained = [[each.holdfast for each in answers] for answers in together]
    assert sum(each["read_tokens"] for turns in explained for each in turns) <= rules + own
    assert sum(each.holdfast["read_tokens"] for answers in alone for each in answers) > 3 * rules
    for turns, answers in zip(explained, together, strict=True):
        for told, last in zip(turns[1:], answers, strict=False):
            assert told["moved_tokens"] + told["shared_tokens"] >= last.usage.prompt_tokens - 1
    after = reused(server)
    assert after["moved"] > before["moved"]
    assert after["shared"] - before["shared"] >= 2 * rules


def reused(server: ServerProcess) -> dict[str, float]:
    """Tokens found in RAM so far, by kind of reuse."""
    told = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    name = "holdfast_prefix_cache_reused_ram_tokens_total{"
    return {
        line.split('how="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in told
        if line.startswith(name)
    }
