"""The objects that HTTP handlers work with: the services, and the requests in progress.

This file also finds the model that a client names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from holdfast.config import LimitsSettings, ServerSettings, Settings
from holdfast.errors import HoldfastError, WorkerUnavailable
from holdfast.front.fleet.catalog import Catalog
from holdfast.front.fleet.library import Library
from holdfast.front.fleet.residency import ModelStatus, Residency
from holdfast.front.gateway import Gateway
from holdfast.front.prompt.dialects import DialectReport
from holdfast.front.records.responses import ResponseStore
from holdfast.front.server.access import ConcurrentAnswers, Drain, KeyRing, Seal
from holdfast.front.server.misses import RecentMisses
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.resumable_answers import ResumableAnswer, ResumableAnswers
from holdfast.front.server.streams import OutputStream
from holdfast.front.telemetry.history_file import HistoryFile
from holdfast.front.telemetry.log_ring import LogRing
from holdfast.front.telemetry.metrics import Metrics
from holdfast.front.telemetry.request_log import RequestRecord, current_record
from holdfast.front.telemetry.traces import Traces
from holdfast.wire.events import WorkerStatistics

RequestState: TypeAlias = Literal["waiting", "reading", "writing", "abandoned"]
_STOPPED = "the server stopped before the answer was complete"


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in progress, as administrators see it and can cancel it."""

    id: str  # the request's id, with a number added if several requests have the same id
    record: RequestRecord
    task: asyncio.Task[object]
    is_cancelled: bool = False
    stream: OutputStream | None = None  # set once the model has accepted the request
    # the events of the answer that this request generates; None: no retry can get them
    generated_answer: ResumableAnswer | None = None
    # the answer of an earlier request, which this one repeats and therefore gets
    followed_answer: ResumableAnswer | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the answer is generated although no client is connected."""
        return self.generated_answer is not None and self.generated_answer.clients == 0

    @property
    def state(self) -> RequestState:
        """The state of the request.

        waiting: for its model or for a place in the queue.
        reading: queued, or in prefill.
        writing: in decode.
        abandoned: its client is gone, but a retry may get the answer.
        """
        if self.is_abandoned:
            return "abandoned"
        if self.followed_answer is not None:
            return "writing" if self.followed_answer.next_place else "reading"
        if self.record.answer is None:  # no model has accepted it; embeddings are shown as reading
            return "waiting" if self.record.generation is not None else "reading"
        return "reading" if self.record.answer.first_text_at is None else "writing"

    def stop_error(self) -> HoldfastError:
        """The error for the client of a request whose task was cancelled.

        The task is cancelled by an administrator, or because the server stops.
        """
        if self.is_cancelled:
            return RequestRefused(
                "the server's administrator has cancelled this request",
                status=403,
                code="request_cancelled",
            )
        return WorkerUnavailable(_STOPPED)


class ActiveRequests:
    """All requests in progress, the oldest first. Event loop's thread only."""

    def __init__(self, *, on_change: Callable[[int], None] = lambda count: None) -> None:
        """on_change: called with the number of requests whenever that number has changed."""
        self._active: dict[str, ActiveRequest] = {}
        self._on_change = on_change

    def __iter__(self) -> Iterator[ActiveRequest]:
        return iter(tuple(self._active.values()))

    @contextlib.contextmanager
    def registered(self, record: RequestRecord) -> Iterator[ActiveRequest]:
        """Context manager: lists the request while the current task answers it."""
        task = asyncio.current_task()
        assert task is not None
        active = ActiveRequest(self._free_id(record.request_id), record, task)
        self._active[active.id] = active
        self._on_change(len(self._active))
        try:
            with current_record(record):
                yield active
        finally:
            del self._active[active.id]
            self._on_change(len(self._active))

    def find_by_answer_id(self, answer_id: str, *, key: str) -> ActiveRequest | None:
        """The request of this API key whose answer has this id; None if there is none."""
        for each in self:
            generation = each.record.generation
            if (
                generation is not None
                and generation.request_id == answer_id
                and each.record.key == key
            ):
                return each
        return None

    @property
    def has_clients(self) -> bool:
        """Whether any client is waiting for an answer."""
        return not all(active.is_abandoned for active in self._active.values())

    def cancel(self, request_id: str) -> ActiveRequest | None:
        """Cancel a request with an error for its client. Returns None if no request has this id."""
        request = self._active.get(request_id)
        if request is not None and not request.is_cancelled:
            request.is_cancelled = True
            request.task.cancel()
        return request

    def _free_id(self, request_id: str) -> str:
        """The id with a number added if it is in use: clients choose ids, and may repeat them."""
        number = 1
        free_id = request_id
        while free_id in self._active:
            number += 1
            free_id = f"{request_id}.{number}"
        return free_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The models of the server."""

    # returns the current catalog (all models and their names), which a reload replaces
    catalog: Callable[[], Catalog]
    control: Residency  # loads, unloads and pins models
    library: Library  # downloads and deletes models
    # returns the status of all models, in the order of the lists that clients get
    statuses: Callable[[], Sequence[ModelStatus]]
    # returns the statistics of the workers that respond, by model id
    statistics: Callable[[], Awaitable[Mapping[str, WorkerStatistics]]]
    # by model id: how the model's chat template writes reasoning and tool calls; only for models
    # whose tokenizer has been loaded
    dialects: Mapping[str, DialectReport] = field(default_factory=dict)
    # ids of models whose tokenizer must be read before the server is ready
    awaited_tokenizers: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The requests in progress, and the answers that outlive them."""

    resumable: ResumableAnswers = field(default_factory=ResumableAnswers)
    active: ActiveRequests = field(default_factory=ActiveRequests)
    # the stored responses of the Responses API
    responses: ResponseStore = field(default_factory=ResponseStore)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may send requests, and how many."""

    keys: KeyRing = field(default_factory=KeyRing)  # in addition to `server.api_key`
    concurrency: ConcurrentAnswers = field(default_factory=ConcurrentAnswers)
    drain: Drain = field(default_factory=Drain)
    seal: Seal = field(default_factory=Seal)  # encrypts texts that clients store for the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What the server records of its requests."""

    metrics: Metrics = field(default_factory=Metrics)
    log_ring: LogRing = field(default_factory=LogRing)  # the latest lines of the log
    history_file: HistoryFile | None = None  # keeps the history of `metrics`
    traces: Traces | None = None
    misses: RecentMisses = field(default_factory=RecentMisses)  # of the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The objects that HTTP handlers use to answer requests."""

    settings: Settings
    gateway: Gateway
    models: ServedModels
    answers: Answers = field(default_factory=Answers)
    access: Access = field(default_factory=Access)
    telemetry: Telemetry = field(default_factory=Telemetry)

    @property
    def server(self) -> ServerSettings:
        """The settings of the server itself."""
        return self.settings.server

    @property
    def limits(self) -> LimitsSettings:
        """The limits of requests."""
        return self.settings.limits

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return bool(self.server.api_key) or self.access.keys.is_needed


