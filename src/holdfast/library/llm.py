"""Holdfast as a library: a model in this process, without a server and without asyncio."""

from __future__ import annotations

import numbers
import os
import shutil
import uuid
import weakref
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, cast, get_args, overload

import msgspec

from holdfast.config import KVBitsChoice, LimitsSettings, Settings, load_settings
from holdfast.errors import InvalidRequest
from holdfast.files import hash_cache_file, read_regular
from holdfast.front.answers.choice import ChoiceText
from holdfast.front.gateway import sessions_of
from holdfast.front.images.folder import images_folder
from holdfast.front.images.intake import ImageIntake, text_only
from holdfast.front.images.sources import ImageSource, image_part, is_image_kind
from holdfast.front.link.event_stream import refusal
from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TextDelta,
    TokenText,
    ToolCall,
    TruncatedPart,
    text_of,
    tool_calls_of,
)
from holdfast.front.prompt.conversation import answer_message
from holdfast.front.prompt.embed_and_rank import (
    PromptReader,
    ReadPrompt,
    embedding_of,
    embedding_sequences,
)
from holdfast.front.prompt.images import ImageLayouts
from holdfast.front.prompt.limits import tenant_of
from holdfast.front.prompt.next_turn import Observe, observer
from holdfast.front.prompt.prepare import NO_IMAGES, Layouts, prepare
from holdfast.front.prompt.tokenizer_bundle import load_tokenizer_bundle
from holdfast.front.records.answer_tokens import AnswerFile
from holdfast.front.request import (
    DEFAULT_ANSWER_TOKENS,
    ChatPrompt,
    EmbeddingRequest,
    GenerationRequest,
    Prompt,
    ThinkingEffort,
    Truncation,
    sampling_options,
)
from holdfast.library.in_process import (
    BlockingEventStream,
    InProcessClient,
    close_before_exit,
    close_now,
)
from holdfast.models.adapter_folder import adapter_folders
from holdfast.models.download import resolve_model, served_id
from holdfast.models.draft_pairs import LocalModel, draft_of
from holdfast.store.folder import library_folder
from holdfast.wire.commands import SequenceRequest, WorkerSettings
from holdfast.wire.events import (
    CacheReport,
    FinishReason,
    ModelInfo,
    Rejected,
    Timings,
    WorkerFailed,
    WorkerStatistics,
)
from holdfast.wire.requests import Pooling, SamplingParams
from holdfast.wire.sessions import SessionCommand, SessionInfo
from holdfast.worker.loop.process import serve_model

TextOrTokens: TypeAlias = str | Sequence[int]
Prompts: TypeAlias = list[str] | tuple[str, ...] | Sequence[Sequence[int]]
Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
ThinkingOption: TypeAlias = ThinkingEffort | bool | Mapping[str, Any]
LEAVE = msgspec.UNSET  # an argument not given: the current value, or the one in the settings
_FORMATS = ("text", "json_object", "json_schema")
_LIMITS = LimitsSettings()
# reasons for an end that have a name in OpenAI's API
_ENDS_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)
_Request = TypeVar("_Request")
_Stream = TypeVar("_Stream", bound="BlockingEventStream | TextStream")
_Result = TypeVar("_Result")


class GenerationOptions(TypedDict, total=False):
    """Options of a generation. Sampling parameters default to the model's recommended values."""

    max_tokens: int | None  # default: 4,096; None: as many as fit in the context window
    temperature: float  # 0: always the most likely token
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    seed: int  # -1: a random one, as without a seed
    stop: str | Sequence[str]
    top_logprobs: int  # log-probabilities of each token and of this many alternatives; may be 0
    ignore_eos: bool
    # as in OpenAI's API: {"type": "json_object"}, {"type": "json_schema", …}; or a JSON schema
    # itself
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]  # as in vLLM: {"regex": …}, {"choice": […]}, …
    adapter: str  # name of a LoRA adapter in the setting `model.adapters`; "": the model itself
    # bits of keys and values, as in `model.kv_bits`, which is the default
    kv_bits: KVBitsChoice | Literal[8, 4]
    truncation: Truncation  # "middle": leave out the middle of a prompt that does not fit
    session_id: str  # opened by the request if it does not exist
    tenant: str  # tenants never share cached tokens


