"""One sequence in the engine: its tokens, its live state, its last sampled token, and which part of
its state is already copied for the prefix cache.

Device thread only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import TokenIds
from holdfast.worker.engine.constraints import SequenceConstraint
from holdfast.worker.engine.plan import CopyPolicy, Span
from holdfast.worker.engine.sampling import RowState, row_state
from holdfast.worker.kv.live import (
    LiveBase,
    LiveState,
    SavedState,
    Snapshot,
    start_from,
)
from holdfast.worker.vision.model import Positions, SequenceImages, text_positions


@dataclass(slots=True)
class EngineSequence:
    """One sequence in the engine.

    known_token_ids: int32 [tokens], the tokens that the host knows: the prompt, with the model's
        own tokens in place of image keys, and the tokens that were generated before a preemption.
    """

    request: SequenceRequest
    known_token_ids: mx.array
    live: LiveState
    sampler: RowState
    constraint: SequenceConstraint | None = None  # limits its next token
    # uint32 [rows]: the tokens that the last step sampled for all its sequences; and the row of this one
    sampled: mx.array | None = None
    sampled_row: int = 0
    repeated: tuple[int, ...] = ()  # tokens before that one that the next span computes again
    saved: SavedState | None = None  # the state before a step that verifies drafted tokens
    copied_tokens: int = 0  # the first tokens, whose keys and values are already in the cache
    copy_policy: CopyPolicy | None = None
    is_trimmed: bool = True
    # float32 [hidden]: the sum of the prompt's hidden states so far, or the last hidden state
    pooled: mx.array | None = None
    images: SequenceImages | None = None  # None if the prompt has none

    @staticmethod
    def begin(
        request: SequenceRequest,
        *,
        live: LiveState,
        vocab_size: int,
        generated: tuple[int, ...] = (),
    ) -> EngineSequence:
        """Create a sequence that continues after `generated`. Raises the errors of `row_state`."""
        packed = (request.prompt_token_ids + TokenIds.of(generated)).packed
        token_ids = np.frombuffer(packed, dtype="<i4")
        # the model's own tokens replace the image keys
        if request.images:
            token_ids = token_ids.copy()
        for image in request.images:
            token_ids[image.start : image.end] = image.layout.token_ids.view
        sampler = row_state(request, generated=generated, vocab_size=vocab_size)
        return EngineSequence(
            request=request, known_token_ids=mx.array(token_ids), live=live, sampler=sampler
        )

    def start_from(self, base: LiveBase | None, snapshots: Sequence[Snapshot]) -> None:
        """Restore a cached prefix: the tokens of a live state, then adjoining blocks, and the state
        at their end. Each of these may be missing. Lazy. Raises SnapshotMismatch if it does not fit
        the model.
        """
        if base is not None:
            # a snapshot without tokens is a state
            is_restored = any(not each.tokens for each in snapshots)
            self.live = start_from(base, self.live.layers, is_restored=is_restored)
        if snapshots:
            self.live.restore(snapshots)

    def trim(self) -> None:
        """Release arrays that only the last forward pass needed. Call it once that is laid out."""
        self.is_trimmed = True
        self.live.trim()

    def add_sampled(self, tokens: mx.array, row: int, *, count: int = 1) -> None:
        """Add `count` sampled tokens to the sequence: the rows of `tokens` from `row` on. Lazy.

        tokens: uint32 [rows], as in `sampled`.
        """
        # `advance` reads the tokens only if there are edits; otherwise, no slice is needed
        self.sampler.advance(tokens[row : row + count] if self.sampler.edits else tokens, count)
        self.sampled = tokens
        self.sampled_row = row + count - 1

    @property
    def last_token(self) -> int:
        """The last sampled token. Waits for it."""
        assert self.sampled is not None, "no token is sampled yet"
        return int(np.array(self.sampled, copy=False)[self.sampled_row])

    def pool(self, hidden: mx.array) -> None:
        """Add the hidden states of the prompt's next tokens, [rows, hidden]. Lazy."""
        rows = hidden.astype(mx.float32)
        if self.request.pooling == "last":
            self.pooled = rows[-1]
            return
        total = rows.sum(axis=0)
        self.pooled = total if self.pooled is None else self.pooled + total

    def embedding(self) -> mx.array:
        """The embedding of the pooled prompt: float32 [hidden], not normalized. Lazy."""
        assert self.pooled is not None, "nothing was pooled"
        if self.request.pooling == "last":
            return self.pooled
        return self.pooled / len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """A span of the plan with its sequence. Each token of the span is a row, in order."""

    sequence: EngineSequence
    span: Span

    @property
    def shows_images(self) -> bool:
        """Whether any token of the span belongs to an image."""
        images = self.sequence.images
        return images is not None and bool(images.overlapping(self.span.start, self.span.tokens))

    def positions(self) -> Positions:
        """The positions of the span's tokens, for models that take positions."""
        start, tokens = self.span.start, self.span.tokens
        images = self.sequence.images
        return (
            text_positions(start, tokens) if images is None else images.positions_of(start, tokens)
        )

    @property
    def is_decoding(self) -> bool:
        """Whether the span's tokens were generated; the host may not know them yet."""
        return self.span.start >= self.sequence.known_token_ids.size

    @property
    def is_row(self) -> bool:
        """Whether the span is one generated token: such spans can share a forward pass."""
        return self.is_decoding and self.span.tokens == 1

    @property
    def ends_prompt(self) -> bool:
        """Whether the span contains the prompt's last token."""
        last = len(self.sequence.request.prompt_token_ids) - 1
        return self.span.start <= last < self.span.start + self.span.tokens

    @property
    def wanted_rows(self) -> range:
        """The rows to sample from: the last certain token and all drafted ones; or none."""
        tokens = self.span.tokens
        return range(self.span.certain_tokens - 1, tokens) if self.span.samples else range(0)

    @property
    def scored_rows(self) -> range:
        """The rows whose logits give the log-probabilities of the next prompt tokens; empty if the
        request does not want them.
        """
        request = self.sequence.request
        start = self.span.start
        if not request.want_prompt_logprobs:
            return range(0)
        end = min(start + self.span.tokens, len(request.prompt_token_ids) - 1)
        return range(max(0, request.scored_from - 1 - start), max(0, end - start))

    @property
    def scored_tokens(self) -> tuple[int, ...]:
        """The tokens of the prompt that follow the scored rows, those of images included."""
        first_position = self.span.start + 1
        rows = self.scored_rows
        following_token_ids = self.sequence.known_token_ids[
            first_position + rows.start : first_position + rows.stop
        ]
        tokens: list[int] = following_token_ids.tolist()  # type: ignore[assignment]
        return tuple(tokens)

    @property
    def pooled_rows(self) -> range:
        """The rows whose hidden states are pooled into the prompt's embedding."""
        match self.sequence.request.pooling:
            case None:
                return range(0)
            case "mean":
                return range(self.span.tokens)
        return self._last_row(self.ends_prompt)

    def _last_row(self, is_wanted: bool) -> range:
        """The row of the span's last token; none unless it is wanted."""
        tokens = self.span.tokens
        return range(tokens - 1, tokens) if is_wanted else range(0)


