"""Takes requests from the code of all protocols, prepares them, submits them to the workers, and
streams the answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import msgspec

from holdfast.config import DEFAULT_TOOLS, LimitsSettings, ToolsSettings
from holdfast.errors import GenerationFailed, SessionFailure, SessionRefused, WorkerUnavailable
from holdfast.front.answers.choice import ChoiceText
from holdfast.front.answers.stops import RepetitionGuard
from holdfast.front.images.intake import ImageIntake, text_only
from holdfast.front.link.event_stream import (
    EventStream,
    LeaseOf,
    WorkerClient,
    refusal,
    wait_for_any,
)
from holdfast.front.output import (
    ChoiceFinished,
    Embedding,
    OutputEvent,
    Relevance,
    TextDelta,
    ThoughtEnder,
)
from holdfast.front.prompt.embed_and_rank import (
    embedding_of,
    embedding_sequences,
    ranking,
    read_prompts,
)
from holdfast.front.prompt.images import ImageLayouts, visible_tokens
from holdfast.front.prompt.next_turn import Observe, WarmAhead, observer
from holdfast.front.prompt.prepare import (
    NO_IMAGES,
    Layouts,
    Prepared,
    prepare,
    prompt_text,
    prompt_tokens,
)
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.prompt.tokenizer_bundle import Bundles, TokenizerBundle
from holdfast.front.request import (
    ChatPrompt,
    EmbeddingRequest,
    EncodedPrompt,
    GenerationRequest,
    Prompt,
    RankRequest,
)
from holdfast.front.structured.answer import is_constrained
from holdfast.front.telemetry.request_log import waiting_for
from holdfast.wire.events import Answer, ModelInfo, Rejected, WaitReason
from holdfast.wire.sessions import SessionAnswer, SessionCommand, SessionInfo

_log = logging.getLogger(__name__)
# tokens, about 20 ms of tokenization; for shorter answers, moving to a thread costs more than it
# saves
_LONG_ANSWER_TOKENS = 2048
# About 5 ms of tokenization. For shorter texts, moving to a thread costs more than it saves.
_LONG_TEXT_CHARACTERS = 20_000
# number of threads per model; each spends most of its time waiting for the template process
_PREPARING_THREADS = 4


def sessions_of(reply: Answer) -> tuple[SessionInfo, ...]:
    """The sessions in a worker's reply to a session command. Raises SessionRefused if it refused."""
    assert isinstance(reply, SessionAnswer)
    if reply.failure is not None:
        raise SessionRefused(reply.failure, reply.message)
    return reply.sessions


@dataclass(slots=True, eq=False)
class _SessionAnswer:
    """Whether a running answer still belongs to its session. It has none of the answer's content.

    submitted: set when its sequences were sent to the worker, or when it ended before that.
    is_closed: whether the session was closed after the answer began. is_forgotten: whether it was
    also forgotten, so that no next turn can use this answer.
    """

    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False
    is_forgotten: bool = False


def _observe_unless_forgotten(answer: _SessionAnswer, observe: Observe) -> Observe:
    """The same function as `observe`, except that it ignores the end of a forgotten answer, so that
    the answer is neither remembered nor its next turn prefilled.
    """

    def observe_unless_forgotten(event: OutputEvent) -> None:
        if not (answer.is_forgotten and isinstance(event, ChoiceFinished)):
            observe(event)

    return observe_unless_forgotten


