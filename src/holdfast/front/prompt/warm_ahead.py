"""When an answer has ended, has the worker read what the next turn will begin with, as soon as it
has nothing else to do.

Only for chat templates that write answers of the past otherwise than they were generated; else all
of it is known already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import aclosing

from holdfast.errors import HoldfastError
from holdfast.front.link.client import EngineClient
from holdfast.front.prompt.answer_observer import Observe
from holdfast.front.prompt.next_turn import read_ahead_request
from holdfast.front.prompt.prepare import Prepared
from holdfast.front.prompt.tokenizer_bundle import TokenizerBundle
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import FinishReason
from holdfast.wire.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    ToolCallStarted,
)
from holdfast.wire.requests import ChatPrompt, GenerationRequest

logger = logging.getLogger("holdfast.front.prompt")


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
