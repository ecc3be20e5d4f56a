"""A gateway and a model directory that follow a script, for tests of the HTTP front."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config import LimitsSettings, LogSettings, ServerSettings, Settings, StoreSettings
from holdfast.errors import UnknownModel
from holdfast.front.fleet.catalog import Catalog, CatalogEntry
from holdfast.front.fleet.library import Library
from holdfast.front.fleet.memory_watch import MemoryWatch
from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.images.intake import text_only
from holdfast.front.output import (
    ChoiceFinished,
    Embedding,
    OutputEvent,
    Relevance,
    TextDelta,
    TokenText,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
)
from holdfast.front.prompt.dialects import DialectReport
from holdfast.front.prompt.limits import with_model_defaults
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.request import (
    ChatPrompt,
    EmbeddingRequest,
    EncodedPrompt,
    GenerationRequest,
    MarkedPrefix,
    RankRequest,
)
from holdfast.front.server.services import ServedModels, Services
from holdfast.wire.cache_map import CacheMap, CacheMapQuestion
from holdfast.wire.commands import SchedulerLimits
from holdfast.wire.events import (
    CacheOutcome,
    CacheReport,
    FinishReason,
    ModelInfo,
    WorkerStatistics,
)
from holdfast.wire.kv import KVHealth
from holdfast.wire.requests import SamplingParams
from holdfast.wire.sessions import SessionCommand, SessionInfo
from tests.fakes import toy_tokenizers
from tests.fakes.hub_library import idle_library

MODEL = "demo/tiny"
PROMPT_TOKENS = 7
Script = Sequence[OutputEvent | Exception | asyncio.Event]


def token(
    text: str, logprob: float = -0.5, *, offset: int = 0, rivals: tuple[tuple[str, float], ...] = ()
) -> TokenText:
    top = tuple(TokenText(text=rival, raw=rival.encode(), logprob=score) for rival, score in rivals)
    return TokenText(text=text, raw=text.encode(), logprob=logprob, top=top, text_offset=offset)


def answer(
    *texts: str, index: int = 0, reason: FinishReason = FinishReason.STOP, cached_tokens: int = 0
) -> list[OutputEvent | Exception | asyncio.Event]:
    deltas = [
        TextDelta(index=index, text=text, token_ids=(place,)) for place, text in enumerate(texts)
    ]
    end = ChoiceFinished(
        index=index,
        reason=reason,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=len(texts),
        cache_report=CacheReport(outcome=CacheOutcome.NEW_TOKENS, ram_tokens=cached_tokens),
    )
    return [*deltas, end]


def calling(
    *calls: tuple[str, str],
    thought: str = "",
    said: str = "",
    reason: FinishReason = FinishReason.STOP,
) -> Script:
    """An answer with thoughts, text and calls, (name, arguments) each, whose arguments arrive in
    two parts.

    If it ends by length, its last call does not end.
    """
    parts = [
        *(
            [TextDelta(index=0, text=thought, kind="reasoning", token_ids=(1, 2))]
            if thought
            else []
        ),
        *([TextDelta(index=0, text=said, token_ids=(3,))] if said else []),
    ]
    events: list[OutputEvent] = [*parts]
    for place, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        events += [
            ToolCallStarted(index=0, call=place, id=f"call_{place}", name=name, token_ids=(4,)),
            ToolArgumentsDelta(index=0, call=place, text=arguments[:half], token_ids=(5,)),
            ToolArgumentsDelta(index=0, call=place, text=arguments[half:], token_ids=(6,)),
            ToolCallFinished(index=0, call=place, token_ids=(7,)),
        ]
    is_cut = bool(calls) and reason is FinishReason.LENGTH
    if is_cut:
        events.pop()
    end = ChoiceFinished(
        index=0,
        reason=reason,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=sum(
            len(event.token_ids) for event in events if not isinstance(event, ChoiceFinished)
        ),
        reasoning_tokens=2 if thought else 0,
        calls=len(calls) - is_cut,
    )
    return [*events, end]


def _for_all_choices(
    script: Script, choices: int
) -> Iterator[OutputEvent | Exception | asyncio.Event]:
    """The script of the first choice, then the same end for each choice without one."""
    missing = set(range(choices))
    for event in script:
        yield event
        if isinstance(event, ChoiceFinished):
            missing.discard(event.index)
            end = event
    if 0 not in missing:
        for index in sorted(missing):
            yield msgspec.structs.replace(end, index=index)


class ScriptedStream:
    """Plays a script: yields events, raises exceptions, and waits for an asyncio.Event."""

    def __init__(
        self,
        script: Script,
        on_close: Callable[[], None],
        *,
        dropped_tokens: int = 0,
        unenforced: tuple[str, ...] = (),
        breakpoints: tuple[MarkedPrefix, ...] = (),
    ) -> None:
        self._script, self._on_close = iter(script), on_close
        self.put_back_tokens = 0
        self.left_out = None
        self.sampling = SamplingParams(temperature=0.6, top_p=0.9)
        self.prompt_tokens, self.dropped_tokens, self.unenforced = (
            PROMPT_TOKENS,
            dropped_tokens,
            unenforced,
        )
        self.breakpoints = breakpoints
        self.cached_tokens: int | None = None
        self.is_paused = False
        self.ended_thoughts = 0
        self.can_end_thoughts = True

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    async def __anext__(self) -> OutputEvent:
        for step in self._script:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                return step
        raise StopAsyncIteration

    def pause(self) -> None:
        self.is_paused = True

    def unpause(self) -> None:
        self.is_paused = False

    def end_thoughts(self) -> bool:
        self.ended_thoughts += 1
        return self.can_end_thoughts

    async def aclose(self) -> None:
        self._on_close()
        for _ in range(5):  # a real one returns the lease in this time
            await asyncio.sleep(0)


@dataclass
class ScriptedGateway:
    """Answers every request with `script`, or refuses it with `refusal`."""

    script: Script | Callable[[GenerationRequest], Script] = field(
        default_factory=lambda: answer("Hel", "lo")
    )
    refusal: Exception | None = None
    generation_defaults: dict[str, float] = field(
        default_factory=lambda: {"temperature": 0.6, "top_p": 0.9}
    )
    dropped_tokens: int = 0
    unenforced: tuple[str, ...] = ()
    breakpoints: tuple[MarkedPrefix, ...] = ()
    accept_when: asyncio.Event | None = None
    refusal_at_last: Exception | None = None  # after that event
    dropped: list[str] = field(default_factory=list)  # cancelled before it
    passing_refusal: Exception | None = None  # as long as `refuses_while` says so
    refuses_while: Callable[[], bool] = lambda: True
    streams: list[ScriptedStream] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)
    embedded: list[EmbeddingRequest] = field(default_factory=list)
    ranked: list[RankRequest] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)
    sessions: ScriptedSessions = field(default_factory=lambda: ScriptedSessions())
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for requests and their ends until a condition holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Nothing runs when the server stops."""

    async def generate(self, request: GenerationRequest) -> ScriptedStream:
        # its model reads text only
        if isinstance(request.prompt, ChatPrompt) and request.prompt.has_images:
            prompt = text_only(request.prompt)
            request = msgspec.structs.replace(request, prompt=prompt)
        self._receive(request, self.requests)
        if self.passing_refusal is not None and self.refuses_while():
            raise self.passing_refusal
        if self.accept_when is not None:
            await self._wait_for(self.accept_when, request)
        if self.refusal_at_last is not None:
            raise self.refusal_at_last
        script = self.script(request) if callable(self.script) else self.script
        stream = ScriptedStream(
            _for_all_choices(script, request.choices),
            lambda: self._close(request.request_id),
            dropped_tokens=self.dropped_tokens,
            unenforced=self.unenforced,
            breakpoints=self.breakpoints,
        )
        stream.sampling = with_model_defaults(
            request.sampling, unset=request.unset_sampling, defaults=self.generation_defaults
        )
        self.streams.append(stream)
        return stream

    async def encode(self, request: GenerationRequest) -> EncodedPrompt:
        self._receive(request, self.requests)
        return EncodedPrompt(text="a prompt", token_ids=tuple(range(PROMPT_TOKENS)))

    async def embed(self, request: EmbeddingRequest) -> tuple[Embedding, ...]:
        self._receive(request, self.embedded)
        if self.accept_when is not None:
            await self._wait_for(self.accept_when, request)
        vectors = [array("f", [0.6, 0.8, place]).tobytes() for place in range(len(request.inputs))]
        return tuple(Embedding(vector=vector, prompt_tokens=PROMPT_TOKENS) for vector in vectors)

    async def rank(self, request: RankRequest) -> tuple[Relevance, ...]:
        """Longer documents are more relevant to everything."""
        self._receive(request, self.ranked)
        scores = [len(document) / 100 for document in request.documents]
        return tuple(
            Relevance(method="likelihood", score=score, logprob=-score, prompt_tokens=PROMPT_TOKENS)
            for score in scores
        )

    async def tokenizer_of(self, model: str) -> Tokenizer:
        if model != MODEL:
            raise UnknownModel(model=model, available=(MODEL,))
        return Tokenizer(toy_tokenizers.byte_level(), config={})

    def _receive(self, request: Any, received: list[Any]) -> None:
        received.append(request)
        self._changed.set()
        if request.model != MODEL:
            raise UnknownModel(model=request.model, available=(MODEL,))
        if self.refusal is not None:
            raise self.refusal

    async def _wait_for(
        self, event: asyncio.Event, request: GenerationRequest | EmbeddingRequest
    ) -> None:
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.dropped.append(request.request_id)
            raise

    def _close(self, request_id: str) -> None:
        self.closed.append(request_id)
        self._changed.set()
        if len(self.closed) == len(self.requests):
            self.all_closed.set()

    @property
    def request(self) -> GenerationRequest:
        """The only received request."""
        assert len(self.requests) == 1
        return self.requests[0]


