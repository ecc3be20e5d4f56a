"""Where a protocol hands in a request: makes it servable, submits it, gives back the stream of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from holdfast.config import DEFAULT_TOOLS, LimitsSettings, ToolsSettings
from holdfast.errors import UnknownModel
from holdfast.intake.answer_observer import Observe, observer
from holdfast.intake.embed import embedding_of, embedding_sequences
from holdfast.intake.grammars.answer import UNCONSTRAINED, answer_grammar, is_constrained
from holdfast.intake.limits import nesting_of
from holdfast.intake.prepare import Prepared, assemble, encode_prompt, prompt_text, prompt_tokens, with_defaults
from holdfast.intake.prompt import EncodedPrompt, PromptText
from holdfast.intake.rank import ranking
from holdfast.intake.read_prompts import read_prompts
from holdfast.intake.stream import GenerationStream
from holdfast.intake.tokenize import Tokenizer
from holdfast.intake.tokenizer_bundle import TokenizerBundle
from holdfast.link.client import ClientOf, EngineClient
from holdfast.link.event_stream import EventStream
from holdfast.messages.events import ModelInfo
from holdfast.messages.output import Embedding, Relevance
from holdfast.messages.requests import ChatPrompt, EmbeddingRequest, GenerationRequest, RankRequest

# About 5 ms of tokenization: below, the hop to a thread costs more than it gives.
_LONG_TEXT_CHARACTERS = 20_000
_MANY_MESSAGES = 300  # about 4 ms of rendering
_MANY_PARTS = 1500  # of tools and of the calls in messages: about 15 ms


class Gateway:
    """Makes requests servable and submits them. One for all protocols, on the loop's thread.

    bundles: by served id, the same ids that `client_of` knows.
    """

    def __init__(
        self,
        client_of: ClientOf,
        bundles: Mapping[str, TokenizerBundle],
        limits: LimitsSettings,
        tools: ToolsSettings = DEFAULT_TOOLS,
    ) -> None:
        self._client_of = client_of
        self._bundles = bundles
        self._limits, self._tools = limits, tools

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Submit a request, as soon as its model serves; returns when the worker has accepted all its choices.

        Raises InvalidRequest (UnknownModel, PromptTooLong, …) before any work, QueueFull and WorkerUnavailable.
        """
        client = await self._client_of(request.model, request.choices)
        started = time.perf_counter()
        bundle = self._bundle(request.model)
        prepared = await self._prepare(request, bundle, client.info)
        observe = observer(request, bundle, prepared)
        return await self._submit(request, client, prepared, observe, intake_seconds=time.perf_counter() - started)

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """What the model would read; nothing is generated, and the prompt may be longer than its window.

        Raises InvalidRequest, UnknownModel and WorkerUnavailable; PromptTooLong only far beyond the window.
        """
        client = await self._client_of(request.model, 0)
        bundle = self._bundle(request.model)

        def encoded() -> EncodedPrompt:
            prompt = prompt_text(request, bundle, info=client.info)
            tokens = prompt_tokens(request, bundle, prompt, info=client.info)
            return EncodedPrompt(text=prompt.text, token_ids=tokens.token_ids)

        return await asyncio.to_thread(encoded)

    async def embed(self, request: EmbeddingRequest) -> tuple[Embedding, ...]:
        """A vector of length 1 for each input, in their order, read in the same steps as all that is generated.

        Raises InvalidRequest before any work (NoEmbeddings where the model cannot), QueueFull, WorkerUnavailable, and
        GenerationFailed when the model fails on an input. Cancelling it ends what still runs.
        """
        client = await self._client_of(request.model, 1)
        sequences = await asyncio.to_thread(embedding_sequences, request, self._bundle(request.model), info=client.info)
        read = await read_prompts(client, sequences, field_of=request.field_of)
        return await asyncio.to_thread(lambda: tuple(embedding_of(each.finished, dimensions=request.dimensions) for each in read))

    async def rank(self, request: RankRequest) -> tuple[Relevance, ...]:
        """How much each document is about the query, in their order. Raises as `embed` does."""
        client = await self._client_of(request.model, 1)
        asked = await asyncio.to_thread(ranking, request, self._bundle(request.model), info=client.info)
        if asked.first is not None:
            await read_prompts(client, [asked.first], field_of=lambda _: "query")
        read = await read_prompts(client, asked.sequences, field_of=lambda place: f"documents.{asked.places[place]}")
        return asked.relevances(read)

    def tokenizer_of(self, model: str) -> Tokenizer:
        """The tokenizer of a served model. Raises UnknownModel."""
        return self._bundle(model).tokenizer

    def _bundle(self, model: str) -> TokenizerBundle:
        if model not in self._bundles:
            raise UnknownModel(model=model, available=tuple(self._bundles))
        return self._bundles[model]

    async def _prepare(self, request: GenerationRequest, bundle: TokenizerBundle, info: ModelInfo) -> Prepared:
        request = with_defaults(request, bundle, info=info, limits=self._limits)
        if isinstance(request.prompt, ChatPrompt) and _takes_long(request.prompt):
            prompt = await asyncio.to_thread(prompt_text, request, bundle, info=info)
        else:
            prompt = prompt_text(request, bundle, info=info)
        grammar = UNCONSTRAINED
        if is_constrained(request, tools=self._tools):  # a new schema costs milliseconds, most of them without the interpreter
            grammar = await asyncio.to_thread(
                answer_grammar, request, bundle.dialect, prompt=prompt, limits=self._limits, tools=self._tools
            )
        if _is_soon_tokenized(prompt, bundle, tenant=request.tenant):
            tokens = encode_prompt(request, bundle, prompt, info=info)
        else:
            tokens = await asyncio.to_thread(encode_prompt, request, bundle, prompt, info=info)
        return assemble(request, bundle, prompt, tokens, info=info).constrained(grammar)

    async def _submit(
        self,
        request: GenerationRequest,
        client: EngineClient,
        prepared: Prepared,
        observe: Observe,
        *,
        intake_seconds: float,
    ) -> GenerationStream:
        sources: list[EventStream] = []
        is_accepted = False
        try:
            for sequence in prepared.sequences:
                sources.append(client.submit(sequence))  # noqa: PERF401 - those that were made are closed if the next one raises
            stream = GenerationStream(request, prepared, sources=sources, intake_seconds=intake_seconds, observe=observe)
            await stream.accepted()
            is_accepted = True
        finally:
            if not is_accepted:
                for source in sources:
                    await source.aclose()
        return stream


def _is_soon_tokenized(prompt: PromptText, bundle: TokenizerBundle, *, tenant: str) -> bool:
    if len(prompt.text) <= _LONG_TEXT_CHARACTERS:
        return True
    unknown = bundle.token_memory.unknown_characters(prompt.text, bundle.tokenizer, tenant=tenant)
    return unknown <= _LONG_TEXT_CHARACTERS


def _takes_long(prompt: ChatPrompt) -> bool:
    """Whether rendering would hold up the event loop."""
    if len(prompt.messages) > _MANY_MESSAGES or _characters_of_answers(prompt) > _LONG_TEXT_CHARACTERS:
        return True
    return nesting_of([prompt.tools, prompt.messages], most_parts=_MANY_PARTS).parts > _MANY_PARTS


def _characters_of_answers(prompt: ChatPrompt) -> int:
    """Of past answers, which are read for calls and thoughts: 10 µs each where nothing but braces stands."""
    answers = (message for message in prompt.messages if isinstance(message, dict) and message.get("role") == "assistant")
    return sum(len(content) for answer in answers if isinstance(content := answer.get("content"), str))
