"""Frozen messages that travel between rooms, threads and processes. Leaf module: no MLX, no web framework."""

from __future__ import annotations

import enum
from typing import Any, TypeAlias

import msgspec

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


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop one sequence within a step. Command of the link; unknown ids are ignored (it may have just ended)."""

    request_id: RequestId


class StatisticsRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask the worker for its `WorkerStatistics`. Command of the link."""


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the worker in order: running requests are finished as cancelled. Command of the link."""


Command: TypeAlias = SequenceRequest | CancelRequest | StatisticsRequest | Shutdown


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
    cached_tokens: int = 0  # part of prompt_tokens that needed no prefill
    error: str = ""  # what went wrong, for FAILED
    timings: Timings = Timings()


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


class LoadProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How far the start of a worker is, for progress bars."""

    stage: str  # "read weights", "probe", ...
    fraction: float


Event: TypeAlias = (
    Accepted | Rejected | PromptScored | TokensGenerated | Finished | WorkerReady | WorkerFailed | WorkerStatistics | LoadProgress
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


class ChoiceFinished(msgspec.Struct, frozen=True, kw_only=True):
    """Last event of one choice."""

    index: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    timings: Timings = Timings()


OutputEvent: TypeAlias = TextDelta | ChoiceFinished
