"""One sequence as the engine keeps it: its tokens, its live state per layer, and what it drew last. Device thread only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from holdfast.engine.plan import KeepPolicy, Span
from holdfast.kv.kinds import LayerState
from holdfast.messages.commands import SequenceRequest

if TYPE_CHECKING:
    from holdfast.engine.sampling import RowState


@dataclass(slots=True)
class Sequence:
    """Live state. `known` are the tokens that are on the host (prompt, and what was generated before a preemption)."""

    request: SequenceRequest
    known: mx.array  # int32 [known_tokens]
    known_tokens: int
    layers: list[LayerState]
    sampler: RowState
    drawn: mx.array | None = None  # int32 [rows] of the step that drew last
    drawn_row: int = 0
    fed: int = 0  # tokens that the live state has (in steps under way too)
    kept: int = 0  # tokens whose keys and values were copied out, or came from a snapshot
    keep: KeepPolicy | None = None
    is_settled: bool = True

    def arrays(self) -> Iterator[mx.array]:
        """Every array of the live state."""
        for layer in self.layers:
            yield from layer.arrays()

    def reserve(self, tokens: int) -> None:
        """Reserve capacity for this many tokens in every layer."""
        for layer in self.layers:
            layer.reserve(tokens)

    def settle(self) -> None:
        """Let go of what only the last step needed: its chunk, the states of its company. Once its forward pass is laid out."""
        self.is_settled = True
        for layer in self.layers:
            layer.settle()


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """A span of the plan together with its sequence."""

    sequence: Sequence
    span: Span

    @property
    def is_decoding(self) -> bool:
        """Whether the span's token is one that the sequence drew itself and the host may not know yet."""
        return self.span.start >= self.sequence.known_tokens

    @property
    def scored_tokens(self) -> tuple[int, ...]:
        """The tokens of the prompt that follow the span's first positions, one each, if they are to be scored."""
        if not self.sequence.request.want_prompt_logprobs:
            return ()
        first = self.span.start + 1
        return self.sequence.request.prompt_token_ids[first : first + self.span.tokens]


@dataclass(slots=True)
class TokenSource:
    """Gathers the token ids of spans into one array without waiting for those that are still on the device."""

    pieces: list[mx.array] = field(default_factory=list)

    def gather(self, spans: list[SequenceSpan]) -> mx.array:
        """int32 [tokens of all spans], in their order."""
        index = 0
        while index < len(spans):
            if not spans[index].is_decoding:
                span, known = spans[index].span, spans[index].sequence.known
                self.pieces.append(known[span.start : span.start + span.tokens])
                index += 1
                continue
            index = self._gather_drawn(spans, index)
        return self.pieces[0] if len(self.pieces) == 1 else mx.concatenate(self.pieces)

    def _gather_drawn(self, spans: list[SequenceSpan], first: int) -> int:
        """Take a run of decoding spans that drew in the same step; returns the index behind it."""
        drawn = spans[first].sequence.drawn
        assert drawn is not None, "a decoding span has no drawn token"
        last = first
        while last < len(spans) and spans[last].is_decoding and spans[last].sequence.drawn is drawn:
            last += 1
        rows = [each.sequence.drawn_row for each in spans[first:last]]
        whole = rows == list(range(drawn.shape[0]))
        self.pieces.append(drawn if whole else drawn[mx.array(rows)])
        return last
