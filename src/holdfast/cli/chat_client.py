"""What `holdfast chat` needs of a server: its models, and one streamed answer after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from holdfast.cli.server_client import ServerClient, ServerFailed, error_text, json_object

_LEAST_SECONDS = 0.05  # an answer that took less from its first text to its last came in one piece, or as good as that


@dataclass(slots=True, kw_only=True)
class AnswerStatistics:
    """How one answer went, as seen from here."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    exact: bool = False  # the server gave the counts; else they are pieces of text, counted here
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token; 0 when there is nothing to measure: what came all at once says nothing of speed."""
        seconds = self.total_seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds > _LEAST_SECONDS else 0.0


class ChatClient(ServerClient):
    """One server, spoken to in OpenAI's form. Blocking; closing an answer's iterator early stops the answer."""

    def stream(self, body: dict[str, Any], statistics: AnswerStatistics) -> Iterator[str]:
        """The pieces of one answer; `statistics` is filled in on the way. Raises ServerFailed."""
        began = time.monotonic()
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if self.is_holdfast else {})  # others may refuse it
        request = {**body, "stream": True, "stream_options": options}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.is_error:
                    raise ServerFailed(error_text(response.read().decode(errors="replace")))
                for text in _pieces(response.iter_lines(), statistics):
                    now = time.monotonic() - began
                    statistics.first_token_seconds = statistics.first_token_seconds or now
                    statistics.total_seconds = now
                    yield text
            if not statistics.finish_reason:
                raise ServerFailed("the answer broke off: the server closed the connection before its end")
        except httpx.HTTPError as error:
            raise ServerFailed(f"the connection to {self.url} broke: {str(error) or type(error).__name__}") from None


def _pieces(lines: Iterator[str], statistics: AnswerStatistics) -> Iterator[str]:
    for line in lines:
        field, _, value = line.partition(":")
        if field != "data" or value.strip() == "[DONE]":
            continue
        chunk = json_object(value)
        if "error" in chunk:
            raise ServerFailed(error_text(value))
        if usage := chunk.get("usage"):
            _take_usage(usage, statistics)
        for choice in chunk.get("choices", ()):
            statistics.finish_reason = choice.get("finish_reason") or statistics.finish_reason
            if text := choice.get("delta", {}).get("content"):
                if not statistics.exact:
                    statistics.completion_tokens += 1
                yield text


def _take_usage(usage: dict[str, Any], statistics: AnswerStatistics) -> None:
    statistics.exact = True
    statistics.prompt_tokens = usage.get("prompt_tokens", 0)
    statistics.completion_tokens = usage.get("completion_tokens", 0)
    statistics.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", statistics.cached_tokens)