def token_ids_of(spans: Sequence[SequenceSpan]) -> mx.array:
    """The tokens of all spans, concatenated: int [tokens]. Lazy: sampled tokens stay on the device."""
    pieces: list[mx.array] = []
    index = 0
    while index < len(spans):
        span = spans[index].span
        sequence = spans[index].sequence
        if not spans[index].is_decoding:
            pieces.append(sequence.known_token_ids[span.start : span.start + span.tokens])
            index += 1
            continue
        assert sequence.sampled is not None, "a decoding span has no sampled token"
        if span.tokens > 1:  # with tokens that are computed again, or with drafted ones
            dtype = sequence.sampled.dtype
            row = sequence.sampled_row
            pieces.append(mx.array(sequence.repeated, dtype=dtype))
            pieces.append(sequence.sampled[row : row + 1])
            pieces.append(mx.array(span.drafted, dtype=dtype))
            index += 1
            continue
        # one indexing for all following spans of one token that the same step sampled
        rows = _rows_sampled_together(spans[index:])
        is_whole_array = rows == list(range(sequence.sampled.shape[0]))
        pieces.append(sequence.sampled if is_whole_array else sequence.sampled[mx.array(rows)])
        index += len(rows)
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)


def _rows_sampled_together(spans: Sequence[SequenceSpan]) -> list[int]:
    """The rows, in the array of sampled tokens, of the first span and of the spans right after it
    whose tokens the same step sampled.
    """
    sampled = spans[0].sequence.sampled
    spans_together = itertools.takewhile(
        lambda each: each.is_row and each.sequence.sampled is sampled, spans
    )
    return [each.sequence.sampled_row for each in spans_together]


def copy_due_state(
    sequence: EngineSequence, policy: CopyPolicy, *, certain_tokens: int
) -> tuple[Snapshot, ...]:
    """Copy the blocks, and then the state, that are due for the cache after the last appended
    tokens. Lazy. The blocks begin where those copied earlier end.

    certain_tokens: how many tokens the sequence certainly has; the others are drafted.
    """
    blocks = list(_copy_full_blocks(sequence, policy.block_tokens, end=certain_tokens))
    if certain_tokens == sequence.live.tokens and certain_tokens in policy.boundaries:
        return _with_current_state(sequence, blocks)
    return tuple(blocks)


def copy_everything(sequence: EngineSequence) -> tuple[Snapshot, ...]:
    """Copy all tokens that are not copied yet, and then the current state. Lazy."""
    # without a policy, nothing has been copied yet
    block_tokens = (sequence.copy_policy or CopyPolicy()).block_tokens
    blocks = list(_copy_full_blocks(sequence, block_tokens, end=sequence.live.tokens))
    return _with_current_state(sequence, blocks)


def _with_current_state(sequence: EngineSequence, blocks: list[Snapshot]) -> tuple[Snapshot, ...]:
    """These blocks, the tokens after them as another block, and the current state, if it has any."""
    if sequence.live.tokens > sequence.copied_tokens:
        blocks.append(_copy_next_block(sequence, sequence.live.tokens - sequence.copied_tokens))
    state = sequence.live.copy_checkpoint()
    return (*blocks, state.checked()) if state.layers else tuple(blocks)


def _copy_full_blocks(
    sequence: EngineSequence, block_tokens: int, *, end: int
) -> Iterator[Snapshot]:
    """Copy the blocks that end at or before token `end`; advances `copied_tokens`."""
    while end >= (end_of_block := _end_of_next_block(sequence, block_tokens)):
        yield _copy_next_block(sequence, end_of_block - sequence.copied_tokens)


def _end_of_next_block(sequence: EngineSequence, block_tokens: int) -> int:
    """The position after the next block to copy, which may be a rest of a block."""
    start = sequence.copied_tokens
    if sequence.live.is_quantized:  # quantized block by block, at fixed positions
        start -= start % block_tokens
    return start + block_tokens


def _copy_next_block(sequence: EngineSequence, tokens: int) -> Snapshot:
    """Copy the next `tokens` tokens that are not copied yet. Lazy."""
    block = sequence.live.copy_block(start=sequence.copied_tokens, tokens=tokens)
    sequence.copied_tokens += tokens
    return block.checked()
