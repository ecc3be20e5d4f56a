"""The services that HTTP handlers work with, and how a client's model name is resolved."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeAlias

from holdfast.config import LimitsSettings, LogSettings, ServerSettings, StoreSettings
from holdfast.front.fleet.catalog import Catalog
from holdfast.front.fleet.library import Library
from holdfast.front.fleet.residency import ModelStatus, Residency
from holdfast.front.prompt.dialects import DialectReport
from holdfast.front.prompt.tokenize import Tokenizer
from holdfast.front.server.access import AnswersAtOnce, Drain, KeyRing
from holdfast.front.server.held_answers import HeldAnswers
from holdfast.front.server.in_progress import ActiveRequests
from holdfast.front.server.sealing import Seal
from holdfast.store.responses import ResponseStore
from holdfast.telemetry.metrics import Metrics
from holdfast.telemetry.traces import Traces
from holdfast.wire.commands import PinnedPrefix
from holdfast.wire.events import WorkerStatistics
from holdfast.wire.output import Embedding, OutputEvent, Relevance
from holdfast.wire.requests import (
    EmbeddingRequest,
    EncodedPrompt,
    GenerationRequest,
    RankRequest,
    SamplingParams,
)
from holdfast.wire.sessions import SessionCommand, SessionInfo

# Sends a session command to the worker of a model. Raises SessionRefused, UnknownModel, QueueFull
# and WorkerUnavailable.
SessionsCall: TypeAlias = Callable[[str, SessionCommand], Awaitable[tuple[SessionInfo, ...]]]


class OutputStream(Protocol):
    """The answer to one accepted request: text deltas, and one `ChoiceFinished` per choice."""

    prompt_tokens: int  # counted once however many choices there are
    put_back_tokens: int  # tokens of earlier answers that the prompt contains as generated
    dropped_tokens: int  # tokens of earlier answers that the chat template left out
    sampling: SamplingParams  # the request's, completed by the model's defaults
    breakpoints: tuple[PinnedPrefix, ...]  # the client's cache breakpoints, ascending
    unenforced: tuple[str, ...]  # schema keywords that the grammar does not enforce, as paths

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        """The events. Raises GenerationFailed if a choice cannot be finished."""
        ...

    def pause(self) -> None:
        """Stop generating until `go_on`; what was generated can still be read.

        Other requests may take the memory of its KV meanwhile.
        """
        ...

    def go_on(self) -> None:
        """Undo `pause`."""
        ...

    def end_thoughts(self) -> bool:
        """End the reasoning now. Returns whether this model supports that."""
        ...

    async def aclose(self) -> None:
        """Cancel the choices that still run."""
        ...


# Checks and submits a request; returns when all its sequences are accepted, or raises a
# HoldfastError.
GenerateCall: TypeAlias = Callable[[GenerationRequest], Coroutine[Any, Any, OutputStream]]
# Renders and tokenizes a request's prompt without using the worker; raises like GenerateCall.
EncodeCall: TypeAlias = Callable[[GenerationRequest], Awaitable[EncodedPrompt]]
# Computes a vector of length 1 for each input; raises like GenerateCall, and GenerationFailed.
EmbedCall: TypeAlias = Callable[[EmbeddingRequest], Awaitable[tuple[Embedding, ...]]]
# Scores the relevance of each document for a query; raises like EmbedCall.
RankCall: TypeAlias = Callable[[RankRequest], Awaitable[tuple[Relevance, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that the HTTP front works with."""

    generate: GenerateCall
    encode: EncodeCall
    embed: EmbedCall
    rank: RankCall
    # by model id; raises UnknownModel, and WorkerUnavailable if the tokenizer is broken
    tokenizer_of: Callable[[str], Awaitable[Tokenizer]]
    sessions: SessionsCall
    catalog: Callable[[], Catalog]  # the current one; a reload replaces it
    control: Residency  # loads, unloads and pins models
    library: Library
    # of all models, in the order of the lists that clients get
    statuses: Callable[[], Sequence[ModelStatus]]
    # of the workers that respond, by model id
    statistics: Callable[[], Awaitable[Mapping[str, WorkerStatistics]]]
    server: ServerSettings
    limits: LimitsSettings
    metrics: Metrics
    log: LogSettings = LogSettings()
    traces: Traces | None = None
    seal: Seal = field(default_factory=Seal)
    # by model id, for models whose tokenizer has been loaded
    dialects: Mapping[str, DialectReport] = field(default_factory=dict)
    # of the Responses API
    responses: ResponseStore = field(default_factory=ResponseStore)
    held: HeldAnswers = field(default_factory=HeldAnswers)
    active: ActiveRequests = field(default_factory=ActiveRequests)
    drain: Drain = field(default_factory=Drain)
    store: StoreSettings = StoreSettings(folder="off")
    keys: KeyRing = field(default_factory=KeyRing)  # in addition to `server.api_key`
    at_once: AnswersAtOnce = field(default_factory=AnswersAtOnce)

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.server.api_key) or self.keys.is_needed


def salted(services: Services, cache_salt: str | None) -> Services:
    """The services with a seal of this salt: it cannot open what another salt's seal closed."""
    return replace(services, seal=services.seal.of(cache_salt)) if cache_salt else services


def is_waited_for(services: Services, model_id: str) -> bool:
    """Whether requests for this model have to wait because it is not loaded."""
    return any(model.id == model_id and model.state != "ready" for model in services.statuses())


def model_of(services: Services, name: str | None) -> str:
    """The id of the model that a client names; without a name, the first model.

    A name that no model or alias has is returned unchanged.
    """
    if name is None:
        return first_model(services)
    find = services.catalog().find
    if (entry := find(name)) is not None:
        return entry.name
    for alias in services.server.model_aliases:
        pattern, _, meant = (part.strip() for part in alias.partition("="))
        if fnmatchcase(name, pattern):
            entry = find(meant)
            return entry.name if entry is not None else meant or first_model(services)
    return name


def served_models(services: Services) -> list[ModelStatus]:
    """The models that requests may name: without removed ones that are still unloading."""
    catalog = services.catalog()
    return [model for model in services.statuses() if catalog.find(model.id) is not None]


def named_model(services: Services, name: str) -> ModelStatus:
    """The model of that name. Raises UnknownModel."""
    wanted = model_of(services, name)
    for model in served_models(services):
        if model.id == wanted:
            return model
    raise services.catalog().unknown(name)


def first_model(services: Services) -> str:
    """The id of the model for requests that name none; empty if there is no model."""
    return next((entry.name for entry in services.catalog().entries), "")