INFO = ModelInfo(
    model_type="qwen3",
    layout="rows",
    layout_reason="both ways agree",
    parameters=1,
    weight_bytes=4,
    compute_dtype="float32",
    context_tokens=2048,
    vocab_size=10,
    kv=KVHealth(bits="native", bytes_per_token=8, forms={}, refused={}),
    fixed_bytes_per_sequence=0,
    kv_budget_bytes=1024,
    device="cpu",
    load_seconds=1.5,
)


def model_status(**facts: Any) -> ModelStatus:
    """A ready model with these properties."""
    usual = {
        "id": MODEL,
        "state": "ready",
        "pid": 4711,
        "running": 2,
        "queued": 1,
        "waits": {},
        "info": INFO,
        "cache": None,
        "created": 1_700_000_000,
        "restarts": {"died": 0, "hung": 2},
        "resumed": 3,
        "context_tokens": INFO.context_tokens if facts.get("info", INFO) else None,
    }
    return ModelStatus(**(usual | facts))


SESSION = SessionInfo(
    session_id="s",
    created_at=1_700_000_000.0,
    last_used_at=1_700_000_100.5,
    expires_at=None,
    pinned=True,
    pin_state="kept",
    requests=3,
    branches=2,
    tokens=120,
    kept_tokens=100,
    ram_tokens=60,
    disk_tokens=40,
    live_tokens=50,
    kept_bytes=4096,
    metadata={"agent": "one"},
)


