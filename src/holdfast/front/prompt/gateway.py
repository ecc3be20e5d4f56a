"""Takes requests from the protocols: prepares and submits them, and returns the answers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

from holdfast.config import DEFAULT_TOOLS, LimitsSettings, ToolsSettings
from holdfast.errors import SessionRefused
from holdfast.front.link.event_stream import EngineClient, EventStream, LeaseOf
from holdfast.front.prompt.embed_and_rank import (
    embedding_of,
    embedding_sequences,
    ranking,
    read_prompts,
)
from holdfast.front.prompt.next_turn import WarmAhead, observer
from holdfast.front.prompt.prepare import Prepared, prepare, prompt_text, prompt_tokens
from holdfast.front.prompt.stream import GenerationStream
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import Bundles, TokenizerBundle
from holdfast.front.structured.answer import is_constrained
from holdfast.wire.events import ModelInfo
from holdfast.wire.output import Embedding, Relevance
from holdfast.wire.requests import (
    ChatPrompt,
    EmbeddingRequest,
    EncodedPrompt,
    GenerationRequest,
    Prompt,
    RankRequest,
)
from holdfast.wire.sessions import SessionAnswer, SessionCommand, SessionInfo

# About 5 ms of tokenization. For shorter texts the hop to a thread costs more than it saves.
_LONG_TEXT_CHARACTERS = 20_000
# per model; most of the time they wait for a template that is rendered in another process
_PREPARING_THREADS = 4


def sessions_of(answer: SessionAnswer) -> tuple[SessionInfo, ...]:
    """The sessions in a worker's answer. Raises SessionRefused if it refuses."""
    if answer.failure is not None:
        raise SessionRefused(answer.failure, answer.message)
    return answer.sessions


class Gateway:
    """Prepares and submits requests for all protocols. Only for the event loop's thread.

    It holds a lease of the model until the answer has ended.
    """

    def __init__(
        self,
        lease_of: LeaseOf,
        bundles: Bundles,
        limits: LimitsSettings,
        tools: ToolsSettings = DEFAULT_TOOLS,
    ) -> None:
        self._lease_of = lease_of
        self._bundles = bundles
        self._limits = limits
        self._tools = tools
        self._warm_ahead = WarmAhead()
        # by model, so that a slow template delays no other model
        self._threads: dict[str, ThreadPoolExecutor] = {}

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Submit a request once its model is loaded; returns when the worker has accepted it.

        Raises InvalidRequest (UnknownModel, PromptTooLong, …) before any work, QueueFull and
        WorkerUnavailable.
        """
        async with AsyncExitStack() as held:
            client, bundle = await self._model(request.model, request.choices, held)
            prepared = await self._prepare(request, bundle, client.info)
            observe = self._warm_ahead.observer(
                request,
                bundle,
                prepared,
                client,
                threads=self._threads_of(request.model),
                observe=observer(request, bundle, prepared),
            )
            sources: list[EventStream] = []
            for sequence in prepared.sequences:
                source = client.submit(sequence)
                held.push_async_callback(source.aclose)
                sources.append(source)
            stream = GenerationStream(
                request,
                prepared,
                sources=sources,
                observe=observe,
                repeated_thought_tokens=self._limits.repeated_thought_tokens,
            )
            await stream.accepted()
            stream.hold(held.pop_all())
        return stream

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """The prompt as the model would read it. It may exceed the context window.

        Raises InvalidRequest, UnknownModel and WorkerUnavailable; PromptTooLong only for a prompt
        far beyond the window.
        """

        def encoded() -> EncodedPrompt:
            prompt = prompt_text(request, bundle, info=client.info)
            tokens = prompt_tokens(request, bundle, prompt, info=client.info)
            return EncodedPrompt(text=prompt.text, token_ids=tokens.token_ids)

        async with AsyncExitStack() as lease:
            client, bundle = await self._model(request.model, 0, lease)
            return await asyncio.get_running_loop().run_in_executor(
                self._threads_of(request.model), encoded
            )

    async def embed(self, request: EmbeddingRequest) -> tuple[Embedding, ...]:
        """A vector of length 1 for each input, in order.

        Inputs are batched with other requests. Cancelling ends what still runs. Raises
        InvalidRequest before any work (NoEmbeddings if the model has none), QueueFull,
        WorkerUnavailable, and GenerationFailed when the model fails on an input.
        """
        async with AsyncExitStack() as lease:
            client, bundle = await self._model(request.model, 1, lease)
            sequences = await asyncio.to_thread(
                embedding_sequences, request, bundle, info=client.info
            )
            read = await read_prompts(client, sequences, field_of=request.field_of)
        return await asyncio.to_thread(
            lambda: tuple(
                embedding_of(each.finished, dimensions=request.dimensions) for each in read
            )
        )

    async def rank(self, request: RankRequest) -> tuple[Relevance, ...]:
        """The relevance of each document to the query, in order. Raises what `embed` raises."""
        async with AsyncExitStack() as lease:
            client, bundle = await self._model(request.model, 1, lease)
            ranked = partial(ranking, request, bundle, info=client.info)
            asked = await asyncio.get_running_loop().run_in_executor(
                self._threads_of(request.model), ranked
            )
            if asked.first is not None:
                await read_prompts(client, [asked.first], field_of=lambda _: "query")
            read = await read_prompts(
                client, asked.sequences, field_of=lambda place: f"documents.{asked.places[place]}"
            )
        return asked.relevances(read)

    async def tokenizer_of(self, model: str) -> Tokenizer:
        """The tokenizer of a model, loaded or not. Raises UnknownModel and WorkerUnavailable."""
        return (await self._bundles.of(model)).tokenizer

    async def sessions(self, model: str, command: SessionCommand) -> tuple[SessionInfo, ...]:
        """Run a session command; returns the sessions concerned.

        Raises SessionRefused, UnknownModel, QueueFull, and WorkerUnavailable when no worker starts,
        or the command kills two of them.
        """
        async with self._lease_of(model, 1) as client:
            return sessions_of(await client.ask_session(command))

    async def _model(
        self, model: str, sequences: int, lease: AsyncExitStack
    ) -> tuple[EngineClient, TokenizerBundle]:
        """A model's client, and its tokenizer, which is read while the model is loaded."""
        self._bundles.begin(model)
        client = await lease.enter_async_context(self._lease_of(model, sequences))
        return client, await self._bundles.of(model)

    def _threads_of(self, model: str) -> ThreadPoolExecutor:
        if model not in self._threads:
            self._threads[model] = ThreadPoolExecutor(
                _PREPARING_THREADS, thread_name_prefix="prepare"
            )
        return self._threads[model]

    async def _prepare(
        self, request: GenerationRequest, bundle: TokenizerBundle, info: ModelInfo
    ) -> Prepared:
        ready = partial(prepare, request, bundle, info=info, limits=self._limits, tools=self._tools)
        # Compiling a new schema takes milliseconds, most of them without the GIL.
        if _takes_long(request.prompt) or is_constrained(request, tools=self._tools):
            return await asyncio.get_running_loop().run_in_executor(
                self._threads_of(request.model), ready
            )
        return ready()


def _takes_long(prompt: Prompt) -> bool:
    """Whether preparing a prompt may block the event loop for long, as any chat template may."""
    return isinstance(prompt, ChatPrompt) or (
        isinstance(prompt, str) and len(prompt) > _LONG_TEXT_CHARACTERS
    )
