"""One log line per request: what was requested, the result and the speed.

It contains no prompt or answer, unless the settings ask for contents.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from holdfast.telemetry.printable import LONGEST_CONTENT, printable
from holdfast.wire.output import PromptProgress
from holdfast.wire.requests import GenerationRequest

if TYPE_CHECKING:  # every process logs, but only the front has prometheus_client
    from holdfast.telemetry.requests import AnswerRecord

RECORD = "holdfast.record"  # key of the RequestRecord in an ASGI scope
CLIENT_GONE = 499  # the client disconnected before the response began
_LONGEST_PATH = 200
_LONGEST_ERROR = 160
UNKNOWN_ROUTE = "other"  # of unknown paths
# estimated duration from which a prefill is logged
LONG_PREFILL_SECONDS = 5.0
PROGRESS_LINE_SECONDS = 5.0  # between two lines of a prefill
QUIET_PATHS = frozenset({"/", "/health", "/metrics", "/admin/requests"})  # polled by programs
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What is known of one request; every part of the front adds to it. Event loop's thread only.

    At the end it is the message of the request's log line: text for people, fields for machines.
    """

    method: str
    path: str
    client: str
    request_id: str = ""
    key: str = ""  # name of its API key
    status: int = CLIENT_GONE
    model: str = ""
    error_code: str = ""
    error_message: str = ""
    is_aborted: bool = False  # by the client
    rejoined: str = ""  # id of the earlier request whose answer it received
    asked: GenerationRequest | None = None  # if a model generates: the first prompt
    answer: AnswerRecord | None = None  # once a model has accepted it
    clock: Callable[[], float] = field(default=perf_counter, repr=False)
    began: float = field(init=False)
    ended: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def has_status(self) -> bool:
        """Whether a response has begun."""
        return self.status != CLIENT_GONE

    def fail(self, *, code: str, message: str) -> None:
        """Note why it was refused or failed."""
        self.error_code, self.error_message = code, message

    @property
    def seconds(self) -> float:
        """Its duration so far, or in all."""
        return (self.clock() if self.ended is None else self.ended) - self.began

    def __str__(self) -> str:
        return "\n".join(
            [" ".join((self.head, str(self.status), *self.details)), *self._contents()]
        )

    @property
    def head(self) -> str:
        """Client, method and path."""
        return (
            f"{printable(self.client)} {printable(self.method)} "
            f"{printable(self.path, longest=_LONGEST_PATH)}"
        )

    @property
    def details(self) -> tuple[str, ...]:
        """The result, as far as it is known."""
        return tuple(
            part for part in (printable(self.model), *self._figures(), self._end()) if part
        )

    @property
    def fields(self) -> dict[str, Any]:
        """All known values by name."""
        named = {
            "client": self.client,
            "key": self.key,
            "method": self.method,
            "path": self.path,
            "request_id": self.request_id,
            "status": self.status,
            "model": self.model,
            "seconds": round(self.seconds, 4),
            "error_code": self.error_code,
            "error_message": self.error_message[:_LONGEST_ERROR],
            "aborted": self.is_aborted or None,
            "rejoined": self.rejoined,
        }
        if self.answer is not None:
            named |= self._answer_fields(self.answer)
        return {name: value for name, value in named.items() if value not in (None, "", [])}

    def _answer_fields(self, answer: AnswerRecord) -> dict[str, Any]:
        return {
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "answer_tokens": answer.tokens,
            "first_token_seconds": _rounded(self._first_text_seconds(answer)),
            "tokens_per_second": _rounded(answer.tokens_per_second),
            "finish_reason": _once_each(answer.finish_reasons),
            "resumed": answer.resumptions or None,
            "thought_ended_by": answer.thought_ended_by,
            "prompt": answer.prompt[:LONGEST_CONTENT],
            "answers": [answer.texts[index] for index in sorted(answer.texts)],
        }

    def _first_text_seconds(self, answer: AnswerRecord) -> float | None:
        return None if answer.first_text_at is None else answer.first_text_at - self.began

    def _figures(self) -> tuple[str, ...]:
        answer = self.answer
        whole = f"in {self.seconds:.2f} s"
        if answer is None:
            return (whole, f"rejoined {printable(self.rejoined)}" if self.rejoined else "")
        cached = "" if answer.cached_tokens is None else f" ({answer.cached_tokens} cached)"
        first_seconds, speed = self._first_text_seconds(answer), answer.tokens_per_second
        return (
            f"prompt {answer.prompt_tokens}{cached}",
            f"answer {answer.tokens}",
            "" if first_seconds is None else f"first {first_seconds:.2f} s",
            "" if speed is None else f"{speed:.1f} tok/s",
            whole,
            f"resumed {answer.resumptions} times" if answer.resumptions else "",
            f"thought ended by {answer.thought_ended_by}" if answer.thought_ended_by else "",
        )

    def _end(self) -> str:
        if self.is_aborted:
            return "aborted by the client"
        if self.error_code:
            return f"{self.error_code}: {printable(self.error_message, longest=_LONGEST_ERROR)}"
        return "" if self.answer is None else _once_each(self.answer.finish_reasons)

    def _contents(self) -> list[str]:
        answer = self.answer
        if answer is None or not answer.prompt:
            return []
        texts = [
            ("prompt", answer.prompt),
            *(("answer", answer.texts[index]) for index in sorted(answer.texts)),
        ]
        return [f"    {name}: {printable(text, longest=LONGEST_CONTENT)}" for name, text in texts]


def write_line(record: RequestRecord) -> None:
    """Log the line of a finished request: at level info, or debug for paths that programs poll."""
    record.ended = record.clock()
    level = logging.DEBUG if record.path in QUIET_PATHS and record.has_status else logging.INFO
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


def _once_each(reasons: list[str]) -> str:
    return ",".join(dict.fromkeys(reasons))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
