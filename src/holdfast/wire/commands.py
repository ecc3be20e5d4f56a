"""Messages from the front to a worker: its assignment, and the commands of the link."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal, TypeAlias

import msgspec

from holdfast.config import (
    LogSettings,
    ModelSettings,
    ResidencySettings,
    SchedulerSettings,
    StoreSettings,
)
from holdfast.errors import InvalidRequest
from holdfast.machine.device_memory import ALL_OF_IT, MemoryShare
from holdfast.wire.requests import Pooling, RequestId, SamplingParams, ServiceClass, TokenIds
from holdfast.wire.sessions import SessionCommand

# -P: nothing in the working folder can pose as a module
WORKER_COMMAND = (sys.executable, "-P", "-m", "holdfast.worker")
MOST_STEP_TOKENS = 1 << 20


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """After so many tokens of thought, the tokens that end it are drawn, whatever the model would
    say.

    All thoughts of an answer count together. Where a grammar does not allow the end, the thought
    goes on until it does.
    """

    tokens: int
    # behind which the thought begins; empty: with the first token
    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()  # that end it


class PinnedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The first `tokens` tokens of a prompt are to be kept for so many seconds since they were used
    last.
    """

    tokens: int
    seconds: float


class ReadAhead(msgspec.Struct, frozen=True, kw_only=True):
    """That a prompt is read for a later one, while there is nothing else to do.

    Nothing is drawn behind it.
    """

    # of its beginning, that were read before it was made: a request that has more of it needs no
    # other
    known_tokens: int


class ReadAheadRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tokens from `start` to the end of `token_ids` were read ahead, and no request has begun
    from them yet.

    As a command of the link: an earlier worker read them. For the figures only.
    """

    tenant: str
    token_ids: TokenIds
    start: int


class SequenceRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One sequence for the worker: token ids in, token ids out. Command of the link."""

    request_id: RequestId
    prompt_token_ids: TokenIds
    max_tokens: int
    sampling: SamplingParams  # seed always set
    stop_token_ids: tuple[int, ...] = ()
    want_logprobs: bool = False
    top_logprobs: int = 0
    want_prompt_logprobs: bool = False
    scored_from: int = 1  # the first of the prompt's tokens whose log-probability is wanted
    # the hidden states that the prompt's embedding is made of; None: none is wanted
    pooling: Pooling | None = None
    is_kept: bool = True  # what is read for it is there for later requests
    grammar: str = ""  # a text of llguidance: the tokens that may be drawn; empty: all
    thinking_budget: ThinkingBudget | None = None
    tenant: str = ""  # what one tenant has read is not there for another
    session_id: str = ""  # opened by the request if the tenant has none of that id
    # positions in the prompt from which later ones are likely to go on in another way
    branch_points: tuple[int, ...] = ()
    pins: tuple[PinnedPrefix, ...] = ()  # ascending, each position once
    service: ServiceClass = ServiceClass()
    # drawn and told by a worker that is gone: they count, and are not told again
    generated_token_ids: TokenIds = TokenIds()
    read_ahead: ReadAhead | None = None  # None: somebody waits for it

    @property
    def is_idle_work(self) -> bool:
        """Whether it runs only while nothing else does, and gives way to whatever comes."""
        return self.read_ahead is not None

    @property
    def reusable_tokens(self) -> int:
        """How many of the prompt's first tokens need not be read where they are cached."""
        if self.pooling == "mean":
            return 0
        return self.scored_from - 1 if self.want_prompt_logprobs else len(self.prompt_token_ids) - 1


ControlAction: TypeAlias = Literal["cancel", "pause", "resume"]


class SequenceControl(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What becomes of one sequence.

    Command of the link; unknown ids are ignored (it may have just ended).

    cancel: it is stopped within a step. pause: nothing is drawn for it until it is resumed, since
    nobody reads what it says.
    """

    request_id: RequestId
    action: ControlAction


class ThoughtLimit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A sequence gets another thinking budget, of all tokens that it has thought.

    Command of the link; unknown ids are ignored.

    A budget of 0 ends a thought at once, and keeps further ones from beginning.
    """

    request_id: RequestId
    budget: ThinkingBudget


class WorkerControl(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the worker as a whole is to do. Command of the link.

    tell_statistics: it answers with its `WorkerStatistics`. shut_down: it ends in order, running
    requests as cancelled.
    """

    action: Literal["tell_statistics", "shut_down"]


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How many sequences may run at once from now on, and how much one step reads.

    Command of the link; nobody is ended by it.

    The next `WorkerStatistics` have what counts then; limits that may not be are left as they are.
    """

    max_running: int
    step_tokens: int


class LogChange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How severe what is logged has to be, from now on. Command of the link."""

    level: str  # as in `log.level`


class MemoryChange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How much memory KV and blocks in RAM may take together from now on, as other models came or
    went. Command of the link.
    """

    state_bytes: int


SHUT_DOWN, TELL_STATISTICS = (
    WorkerControl(action="shut_down"),
    WorkerControl(action="tell_statistics"),
)

Command: TypeAlias = (
    SequenceRequest
    | SequenceControl
    | ThoughtLimit
    | WorkerControl
    | SchedulerLimits
    | LogChange
    | MemoryChange
    | SessionCommand
    | ReadAheadRun
)


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One model to serve, resolved to a local folder, and all settings that its worker goes by."""

    folder: str
    # file in which hashes of model files are kept for the next start; empty: nowhere
    hash_cache: str = ""
    # folder in which what MLX compiles is kept for the next start; empty: nowhere
    compiled_code: str = ""
    crash_reports: str = ""  # folder for what is told of workers that died; empty: nowhere
    model: ModelSettings
    scheduler: SchedulerSettings
    store: StoreSettings
    log: LogSettings = LogSettings()
    share: MemoryShare = ALL_OF_IT  # of the memory that is left
    residency: ResidencySettings = ResidencySettings()
    command: tuple[str, ...] = WORKER_COMMAND  # that starts its process


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process reads from its standard input: one JSON document, nothing in the
    process list.
    """

    settings: WorkerSettings
    endpoint: str
    heartbeat_endpoint: str
    parent_pid: int


def checked_limits(
    settings: SchedulerSettings, *, max_running: int, step_tokens: int
) -> SchedulerSettings:
    """The settings with other limits. Raises InvalidRequest for what they may not be."""
    if max_running < 1:
        raise InvalidRequest(
            f"`max_running`: at least 1 has to run, got {max_running}", field="max_running"
        )
    least = max(settings.min_chunk_tokens, max_running)
    if not least <= step_tokens <= MOST_STEP_TOKENS:
        why = (
            f"max_running = {max_running}, scheduler.min_chunk_tokens = {settings.min_chunk_tokens}"
        )
        message = (
            f"`step_tokens`: a step has to read {least:,} to {MOST_STEP_TOKENS:,} tokens ({why}), "
            f"got {step_tokens:,}"
        )
        raise InvalidRequest(message, field="step_tokens")
    return replace(settings, max_running=max_running, step_tokens=step_tokens)
