"""What changes a sequence's logits before anything is drawn: logit bias and penalties.

Sparse: a state holds the ids seen, not an array as long as the vocabulary, and the work goes with
their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from holdfast.errors import InvalidRequest
from holdfast.wire.requests import SAMPLING_RANGES, SamplingParams
from holdfast.worker.engine.sampling_draw import fused_on_gpus

BANNED_AT = SAMPLING_RANGES["logit_bias"][0]  # a bias this low means "never", not "rarely"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdits:
    """What changes the logits of one sequence, on the device.

    Immutable: a drawn token makes new edits.

    bias_ids: int32 [entries]; bias_values: fp32 [entries], -inf where banned.
    prompt_ids: int32 [n], each distinct id of the prompt once, empty when the repetition penalty is
        off.
    generated_ids: int32 [m], as generated, with repeats, empty without penalties. May be lazy; the
        next `sample` evaluates it.
    """

    params: SamplingParams
    bias_ids: mx.array
    bias_values: mx.array
    prompt_ids: mx.array
    generated_ids: mx.array

    @staticmethod
    def of(
        params: SamplingParams,
        *,
        prompt_ids: Iterable[int],
        generated_ids: Sequence[int],
        vocab_size: int,
    ) -> RowEdits | None:
        """Those after `generated_ids`; None when there are none.

        Raises InvalidRequest for ids that the model does not have.
        """
        if not params.logit_bias and not _penalises(params):
            return None
        for token_id in params.logit_bias:
            if not 0 <= token_id < vocab_size:
                message = (
                    f"logit_bias names token {token_id}, the model's tokens are 0 to "
                    f"{vocab_size - 1}"
                )
                raise InvalidRequest(message, field="logit_bias")
        seen = sorted(set(prompt_ids)) if params.repetition_penalty != 1.0 else []
        return RowEdits(
            params=params,
            bias_ids=mx.array(list(params.logit_bias), dtype=mx.int32),
            bias_values=mx.array(
                [value if value > BANNED_AT else -mx.inf for value in params.logit_bias.values()],
                mx.float32,
            ),
            # image placeholders may lie beyond the vocabulary
            prompt_ids=mx.array(
                [token_id for token_id in seen if 0 <= token_id < vocab_size], dtype=mx.int32
            ),
            generated_ids=mx.array(
                list(generated_ids) if _penalises(params) else [], dtype=mx.int32
            ),
        )

    def with_token(self, token: mx.array) -> RowEdits:
        """The edits after one more generated token. token: any int dtype, [1], lazy or not."""
        if not _penalises(self.params):
            return self
        return replace(
            self, generated_ids=mx.concatenate([self.generated_ids, token.astype(mx.int32)])
        )


def _penalises(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def apply_edits(logits: mx.array, edits: Sequence[RowEdits]) -> mx.array:
    """Bias, then the repetition penalty, then presence and frequency.

    Lazy; a row's result does not depend on the others.

    logits: fp32 [rows, vocab], one row per entry of `edits`. Returns the same shape. Repetition
    (prompt and generated): positive logits are divided by the penalty, others multiplied. Presence
    is taken off once, frequency once per occurrence, of generated tokens only.
    """
    biased = [(row, edit.bias_ids) for row, edit in enumerate(edits)]
    if _entries(biased):
        rows, ids = _places(biased)
        logits = logits.at[rows, ids].add(mx.concatenate([edit.bias_values for edit in edits]))
    repeated = [
        (row, ids)
        for row, edit in enumerate(edits)
        if edit.params.repetition_penalty != 1.0
        for ids in (edit.prompt_ids, edit.generated_ids)
    ]
    counted = [
        (row, edit.generated_ids)
        for row, edit in enumerate(edits)
        if edit.params.presence_penalty != 0.0 or edit.params.frequency_penalty != 0.0
    ]
    return _take_off(_penalise_repetition(logits, repeated, edits), counted, edits)


def _penalise_repetition(
    logits: mx.array, seen: Sequence[tuple[int, mx.array]], edits: Sequence[RowEdits]
) -> mx.array:
    if not _entries(seen):
        return logits
    rows, ids = _places(seen)
    penalty = mx.array([edit.params.repetition_penalty for edit in edits], dtype=mx.float32)[rows]
    before = logits[rows, ids]
    edited = mx.array(logits)  # a second handle: assignment leaves the caller's array alone
    # An id that comes twice is written twice the same.
    edited[rows, ids] = _penalised(before, penalty)
    return edited


@fused_on_gpus
def _penalised(logits: mx.array, penalty: mx.array) -> mx.array:
    return mx.where(logits > 0, logits / penalty, logits * penalty)


def _take_off(
    logits: mx.array, generated: Sequence[tuple[int, mx.array]], edits: Sequence[RowEdits]
) -> mx.array:
    if not _entries(generated):
        return logits
    rows, ids = _places(generated)
    edited = mx.array(logits)
    if any(edit.params.presence_penalty for edit in edits):
        presence = mx.array([edit.params.presence_penalty for edit in edits], dtype=mx.float32)[
            rows
        ]
        edited[rows, ids] = logits[rows, ids] - presence
    if any(edit.params.frequency_penalty for edit in edits):
        frequency = mx.array([edit.params.frequency_penalty for edit in edits], dtype=mx.float32)[
            rows
        ]
        edited = edited.at[rows, ids].add(-frequency)
    return edited


def _entries(lists: Sequence[tuple[int, mx.array]]) -> int:
    return sum(ids.size for _, ids in lists)


def _places(lists: Sequence[tuple[int, mx.array]]) -> tuple[mx.array, mx.array]:
    rows = mx.concatenate([mx.full(ids.shape, row, dtype=mx.int32) for row, ids in lists])
    return rows, mx.concatenate([ids for _, ids in lists])