class ChatOptions(GenerationOptions, total=False):
    """Options for answering a conversation."""

    # as in OpenAI's API: {"type": "function", "function": {"name", "parameters", …}}
    tools: Sequence[Mapping[str, Any]]
    # "auto", "none", "required", the name of a tool, or as in OpenAI's API
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool  # False: at most one call per answer
    thinking: ThinkingOption  # whether to reason first; or how much: "low", "high", …
    template_options: Mapping[str, Any]  # variables for the chat template


class EmbeddingOptions(TypedDict, total=False):
    """Options for embedding texts."""

    pooling: (
        Pooling  # "mean" of all hidden states, or the "last"; default: as the model was trained
    )
    dimensions: int  # the number of leading dimensions to keep
    truncates: bool  # whether to cut a text that exceeds the context window, instead of refusing it
    adapter: str  # as in GenerationOptions


class LLM:
    """A loaded model. Any thread may call any method. Use it as a context manager, or call `close`.

    model: a folder, a Hub id, or None for the bundled model.

    settings: any settings by key, such as `{"model.layout": "rows", "scheduler.max_running": 8}`;
    files and environment variables are not read.

    Raises ModelLoadError or ConfigError.
    """

    def __init__(
        self, model: str | Path | None = None, *, settings: Mapping[str, object] | None = None
    ) -> None:
        flags = dict(settings or {})
        if model is not None:
            flags["model.path"] = str(model)
        self._settings = load_settings(file=None, environ={}, flags=flags).settings
        self._adapters = tuple(adapter_folders(self._settings.model.adapters))
        folder = resolve_model(self._settings.model, progress=lambda stage, fraction: None)
        store = library_folder(self._settings.store, os.environ)
        images = images_folder(store)
        if not store:  # in a folder for this model only, which `close` deletes
            images = images.with_name(f"holdfast-images-{uuid.uuid4().hex}")
        self._images = ImageIntake(images, self._settings.images)
        self._layouts = ImageLayouts(self._images.folder)
        self._client = _start_client(self._settings, folder, store, images=images)
        close_before_exit(self._client)
        self._finalizer = weakref.finalize(
            self, _close_client, self._client, temporary_images=None if store else images
        )
        try:
            self._bundle = load_tokenizer_bundle(
                folder,
                settings=self._settings.model,
                answers=AnswerFile(Path(store)) if store else None,
            )
            outcome = self._client.wait_started()
            if isinstance(outcome, WorkerFailed):
                raise outcome.error
            vision = outcome.model.vision
            if vision is not None and not vision.refused:
                self._bundle = self._bundle.with_vision(vision)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def info(self) -> ModelInfo:
        """The loaded model, as its worker reports it."""
        return self._client.info

    @overload
    def generate(
        self, prompt: TextOrTokens, **options: Unpack[GenerationOptions]
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Prompts, **options: Unpack[GenerationOptions]
    ) -> list[Completion]: ...

    def generate(
        self, prompt: TextOrTokens | Prompts, **options: Unpack[GenerationOptions]
    ) -> Completion | list[Completion]:
        """Continue a prompt (text or token ids), or a list of prompts in one batch.

        Raises InvalidRequest for an invalid option or prompt, and GenerationFailed if the model
        fails.
        """
        prompts, is_list = _as_list(prompt)
        limits = self._settings.limits
        requests = [
            generation_request(_text_or_tuple(each), options, limits=limits) for each in prompts
        ]
        answers = self._run_batch(requests, self._start_answer, TextStream.read_all)
        return answers if is_list else answers[0]

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Completion:
        """Answer a conversation.

        Messages are as in OpenAI's API; a plain text counts as one user message. Images are parts
        such as `{"type": "image", "path": "cat.png"}`, or as in OpenAI's API.

        With `tools`, the answer's `tool_calls` are the calls that the model wants. For the next
        turn, append the answer's `message` and the results of the calls.
        """
        with self.stream_chat(messages, **options) as stream:
            return stream.read_all()

    def stream(self, prompt: TextOrTokens, **options: Unpack[GenerationOptions]) -> TextStream:
        """Continue a prompt. Returns an iterator over the text while it is generated."""
        request = generation_request(_text_or_tuple(prompt), options, limits=self._settings.limits)
        return self._start_answer(request)

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> TextStream:
        """Like `chat`, but returns an iterator over the text while it is generated.

        The stream's `events` also contain reasoning and tool calls.
        """
        request = chat_request(messages, options, limits=self._settings.limits)
        return self._start_answer(request)

    @overload
    def embed(self, texts: TextOrTokens, **options: Unpack[EmbeddingOptions]) -> list[float]: ...

    @overload
    def embed(self, texts: Prompts, **options: Unpack[EmbeddingOptions]) -> list[list[float]]: ...

    def embed(
        self, texts: TextOrTokens | Prompts, **options: Unpack[EmbeddingOptions]
    ) -> list[float] | list[list[float]]:
        """Return the embedding of a text (or of token ids), or those of a list of texts in one
        batch.

        A vector has length 1. Raises InvalidRequest for an invalid option or text, or if the model
        lacks embeddings, and GenerationFailed if the model fails.
        """
        inputs, is_list = _as_list(texts)
        adapter = options.pop("adapter", "")
        request = embedding_request(inputs, options, is_list=is_list)
        sequences = [
            msgspec.structs.replace(each, adapter=adapter)
            for each in embedding_sequences(request, self._bundle, info=self._client.info)
        ]
        vectors = [
            array(
                "f", embedding_of(read_prompt.finished, dimensions=request.dimensions).vector
            ).tolist()
            for read_prompt in self._run_batch(sequences, self._submit, _read_prompt)
        ]
        return vectors if is_list else vectors[0]

    def sessions(self, *, tenant: str = "", adapter: str = "") -> Sessions:
        """The sessions of this model, or of one of its adapters: named branches of the prefix
        cache.
        """
        tenant = tenant_of(api_key="", name=tenant, cache_salt="")
        return Sessions(self._client, tenant=tenant, adapter=adapter)

    def statistics(self) -> WorkerStatistics:
        """Current figures of the worker, and counters since its start."""
        return self._client.statistics()

    def close(self) -> None:
        """Cancel running requests, unload the model and release the device. May be called twice."""
        self._finalizer()
        if hasattr(self, "_bundle"):  # otherwise loading has failed
            self._bundle.known_answers.close()

    def _run_batch(
        self,
        requests: Sequence[_Request],
        start: Callable[[_Request], _Stream],
        read_result: Callable[[_Stream], _Result],
    ) -> list[_Result]:
        """Return the results in the order of the requests.

        start: sends a request. read_result: waits for its result. As many requests are sent ahead
        as the worker can run and queue.
        """
        most_ahead = self._settings.scheduler.max_running + self._settings.scheduler.max_queued
        streams: list[_Stream] = []
        results: list[_Result] = []
        try:
            for index in range(len(requests)):
                while len(streams) < min(len(requests), index + most_ahead):
                    streams.append(start(requests[len(streams)]))
                results.append(read_result(streams[index]))
        finally:
            for stream in streams:
                stream.close()
        return results

    def _start_answer(self, request: GenerationRequest) -> TextStream:
        """Render and send one request. Returns the stream of its answer."""
        image_files = ExitStack()
        try:
            prompt, layouts = self._take_images(request, image_files)
            prepared = prepare(
                request,
                self._bundle,
                info=self._client.info,
                limits=self._settings.limits,
                tools=self._settings.tools,
                prompt=prompt,
                layouts=layouts,
            )
            (sequence,) = prepared.sequences
            events = self._submit(sequence)
        except BaseException:
            image_files.close()
            raise
        return TextStream(
            events,
            prepared.choice(),
            image_files=image_files,
            prompt_tokens=prepared.prompt_tokens,
            left_out=prepared.left_out,
            observe=observer(request, self._bundle, prepared),
        )

    def _take_images(
        self, request: GenerationRequest, image_files: ExitStack
    ) -> tuple[Prompt, Layouts]:
        """Store the images of a request, and get from the worker the tokens that stand for them.

        image_files: keeps the files of the images until it is closed.

        Returns the prompt with the names of its images, and their layouts.
        """
        if not isinstance(request.prompt, ChatPrompt) or not request.prompt.has_images:
            return request.prompt, NO_IMAGES
        vision = self._client.info.vision
        if vision is None or vision.refused:
            return text_only(request.prompt, vision), NO_IMAGES
        prompt = image_files.enter_context(
            self._images.stored_here(request.prompt, tenant=request.tenant)
        )
        fingerprint = self._client.info.fingerprint
        question = self._layouts.question(
            prompt, model=fingerprint, max_pixels=self._images.max_pixels
        )
        if question is not None:
            self._layouts.learn(self._client.call(question), model=fingerprint)
        return self._layouts.prompt_and_layouts(prompt, model=fingerprint)

    def _submit(self, sequence: SequenceRequest) -> BlockingEventStream:
        """Send a sequence to the model or one of its adapters. Raises InvalidRequest if there is
        none.
        """
        if sequence.adapter and sequence.adapter not in self._adapters:
            raise InvalidRequest(
                f"the model has no adapter {sequence.adapter!r}; available: "
                f"{', '.join(self._adapters) or 'none'}",
                field="adapter",
            )
        return self._client.submit(sequence)


