"""Prefill of a conversation's next turn while the worker is idle.

When an answer has ended, the next turn is rendered, earlier answers put back, with two different
next messages: the tokens that both have in common do not depend on the message. Only for chat
templates that rewrite past answers; with others, all of it is cached already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing

import msgspec

from holdfast.errors import HoldfastError
from holdfast.front.link.client import EngineClient
from holdfast.front.prompt.conversation import REASONING_FIELDS, answer_message
from holdfast.front.prompt.prepare import Prepared, conversation_tokens
from holdfast.front.prompt.stream import Observe
from holdfast.front.prompt.template_probes import next_messages
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.wire.commands import ReadAhead, SequenceRequest
from holdfast.wire.events import FinishReason
from holdfast.wire.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    ToolCallStarted,
    text_of,
    tool_calls_of,
)
from holdfast.wire.requests import (
    ChatPrompt,
    GenerationRequest,
    SamplingParams,
    TokenIds,
    common_tokens,
)

logger = logging.getLogger("holdfast.front.prompt")
LEAST_TOKENS = 64  # fewer are read in no time when the turn comes
# what a message may begin with: a word, or what the tokenizer may join to the line before
_PROBES = ("Next", "\n\n1. next")


class WarmAhead:
    """Reads of a server's conversations ahead of their next turns. Loop's thread only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def observer(
        self,
        request: GenerationRequest,
        bundle: TokenizerBundle,
        prepared: Prepared,
        client: EngineClient,
        *,
        threads: Executor,
        observe: Observe,
    ) -> Observe:
        """A function that must see all events of the answer; it passes each to `observe` first.

        threads: where the next turn is rendered. A request with several choices is not read ahead,
        because nobody knows which of them the conversation continues from.
        """
        prompt = request.prompt
        if (
            not bundle.read_ahead
            or not isinstance(prompt, ChatPrompt)
            or prompt.continue_last
            or request.choices != 1
        ):
            return observe
        loop = asyncio.get_running_loop()
        deltas: list[OutputDelta] = []

        def made() -> SequenceRequest | None:
            return read_ahead_request(
                request,
                prompt,
                bundle,
                prepared=prepared,
                deltas=deltas,
                context_tokens=client.info.context_tokens,
            )

        def see(event: OutputEvent) -> None:
            observe(event)
            if isinstance(event, PromptProgress):
                return
            if not isinstance(event, ChoiceFinished):
                deltas.append(event)
            elif event.reason is FinishReason.STOP:
                turn = (
                    "results"
                    if any(isinstance(delta, ToolCallStarted) for delta in deltas)
                    else "user"
                )
                if turn in bundle.read_ahead:
                    # a long answer's end is seen on another thread
                    loop.call_soon_threadsafe(self._begin, made, client, threads)

        return see

    def _begin(
        self, made: Callable[[], SequenceRequest | None], client: EngineClient, threads: Executor
    ) -> None:
        task = asyncio.get_running_loop().create_task(
            _read(made, client, threads), name="warm-ahead"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _read(
    made: Callable[[], SequenceRequest | None], client: EngineClient, threads: Executor
) -> None:
    """Make the request, and let the worker decide when it is read.

    Nothing depends on it, so nothing that fails here is told.
    """
    try:
        sequence = await asyncio.get_running_loop().run_in_executor(threads, made)
        if sequence is None:
            return
        async with aclosing(client.submit(sequence)) as events:
            async for _ in events:
                continue
    except HoldfastError as error:
        logger.debug("the next turn is not read ahead: %s", error)


def read_ahead_request(
    request: GenerationRequest,
    prompt: ChatPrompt,
    bundle: TokenizerBundle,
    *,
    prepared: Prepared,
    deltas: Sequence[OutputDelta],
    context_tokens: int,
) -> SequenceRequest | None:
    """What is to be read before the next turn comes, of a request's conversation and its answer;
    None when there is too little.

    deltas: the whole answer. Raises InvalidRequest where the template refuses such a turn.
    """
    calls = tool_calls_of(deltas)
    sends_thoughts = any(map(_has_thought, prompt.messages))
    answer = answer_message(
        text_of(deltas),
        reasoning=text_of(deltas, "reasoning") if sends_thoughts else "",
        calls=calls,
    )
    ahead: TokenIds | None = None
    for probe in _PROBES:
        messages = (*prompt.messages, answer, *next_messages(calls, probe))
        tokens = conversation_tokens(
            request, msgspec.structs.replace(prompt, messages=messages), bundle
        )
        ahead = tokens if ahead is None else ahead[: common_tokens(ahead.packed, tokens.packed)]
    generated = TokenIds.of(token_id for delta in deltas for token_id in delta.token_ids)
    known = (
        0
        if ahead is None
        else common_tokens(ahead.packed, (prepared.rules.prompt_token_ids + generated).packed)
    )
    if ahead is None or len(ahead) - known < LEAST_TOKENS or len(ahead) >= context_tokens:
        return None
    return SequenceRequest(
        request_id=f"{request.request_id}/ahead",
        prompt_token_ids=ahead,
        max_tokens=0,
        sampling=SamplingParams(seed=0),
        tenant=request.tenant,
        session_id=request.session_id,
        read_ahead=ReadAhead(known_tokens=known),
    )


def _has_thought(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and any(map(message.get, REASONING_FIELDS))
    )
