"""What a client sees of an answer: typed events, neutral of protocol. Leaf module: no MLX, no web framework."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from holdfast.messages.events import CacheReport, FinishReason, Timings

SegmentKind: TypeAlias = Literal["text", "reasoning", "call"]
EndWord: TypeAlias = Literal["stop", "length"]  # why an answer ended, as protocols name it


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New text of one choice, all of one kind. UTF-8 is never split and no part of a stop string is ever in it."""

    index: int
    text: str
    kind: SegmentKind = "text"  # as yet models' reasoning and calls are text, too
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
    memory: CacheReport = CacheReport()
    divergent: DivergentTexts | None = None  # for memory.divergence

    @property
    def finish_reason(self) -> EndWord:
        """Why the answer ended; of one that ended by itself."""
        return "length" if self.reason is FinishReason.LENGTH else "stop"

    @property
    def cached_tokens(self) -> int:
        """The part of prompt_tokens that was not read again."""
        return self.memory.cached_tokens


OutputEvent: TypeAlias = TextDelta | ChoiceFinished