def _close_client(client: InProcessClient, *, temporary_images: Path | None) -> None:
    """Close the client, and delete the images folder if it was made for this model only."""
    close_now(client)
    if temporary_images is not None:
        shutil.rmtree(temporary_images, ignore_errors=True)


def _start_client(settings: Settings, folder: Path, store: str, *, images: Path) -> InProcessClient:
    """Start a worker on a thread, which begins to load the model.

    folder: with the model's files. store: the store's folder; empty: none. images: where the images
    of prompts are kept.
    """
    model = replace(settings.model, name=served_id(settings.model))
    draft = draft_of(
        LocalModel(name=model.name, folder=folder), model.speculation, environ=os.environ
    )
    worker = WorkerSettings(
        folder=str(folder),
        # without a store, write nothing to disk
        hash_cache=hash_cache_file(os.environ) if store else "",
        images=str(images),
        model=model,
        draft_folder="" if draft is None else str(draft.folder),
        draft_name="" if draft is None else draft.name,
        scheduler=settings.scheduler,
        store=replace(settings.store, folder=store),
    )
    return InProcessClient(lambda inbox: serve_model(inbox, worker))


def _as_list(prompt: TextOrTokens | Prompts) -> tuple[Sequence[TextOrTokens], bool]:
    """Return the prompts, and whether they were given as a list."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [cast(TextOrTokens, prompt)], False
    return cast(Sequence[TextOrTokens], prompt), True


def _text_or_tuple(prompt: TextOrTokens) -> str | tuple[int, ...]:
    """A prompt in the form that a request has."""
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _read_prompt(stream: BlockingEventStream) -> ReadPrompt:
    """Wait until a prompt without an answer is prefilled. Raises the error if it fails."""
    reader = PromptReader()
    return next(
        read_prompt for event in stream if (read_prompt := reader.read_event(event)) is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer: its text and tokens, tool calls, token counts and times."""

    text: str  # does not include reasoning and tool calls
    token_ids: tuple[int, ...]  # all generated tokens, including markers
    finish_reason: str  # "stop", "length", "tool_calls" or "cancelled"
    prompt_tokens: int
    completion_tokens: int  # includes stop tokens
    cached_tokens: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # in order; never run an incomplete call
    reasoning_tokens: int = 0  # included in completion_tokens
    logprobs: tuple[TokenText, ...] = ()
    timings: Timings = Timings()
    cache_report: CacheReport = CacheReport()
    left_out: TruncatedPart | None = None  # what `truncation` left out of the prompt

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of OpenAI's API, for the next turn of the conversation."""
        return answer_message(self.text, reasoning=self.reasoning, calls=self.tool_calls)