class Gateway:
    """Prepares and submits requests for all protocols. Call it only from the event loop's thread.

    Each request holds a lease on its model until the answer has ended, so that the model stays
    loaded.
    """

    def __init__(
        self,
        lease_of: LeaseOf,
        bundles: Bundles,
        limits: LimitsSettings,
        tools: ToolsSettings = DEFAULT_TOOLS,
        *,
        images: ImageIntake | None = None,
    ) -> None:
        """lease_of: returns a context manager that waits for the client of a model's worker, and
        keeps the model loaded for a number of sequences.
        bundles: the tokenizers of the models. images: None: no model can be given images.
        """
        self._lease_model = lease_of
        self._images = images
        self._image_layouts = ImageLayouts(images.folder if images is not None else None)
        self._bundles = bundles
        self._limits = limits
        self._tools = tools
        self._warm_ahead = WarmAhead()
        # the running answers of each session, by model, tenant and id
        self._running_answers: defaultdict[tuple[str, str, str], set[_SessionAnswer]] = defaultdict(
            set
        )
        # thread pools by model, so that a slow template delays no other model
        self._threads: dict[str, ThreadPoolExecutor] = {}

    def close(self) -> None:
        """Stop fetching images, because the server stops."""
        if self._images is not None:
            self._images.close()

    async def generate(self, request: GenerationRequest) -> GenerationStream:
        """Load the model if necessary, submit a request, and wait until the worker has accepted it.

        Raises InvalidRequest (UnknownModel, PromptTooLong, …) before any work, QueueFull and
        WorkerUnavailable.
        """
        async with AsyncExitStack() as resources:
            running_answer = self._record_running_answer(request, resources)
            client, bundle = await self._lease_client(request.model, request.choices, resources)
            prompt, layouts = await self._prompt_and_layouts(request, client, resources)
            prepared = await self._prepare(request, prompt, bundle, client.info, layouts)
            observe = self._warm_ahead.observer(
                request,
                bundle,
                prepared,
                client,
                threads=self._threads_of(request.model),
                observe=observer(request, bundle, prepared),
            )
            event_streams: list[EventStream] = []
            for sequence in prepared.sequences:
                if running_answer.is_closed:
                    sequence = sequence.without_session(forget=running_answer.is_forgotten)
                events = client.submit(sequence)
                resources.push_async_callback(events.aclose)
                event_streams.append(events)
            running_answer.submitted.set()
            stream = GenerationStream(
                request,
                prepared,
                sources=event_streams,
                observe=_observe_unless_forgotten(running_answer, observe),
                repeated_tokens=self._limits.repeated_tokens,
            )
            await stream.accepted()
            stream.close_at_end(resources.pop_all())
        return stream

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        """Encode the prompt as the model would read it. The prompt may exceed the context window.

        Raises InvalidRequest, UnknownModel and WorkerUnavailable; PromptTooLong only for a prompt
        far beyond the window.
        """
        async with AsyncExitStack() as lease:
            client, bundle = await self._lease_client(request.model, 0, lease)
            prompt, layouts = await self._prompt_and_layouts(request, client, lease)

            def encode_prompt() -> EncodedPrompt:
                text = prompt_text(request, bundle, prompt, info=client.info)
                tokens = prompt_tokens(request, bundle, text, info=client.info, layouts=layouts)
                visible_token_ids = visible_tokens(tokens.token_ids, tokens.images, layouts)
                return EncodedPrompt(text=text.text, token_ids=visible_token_ids)

            return await asyncio.get_running_loop().run_in_executor(
                self._threads_of(request.model), encode_prompt
            )

    async def embed(self, request: EmbeddingRequest) -> tuple[Embedding, ...]:
        """Embed the inputs: one vector with a norm of 1 for each, in order.

        Inputs are batched with other requests. If this call is cancelled, so are the inputs that
        are still running.
        Raises InvalidRequest before any work (NoEmbeddings if the model has none), QueueFull,
        WorkerUnavailable, and GenerationFailed when the model fails on an input.
        """
        async with AsyncExitStack() as lease:
            # 1: `read_prompts` limits how many of the inputs run at once
            client, bundle = await self._lease_client(request.model, 1, lease)
            sequences = await asyncio.to_thread(
                embedding_sequences, request, bundle, info=client.info
            )
            results = await read_prompts(client, sequences, field_of=request.field_of)
        return await asyncio.to_thread(
            lambda: tuple(
                embedding_of(result.finished, dimensions=request.dimensions) for result in results
            )
        )

    async def rank(self, request: RankRequest) -> tuple[Relevance, ...]:
        """Rate the relevance of each document to the query, in the order of the documents.

        Raises InvalidRequest before any work, QueueFull, WorkerUnavailable, and GenerationFailed
        when the model fails on a document.
        """
        async with AsyncExitStack() as lease:
            client, bundle = await self._lease_client(request.model, 1, lease)
            prepare_ranking = partial(ranking, request, bundle, info=client.info)
            prepared = await asyncio.get_running_loop().run_in_executor(
                self._threads_of(request.model), prepare_ranking
            )
            if prepared.shared_prefix is not None:
                await read_prompts(client, [prepared.shared_prefix], field_of=lambda _: "query")
            results = await read_prompts(
                client,
                prepared.sequences,
                field_of=lambda index: f"documents.{prepared.document_indices[index]}",
            )
        return prepared.relevances(results)

    async def tokenizer_of(self, model: str) -> Tokenizer:
        """The tokenizer of a model, which need not be loaded.

        Raises UnknownModel and WorkerUnavailable.
        """
        return (await self._bundles.of(model)).tokenizer

    async def sessions(self, model: str, command: SessionCommand) -> tuple[SessionInfo, ...]:
        """Let the model's worker run a session command. Returns the sessions that it concerns.

        If the session's first request is still being prepared, waits until it is submitted, which
        opens the session.

        Raises SessionRefused, UnknownModel, QueueFull, and WorkerUnavailable when no worker starts
        or the command kills two workers.
        """
        running_answers = tuple(
            self._running_answers.get((model, command.tenant, command.session_id), ())
        )
        unsubmitted = [each for each in running_answers if not each.submitted.is_set()]
        if command.operation == "close":
            for running_answer in running_answers:
                running_answer.is_closed = True
                running_answer.is_forgotten |= command.forget
        try:
            async with self._lease_model(model, 1) as client:
                return sessions_of(await client.call(command))
        except SessionRefused as refusal:
            if not unsubmitted or refusal.failure is not SessionFailure.NOT_FOUND:
                raise
        if command.operation == "close":
            return ()  # its first request has not been submitted, and will not open it
        for running_answer in unsubmitted:
            await running_answer.submitted.wait()
        async with self._lease_model(model, 1) as client:
            return sessions_of(await client.call(command))

    def _record_running_answer(
        self, request: GenerationRequest, resources: AsyncExitStack
    ) -> _SessionAnswer:
        """Record the running answer of the request's session until `resources` is closed. Session
        commands need to know it.
        """
        running_answer = _SessionAnswer()
        if request.session_id:
            session_key = (request.model, request.tenant, request.session_id)
            self._running_answers[session_key].add(running_answer)

            def record_end() -> None:
                running_answer.submitted.set()
                self._running_answers[session_key].discard(running_answer)
                if not self._running_answers[session_key]:
                    del self._running_answers[session_key]

            resources.callback(record_end)
        return running_answer

    async def _lease_client(
        self, model: str, sequences: int, lease: AsyncExitStack
    ) -> tuple[WorkerClient, TokenizerBundle]:
        """The client of a model's worker, and the tokenizer. Both are loaded at the same time.

        sequences: for how many the caller counts while it waits. lease: keeps the model loaded until
        it is closed.
        """
        self._bundles.begin(model)
        client = await lease.enter_async_context(self._lease_model(model, sequences))
        bundle = await self._bundles.of(model)
        vision = client.info.vision
        if vision is None or vision.refused:
            return client, bundle
        if vision not in bundle.by_vision:
            await asyncio.to_thread(bundle.with_vision, vision)
        return client, bundle.with_vision(vision)

    async def _prompt_and_layouts(
        self, request: GenerationRequest, client: WorkerClient, resources: AsyncExitStack
    ) -> tuple[Prompt, Layouts]:
        """Take the images of a request and get their token layouts from the worker.

        Returns the prompt with the names of its images, and their layouts.

        resources: holds the files of the images.
        """
        if not isinstance(request.prompt, ChatPrompt) or not request.prompt.has_images:
            return request.prompt, NO_IMAGES
        vision = client.info.vision
        if self._images is None or vision is None or vision.refused:
            reported_vision = None if self._images is None else vision
            return text_only(request.prompt, reported_vision), NO_IMAGES
        model = client.info.fingerprint
        with waiting_for(WaitReason.IMAGES):
            stored_prompt = await resources.enter_async_context(
                self._images.stored(request.prompt, tenant=request.tenant)
            )
            layout_query = self._image_layouts.question(
                stored_prompt, model=model, max_pixels=self._images.max_pixels
            )
            if layout_query is not None:
                self._image_layouts.learn(await client.call(layout_query), model=model)
        return self._image_layouts.prompt_and_layouts(stored_prompt, model=model)

    def _threads_of(self, model: str) -> ThreadPoolExecutor:
        """The threads that prepare the requests of a model. They are started when first needed."""
        if model not in self._threads:
            self._threads[model] = ThreadPoolExecutor(
                _PREPARING_THREADS, thread_name_prefix="prepare"
            )
        return self._threads[model]

    async def _prepare(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        bundle: TokenizerBundle,
        info: ModelInfo,
        layouts: Layouts,
    ) -> Prepared:
        """Prepare a request: on one of its model's threads if it may take long, or else
        immediately.
        """
        prepare_request = partial(
            prepare,
            request,
            bundle,
            info=info,
            limits=self._limits,
            tools=self._tools,
            prompt=prompt,
            layouts=layouts,
        )
        # Compiling a new schema takes milliseconds, mostly without the GIL.
        if _takes_long(request.prompt) or is_constrained(request, tools=self._tools):
            return await asyncio.get_running_loop().run_in_executor(
                self._threads_of(request.model), prepare_request
            )
        return prepare_request()


