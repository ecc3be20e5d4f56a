"""What the HTTP front needs from the rooms below, as narrow protocols, and the bundle in which it
is handed over.
"""

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
from holdfast.front.server.held_answers import HeldAnswers, RunningAnswers
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

# Has the worker of a model carry out a command. Raises SessionRefused, UnknownModel, QueueFull and
# WorkerUnavailable.
SessionsCall: TypeAlias = Callable[[str, SessionCommand], Awaitable[tuple[SessionInfo, ...]]]


class OutputStream(Protocol):
    """The answer to one accepted request: text deltas, and one `ChoiceFinished` per choice."""

    prompt_tokens: int  # counted once however many choices there are
    put_back_tokens: int  # of earlier answers, which stand in the prompt as they were generated
    dropped_tokens: int  # of earlier answers, which the chat template has left out of the prompt
    # how tokens are drawn; the model's defaults stand in for what the request left open
    sampling: SamplingParams
    # where the prompt has the cache breakpoints of its client, ascending
    breakpoints: tuple[PinnedPrefix, ...]
    # places in the schemas of tools, of keywords that the answer need not keep to
    unenforced: tuple[str, ...]

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        """The events. Raises GenerationFailed when one of the choices cannot be finished."""
        ...

    def pause(self) -> None:
        """Stop generating until `go_on`; what was generated can still be read.

        Others may take its memory meanwhile.
        """
        ...

    def go_on(self) -> None:
        """Undo `pause`."""
        ...

    def end_thoughts(self) -> bool:
        """Have it think no more: a thought under way ends now.

        Returns whether that can be done with this model.
        """
        ...

    async def aclose(self) -> None:
        """Cancel what still runs. Does nothing when everything has ended."""
        ...


# Checks a request, submits it and returns once all its sequences are accepted; raises a
# HoldfastError otherwise.
GenerateCall: TypeAlias = Callable[[GenerationRequest], Coroutine[Any, Any, OutputStream]]
# What the model would read of a request's prompt, without any work of the worker's; raises as
# GenerateCall does.
EncodeCall: TypeAlias = Callable[[GenerationRequest], Awaitable[EncodedPrompt]]

# A vector of length 1 for each input, and what it took; raises as GenerateCall does, and
# GenerationFailed.
EmbedCall: TypeAlias = Callable[[EmbeddingRequest], Awaitable[tuple[Embedding, ...]]]
# How much each document is about the query; raises as EmbedCall does.
RankCall: TypeAlias = Callable[[RankRequest], Awaitable[tuple[Relevance, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that the HTTP front works with."""

    generate: GenerateCall
    encode: EncodeCall
    embed: EmbedCall
    rank: RankCall
    # of a model; raises UnknownModel, and WorkerUnavailable if it is broken
    tokenizer_of: Callable[[str], Awaitable[Tokenizer]]
    sessions: SessionsCall
    catalog: Callable[[], Catalog]  # names of all models; it changes when it is read anew
    control: Residency  # what an administrator can do with models
    library: Library
    # of all models, in the order in which they are listed
    statuses: Callable[[], Sequence[ModelStatus]]
    # of the workers that answer, by model id
    statistics: Callable[[], Awaitable[Mapping[str, WorkerStatistics]]]
    server: ServerSettings
    limits: LimitsSettings
    metrics: Metrics
    version: str
    log: LogSettings = LogSettings()
    traces: Traces | None = None
    seal: Seal = field(default_factory=Seal)
    # by model id, of those whose tokenizer was needed
    dialects: Mapping[str, DialectReport] = field(default_factory=dict)
    # kept for clients that come back to them
    responses: ResponseStore = field(default_factory=ResponseStore)
    running: RunningAnswers = field(default_factory=RunningAnswers)
    held: HeldAnswers = field(default_factory=HeldAnswers)
    active: ActiveRequests = field(default_factory=ActiveRequests)
    drain: Drain = field(default_factory=Drain)
    store: StoreSettings = StoreSettings(folder="off")
    keys: KeyRing = field(default_factory=KeyRing)  # beside `server.api_key`
    at_once: AnswersAtOnce = field(default_factory=AnswersAtOnce)

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.server.api_key) or self.keys.is_needed


def salted(services: Services, cache_salt: str | None) -> Services:
    """The services with a seal that is the salt's own: what was sealed under another salt cannot be
    opened.
    """
    return replace(services, seal=services.seal.of(cache_salt)) if cache_salt else services


def is_waited_for(services: Services, model_id: str) -> bool:
    """Whether requests for that model have to wait until it is loaded."""
    return any(model.id == model_id and model.state != "ready" for model in services.statuses())


def model_of(services: Services, name: str | None) -> str:
    """The id of the model that a client means by a name; the name itself where it is nobody's, the
    first model's for none.
    """
    if name is None:
        return first_model(services)
    find = services.catalog().find
    if (entry := find(name)) is not None:
        return entry.name
    for alias in services.server.model_aliases:
        pattern, _, meant = (part.strip() for part in alias.partition("="))
        if fnmatchcase(name, pattern):
            return (
                entry.name if (entry := find(meant)) is not None else meant or first_model(services)
            )
    return name


def served_models(services: Services) -> list[ModelStatus]:
    """All models that requests may name: without those that are only waited for to end."""
    catalog = services.catalog()
    return [model for model in services.statuses() if catalog.find(model.id) is not None]


def named_model(services: Services, name: str) -> ModelStatus:
    """The model of that name. Raises UnknownModel."""
    wanted = model_of(services, name)
    if (
        found := next((model for model in served_models(services) if model.id == wanted), None)
    ) is None:
        raise services.catalog().unknown(name)
    return found


def first_model(services: Services) -> str:
    """The model of requests that name none; empty when there is none."""
    return next((entry.name for entry in services.catalog().entries), "")
