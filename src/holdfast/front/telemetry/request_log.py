"""Records each request and its answer, for the metrics, the traces, and one log line per request.

The log line contains no prompt or answer, unless the setting `log.content` is on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from holdfast.front.output import (
    ChoiceFinished,
    OutputDelta,
    OutputEvent,
    PromptProgress,
    TextDelta,
    TextRead,
    TokenCounts,
    ToolCallFinished,
)
from holdfast.front.request import GenerationRequest
from holdfast.front.telemetry.history import Cell, Distribution
from holdfast.wire.events import CacheOutcome, FinishReason, WaitReason

if TYPE_CHECKING:  # the command line imports this module, too
    from prometheus_client import Histogram

    from holdfast.front.telemetry.metrics import Metrics

RECORD = "holdfast.record"  # key of the RequestRecord in an ASGI scope
CLIENT_GONE = 499  # status of a request whose client disconnected before the response began
_LEAST_WAIT_SECONDS = 0.05  # shorter waits are not logged
UNKNOWN_ROUTE = "other"  # the route of unknown paths
# the progress of a prefill is logged if its estimated duration is at least this long
LONG_PREFILL_SECONDS = 5.0
PROGRESS_LINE_SECONDS = 5.0  # between two log lines about a prefill
QUIET_PATHS = frozenset(  # polled by programs
    {
        "/",
        "/health",
        "/metrics",
        "/admin/requests",
        "/admin/activity",
        "/admin/models",
        "/admin/performance",
        "/admin/logs",
        "/admin/logs/events",
        "/admin/cache",
        "/admin/misses",
        "/admin/caller",
        "/admin/store",
    }
)
# what the page for browsers reads again and again, but other clients do not
_QUIET_FROM_PAGE = frozenset({"/v1/models", "/v1/sessions"})
PAGE_HEADER = b"x-holdfast-page"  # sent with all requests of the page
_QUIET_FOLDER = "/page/"  # the files of the page for browsers
_LONGEST_PATH = 200
_LONGEST_ERROR = 160
_GAPS_PER_BATCH = 256  # counted together, since that takes half of the time
_LONGEST_CONTENT = 20_000  # characters of a prompt or an answer in the log
_MIN_SPEED_SECONDS = 0.01  # an answer that arrived at once has no meaningful speed
_TOKEN_COUNTERS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
_TEXTS_OF_FIELDS = (  # fields that appear in the text of a log line
    ("prompt_tokens", "prompt {}"),
    ("cached_tokens", "({} cached)"),
    ("answer_tokens", "answer {}"),
    ("first_token_seconds", "first {:.2f} s"),
    ("tokens_per_second", "{:.1f} tok/s"),
    ("seconds", "in {:.2f} s"),
    ("resumed", "resumed {} times"),
    ("thought_ended_by", "thought ended by {}"),
    ("answer_ended_by", "ended by {}"),
    ("rejoined", "rejoined {}"),
)
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Everything known about one request. Every part of the front adds to this record.

    Event loop's thread only. In the end, the record is the message of the request's log line: text
    for people, fields for machines.
    """

    method: str
    path: str
    client: str  # the client's address
    is_from_page: bool = False  # sent by the server's own web page
    request_id: str = ""
    key: str = ""  # name of the request's API key
    status: int = CLIENT_GONE  # HTTP status
    model: str = ""
    error_code: str = ""  # empty: no error
    error_message: str = ""
    is_aborted: bool = False  # aborted by the client
    rejoined: str = ""  # id of the earlier request whose answer it received
    generation: GenerationRequest | None = None  # the first one; None if there is none
    answer: AnswerRecord | None = None  # set when a model has accepted the request
    waits_for: WaitReason | None = None  # what the request waits for now, in the front
    waited: dict[WaitReason, float] = field(default_factory=dict)  # seconds in the front, by reason
    clock: Callable[[], float] = field(default=perf_counter, repr=False)
    began: float = field(init=False)
    ended: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def is_quiet(self) -> bool:
        """Whether the request is routine, because programs or the page poll its path."""
        is_polled = self.path in QUIET_PATHS or self.path.startswith(_QUIET_FOLDER)
        is_from_view = self.is_from_page and self.method == "GET" and self.path in _QUIET_FROM_PAGE
        return is_polled or is_from_view

    @property
    def has_status(self) -> bool:
        """Whether a response has begun."""
        return self.status != CLIENT_GONE

    def end(self) -> None:
        """Note that the request has ended, unless that is noted already."""
        if self.ended is None:
            self.ended = self.clock()

    def fail(self, *, code: str, message: str) -> None:
        """Note why the request was refused or failed."""
        self.error_code, self.error_message = code, message

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that the request waited in front and worker, by reason; known at the end.

        If there are several sequences, the longest wait counts.
        """
        waited = dict(self.waited)
        for choice, _ in () if self.answer is None else self.answer.ends:
            for reason, seconds in choice.timings.waited.items():
                waited[reason] = max(seconds, waited.get(reason, 0.0))
        return {
            reason.value: round(waited[reason], 3)
            for reason in WaitReason
            if waited.get(reason, 0.0) >= _LEAST_WAIT_SECONDS
        }

    @property
    def seconds(self) -> float:
        """The duration of the request: so far, or in total if it has ended."""
        return (self.clock() if self.ended is None else self.ended) - self.began

    def __str__(self) -> str:
        return "\n".join([self.line, *self._content_lines()])

    @property
    def line(self) -> str:
        """The log line, without prompt and answers."""
        fields = self.fields
        figures = (text.format(fields[name]) for name, text in _TEXTS_OF_FIELDS if name in fields)
        waits = ", ".join(f"{reason} {seconds:.2f} s" for reason, seconds in self.waits.items())
        parts = (
            self.head,
            str(self.status),
            printable(self.model),
            *figures,
            f"(waited for {waits})" if waits else "",
            self._ending(),
        )
        return " ".join(filter(None, parts))

    @property
    def head(self) -> str:
        """The beginning of the log line: client, method and path."""
        return (
            f"{printable(self.client)} {printable(self.method)} "
            f"{printable(self.path, longest=_LONGEST_PATH)}"
        )

    @property
    def fields(self) -> dict[str, Any]:
        """All known values of the request, by name."""
        values = {
            "client": self.client,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "request_id": self.request_id,
            "status": self.status,
            "model": self.model,
            "seconds": round(self.seconds, 4),
            "waited_seconds": self.waits or None,
            "error_code": self.error_code,
            "error_message": self.error_message[:_LONGEST_ERROR],
            "aborted": self.is_aborted or None,
            "rejoined": self.rejoined,
        }
        if (answer := self.answer) is not None:
            first_at = answer.first_text_at
            values |= {
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.cached_tokens,
                "answer_tokens": answer.tokens,
                "first_token_seconds": _rounded(
                    None if first_at is None else first_at - self.began
                ),
                "tokens_per_second": _rounded(answer.tokens_per_second),
                "finish_reason": answer.finish_reason,
                "resumed": answer.resumptions or None,
                "thought_ended_by": answer.counts.thought_ended_by,
                "answer_ended_by": answer.ended_by,
                "prompt": answer.prompt[:_LONGEST_CONTENT],
                "answers": [answer.texts[index] for index in sorted(answer.texts)],
            }
        return {name: value for name, value in values.items() if value not in (None, "", [])}

    def _ending(self) -> str:
        """How the request ended, in the words of the log line: aborted, an error, or the reason."""
        if self.is_aborted:
            return "aborted by the client"
        if self.error_code:
            return f"{self.error_code}: {printable(self.error_message, longest=_LONGEST_ERROR)}"
        return "" if self.answer is None else self.answer.finish_reason

    def _content_lines(self) -> list[str]:
        """Lines with the prompt and the answers; empty unless contents are logged."""
        answer = self.answer
        if answer is None or not answer.prompt:
            return []
        texts = [("prompt", answer.prompt)]
        texts += [("answer", answer.texts[index]) for index in sorted(answer.texts)]
        return [f"    {name}: {printable(text, longest=_LONGEST_CONTENT)}" for name, text in texts]


_current: ContextVar[RequestRecord | None] = ContextVar("holdfast_record", default=None)


@contextmanager
def current_record(record: RequestRecord) -> Iterator[None]:
    """Within the block, the current task and the tasks that it creates serve this request."""
    token = _current.set(record)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def waiting_for(reason: WaitReason) -> Iterator[None]:
    """Within the block, the request that the current task serves, if any, waits for `reason`."""
    record = _current.get()
    if record is None:
        yield
        return
    began = record.clock()
    record.waits_for = reason
    try:
        yield
    finally:
        record.waits_for = None
        record.waited[reason] = record.waited.get(reason, 0.0) + record.clock() - began


def current_request_id() -> str:
    """The id of the request that the current task serves; empty if it serves none."""
    record = _current.get()
    return "" if record is None else record.request_id


def write_line(record: RequestRecord) -> None:
    """Log the line of a finished request.

    The level is info, or debug for what programs and the page poll.
    """
    record.end()
    is_quiet = record.is_quiet and record.has_status
    level = logging.DEBUG if is_quiet else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(level, record)


def write_progress(record: RequestRecord, progress: PromptProgress) -> None:
    """Log the progress of a long prefill: at its start and then every few seconds."""
    answer = record.answer
    if answer is None or progress.read_tokens >= progress.total_tokens:
        return
    now = record.clock()
    new_tokens = max(1, progress.read_tokens - progress.cached_tokens)
    seconds_left = progress.seconds * (progress.total_tokens - progress.read_tokens) / new_tokens
    if answer.progress_logged_at is None:
        is_due = progress.seconds + seconds_left >= LONG_PREFILL_SECONDS
    else:
        is_due = now - answer.progress_logged_at >= PROGRESS_LINE_SECONDS
    if not is_due:
        return
    answer.progress_logged_at = now
    _log.info(
        "%s %s prefill %s of %s tokens (%s cached) after %.1f s, about %.0f s left",
        record.head,
        printable(record.model),
        f"{progress.read_tokens:,}",
        f"{progress.total_tokens:,}",
        f"{progress.cached_tokens:,}",
        progress.seconds,
        seconds_left,
    )


class AnswerRecord:
    """Times, token counts and, if contents are logged, texts of one answer, for metrics and logs.

    A `ResumableAnswer`, in contrast, has the events that clients get.

    Times are measured from the creation of this object, when the request arrives.
    """

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = perf_counter) -> None:
        self._metrics, self._clock = metrics, clock
        self.ends: list[tuple[ChoiceFinished, float]] = []  # each with its time
        self.began = clock()
        self.prompt = ""  # empty unless contents are logged
        self.accept_seconds = 0.0  # until a model accepted the request
        self.prompt_tokens = self.put_back_tokens = self.dropped_tokens = 0
        self.texts: dict[int, str] = {}  # generated texts by choice
        # the latest progress of each choice; only long prefills report progress
        self.progress: dict[int, PromptProgress] = {}
        self.progress_logged_at: float | None = None  # when progress was last logged; None: never
        self._model = ""  # empty until a model accepts the request
        self._choices_per_prompt = 1
        self._tokens_by_choice: dict[int, int] = {}  # number of tokens by choice
        self._first_text_times: dict[int, float] = {}  # time of the first text, by choice
        self._latest_text_times: dict[int, float] = {}  # time of the latest text, by choice
        # the seconds between two texts of a choice: the metric of all answers, those of this answer
        # for the history, and the latest ones, which `_gaps_of_answer` does not contain yet
        self._gap_metric: Histogram | None = None
        self._gaps_of_answer = Distribution()
        self._uncounted_gaps: list[float] = []

    def note_accepted(
        self,
        model: str,
        *,
        prompt_tokens: int,
        put_back_tokens: int = 0,
        dropped_tokens: int = 0,
        choices_per_prompt: int = 1,
        prompt: str = "",
    ) -> None:
        """Note that the request is in the worker's queue.

        Metrics with the model as a label are counted from here on, because only now it is known to
        exist.

        put_back_tokens: tokens of earlier answers that the prompt contains exactly as generated.
        dropped_tokens: tokens of earlier answers that the chat template left out of the prompt.
        prompt: empty unless contents are logged. If it is set, the texts of the answers are
            recorded, too.
        """
        self._model = model
        self.prompt = prompt
        self._choices_per_prompt = choices_per_prompt
        self.prompt_tokens = prompt_tokens
        self.put_back_tokens = put_back_tokens
        self.dropped_tokens = dropped_tokens
        self.accept_seconds = self._clock() - self.began
        self._metrics.accept_seconds.labels(model).observe(self.accept_seconds)
        self._metrics.tokens["put_back_tokens"].labels(model).inc(put_back_tokens)
        self._metrics.tokens["dropped_tokens"].labels(model).inc(dropped_tokens)
        self._gap_metric = self._metrics.inter_token_seconds.labels(model)

    def observe(self, event: OutputEvent) -> None:
        """Record one event."""
        now = self._clock()
        if isinstance(event, ChoiceFinished):
            self._observe_end(event, now)
        elif isinstance(event, PromptProgress):
            self.progress[event.index] = event
        else:
            self._observe_delta(event, now)

    def record_prefilled(self, model: str, prompts: Sequence[TextRead]) -> None:
        """Record prompts that were only prefilled, for example for embeddings."""
        self._model = model
        self.prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
        for index, prompt in enumerate(prompts):
            end = ChoiceFinished(
                index=index,
                reason=FinishReason.STOP,
                prompt_tokens=prompt.prompt_tokens,
                completion_tokens=0,
                timings=prompt.timings,
                cache_report=prompt.cache_report,
            )
            self._observe_end(end, self._clock())

    def close(self, waited: Mapping[WaitReason, float] | None = None) -> None:
        """Note that the answer has ended, whether it is complete or not.

        waited: how long its request waited in the front, in seconds.
        """
        if self._model:
            self._metrics.request_seconds.labels(self._model).observe(self._clock() - self.began)
            self._metrics.history.add(self._model, self._history_cell(waited or {}))

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that needed no prefill; None until a choice has ended.

        All choices of a prompt share one prefill, so only the first choice of each prompt counts.
        """
        cached = [
            end.cached_tokens for end, _ in self.ends if end.index % self._choices_per_prompt == 0
        ]
        return sum(cached) if cached else None

    @property
    def known_cached_tokens(self) -> int:
        """`cached_tokens`; before the end, as last reported during a long prefill."""
        if (cached := self.cached_tokens) is not None:
            return cached
        return sum(progress.cached_tokens for progress in self.progress.values())

    @property
    def finish_reason(self) -> str:
        """The finish reasons of all ended choices, each reason once; empty if none has ended."""
        return ",".join(dict.fromkeys(end.reason.value for end, _ in self.ends))

    @property
    def resumptions(self) -> int:
        """How often another worker continued a choice after a crash; known at the end."""
        return sum(end.resumptions for end, _ in self.ends)

    @property
    def ended_by(self) -> Literal["repetition"] | None:
        """What ended an answer without a length limit; None if nothing did."""
        return "repetition" if any(end.repeats for end, _ in self.ends) else None

    @property
    def counts(self) -> TokenCounts:
        """The token counts. Those of reasoning and drafts are of the choices that have ended."""
        ends = [end for end, _ in self.ends]
        return TokenCounts(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.tokens,
            cached_tokens=self.cached_tokens or 0,
            reasoning_tokens=sum(end.reasoning_tokens for end in ends),
            accepted_tokens=sum(end.accepted_tokens for end in ends),
            rejected_tokens=sum(end.rejected_tokens for end in ends),
            thought_ended_by=next(filter(None, (end.thought_ended_by for end in ends)), None),
        )

    @property
    def tokens(self) -> int:
        """Number of tokens in all choices so far."""
        return sum(self._tokens_by_choice.values())

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of all choices together after the first text.

        None if there are too few tokens, or too little time, to measure.
        """
        tokens_after_first, first_text_at = (
            self.tokens - len(self._tokens_by_choice),
            self.first_text_at,
        )
        if first_text_at is None or tokens_after_first < 1:
            return None
        seconds = max(self._latest_text_times.values()) - first_text_at
        return None if seconds < _MIN_SPEED_SECONDS else tokens_after_first / seconds

    @property
    def prefilled_tokens(self) -> int:
        """Number of prompt tokens that are prefilled, as last reported."""
        return sum(progress.read_tokens for progress in self.progress.values())

    @property
    def first_text_at(self) -> float | None:
        """Time of the first text of any choice; None before that."""
        return min(self._first_text_times.values(), default=None)

    def first_text_seconds(self, index: int) -> float | None:
        """Seconds from the request to the first text of a choice; None before that."""
        at = self._first_text_times.get(index)
        return None if at is None else at - self.began

    def _observe_delta(self, event: OutputDelta, now: float) -> None:
        """Measure when text of a choice arrives, and count its tokens, calls and repairs."""
        index = event.index
        latest = self._latest_text_times.get(index)
        if latest is None:
            self._first_text_times[index] = now
            self._metrics.first_token_seconds.labels(self._model).observe(now - self.began)
        elif self._gap_metric is not None:
            self._gap_metric.observe(now - latest)
            self._uncounted_gaps.append(now - latest)
            if len(self._uncounted_gaps) == _GAPS_PER_BATCH:
                self._count_gaps()
        self._latest_text_times[index] = now
        self._tokens_by_choice[index] = self._tokens_by_choice.get(index, 0) + len(event.token_ids)
        if isinstance(event, ToolCallFinished):
            self._metrics.tool_calls.labels(self._model).inc()
            for repair in event.repairs:
                self._metrics.tool_call_repairs.labels(self._model, repair).inc()
        if isinstance(event, TextDelta) and self.prompt:
            text = self.texts.get(index, "")
            if len(text) < _LONGEST_CONTENT:
                self.texts[index] = text + event.appended

    def _observe_end(self, event: ChoiceFinished, now: float) -> None:
        """Count a finished choice, with its tokens and durations."""
        metrics, model = self._metrics, self._model
        # 0 if a stop string ended the answer before the worker did
        decode_seconds = event.timings.decode_seconds or now - self._first_text_times.get(
            event.index, now
        )
        metrics.requests.labels(model, event.reason.value).inc()
        for name in _TOKEN_COUNTERS:
            metrics.tokens[name].labels(model).inc(getattr(event, name))
        metrics.queue_seconds.labels(model).observe(event.timings.queue_seconds)
        metrics.prefill_seconds.labels(model).observe(event.timings.prefill_seconds)
        metrics.decode_seconds.labels(model).observe(decode_seconds)
        self.ends.append((event, now))
        self._tokens_by_choice[event.index] = event.completion_tokens

    def _count_gaps(self) -> None:
        """Add the latest gaps to those of this answer, many at once because that is faster."""
        self._gaps_of_answer.add_all(self._uncounted_gaps)
        self._uncounted_gaps.clear()

    def _history_cell(self, waited: Mapping[WaitReason, float]) -> Cell:
        """What this answer took, for the history: the same figures as in the metrics."""
        cell = Cell()
        load_wait_seconds = waited.get(WaitReason.PLACE, 0.0) + waited.get(WaitReason.LOAD, 0.0)
        if load_wait_seconds >= _LEAST_WAIT_SECONDS:
            cell.add_duration("load", load_wait_seconds)
        for at in self._first_text_times.values():
            cell.add_duration("first_token", at - self.began)
        self._count_gaps()
        if self._gaps_of_answer.counts:
            cell.phases["gap"] = self._gaps_of_answer
        if (speed := self.tokens_per_second) is not None:
            cell.speed.add(speed)
        for end, _ in self.ends:
            cell.answers += 1
            cell.prompt_tokens += end.prompt_tokens
            cell.cached_tokens += end.cached_tokens
            cell.generated_tokens += end.completion_tokens
            cell.drafted_tokens += end.accepted_tokens + end.rejected_tokens
            cell.accepted_tokens += end.accepted_tokens
            if end.timings.prefill_seconds:  # otherwise it ended before it was admitted
                cell.add_duration("queue", end.timings.queue_seconds)
                cell.add_duration("prefill", end.timings.prefill_seconds)
            if end.cache_report.outcome is not CacheOutcome.OFF:
                cell.add_duration("lookup", end.cache_report.lookup_seconds)
            if end.cache_report.restore_seconds:
                cell.add_duration("restore", end.cache_report.restore_seconds)
        return cell


def printable(text: str, *, longest: int = 100) -> str:
    """A client's text, escaped so that a terminal can show it, and truncated if it is long."""
    shown = escaped(text[:longest])
    return shown if len(text) <= longest else f"{shown}… ({len(text) - longest} more characters)"


def escaped(text: str) -> str:
    """The text with unprintable characters, such as control codes, written as Python escapes."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)