def _takes_long(prompt: Prompt) -> bool:
    """Whether preparing a prompt may block the event loop for long.

    True for every conversation, because its chat template may be slow.
    """
    return isinstance(prompt, ChatPrompt) or (
        isinstance(prompt, str) and len(prompt) > _LONG_TEXT_CHARACTERS
    )


@dataclass(slots=True)
class _Choice:
    """One of the answers to a request, while it is read."""

    index: int
    text: ChoiceText  # turns the events into deltas
    source: EventStream  # the worker's events
    guard: RepetitionGuard  # notices a thought that repeats itself
    thought_ended_by: ThoughtEnder | None = None  # None: nothing has interrupted it


class GenerationStream:
    """The events of an accepted request: deltas, and one `ChoiceFinished` per choice.

    `aclose` cancels the choices that still run, and so does cancelling a pending `__anext__`. If a
    choice fails, the iteration raises GenerationFailed and cancels the others. Only one consumer
    may iterate, inside `async with contextlib.aclosing(stream)`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        *,
        sources: Sequence[EventStream],
        observe: Observe = lambda event: None,
        repeated_tokens: int = 0,
    ) -> None:
        """sources: the events of each sequence, as the worker sends them. observe: called with every
        event that the client gets. repeated_tokens: a thought is ended when this many tokens repeat
        themselves; 0: never.
        """
        self.request = request
        self.prompt_tokens = prepared.prompt_tokens  # counted once, however many choices there are
        self.sampling = prepared.sequences[0].sampling  # completed by the model's defaults
        self.put_back_tokens = prepared.put_back_tokens
        self.dropped_tokens = prepared.dropped_tokens
        self.breakpoints = prepared.breakpoints
        self.unenforced = prepared.unenforced
        self.left_out = prepared.left_out
        self._observe = observe
        self._choices = [
            _Choice(index, prepared.choice(), source, RepetitionGuard(repeated_tokens))
            for index, source in enumerate(sources)
        ]
        self._running = self._choices  # the choices that have not ended
        self._thought_end = prepared.thought_end  # budget that ends a thought immediately
        self._unreturned: deque[OutputEvent] = deque()  # read, but not returned yet
        self._closed = False
        self._resources = AsyncExitStack()  # released when the stream ends

    def close_at_end(self, resources: AsyncExitStack) -> None:
        """Hold resources, such as the lease on the model, until the answer has ended."""
        self._resources = resources

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that needed no prefill; None until the prompt is prefilled."""
        started = self._choices[0].source.prefill_finished
        return None if started is None else started.cache_report.cached_tokens

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> OutputEvent:
        while not self._unreturned:
            if self._closed:
                raise StopAsyncIteration
            is_complete = False
            try:
                await self._read_more()
                is_complete = True
            finally:
                if not is_complete:
                    await self.aclose()
        event = self._unreturned.popleft()
        if isinstance(event, ChoiceFinished) and event.completion_tokens > _LONG_ANSWER_TOKENS:
            await asyncio.to_thread(self._observe, event)  # may tokenize the whole answer
        else:
            self._observe(event)
        return event

    async def accepted(self) -> None:
        """Wait until the worker has accepted all choices.

        Raises the matching error if the worker refuses; then the caller must close the stream.
        """
        for choice in self._choices:
            event = await anext(choice.source, None)
            if event is None:
                raise WorkerUnavailable(
                    "the worker ended before it accepted the request; please try again"
                )
            if isinstance(event, Rejected):
                raise refusal(event)
            self._unreturned.extend(
                [self._process_event(choice, each) for each in choice.text.feed(event)]
            )

    def pause(self) -> None:
        """Pause generation until `unpause`. Tokens that were already generated can still be read.

        Until then, other requests may take the KV memory of this one.
        """
        for choice in self._choices:
            choice.source.pause()

    def unpause(self) -> None:
        """Undo `pause`."""
        for choice in self._choices:
            choice.source.unpause()

    def end_thoughts(self) -> bool:
        """End the thoughts of all choices. Returns False if no marker ends this model's thoughts."""
        for choice in self._choices:
            self._end_thought(choice, by="request")
        return self._thought_end is not None

    async def aclose(self) -> None:
        """Cancel the choices that still run and end the iteration. Idempotent."""
        self._closed = True
        self._unreturned.clear()
        # The sources are closed first, because the await below may be cancelled, and a sequence must
        # not be left running.
        for choice in self._choices:
            await choice.source.aclose()
        await self._resources.aclose()

    async def _read_more(self) -> None:
        """Read the next event of each choice that has one; wait until one has.

        Unread events stay in the sources, which apply backpressure.
        """
        running = self._running
        if len(running) > 1:
            await wait_for_any([choice.source for choice in running])
            running = [choice for choice in running if choice.source.is_ready]
        for choice in running:
            self._unreturned.extend(await self._read_choice(choice))
            if choice.text.is_done:
                await choice.source.aclose()
                self._running = [each for each in self._running if each is not choice]
        if not self._running:
            self._closed = True
            await self._resources.aclose()

    async def _read_choice(self, choice: _Choice) -> list[OutputEvent]:
        """Read the next event that the worker sent about a choice. Returns the events for the
        client.
        """
        worker_event = await anext(choice.source, None)
        if worker_event is None:
            raise GenerationFailed("the worker's stream ended without a result")
        return [self._process_event(choice, event) for event in choice.text.feed(worker_event)]

    def _process_event(self, choice: _Choice, event: OutputEvent) -> OutputEvent:
        """End the choice's thought if this event shows that it repeats itself.

        Returns the event with the index of its choice. The final event also says what ended the
        reasoning.
        """
        if (
            isinstance(event, TextDelta)
            and event.kind == "reasoning"
            and choice.guard.push(event.token_ids)
        ):
            self._end_thought(choice, by="repetition")
        if isinstance(event, ChoiceFinished) and choice.thought_ended_by is not None:
            event = msgspec.structs.replace(event, thought_ended_by=choice.thought_ended_by)
        return msgspec.structs.replace(event, index=choice.index) if choice.index else event

    def _end_thought(self, choice: _Choice, *, by: ThoughtEnder) -> None:
        """End the thought of a choice, unless it was ended before, or no marker ends thoughts."""
        if self._thought_end is None or choice.thought_ended_by is not None or choice.text.is_done:
            return
        choice.thought_ended_by = by
        choice.source.limit_thoughts(self._thought_end)
        if by == "repetition":
            _log.info(
                "request %s: the thought repeated itself and was ended", self.request.request_id
            )