@dataclass
class ScriptedSessions:
    """Answers every session command with `found`, or refuses it; an export writes `exported`, an
    import is read.
    """

    found: tuple[SessionInfo, ...] = (SESSION,)
    refusal: Exception | None = None
    exported: bytes = b"a portable session"
    imported: bytes = b""
    answers_when: asyncio.Event | None = None
    asked: list[tuple[str, SessionCommand]] = field(default_factory=list)

    async def __call__(self, model: str, command: SessionCommand) -> tuple[SessionInfo, ...]:
        self.asked.append((model, command))
        if self.answers_when is not None:
            await self.answers_when.wait()
        if command.operation == "export":
            Path(command.path).write_bytes(self.exported)
        elif command.operation == "import":
            self.imported = Path(command.path).read_bytes()
        if self.refusal is not None:
            raise self.refusal
        return self.found


@dataclass
class ScriptedDirectory:
    models: Sequence[ModelStatus] = (model_status(),)
    numbers: Mapping[str, WorkerStatistics] = field(default_factory=dict)
    dialects: Mapping[str, DialectReport] = field(default_factory=dict)
    awaited_tokenizers: Sequence[str] = ()  # of models

    def statuses(self) -> Sequence[ModelStatus]:
        return self.models

    def catalog(self) -> Catalog:
        settings = Settings()
        return Catalog(
            entries=tuple(
                CatalogEntry(
                    name=model.id,
                    model=settings.model,
                    origin="",
                    aliases=model.aliases,
                )
                for model in self.models
            )
        )

    async def statistics(self) -> Mapping[str, WorkerStatistics]:
        return self.numbers


