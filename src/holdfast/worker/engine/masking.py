"""What limits the draws of a step's rows, and how masks are laid over logits. Device thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np

from holdfast.worker.engine.constraints import SequenceConstraint
from holdfast.worker.engine.grammars import Words

_ANY_TOKEN = np.int32(-1)  # a word with all bits set


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """words: int32 [rows, at least vocab / 32], None when no row is masked. forced: token by row,
    whatever its logits say.
    """

    words: Words | None
    forced: Mapping[int, int]


NO_LIMITS = RowLimits(words=None, forced={})


def limits_of(constraints: Sequence[SequenceConstraint | None], *, words_per_row: int) -> RowLimits:
    """What the rows may draw, one constraint or None for each.

    A constraint that allows nothing has a `failure` afterwards.
    """
    if not any(constraints):
        return NO_LIMITS
    words = np.empty((len(constraints), words_per_row), np.int32)
    forced: dict[int, int] = {}
    is_masked = False
    for row, constraint in enumerate(constraints):
        token = None if constraint is None else constraint.forced_token()
        if token is not None:
            forced[row] = token
        if constraint is not None and token is None and constraint.fill(words[row]):
            is_masked = True
        else:
            words[row] = _ANY_TOKEN
    return RowLimits(words=words if is_masked else None, forced=forced)


def with_masks(logits: mx.array, limits: RowLimits) -> mx.array:
    """Logits with -inf where a token may not be drawn; NaN stays, and so do rows without a mask.

    Lazy.

    logits: any float dtype [rows, vocab].
    """
    if limits.words is None:
        return logits
    rows, columns = logits.shape
    additions = _additions(logits.dtype)[mx.array(limits.words.view(np.uint8))]
    return logits + additions.reshape(rows, -1)[:, :columns]


def with_forced(tokens: mx.array, limits: RowLimits) -> mx.array:
    """Drawn tokens, with those in their place that have to come. Lazy. tokens: uint32 [rows]."""
    if not limits.forced:
        return tokens
    forced = np.full(tokens.shape, -1, np.int32)
    forced[list(limits.forced)] = list(limits.forced.values())
    there = mx.array(forced)
    return mx.where(there >= 0, there.astype(tokens.dtype), tokens)


@cache
def _additions(dtype: mx.Dtype) -> mx.array:
    """[256, 8]: what a byte of a mask adds to the logits of its eight tokens."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table = mx.array(np.where(bits, np.float32(0), np.float32(-np.inf))).astype(dtype)
    mx.eval(table)
    return table
