"""Frozen messages that travel between rooms, threads and processes. Leaf module: no MLX, no web framework."""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import msgspec

from holdfast.session_messages import SessionAnswer, SessionCommand

RequestId: TypeAlias = str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request draws its tokens. The defaults draw from the model's own distribution."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: the gateway draws one before the request leaves the front process

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken every time."""
        return self.temperature == 0.0


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A conversation to be rendered by the model's chat template. Messages are OpenAI-shaped dictionaries."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = {}  # e.g. {"enable_thinking": False}
    continue_last: bool = False  # the last assistant message is to be continued, not answered


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Raw text, tokenized as it is (with the tokenizer's own special tokens in front)."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Token ids, used as they are."""

    token_ids: tuple[int, ...]


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a protocol in `http` (or the library) asks for, neutral of protocol and model. `intake` makes it servable."""

    request_id: RequestId
    model: str
    prompt: Prompt
    max_tokens: int | None = None  # None: as many as fit the context window
    choices: int = 1
    sampling: SamplingParams = SamplingParams()
    unset_sampling: tuple[str, ...] = ()  # fields of `sampling` that the client left open, for generation_config.json to fill
    stop: tuple[str, ...] = ()
    want_logprobs: bool = False
    top_logprobs: int = 0
    echo: bool = False  # the prompt is part of the answer (with its logprobs if wanted)
    ignore_eos: bool = False
    tenant: str = ""  # what one tenant has read is not there for another; nothing secret, it is hashed already
    session_id: str = ""  # the session whose branch this goes on; empty: none
    prompt_field: str = "messages"  # the request's field to name in errors about the prompt


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One sequence for the worker: token ids in, token ids out. Command of the link."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams  # seed always set
    stop_token_ids: tuple[int, ...] = ()
    want_logprobs: bool = False
    top_logprobs: int = 0
    want_prompt_logprobs: bool = False
    tenant: str = ""  # what one tenant has read is not there for another
    session_id: str = ""  # opened by the request if the tenant has none of that id
    partings: tuple[int, ...] = ()  # positions in the prompt from which later ones are likely to go on in another way


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop one sequence within a step. Command of the link; unknown ids are ignored (it may have just ended)."""

    request_id: RequestId


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Draw no more for one sequence until it is resumed, since nobody reads what it says. Command of the link."""

    request_id: RequestId


class ResumeRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Go on with a paused sequence. Command of the link; unknown ids are ignored."""

    request_id: RequestId


class StatisticsRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask the worker for its `WorkerStatistics`. Command of the link."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the worker in order: running requests are finished as cancelled. Command of the link."""


Command: TypeAlias = (
    SequenceRequest | CancelRequest | PauseRequest | ResumeRequest | StatisticsRequest | SessionCommand | Shutdown
)


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a token and its likeliest rivals: natural, after bias and penalties, before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one request went, in seconds, as seen by the worker."""

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0  # admission to first token
    decode_seconds: float = 0.0  # first token to last


class MemoryOutcome(enum.Enum):
    """Why no more of a prompt was found in memory."""

    COMPLETE = "complete"  # all of it was there, but for the last token, which is always read
    NEW_TOKENS = "new_tokens"  # what is kept ends there, the prompt goes on
    DIVERGED = "diverged"  # something else is kept from there on
    NOTHING_STORED = "nothing_stored"  # nothing of this model and tenant is kept
    NO_BOUNDARY = "no_boundary"  # more is kept, but the model can be resumed only where a state was taken
    EVICTED = "evicted"  # more was kept, and had to make room
    UNREADABLE = "unreadable"  # more was kept, in files that turned out damaged, missing or unfit
    FORGOTTEN = "forgotten"  # more was kept, and somebody had it deleted
    SCORED = "scored"  # the prompt's log-probabilities were asked for, so that all of it had to be read
    FAILED = "failed"  # the memory failed; the worker's log says how
    OFF = "off"  # this worker keeps nothing


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first token of a prompt that differs from what is kept."""

    position: int  # from 0
    stored_token_id: int
    prompt_token_id: int


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory had of one prompt, why not more, and what that took."""

    outcome: MemoryOutcome = MemoryOutcome.OFF
    ram_tokens: int = 0
    disk_tokens: int = 0
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


class RejectionKind(enum.Enum):
    """Why the worker did not take a request."""

    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    INVALID = "invalid"
    SHUTTING_DOWN = "shutting_down"


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker did not take the request; nothing follows."""

    request_id: RequestId
    kind: RejectionKind
    message: str
    field: str = ""
    retry_after_seconds: float = 0.0
    queued: int = 0  # for QUEUE_FULL: requests that wait, and how many may
    queue_limit: int = 0


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The prompt has been read. Comes right before the first token, and before the prompt's scores; not when there is none."""

    request_id: RequestId
    memory: MemoryReport
    timings: Timings  # without the time of decoding


