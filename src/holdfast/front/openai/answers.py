"""What the answers of OpenAI's two generating endpoints have in common: their head, token counts,
errors and the end mark.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec

from holdfast.front.openai.errors import openai_error
from holdfast.front.openai.shapes import CompletionTokensDetails, PromptTokensDetails, Usage
from holdfast.front.server.answers import AnswerFormat, TokenCounts
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.problem import Problem
from holdfast.wire.output import PromptProgress

_DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0


class OpenAIAnswer(AnswerFormat):
    """AnswerFormat of both endpoints. All that is the same in every chunk is encoded once.

    shows_usage: a stream's last chunk has the token counts. shows_counts: every chunk has those so
        far.
    shows_progress: a stream tells how far the prompt is read, as llama.cpp's server does.
    shows_logprobs: a whole answer has the log-probabilities of its tokens.
    """

    id_prefix: str  # chatcmpl or cmpl
    chunk_object: str  # what a chunk of a stream is called
    no_news: bytes  # of a choice, in a chunk

    def __init__(
        self,
        *,
        model: str,
        version: str,
        shows_usage: bool = False,
        shows_counts: bool = False,
        shows_logprobs: bool = False,
        shows_progress: bool = False,
    ) -> None:
        self.id, self.model = f"{self.id_prefix}-{uuid.uuid4().hex}", model
        self._shows_usage, self._shows_counts, self._shows_logprobs = (
            shows_usage,
            shows_counts,
            shows_logprobs,
        )
        self._shows_progress = shows_progress
        fingerprint = f"fp_holdfast_{version.replace('.', '_')}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        head = msgspec.json.encode({"id": self.id, "object": self.chunk_object, **self._head})
        self._chunk_begin = b"data: " + head[:-1] + b',"choices":['
        self._fixed_end = b'],"usage":null}\n\n' if shows_usage else b"]}\n\n"
        self._prompt_tokens = self._completion_tokens = 0

    def opening(self, *, prompt_tokens: int) -> bytes:
        """Nothing, but from here on the prompt counts."""
        self._prompt_tokens = prompt_tokens
        return b""

    def progress(self, event: PromptProgress) -> bytes:
        """A chunk without news of the choice; `processed` has what was cached in it."""
        if not self._shows_progress:
            return b""
        progress = {
            "total": event.total_tokens,
            "cache": event.cached_tokens,
            "processed": event.read_tokens,
            "time_ms": round(event.seconds * 1000),
        }
        end = self._chunk_end().removesuffix(b"}\n\n")
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":null}' % (
            event.index,
            self.no_news,
        )
        return b'%b%b%b,"prompt_progress":%b}\n\n' % (
            self._chunk_begin,
            choice,
            end,
            msgspec.json.encode(progress),
        )

    def closing(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        """A chunk that has no choices, only token counts and explanation, if there is one of both;
        then the end mark.
        """
        parts = {
            b"usage": usage_of(counts) if self._shows_usage else None,
            b"holdfast": explanation,
        }
        said = b"".join(
            b',"%b":%b' % (name, msgspec.json.encode(part))
            for name, part in parts.items()
            if part is not None
        )
        return b"%b]%b}\n\n%b" % (self._chunk_begin, said, _DONE) if said else _DONE

    def broken(self, problem: Problem) -> bytes:
        """The error as an event; no end mark follows."""
        return b"data: %b\n\n" % msgspec.json.encode(openai_error(problem))

    def _chunk_end(self, new_tokens: int = 0) -> bytes:
        """What follows the choices of a chunk that brings so many tokens: no `usage`, null, or the
        counts so far.
        """
        if not self._shows_counts:
            return self._fixed_end
        self._completion_tokens += new_tokens
        counts = (
            self._prompt_tokens,
            self._completion_tokens,
            self._prompt_tokens + self._completion_tokens,
        )
        return (
            b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % counts
        )

    def _around_choices(
        self, counts: TokenCounts, explanation: Explanation | None
    ) -> dict[str, Any]:
        """The fields of a whole answer beside its choices."""
        return {
            **self._head,
            "usage": usage_of(counts),
            "holdfast": msgspec.UNSET if explanation is None else explanation,
        }


def usage_of(counts: TokenCounts) -> Usage:
    """Token counts as OpenAI shows them."""
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
        total_tokens=counts.prompt_tokens + counts.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=counts.reasoning_tokens,
            reasoning_ended_by=msgspec.UNSET
            if counts.thought_ended_by is None
            else counts.thought_ended_by,
        ),
    )


def shown_logprob(logprob: float) -> float:
    """A log-probability as OpenAI shows it: minus infinity, which JSON cannot say, is -9999."""
    return logprob if logprob > _LEAST_LOGPROB else _LEAST_LOGPROB
