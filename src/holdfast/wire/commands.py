"""Messages from the front to a worker: the settings that it starts with, and the commands that it
gets while it runs.
"""

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
from holdfast.machine.device_memory import Pressure
from holdfast.machine.memory_plan import ALL_OF_IT, MemoryShare
from holdfast.wire.cache_map import CacheMapQuestion
from holdfast.wire.images import ImageCommand, ImageSpan
from holdfast.wire.kv import CacheScope, CacheUse
from holdfast.wire.requests import (
    Pooling,
    RequestId,
    SamplingParams,
    ServiceClass,
    TokenIds,
)
from holdfast.wire.sessions import SessionCommand

# -P: files in the working folder must not shadow modules
WORKER_COMMAND = (sys.executable, "-P", "-m", "holdfast.worker")
MOST_STEP_TOKENS = 1 << 20


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A limit on the reasoning tokens of an answer, also if the reasoning is interrupted
    several times.

    At the limit, the worker forces the tokens that end the reasoning. As long as a grammar does not
    allow these tokens, the reasoning continues.
    """

    tokens: int
    # reasoning begins after these tokens; empty: at the first token
    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()  # the tokens that end the reasoning


class ReadAhead(msgspec.Struct, frozen=True, kw_only=True):
    """Marks a request that only prefills its prompt, for a later request, while the worker is idle.

    known_tokens: how many of the prompt's tokens belong to the conversation so far. A request that
    begins with these tokens continues the conversation, and makes this prefill obsolete.
    """

    known_tokens: int


class ReadAheadRun(CacheScope, frozen=True, kw_only=True, tag=True):
    """A prompt of which `token_ids[start:]` was prefilled in advance, and not yet used by a request.

    As a command, it tells a new worker what an earlier worker has prefilled. The new worker only
    counts these tokens in its figures.
    """

    token_ids: TokenIds
    start: int


class SequenceRequest(CacheUse, frozen=True, kw_only=True, tag=True):
    """A request to generate one answer. Prompt and answer are token ids; the front handles text."""

    request_id: RequestId
    prompt_token_ids: TokenIds  # with image keys (`wire/images.py`) where images are
    images: tuple[ImageSpan, ...] = ()  # in order, not overlapping
    max_tokens: int  # of the answer
    sampling: SamplingParams  # its seed is always set
    stop_token_ids: tuple[int, ...] = ()  # each of them ends the answer
    want_logprobs: bool = False
    top_logprobs: int = 0  # how many likeliest tokens to report at each position
    want_prompt_logprobs: bool = False
    scored_from: int = 1  # the first prompt token whose log-probability is wanted
    pooling: Pooling | None = None  # if set, the request asks for an embedding of its prompt
    is_kept: bool = True  # whether its KV is cached for later requests
    grammar: str = ""  # for llguidance; empty: no constraint
    thinking_budget: ThinkingBudget | None = None  # None: unlimited
    # whether it is a further choice of an answer of its session, which the next turn probably does
    # not continue
    is_alternative: bool = False
    # positions in the prompt after which later prompts are likely to differ
    branch_points: tuple[int, ...] = ()
    service: ServiceClass = ServiceClass()
    # the beginning of the answer, if an earlier worker has streamed it: counted, but not sent again
    generated_token_ids: TokenIds = TokenIds()
    predicted_token_ids: TokenIds = TokenIds()  # what the client expects the answer to be
    read_ahead: ReadAhead | None = None  # None: an ordinary request, whose client waits

    @property
    def resume_points(self) -> tuple[int, ...]:
        """Positions in the prompt from which later prompts are likely to continue: the branch
        points, then the ends of images, from the last to the first.
        """
        ends = [image.end for image in self.images]
        return (*self.branch_points, *reversed(ends))

    @property
    def is_idle_work(self) -> bool:
        """Whether the request may run only while no other request runs."""
        return self.read_ahead is not None

    def without_session(self, *, forget: bool) -> SequenceRequest:
        """This request without its session, which was closed. forget: whether it must leave nothing
        in the cache.
        """
        return msgspec.structs.replace(self, session_id="", is_kept=self.is_kept and not forget)

    @property
    def reusable_tokens(self) -> int:
        """The number of tokens at the beginning of the prompt that may come from the cache."""
        if self.pooling == "mean":
            return 0
        return self.scored_from - 1 if self.want_prompt_logprobs else len(self.prompt_token_ids) - 1


ControlAction: TypeAlias = Literal["cancel", "pause", "resume"]


class SequenceControl(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel a sequence, pause it because its client does not read the stream, or resume it.

    Takes effect within one step. The worker ignores unknown ids, because the sequence may have just
    finished.
    """

    request_id: RequestId
    action: ControlAction


