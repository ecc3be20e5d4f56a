"""Messages from a worker to the front: events of requests, figures, heartbeats."""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

import msgspec

from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer

DropReason: TypeAlias = Literal["queue_full", "memory_only", "daily_budget", "no_room"]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative-ready histogram: `counts[i]` observations ≤ `bounds[i]`, the last count is above
    all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0


class StoreFigures(msgspec.Struct, kw_only=True):
    """The store of a worker: the folder as it is now, and counters of this worker since its start.

    The store's threads count in one of these, each in fields of its own; what travels is a copy.
    """

    model: str  # short name of the model in the folder
    # memory-only while the folder cannot be written or has no room
    mode: Literal["writing", "memory-only"] = "writing"
    blocks: int = 0
    stored_bytes: int = 0
    allowed_bytes: int = 0
    written_today_bytes: int = 0  # by all processes
    queued_blocks: int = 0
    queued_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evicted_blocks: int = 0
    bad_blocks: int = 0
    missing_blocks: int = 0
    outages: int = 0  # how often the folder could not be written
    dropped_blocks: dict[DropReason, int] = {}  # not written, by reason


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker keeps, and counters of its memory since its start."""

    kept_tokens: int = 0  # in RAM or on disk, each once
    tenants: int = 0
    ram_bytes: int = 0
    ram_budget_bytes: int = 0
    ram_evicted_blocks: int = 0
    parked_sequences: int = 0  # that have ended, and whose state is kept as it was
    parked_bytes: int = 0  # of their states, what several share once
    ram_tokens: int = 0  # that were not read again, by where they were
    moved_tokens: int = 0  # of these, in a parked state that went over to the next request
    shared_tokens: int = 0  # of these, in buffers that several sequences hold
    disk_tokens: int = 0
    read_ahead_tokens: int = 0  # read for next turns, while there was nothing else to do
    used_ahead_tokens: int = 0  # of these, that such turns began from
    lookups: dict[str, int] = {}  # by CacheOutcome
    waiting: int = 0  # requests that wait for another one's reading now
    waits: int = 0
    lookup_seconds: Histogram | None = None
    restore_seconds: Histogram | None = None  # of requests for which something was there
    store: StoreFigures | None = None  # None: no folder is set


class ConstraintFigures(msgspec.Struct, kw_only=True):
    """Counters of a worker since its start.

    The engine counts in one of these; what travels is a copy.
    """

    sequences: int = 0  # that were opened with a grammar or a thinking budget
    masks: int = 0  # of tokens that a grammar allowed, one for each that was drawn
    mask_seconds: float = 0.0
    failures: int = 0  # sequences that ended because nothing was allowed any more


class ResidencyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded and used, and counters since the server's start."""

    loaded: int = 0  # 1 when it is
    leases: int = 0  # requests that use it
    waiting: int = 0  # requests that wait until there is room for it
    footprint_bytes: int = 0  # of memory, as measured
    # loaded, failed; unloaded by what it made way for: room, idle, asked
    changes: dict[str, int] = {}
    wait_seconds: dict[str, float] = {}  # of requests, by what they waited for: place or load


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Counters since the worker's start, and gauges of now."""

    in_answer: bool = False  # to TELL_STATISTICS; a working worker also tells them unasked
    running: int = 0
    queued: int = 0
    max_running: int = 0  # the limits that count
    step_tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    kv_reserved_bytes: int = 0
    kv_budget_bytes: int = 0
    resident_bytes: int = 0
    device_bytes: int = 0  # that a GPU has for this worker; 0 without one
    step_seconds: Histogram | None = None
    memory: CacheFigures | None = None  # None: this worker keeps nothing
    constraints: ConstraintFigures = msgspec.field(default_factory=ConstraintFigures)


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"  # what was asked cannot be served, which only the worker could find out


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token and its likeliest rivals: natural, after bias and penalties,
    before temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went, in seconds, as seen by the worker."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0  # admission to first token
    decode_seconds: float = 0.0  # first token to last


