"""After an answer, the beginning of the next turn is sent to the worker; nobody waits for it, and
no answer depends on it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from holdfast.config import LimitsSettings
from holdfast.front.gateway import Gateway
from holdfast.front.link.event_stream import WorkerClient
from holdfast.front.prompt.known_answers import KnownAnswers
from holdfast.front.prompt.template_probes import NextTurn
from holdfast.front.prompt.tokenizer_bundle import Bundles, TokenizerBundle
from holdfast.front.request import ChatPrompt, GenerationRequest
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import Accepted, Event, Finished, FinishReason
from tests.fakes.agent_turns import QUESTION, TOOLS, in_any_tokens
from tests.fakes.scripted_client import ScriptedClient, answers, model_info
from tests.fakes.thinking_bundle import bundle_of

LONG = "hello world, hello. " * 30
SAID = f"<think>\nwhy\n</think>\n\n{LONG}"
CALLED = SAID + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
INFO = model_info(context_tokens=100_000)


def bundle(*turns: NextTurn) -> TokenizerBundle:
    return replace(bundle_of(), known_answers=KnownAnswers(), read_ahead=frozenset(turns))


def client_that_says(
    text: str, served: TokenizerBundle, *, reason: FinishReason = FinishReason.STOP
) -> ScriptedClient:
    """A client that answers with a text and accepts work to prefill ahead."""
    ids = (*in_any_tokens(text, served, random.Random(0)), served.tokenizer.eos_token_ids[0])
    answered = answers(*ids, reason=reason)

    def script(request: SequenceRequest) -> Sequence[Event]:
        if not request.is_idle_work:
            return answered(request)
        end = Finished(
            request_id=request.request_id,
            reason=FinishReason.LENGTH,
            prompt_tokens=1,
            completion_tokens=0,
        )
        return [Accepted(request_id=request.request_id), end]

    return ScriptedClient(script, info=INFO)


async def ask(
    client: ScriptedClient, served: TokenizerBundle, **fields: Any
) -> list[SequenceRequest]:
    """Read one answer to its end; returns the requests to prefill ahead."""

    @asynccontextmanager
    async def lease_of(model: str, sequences: int) -> AsyncIterator[WorkerClient]:
        yield client

    async def read(model: str) -> TokenizerBundle:
        return served

    gateway = Gateway(lease_of, Bundles(read), LimitsSettings())
    prompt = ChatPrompt(messages=(QUESTION,), tools=TOOLS)
    stream = await gateway.generate(
        GenerationRequest(request_id="r", model="m", prompt=prompt, **fields)
    )
    async with aclosing(stream):
        async for _ in stream:
            continue
    await asyncio.sleep(0)  # the end may have been seen on another thread
    while tasks := [task for task in asyncio.all_tasks() if task.get_name() == "warm-ahead"]:
        await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    return [request for request in client.submitted if request.is_idle_work]


async def test_the_history_is_prefilled_ahead_under_its_own_id() -> None:
    served = bundle("user")
    (ahead,) = await ask(client := client_that_says(SAID, served), served)
    assert ahead.request_id not in {
        request.request_id for request in client.submitted if request is not ahead
    }
    assert "<think>" not in served.tokenizer.decode(
        ahead.prompt_token_ids, skip_special_tokens=False
    )


async def test_history_that_the_template_keeps_is_not_prefilled_ahead() -> None:
    assert await ask(client_that_says(SAID, bundle()), bundle()) == []
    assert await ask(client_that_says(CALLED, bundle("user")), bundle("user")) == []
    assert await ask(client_that_says(SAID, bundle("results")), bundle("results")) == []


async def test_several_choices_are_not_prefilled_ahead() -> None:
    assert await ask(client_that_says(SAID, bundle("user")), bundle("user"), choices=2) == []


async def test_a_cut_answer_is_not_prefilled_ahead() -> None:
    client = client_that_says(SAID, bundle("user"), reason=FinishReason.LENGTH)
    assert await ask(client, bundle("user")) == []


async def test_a_long_answer_finished_on_another_thread_is_prefilled_ahead() -> None:
    served = bundle("user")
    long_answer = SAID + "".join(f"{number} {LONG}" for number in range(30))
    assert len(await ask(client_that_says(long_answer, served), served)) == 1


async def test_a_missing_worker_harms_nobody() -> None:
    served = bundle("user")
    client = client_that_says(SAID, served)
    client.refuses_after = 1
    assert await ask(client, served) == []
