"""Plans and results of steps. A step is a list of spans: parts of sequences that are computed
together. Does not import MLX, so that the scheduler can use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.wire.events import TokenLogprob
from holdfast.wire.requests import RequestId

BLOCK_TOKENS = 256  # tokens per KV block in the prefix cache


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence. The scheduler decides how many of them the next step
    verifies.

    token_ids: empty for a draft that is only expected: it will be made before it is verified.
    chances: for each token, the chance that it and all tokens before it are right.
    is_by_model: whether the draft model made it.
    """

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    is_by_model: bool = False

    @property
    def expected_tokens(self) -> float:
        """The expected number of tokens that are right."""
        return sum(self.chances)

    def cut(self, tokens: int) -> Draft:
        """The first tokens of the draft, at most this many."""
        return Draft(self.token_ids[:tokens], self.chances[:tokens], self.is_by_model)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The next `tokens` tokens of one sequence, starting at position `start`.

    The tokens of a span in the prompt are known. A decoding span (start >= prompt length) reads the
    token that was sampled for the sequence's previous span. That token stays on the device, so that
    the next step can be laid out before the host knows it.

    draft: tokens that are expected after that token. The step samples after each of them; those
    that plain decoding would have sampled, too, are kept (see docs/how-it-works/speculation.md).
    If a decoding span has several tokens and none is drafted, then all except the last one were
    part of the span before it, and are computed again (`SpanResult.repeated`).
    """

    request_id: RequestId
    start: int
    tokens: int
    samples: bool  # whether to sample the next token: the span reaches the end of the known tokens
    draft: Draft = NO_DRAFT  # all tokens of a decoding span but the first, if it verifies any

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.draft.token_ids

    @property
    def certain_tokens(self) -> int:
        """The number of tokens that are part of the sequence, independent of the step's samples."""
        return self.tokens - len(self.drafted)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All spans of one step, at most one per sequence; empty if there is nothing to do."""

    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanResult:
    """The result of one span."""

    request_id: RequestId
    # The sampled token, after the drafted tokens that are accepted; empty if the span samples none or
    # failed.
    token_ids: tuple[int, ...] = ()
    # How many of these tokens the next span must compute again. Some layers cannot drop only the
    # rejected tokens, so they drop accepted ones, too.
    repeated: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    # the log-probability of the token after each position of this chunk, if requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # set with the last chunk of a prompt to be embedded: float32, normalized to length 1
    embedding: bytes = b""
    # why the computation failed; only this sequence has to end or to be prefilled again
    failure: str = ""
    # why no token can be sampled although the computation succeeded; this sequence has to end
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPolicy:
    """When the state of a sequence is copied for the prefix cache.

    Layers that keep every token are copied after each `block_tokens` tokens; all layers are copied
    at each boundary.

    cached_tokens: the first tokens of the sequence, whose keys and values the cache already has.
    """

    block_tokens: int = BLOCK_TOKENS
    cached_tokens: int = 0
    # token positions; the scheduler must end a span at each of them
    boundaries: frozenset[int] = frozenset()