def needs_load(services: Services, model_id: str) -> bool:
    """Whether requests for this model must wait, because the model is not loaded."""
    base_id = base_model_id(services, model_id)
    return any(
        model.id == base_id and model.state != "ready" for model in services.models.statuses()
    )


def model_of(services: Services, name: str | None) -> str:
    """The id of what a client names (`Catalog.named`); without a name, that of the first model.

    An alias of `server.model_aliases` has the form `PATTERN=MODEL`; without MODEL, it stands for
    the first model. A name that no model or alias has is returned unchanged.
    """
    if name is None:
        return first_model(services)
    find_named = services.models.catalog().named
    if (model := find_named(name)) is not None:
        return model.id
    for alias in services.server.model_aliases:
        pattern, _, target = (part.strip() for part in alias.partition("="))
        if fnmatchcase(name, pattern):
            model = find_named(target)
            return model.id if model is not None else target or first_model(services)
    return name


def base_model_id(services: Services, model_id: str) -> str:
    """The id of the model that is loaded for requests to `model_id`."""
    model = services.models.catalog().named(model_id)
    return model_id if model is None else model.entry.name


def served_models(services: Services) -> list[ModelStatus]:
    """The models that requests may name. Removed models that are still unloading are left out."""
    catalog = services.models.catalog()
    return [
        variant
        for model in services.models.statuses()
        if catalog.find(model.id) is not None
        for variant in model.variants()
    ]


def named_model(services: Services, name: str) -> ModelStatus:
    """The status of what a client names. Raises UnknownModel."""
    model_id = model_of(services, name)
    for model in served_models(services):
        if model.id == model_id:
            return model
    raise services.models.catalog().unknown(name)


def first_model(services: Services) -> str:
    """The id of the model for requests that name no model; empty if no model is served."""
    return next((entry.name for entry in services.models.catalog().entries), "")