class ThoughtLimit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change the reasoning budget of a sequence. Reasoning tokens generated so far are included.

    A budget of 0 ends the reasoning immediately, and prevents more. The worker ignores unknown ids.
    """

    request_id: RequestId
    budget: ThinkingBudget


class WorkerControl(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A command without arguments.

    "tell_statistics": the worker answers with `WorkerStatistics`. "shut_down": the worker cancels
    running requests and exits cleanly.
    """

    action: Literal["tell_statistics", "shut_down"]


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change how many sequences may run concurrently and how many tokens a step may have.

    Sequences that exceed `max_running` wait again; none is lost. Invalid limits change nothing. The
    next `WorkerStatistics` contain the limits that are in effect.
    """

    max_running: int
    step_tokens: int


class LogChange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change the log level of the worker."""

    level: str  # a value of the setting `log.level`


class MemoryChange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change how much memory KV and cached blocks may use together.

    Sent after another model was loaded or unloaded.
    """

    state_bytes: int


class MemoryPressure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tell the worker the memory pressure of all workers together; sent when it changes."""

    pressure: Pressure


SHUT_DOWN = WorkerControl(action="shut_down")
TELL_STATISTICS = WorkerControl(action="tell_statistics")

Command: TypeAlias = (
    SequenceRequest
    | SequenceControl
    | ThoughtLimit
    | WorkerControl
    | SchedulerLimits
    | LogChange
    | MemoryChange
    | MemoryPressure
    | SessionCommand
    | ImageCommand
    | CacheMapQuestion
    | ReadAheadRun
)


Question: TypeAlias = SessionCommand | ImageCommand
"""A command that a worker answers with one `Answer` of the same call id."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one worker. Its model is a local folder."""

    folder: str  # with the model's files
    hash_cache: str = ""  # file for hashes of model files; empty: none
    compiled_code: str = ""  # folder for code compiled by MLX; empty: none
    crash_reports: str = ""  # folder for crash reports; empty: none
    images: str = ""  # folder with the images of prompts; empty: none
    model: ModelSettings
    draft_folder: str = ""  # of a draft model with the same tokens; empty: none
    draft_name: str = ""  # its name, for messages
    scheduler: SchedulerSettings
    store: StoreSettings
    log: LogSettings = LogSettings()
    share: MemoryShare = ALL_OF_IT  # the worker's share of the machine's memory
    residency: ResidencySettings = ResidencySettings()
    command: tuple[str, ...] = WORKER_COMMAND  # starts the process


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The settings and addresses of a worker process, which reads them from its standard input as
    one JSON document.

    Command-line arguments would show the settings in the process list.
    """

    settings: WorkerSettings
    endpoint: str  # address of the link to the front
    heartbeat_endpoint: str  # address for heartbeats
    parent_pid: int  # of the front


def checked_limits(
    settings: SchedulerSettings, *, max_running: int, step_tokens: int
) -> SchedulerSettings:
    """Return the settings with other limits. Raises InvalidRequest if a limit is out of range."""
    if max_running < 1:
        raise InvalidRequest(
            f"`max_running` must be at least 1, got {max_running}", field="max_running"
        )
    lowest_step_tokens = max(settings.min_chunk_tokens, max_running)
    if not lowest_step_tokens <= step_tokens <= MOST_STEP_TOKENS:
        causes = (
            f"max_running = {max_running}, scheduler.min_chunk_tokens = {settings.min_chunk_tokens}"
        )
        message = (
            f"`step_tokens` must be {lowest_step_tokens:,} to {MOST_STEP_TOKENS:,} tokens "
            f"({causes}), got {step_tokens:,}"
        )
        raise InvalidRequest(message, field="step_tokens")
    return replace(settings, max_running=max_running, step_tokens=step_tokens)