class TextStream:
    """Iterates over an answer's text while it is generated, without reasoning and tool calls.

    `events` iterates over all parts of the answer instead; use only one of the two. To stop early,
    call `close` or leave the `with` block.
    """

    def __init__(
        self,
        events: BlockingEventStream,
        choice: ChoiceText,
        *,
        image_files: ExitStack,
        prompt_tokens: int,
        left_out: TruncatedPart | None = None,
        observe: Observe,
    ) -> None:
        """choice: turns the events into text, reasoning and tool calls. image_files: closed when
        the answer has ended. observe: called with each event of the answer, to record its tokens.
        """
        self._events = events
        self._image_files = image_files
        self._choice = choice
        self._observe = observe
        self._prompt_tokens = prompt_tokens
        self._left_out = left_out
        self._deltas: list[OutputDelta] = []
        self._finished: ChoiceFinished | None = None
        self._outputs = self._read_outputs()

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> str:
        return next(
            event.appended
            for event in self._outputs
            if isinstance(event, TextDelta) and event.kind == "text" and event.text
        )

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def events(self) -> Iterator[OutputEvent]:
        """Iterate over everything while it is generated: text, reasoning, tool calls with
        arguments, and the end.
        """
        return self._outputs

    @property
    def completion(self) -> Completion:
        """The answer so far. It is complete after the end of the iteration."""
        finished = self._finished or ChoiceFinished(
            index=0,
            reason=FinishReason.CANCELLED,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._choice.completion_tokens,
            timings=self._choice.timings,
            cache_report=self._choice.cache_report,
        )
        reason = finished.reason.value
        if finished.reason in _ENDS_BY_ITSELF:  # may also be "tool_calls"
            reason = finished.finish_reason
        return Completion(
            text=text_of(self._deltas),
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            finish_reason=reason,
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            cached_tokens=finished.cached_tokens,
            left_out=self._left_out,
            reasoning=text_of(self._deltas, "reasoning"),
            tool_calls=tool_calls_of(self._deltas),
            reasoning_tokens=finished.reasoning_tokens,
            logprobs=tuple(token for delta in self._deltas for token in delta.logprobs),
            timings=finished.timings,
            cache_report=finished.cache_report,
        )

    def read_all(self) -> Completion:
        """Wait for the end of the answer and return it."""
        for _ in self._outputs:
            continue
        return self.completion

    def close(self) -> None:
        """Stop generating; the model computes at most one further step."""
        self._events.close()
        self._image_files.close()

    def _read_outputs(self) -> Iterator[OutputEvent]:
        """Iterate over the events. Raises the error of a refused request, and GenerationFailed."""
        for event in self._events:
            if isinstance(event, Rejected):
                self.close()
                raise refusal(event)
            for output in self._choice.feed(event):
                if isinstance(output, PromptProgress):
                    continue
                self._observe(output)
                if isinstance(output, ChoiceFinished):
                    self._finished = output
                else:
                    self._deltas.append(output)
                yield output
            if self._choice.is_done:
                self.close()
                return


