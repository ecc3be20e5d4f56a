"""Messages from a worker to the front: events of requests, figures, heartbeats."""

from __future__ import annotations

import enum
from typing import Literal, TypeAlias

import msgspec

from holdfast.errors import ModelLoadError, UnusableModel
from holdfast.wire.cache_map import CacheMap
from holdfast.wire.images import ImageAnswer, VisionInfo
from holdfast.wire.kv import CacheUse, KVHealth
from holdfast.wire.requests import RequestId
from holdfast.wire.sessions import SessionAnswer

DropReason: TypeAlias = Literal["queue_full", "memory_only", "daily_budget", "no_room"]


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram whose counts are not cumulative.

    `counts[i]` observations are at most `bounds[i]`, but above the bound before it. The last count
    is for observations above all bounds. total: the sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0


class StoreFigures(msgspec.Struct, kw_only=True):
    """Figures of a worker's store: the state of its folder, and counters since the worker's start.

    The store's threads count in one shared object, each in its own fields; the front gets a copy.
    """

    model: str  # short name of the model in the folder
    # memory-only while the folder is full or cannot be written
    mode: Literal["writing", "memory-only"] = "writing"
    blocks: int = 0  # in the folder
    stored_bytes: int = 0  # size of their files
    allowed_bytes: int = 0  # limit of that size
    written_today_bytes: int = 0  # by all processes together
    queued_blocks: int = 0  # waiting to be written
    queued_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    evicted_blocks: int = 0
    bad_blocks: int = 0  # files with damaged content
    missing_blocks: int = 0  # files that were gone
    unreadable_blocks: int = 0
    outages: int = 0  # how often the folder could not be written
    dropped_blocks: dict[DropReason, int] = {}  # blocks that were not written, by reason


class CacheFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's prefix cache now, and counters since the worker's start."""

    kept_tokens: int = 0  # cached tokens; those both in RAM and on disk count once
    tenants: int = 0
    ram_bytes: int = 0  # size of the blocks in RAM
    ram_budget_bytes: int = 0
    ram_evicted_blocks: int = 0
    parked_sequences: int = 0  # finished sequences whose live state is kept for later requests
    parked_bytes: int = 0  # memory of these states; shared memory counts once
    ram_tokens: int = 0  # cache hits in RAM
    moved_tokens: int = 0  # of `ram_tokens`: from a parked state that the next request took over
    shared_tokens: int = 0  # of `ram_tokens`: in buffers that several sequences share
    disk_tokens: int = 0  # cache hits on disk
    read_ahead_tokens: int = 0  # prefilled in advance, for next turns, while idle
    used_ahead_tokens: int = 0  # of `read_ahead_tokens`: reused when the turn arrived
    lookups: dict[str, int] = {}  # number of lookups by the value of their CacheOutcome
    waiting: int = 0  # requests that wait now, until another request has prefilled their prefix
    waits: int = 0  # such waits since the start
    lookup_seconds: Histogram | None = None
    restore_seconds: Histogram | None = None  # of requests with a cache hit
    store: StoreFigures | None = None  # None: no folder is set


class ConstraintFigures(msgspec.Struct, kw_only=True):
    """Counters of structured output since the worker's start.

    The engine counts in one such object; the front gets a copy.
    """

    sequences: int = 0  # opened with a grammar or a reasoning budget
    masks: int = 0  # computed by grammars, one for each generated token
    mask_seconds: float = 0.0
    failures: int = 0  # sequences that ended because the grammar allowed no token


class ImageFigures(msgspec.Struct, kw_only=True):
    """Counters of the images in prompts since the worker's start.

    The engine counts in one such object; the front gets a copy.
    """

    encoded: int = 0  # images whose features the vision tower computed
    encode_seconds: float = 0.0
    reused: int = 0  # images whose features were kept from earlier


class WaitReason(enum.Enum):
    """What a request waits for.

    The front reports PLACE, LOAD and IMAGES, the worker IMAGES and the others.
    """

    PLACE = "place"  # room for its model in the machine's memory
    LOAD = "load"  # its model is loading
    LOOKUP = "lookup"  # the cache is searched again
    DISK = "disk"  # the store is reading cached blocks
    IMAGES = "images"  # its images are being decoded, or their features computed
    TWIN = "twin"  # another request prefills the same prefix
    MEMORY = "memory"  # a free slot among the running sequences, or KV memory
    READER = "reader"  # backpressure: the client does not read the answer


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A step that has ended: its batch, and how long it took."""

    at: float  # the end, in seconds since the epoch
    seconds: float
    sequences: int  # in its batch
    prompt_tokens: int  # prefilled
    generated_tokens: int


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's gauges, and counters since its start."""

    # whether this is the answer to TELL_STATISTICS; a busy worker also sends statistics unasked
    in_answer: bool = False
    running: int = 0  # sequences now
    queued: int = 0  # sequences that wait now
    max_running: int = 0  # the limits in effect
    step_tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # prefilled
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of `drafted_tokens`: those that are part of an answer
    model_drafted_tokens: int = 0  # of `drafted_tokens`: those that the draft model drafted
    model_accepted_tokens: int = 0  # of `accepted_tokens`: those that the draft model drafted
    draft_model: str = ""  # the model that drafts; empty: none, or it has failed
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0  # requests, like `failed`, `cancelled` and `rejected`
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    quantized: int = 0  # sequences whose state was quantized while they ran
    kv_reserved_bytes: int = 0
    kv_budget_bytes: int = 0
    resident_bytes: int = 0
    device_bytes: int = 0  # allocated on the GPU; 0 without one
    step_seconds: Histogram | None = None
    cache: CacheFigures | None = None  # None: no prefix cache
    constraints: ConstraintFigures = msgspec.field(default_factory=ConstraintFigures)
    images: ImageFigures = msgspec.field(default_factory=ImageFigures)
    waits: dict[RequestId, WaitReason] = {}  # what each waiting request waits for
    recent_steps: tuple[StepRecord, ...] = ()  # the oldest first; only in an answer


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"  # invalid for a reason that only the worker could find


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural log-probability of a token, and those of the likeliest tokens at its position.

    They are computed after bias and penalties, but before the temperature is applied.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """How long each phase of one request took, measured by the worker."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0  # from admission to the first token
    decode_seconds: float = 0.0  # from the first token to the last
    waited: dict[WaitReason, float] = {}  # seconds, by the reason for waiting


class CacheOutcome(enum.StrEnum):
    """Why the cache hit was not longer."""

    COMPLETE = "complete"  # all tokens but the last were cached; the last one is always prefilled
    NEW_TOKENS = "new_tokens"  # the cached sequence ends where the hit ends
    DIVERGED = "diverged"  # the cached sequence differs after the hit
    NOTHING_STORED = "nothing_stored"  # the cache is empty for this model and tenant
    # more is cached, but this model can resume only at a saved checkpoint
    NO_BOUNDARY = "no_boundary"
    EVICTED = "evicted"
    UNREADABLE = "unreadable"  # more is on disk, in files that are damaged, missing or unsuitable
    FORGOTTEN = "forgotten"  # more was cached, but was deleted on request
    # the whole prompt must be prefilled, because the request asks for log-probabilities of the
    # prompt, or for a mean of hidden states
    SCORED = "scored"
    FAILED = "failed"  # the cache failed; the reason is in the worker's log
    OFF = "off"  # this worker works without a cache

    @property
    def is_miss(self) -> bool:
        """Whether tokens of the prompt were prefilled that the cache could have had."""
        return self in (
            CacheOutcome.DIVERGED,
            CacheOutcome.NO_BOUNDARY,
            CacheOutcome.EVICTED,
            CacheOutcome.UNREADABLE,
            CacheOutcome.FORGOTTEN,
            CacheOutcome.FAILED,
        )


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of a prompt that differs from the cached sequence."""

    position: int  # from 0
    stored_token_id: int
    prompt_token_id: int


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cache hit of one prompt, why it was not longer, and how long it took."""

    outcome: CacheOutcome = CacheOutcome.OFF
    ram_tokens: int = 0
    moved_tokens: int = 0  # of `ram_tokens`: from a parked state that this request took over
    # of `ram_tokens`: in buffers shared with other sequences; the rest was copied
    shared_tokens: int = 0
    disk_tokens: int = 0
    read_ahead_tokens: int = 0  # of all `cached_tokens`: prefilled in advance for this turn
    unused_tokens: int = 0  # further tokens that are, or were, cached but could not be used
    divergence: Divergence | None = None  # None: the cached sequence does not differ
    waited_for_another: bool = False  # whether another request was prefilling the same prefix
    # duration of that wait; included in the queue time, like the next two fields
    waited_seconds: float = 0.0
    lookup_seconds: float = 0.0
    restore_seconds: float = 0.0  # to read and assemble the blocks from disk

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache and were not prefilled."""
        return self.ram_tokens + self.disk_tokens


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker has taken the request into its queue; exactly one `Finished` will follow."""

    request_id: RequestId


RejectionKind: TypeAlias = Literal["queue_full", "too_large", "invalid", "shutting_down"]


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker has refused the request; no other event follows."""

    request_id: RequestId
    kind: RejectionKind
    message: str
    field: str = ""  # of the request, if one is at fault
    retry_after_seconds: float = 0.0
    # set for queue_full
    queued: int = 0
    queue_limit: int = 0
    # set for too_large: KV memory
    needed_bytes: int = 0
    budget_bytes: int = 0


class PromptRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Progress of a long prefill. Sent now and then, but never after the prefill has ended."""

    request_id: RequestId
    total_tokens: int  # the length of the prompt
    cached_tokens: int  # prompt tokens that were found in the cache
    read_tokens: int  # prompt tokens that are cached or prefilled so far
    seconds: float  # since the admission of the request


class PrefillFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt is prefilled, and the first token is sampled.

    Sent right before the first `TokensGenerated`. If no token is generated, it is sent only if the
    request asked for log-probabilities of the prompt.
    """

    request_id: RequestId
    cache_report: CacheReport
    timings: Timings  # does not include decoding yet
    logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt, from `scored_from` on


class TokensGenerated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New tokens of one sequence, stop tokens included.

    `logprobs` has one entry per token if the request asked for them; otherwise it is empty.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last event of a request. Each accepted request gets exactly one, even after an error."""

    request_id: RequestId
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    error: str = ""  # for FAILED and REFUSED
    # whether the request crashed workers, so that it must not be retried; set by the front
    is_deadly: bool = False
    timings: Timings = Timings()
    cache_report: CacheReport = CacheReport()
    embedding: bytes = b""  # of a pooled prompt: float32, little-endian, normalized
    resumptions: int = 0  # workers that died while they had this request; counted by the front
    # of the drafts that the last worker verified: tokens that are part of the answer, and the others
    accepted_tokens: int = 0
    rejected_tokens: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the cache and were not prefilled."""
        return self.cache_report.cached_tokens


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The loaded model, as its worker reports it."""

    model_type: str
    layout: str  # rows, split or solo
    layout_reason: str  # why that layout was chosen
    parameters: int
    weight_bytes: int
    compute_dtype: str  # such as float32
    context_tokens: int  # the longest sequence (prompt and answer) that the KV budget can hold
    vocab_size: int
    kv: KVHealth  # of one sequence, in layers whose cache grows
    # `context_tokens` by the `kv_bits` of a request; for "auto", with 8 bits if these are supported
    context_tokens_by_bits: dict[str, int] = {}
    fixed_bytes_per_sequence: int  # sliding windows and recurrent states
    kv_budget_bytes: int
    device: str  # name of the device
    is_on_cpu: bool = False
    wired_bytes: int = 0  # memory that a Mac may not page out while the model serves
    # GPU memory that a step needs besides weights and KV, including cached buffers
    reserve_bytes: int = 0
    # the GPU's recommended working set or its total memory; 0 without a GPU
    device_memory_bytes: int = 0
    # hash of the files, code and versions that determine the KV (`worker/engine/fingerprint.py`)
    fingerprint: str = ""
    embedding_dimensions: int = 0  # 0: the hidden states of this model cannot be read
    blas: str = ""  # which BLAS MLX uses, in words
    load_seconds: float = 0.0  # duration of the load
    own_context_tokens: int = 0  # the context that the model was trained for; 0: unknown
    speculation_refused: str = ""  # why drafts are not used for this model; empty: they are
    vision: VisionInfo | None = None  # None: the model reads text only
    draft_model: str = ""  # the model that drafts for this one; empty: none
    draft_weight_bytes: int = 0
    kept_layers: int = 0  # layers that are computed in float32, but keep their stored weights
    weights_note: str = ""  # why weights are not computed as stored; empty: they are
    attention: str = ""  # what computes the attention of decode steps
    # for the user; each says what the problem costs, why it exists, and what to do
    warnings: tuple[str, ...] = ()

    def with_budget(self, change: BudgetChanged) -> ModelInfo:
        """The model with another KV budget."""
        context_tokens = change.context_tokens_by_bits
        return msgspec.structs.replace(
            self,
            kv_budget_bytes=change.kv_budget_bytes,
            context_tokens=context_tokens.get(self.kv.bits, self.context_tokens),
            context_tokens_by_bits=context_tokens,
        )

    def for_request(self, request: CacheUse) -> ModelInfo:
        """The model with the context that fits if keys and values are held as a request asks:
        quantized ones take less memory.
        """
        bits = self.kv.bits_of(request)
        context_tokens = self.context_tokens_by_bits.get(bits, self.context_tokens)
        return msgspec.structs.replace(self, context_tokens=context_tokens)


class BudgetChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The KV budget of the worker has changed, because other models were loaded or unloaded."""

    kv_budget_bytes: int
    context_tokens_by_bits: dict[str, int]  # as in `ModelInfo`


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and probed, and the worker serves requests."""

    pid: int
    model: ModelInfo


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker could not start.

    fatal_input: the cause is the model or a setting, so a restart will not help.
    bad_files: whether the model's files are the cause, so that retrying is useless until they
    change.
    """

    message: str
    fatal_input: bool
    bad_files: bool = False

    @property
    def error(self) -> ModelLoadError:
        """The error for requests that wait for the model, if the cause is the model or a setting."""
        return UnusableModel(self.message) if self.bad_files else ModelLoadError(self.message)


# resting: the device thread waits for commands
Activity: TypeAlias = Literal["loading", "resting", "working"]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What the device thread is doing. The heartbeat thread sends this, on a separate socket."""

    activity: Activity
    # how long the current activity has lasted, except while the process was stopped or paging
    lasting_seconds: float = 0.0
    # the longest time measured for similar work; None: unknown
    expected_seconds: float | None = None


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Progress of a worker's start."""

    stage: str  # "reading", "probing", ...
    fraction: float  # of the stage, 0 to 1


Answer: TypeAlias = SessionAnswer | ImageAnswer
"""The answer to a session command or to an image command."""
Event: TypeAlias = (
    Accepted
    | Rejected
    | PromptRead
    | PrefillFinished
    | TokensGenerated
    | Finished
    | WorkerReady
    | WorkerFailed
    | WorkerStatistics
    | BudgetChanged
    | SessionAnswer
    | ImageAnswer
    | CacheMap
    | LoadProgress
)
