"""A step is a list of spans. Pure data without MLX, so that the scheduler can write plans."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.wire.events import TokenLogprob
from holdfast.wire.requests import RequestId

BLOCK_TOKENS = 256  # of a KV block in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The next `tokens` tokens of one sequence, from position `start` on.

    A span in the prompt has known tokens. A decoding span (tokens == 1, start >= prompt length)
    reads the token that the previous span drew: the engine keeps it on the device, so that the next
    step can be laid out before the host knows it.
    """

    request_id: RequestId
    start: int
    tokens: int
    draws: bool  # a token is drawn from the last position: it is the end of what is known


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All spans of one step, at most one per sequence; empty if there is nothing to do."""

    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanResult:
    """The result of a span."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()  # empty for a span that does not draw, and on failure
    logprobs: tuple[TokenLogprob, ...] = ()
    # of the tokens after each position of this chunk, if wanted
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # of a prompt that is to be embedded, with its last chunk: float32, normalized to length 1
    embedding: bytes = b""
    # why the computation failed: only this sequence has to end, or to be prefilled again
    failure: str = ""
    # why nothing can be drawn although the computation is right: only this sequence has to end
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPolicy:
    """When state is copied out: every `block_tokens` tokens of what grows, and everything at each
    boundary.
    """

    block_tokens: int = BLOCK_TOKENS
    # token positions; the scheduler must end a span at each of them
    boundaries: frozenset[int] = frozenset()