@dataclass
class ScriptedControl:
    """Records operations on models, or refuses them; waits for an event if given."""

    refusal: Exception | None = None
    done_when: asyncio.Event | None = None
    done: list[tuple[object, ...]] = field(default_factory=list)
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    maps: dict[str, CacheMap] = field(default_factory=dict)
    questions: list[CacheMapQuestion] = field(default_factory=list)

    async def cache_maps(self, question: CacheMapQuestion) -> dict[str, CacheMap]:
        self.questions.append(question)
        return self.maps

    async def load(self, model: str) -> None:
        await self._do("load", model)

    async def unload(self, model: str) -> None:
        await self._do("unload", model)

    def unload_when_unused(self, model: str) -> None:
        self.done.append(("let go", model))

    async def pin(self, model: str, *, pinned: bool) -> None:
        await self._do("pin", model, pinned)

    async def set_limits(
        self, model: str, *, max_running: int | None = None, step_tokens: int | None = None
    ) -> SchedulerLimits:
        await self._do("limits", model, max_running, step_tokens)
        return SchedulerLimits(max_running=max_running or 16, step_tokens=step_tokens or 0)

    async def _do(self, *what: object) -> None:
        self.done.append(what)
        if self.done_when is not None:
            await self.done_when.wait()
        if self.refusal is not None:
            raise self.refusal


def scripted_services(
    gateway: ScriptedGateway,
    *,
    control: ScriptedControl | None = None,
    sessions: ScriptedSessions | None = None,
    directory: ScriptedDirectory | None = None,
    server: ServerSettings | None = None,
    limits: LimitsSettings | None = None,
    log: LogSettings | None = None,
    library: Library | None = None,
) -> Services:
    directory = directory or ScriptedDirectory()
    gateway.sessions = sessions or gateway.sessions
    return Services(
        settings=Settings(
            server=server or ServerSettings(reconnect_seconds=0),
            limits=limits or LimitsSettings(),
            log=log or LogSettings(),
            store=StoreSettings(folder="off"),
        ),
        gateway=gateway,
        models=ServedModels(
            catalog=directory.catalog,
            control=control or ScriptedControl(),
            library=library or idle_library(directory.catalog()),
            statuses=directory.statuses,
            statistics=directory.statistics,
            dialects=directory.dialects,
            awaited_tokenizers=directory.awaited_tokenizers,
        ),
    )