class Sessions:
    """The sessions of one tenant of a model, or of one of its adapters.

    Any thread may call any method. Each method blocks until it is done.

    All methods raise SessionRefused, whose `failure` is the reason, and WorkerUnavailable after the
    model was closed.
    """

    def __init__(self, client: InProcessClient, *, tenant: str, adapter: str = "") -> None:
        self._client = client
        self._command = partial(SessionCommand, tenant=tenant, adapter=adapter)

    def list(self) -> tuple[SessionInfo, ...]:
        """Return all sessions, the most recently used first."""
        return sessions_of(self._client.call(self._command(operation="list")))

    def get(self, session_id: str) -> SessionInfo:
        """Return one session."""
        return self._call(operation="get", session_id=session_id)

    def open(
        self,
        session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> SessionInfo:
        """Open a session. ttl_seconds: its lifetime after the last use; None: it lives until it is
        closed.
        """
        return self._call(
            operation="open",
            session_id=session_id,
            ttl_seconds=ttl_seconds,
            pinned=pinned,
            metadata=dict(metadata or {}),
        )

    def update(
        self,
        session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool | msgspec.UnsetType = LEAVE,
        metadata: Mapping[str, str] | msgspec.UnsetType = LEAVE,
    ) -> SessionInfo:
        """Change a session. Arguments that are not given change nothing."""
        return self._call(
            operation="update",
            session_id=session_id,
            ttl_seconds=ttl_seconds,
            pinned=pinned,
            metadata=metadata if metadata is msgspec.UNSET else dict(metadata),
        )

    def fork(
        self,
        session_id: str,
        new_session_id: str,
        *,
        ttl_seconds: float | msgspec.UnsetType | None = LEAVE,
        pinned: bool = False,
    ) -> SessionInfo:
        """Open a session that continues from the current state of another one."""
        return self._call(
            operation="fork",
            session_id=session_id,
            new_session_id=new_session_id,
            ttl_seconds=ttl_seconds,
            pinned=pinned,
        )

    def close(self, session_id: str, *, forget: bool = False) -> SessionInfo:
        """Close a session and return its last state.

        forget: also delete its blocks, except those that other sessions share.
        """
        return self._call(operation="close", session_id=session_id, forget=forget)

    def export_to(self, path: str | Path, session_id: str) -> SessionInfo:
        """Write a session and its blocks to a file."""
        return self._call(
            operation="export", session_id=session_id, path=str(Path(path).absolute())
        )

    def import_from(self, path: str | Path, session_id: str = "") -> SessionInfo:
        """Read a session from a file. The session keeps its id unless another id is given.

        The session must come from the same model, with the same weights and tokenizer.
        """
        return self._call(
            operation="import", session_id=session_id, path=str(Path(path).absolute())
        )

    def _call(self, **fields: Any) -> SessionInfo:
        (session,) = sessions_of(self._client.call(self._command(**fields)))
        return session


def embedding_request(
    texts: Sequence[TextOrTokens], options: Mapping[str, Any], *, is_list: bool
) -> EmbeddingRequest:
    """Create the request for the embeddings of texts.

    Raises InvalidRequest, and TypeError for unknown options.
    """
    _refuse_unknown(options.keys() - EmbeddingOptions.__annotations__.keys(), EmbeddingOptions)
    if options.get("pooling") not in (None, *get_args(Pooling)):
        raise InvalidRequest(
            f"pooling must be one of {', '.join(get_args(Pooling))}", field="pooling"
        )
    return EmbeddingRequest(
        request_id=uuid.uuid4().hex,
        model="",
        inputs=tuple(map(_text_or_tuple, texts)),
        input_field="texts",
        is_list=is_list,
        **options,
    )


def generation_request(
    prompt: str | tuple[int, ...], options: Mapping[str, Any], *, limits: LimitsSettings = _LIMITS
) -> GenerationRequest:
    """Create the request for a continuation of a prompt.

    Raises InvalidRequest, and TypeError for unknown options.
    """
    _refuse_unknown(options.keys() - GenerationOptions.__annotations__.keys(), GenerationOptions)
    request = chat_request("", options, limits=limits)
    return msgspec.structs.replace(request, prompt=prompt, prompt_field="prompt")


def chat_request(
    messages: Messages, options: Mapping[str, Any], *, limits: LimitsSettings = _LIMITS
) -> GenerationRequest:
    """Create the request for an answer to a conversation, as the server does for a chat.

    A plain text counts as one user message. Raises InvalidRequest, and TypeError for unknown
    options.
    """
    # imported here: it takes 0.3 s, and a program that only embeds texts does not need it
    from holdfast.front.openai.endpoints import ChatCompletionRequest
    from holdfast.front.server.request import validated

    _refuse_unknown(options.keys() - ChatOptions.__annotations__.keys(), ChatOptions)
    set_options = {name: value for name, value in options.items() if value is not None}
    set_options.setdefault("max_tokens", options.get("max_tokens", DEFAULT_ANSWER_TOKENS))
    # not part of the body, because the protocol's ranges are smaller than the library's
    sampling = {
        name: _python_number(set_options.pop(name, None))
        for name in SamplingParams.__struct_fields__
    }
    if isinstance(bias := sampling["logit_bias"], Mapping):
        sampling["logit_bias"] = {
            _python_number(token): _python_number(bias[token]) for token in bias
        }
    tenant = set_options.pop("tenant", "")
    session_id = set_options.pop("session_id", "")
    adapter = set_options.pop("adapter", "")
    template_options = set_options.pop("template_options", None)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {
        **set_options,
        "messages": [
            _with_files(message, f"messages.{position}")
            for position, message in enumerate(messages)
        ],
        "tools": [{"type": "function", **tool} for tool in set_options.get("tools", ())],
        "chat_template_kwargs": template_options,
        "logprobs": "top_logprobs" in set_options,
    }
    tool_choice = set_options.get("tool_choice")
    response_format = set_options.get("response_format")
    if isinstance(tool_choice, str) and tool_choice not in ("auto", "none", "required"):
        body["tool_choice"] = {"function": {"name": tool_choice}}
    if isinstance(response_format, Mapping) and response_format.get("type") not in _FORMATS:
        schema = {"schema": response_format}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    parsed = validated(ChatCompletionRequest, _json_value(body))
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        model="",
        tenant=tenant_of(api_key="", name=tenant, cache_salt=""),
        session_id=session_id,
        adapter=adapter,
        **parsed.conversation_fields(limits),
        **{**parsed.body_options(), **sampling_options(sampling)},
    )