class CacheOutcome(enum.Enum):
    """Why no more of a prompt was found in memory."""

    COMPLETE = "complete"  # all of it was there, but for the last token, which is always read
    NEW_TOKENS = "new_tokens"  # what is kept ends there, the prompt goes on
    DIVERGED = "diverged"  # something else is kept from there on
    NOTHING_STORED = "nothing_stored"  # nothing of this model and tenant is kept
    # more is kept, but the model can be resumed only where a state was taken
    NO_BOUNDARY = "no_boundary"
    EVICTED = "evicted"  # more was kept, and had to make room
    UNREADABLE = "unreadable"  # more was kept, in files that turned out damaged, missing or unfit
    FORGOTTEN = "forgotten"  # more was kept, and somebody had it deleted
    # something of all of the prompt's tokens was asked for (log-probabilities, a mean): all had to
    # be read
    SCORED = "scored"
    FAILED = "failed"  # the memory failed; the worker's log says how
    OFF = "off"  # this worker keeps nothing


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of a prompt that differs from what is kept."""

    position: int  # from 0
    stored_token_id: int
    prompt_token_id: int


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory had of one prompt, why not more, and what that took."""

    outcome: CacheOutcome = CacheOutcome.OFF
    ram_tokens: int = 0
    moved_tokens: int = 0  # of these, in a parked state that is this request's own now
    # of these, in buffers that other sequences hold too; the others were copied
    shared_tokens: int = 0
    disk_tokens: int = 0
    # of both, those that were read for this turn before it came, while there was nothing else to do
    read_ahead_tokens: int = 0
    unused_tokens: int = 0  # further tokens that are, or were, kept but could not be used
    divergence: Divergence | None = None
    waited_for_another: bool = False  # another request was reading the same beginning at that time
    waited_seconds: float = 0.0  # for that; part of the queue's time, like the next two
    lookup_seconds: float = 0.0
    restore_seconds: float = 0.0  # until it had come from disk and was put together

    @property
    def cached_tokens(self) -> int:
        """Tokens that were not read again."""
        return self.ram_tokens + self.disk_tokens


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker has taken the request into its queue; exactly one `Finished` will follow."""

    request_id: RequestId


RejectionKind: TypeAlias = Literal["queue_full", "too_large", "invalid", "shutting_down"]


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker did not take the request; nothing follows."""

    request_id: RequestId
    kind: RejectionKind
    message: str
    field: str = ""
    retry_after_seconds: float = 0.0
    queued: int = 0  # for QUEUE_FULL: requests that wait, and how many may
    queue_limit: int = 0
    needed_bytes: int = 0  # for TOO_LARGE: KV memory of the request, and of all
    budget_bytes: int = 0


class PromptRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far a prompt is read that takes long.

    Comes now and then, and never once all of it is read.
    """

    request_id: RequestId
    total_tokens: int  # of the prompt
    cached_tokens: int  # of these, need not be read
    read_tokens: int  # of these, are read; those that were cached included
    seconds: float  # since it was admitted


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt has been read.

    Comes right before the first token; when there is none, only if the prompt was scored.
    """

    request_id: RequestId
    memory: CacheReport
    timings: Timings  # without the time of decoding
    # of the prompt's tokens, from the first one that was asked for on
    logprobs: tuple[TokenLogprob, ...] = ()


class TokensGenerated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New tokens of one sequence, stop tokens included.

    `logprobs` is as long as `token_ids` when wanted, else empty.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Last message of a request.

    Each accepted request gets exactly one, cancelled and failed ones too.
    """

    request_id: RequestId
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    error: str = ""  # what went wrong, for FAILED and REFUSED
    # its workers died of it: another try would cost more of them; the front says so
    is_deadly: bool = False
    timings: Timings = Timings()
    memory: CacheReport = CacheReport()
    # of a prompt that was to be pooled: float32 in the order of the machine, of length 1
    embedding: bytes = b""
    resumptions: int = 0  # workers that ended while they had it; the front counts them

    @property
    def cached_tokens(self) -> int:
        """The part of prompt_tokens that was not read again."""
        return self.memory.cached_tokens


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker knows of the loaded model."""

    model_type: str
    layout: str  # rows, split or solo
    layout_reason: str
    parameters: int
    weight_bytes: int
    compute_dtype: str
    context_tokens: int
    vocab_size: int
    kv_bytes_per_token: int  # of one sequence, growing layers only
    fixed_bytes_per_sequence: int  # windows and recurrent states
    kv_budget_bytes: int
    device: str  # its name, where it tells one
    is_on_cpu: bool = False
    wired_bytes: int = 0  # that a Mac may not page out while the model serves
    # that a step may take of a GPU's memory beside weights and KV, buffers used again included
    reserve_bytes: int = 0
    device_memory_bytes: int = 0  # that a GPU recommends to use, or has; 0 without one
    # of a pooled prompt; 0: the hidden states of this model cannot be reached
    embedding_dimensions: int = 0
    blas: str = ""
    load_seconds: float = 0.0
    warnings: tuple[str, ...] = ()  # what a user should know: what it costs, why, what to do


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and probed; requests are served from now on."""

    pid: int
    model: ModelInfo


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker could not start (`fatal_input`: the model or a setting is at fault, so a restart
    will not help).
    """

    message: str
    fatal_input: bool


# resting: the device thread waits for commands
Activity: TypeAlias = Literal["loading", "resting", "working"]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What the device thread is at.

    Sent now and then by a thread beside it, on a socket of its own.
    """

    activity: Activity
    # since it began, without time in which the process did not run or waited for its own pages
    lasting_seconds: float = 0.0
    # what such work takes at most, as far as was measured; None: nothing like it was
    expected_seconds: float | None = None


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far the start of a worker is, for progress bars."""

    stage: str  # "read weights", "probe", ...
    fraction: float


Event: TypeAlias = (
    Accepted
    | Rejected
    | PromptRead
    | Started
    | TokensGenerated
    | Finished
    | WorkerReady
    | WorkerFailed
    | WorkerStatistics
    | SessionAnswer
    | LoadProgress
)
