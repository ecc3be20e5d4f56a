"""What a step is: a list of spans.

Pure data, no MLX, so that the scheduler can write plans and anyone can test them.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.wire.events import TokenLogprob
from holdfast.wire.requests import RequestId

BLOCK_TOKENS = 256  # of the KV that is kept together


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The next `tokens` tokens of one sequence.

    `start` is the position of the first of them. Tokens of the prompt are known; the token of a
    decoding span (tokens == 1, start >= prompt length) is what the span before it drew: the engine
    keeps it on the device, so that the next step can be laid out before the last one's tokens are
    known.
    """

    request_id: RequestId
    start: int
    tokens: int
    # the span reaches the end of what is known: a new token is drawn from its last position
    draws: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All spans of one forward pass.

    A sequence has at most one span in it; an empty plan means there is nothing to do.
    """

    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanResult:
    """What a drawing span (or a prompt chunk whose scores are wanted) gave."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()  # empty for a prompt chunk that draws nothing, and on failure
    logprobs: tuple[TokenLogprob, ...] = ()
    # of the tokens after each position of this chunk, when wanted
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # of a prompt that was to be pooled, with its last chunk: float32, of length 1
    embedding: bytes = b""
    # what went wrong in computing it; this sequence alone must end, unless it can be read afresh
    failure: str = ""
    # why nothing can be drawn though what was computed is right: this sequence alone must end
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPolicy:
    """When state is copied out: every `block_tokens` tokens of what grows, and at each boundary
    everything up to it.
    """

    block_tokens: int = BLOCK_TOKENS
    # token positions; the scheduler must end a span at each of them
    boundaries: frozenset[int] = frozenset()