def _with_files(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The message with the images whose files its parts name."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return dict(message)
    parts = [
        _with_file(part, f"{field}.content.{position}") for position, part in enumerate(content)
    ]
    return {**message, "content": parts}


def _with_file(part: Any, field: str) -> Any:
    """The part with the image that its path names; other parts are unchanged. An error of the file
    is reported later, as that of an invalid image.
    """
    path = part.get("path") if isinstance(part, Mapping) else None
    if path is None or not is_image_kind(str(part.get("type"))):
        return part
    field += ".path"
    try:
        source = ImageSource(field=field, data=read_regular(path))
    except OSError as error:
        source = ImageSource(field=field, problem=f"the image cannot be read: {error}")
    return image_part(source)


def _json_value(value: Any) -> Any:
    """The value with the types that a body in JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(each) for key, each in value.items()}
    return [*map(_json_value, value)] if isinstance(value, list | tuple) else _python_number(value)


def _python_number(value: Any) -> Any:
    """The value; a number of another library, such as NumPy, as a number of Python."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _refuse_unknown(unknown_names: Collection[str], options: type) -> None:
    """Raise TypeError if there are unknown options, as Python does for unknown arguments."""
    if unknown_names:
        raise TypeError(
            f"unknown options: {', '.join(unknown_names)}; known: "
            f"{', '.join(options.__annotations__)}"
        )