class PromptScored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Log-probabilities of the prompt's tokens from the second on (for echo with logprobs). Comes before the first token."""

    request_id: RequestId
    logprobs: tuple[TokenLogprob, ...]


class TokensGenerated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New tokens of one sequence, stop tokens included. `logprobs` is as long as `token_ids` when wanted, else empty."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Last message of a request. Each accepted request gets exactly one, cancelled and failed ones too."""

    request_id: RequestId
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    error: str = ""  # what went wrong, for FAILED
    timings: Timings = Timings()
    memory: MemoryReport = MemoryReport()

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
    device: str
    blas: str = ""
    load_seconds: float = 0.0


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded and probed; requests are served from now on."""

    pid: int
    model: ModelInfo


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker could not start (`fatal_input`: the model or a setting is at fault, so a restart will not help)."""

    message: str
    fatal_input: bool


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative-ready histogram: `counts[i]` observations ≤ `bounds[i]`, the last count is above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float = 0.0


class StoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The store of a worker: the folder as it is now, and counters of this worker since its start."""

    model: str  # short name of the model in the folder
    mode: str  # writing, or memory-only while the folder cannot be written
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
    dropped_blocks: dict[str, int] = {}  # not written, by reason


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker keeps, and counters of its memory since its start."""

    kept_tokens: int = 0  # in RAM or on disk, each once
    tenants: int = 0
    ram_bytes: int = 0
    ram_budget_bytes: int = 0
    ram_evicted_blocks: int = 0
    ram_tokens: int = 0  # that were not read again, by where they were
    disk_tokens: int = 0
    lookups: dict[str, int] = {}  # by MemoryOutcome
    waiting: int = 0  # requests that wait for another one's reading now
    waits: int = 0
    lookup_seconds: Histogram | None = None
    restore_seconds: Histogram | None = None  # of requests for which something was there
    store: StoreFigures | None = None  # None: no folder is set


class WorkerStatistics(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Counters since the worker's start, and gauges of now."""

    in_answer: bool = False  # to a StatisticsRequest; a working worker also tells them unasked
    running: int = 0
    queued: int = 0
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
    step_seconds: Histogram | None = None
    memory: MemoryFigures | None = None  # None: this worker keeps nothing


class Activity(enum.Enum):
    """What a worker's device thread is at."""

    LOADING = "loading"
    RESTING = "resting"  # it waits for commands
    WORKING = "working"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Said now and then by a thread beside the device thread, on a socket of its own."""

    activity: Activity
    lasting_seconds: float  # since it began; time in which the process did not run, or waited for its own pages, does not count
    expected_seconds: float | None = None  # what such work takes at most, as far as was measured; None: nothing like it was


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far the start of a worker is, for progress bars."""

    stage: str  # "read weights", "probe", ...
    fraction: float


Event: TypeAlias = (
    Accepted
    | Rejected
    | Started
    | PromptScored
    | TokensGenerated
    | Finished
    | WorkerReady
    | WorkerFailed
    | WorkerStatistics
    | SessionAnswer
    | LoadProgress
)


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New visible text of one choice. UTF-8 is never split and no part of a stop string is ever in it."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenText, ...] = ()


class TokenText(msgspec.Struct, frozen=True, kw_only=True):
    """A token as shown to a client: text, raw bytes, log-probability, rivals."""

    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenText, ...] = ()
    text_offset: int = 0  # characters from the beginning of the answer (prompt included when echoed)


class DivergentTexts(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's first token that differs from what is kept, as text: what stands before it, the kept one, the prompt's own."""

    before: str
    stored: str
    prompt: str


class ChoiceFinished(msgspec.Struct, frozen=True, kw_only=True):
    """Last event of one choice. `timings` lacks the decoding of an answer that a stop string has ended."""

    index: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    timings: Timings = Timings()
    memory: MemoryReport = MemoryReport()
    divergent: DivergentTexts | None = None  # for memory.divergence

    @property
    def cached_tokens(self) -> int:
        """The part of prompt_tokens that was not read again."""
        return self.memory.cached_tokens


OutputEvent: TypeAlias = TextDelta | ChoiceFinished
