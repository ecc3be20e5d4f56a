"""Embeddings and ranks from a real server, through OpenAI's own client."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import openai
import pytest

from tests.fakes.server_process import ServerProcess, until

HELLO = [{"role": "user", "content": "Hello"}]


def test_vectors_are_returned_as_base64_or_numbers(client: openai.OpenAI) -> None:
    texts = ["Hello", "Goodbye", "Hello"]
    packed = client.embeddings.create(model="demo", input=texts)  # requests base64 by default
    plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(value * value for value in one.embedding) == pytest.approx(1, abs=1e-4)
    assert packed.data[0].embedding == pytest.approx(packed.data[2].embedding, abs=1e-5)
    assert packed.data[0].embedding != pytest.approx(packed.data[1].embedding, abs=1e-2)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0


def test_an_input_that_is_too_long_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="demo", input=["a", "the " * 100_000])
    assert refused.value.param == "input.1"
    assert refused.value.code == "context_length_exceeded"


def test_the_document_that_repeats_the_query_ranks_first(server: ServerProcess) -> None:
    documents = ["Bananas are yellow.", "What is the capital of France?"]
    body = {"query": "What is the capital of France?", "documents": documents}
    answer = httpx.post(f"{server.url}/v1/rerank", json=body, timeout=60).json()
    assert [result["index"] for result in answer["results"]] == [1, 0]


async def test_a_disconnect_ends_only_its_own_work(server: ServerProcess) -> None:
    texts = [f"{number} " + "sheep are white and " * 100 for number in range(64)]

    def running() -> int:
        return int(httpx.get(f"{server.url}/health", timeout=60).json()["models"][0]["running"])

    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:
        answer = asyncio.create_task(
            client.chat.completions.create(
                model="demo", messages=HELLO, temperature=0, max_tokens=40
            )
        )
        embedding = asyncio.create_task(client.embeddings.create(model="demo", input=texts))
        await asyncio.to_thread(until, lambda: running() > 1, "the texts are read")
        embedding.cancel()
        with suppress(asyncio.CancelledError):
            await embedding
        assert (await answer).choices[0].message.content
        await asyncio.to_thread(until, lambda: running() == 0, "nothing runs")
