"""Samples one token for each row of a step's logits, on the device, with any mix of parameters.

Results of a GPU are not read back. The backend of a CPU samples from large vocabularies itself, and
has to wait for the logits.

Order: logit bias; repetition, presence and frequency penalties; computing the log-probabilities;
the grammar's mask; temperature, top-k, top-p, min-p; choosing the token. A row's token depends only
on the row's logits, parameters, mask, seed and position. Device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequest
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SAMPLING_RANGES, SamplingParams
from holdfast.worker.engine.backend import SampleRows, SamplingKind, Scores, in_use
from holdfast.worker.engine.constraints import SequenceConstraint, Words
from holdfast.worker.engine.token_sampling import (
    fused_on_gpus,
    largest,
    random_key,
    sample_tokens,
    sampling_kind,
)

BANNED_AT = SAMPLING_RANGES["logit_bias"].lowest  # a bias this low means "never", not "rarely"
_ANY_TOKEN = np.int32(-1)  # a word with all bits set


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdits:
    """The logit bias and penalties of one sequence, on the device.

    Sparse: the work depends on the number of ids, not on the vocabulary. Immutable: `with_tokens`
    returns new edits.

    bias_ids: int32 [entries]. bias_values: fp32 [entries], -inf for banned tokens.
    prompt_ids: int32 [n], the distinct ids of the prompt; empty without a repetition penalty.
    generated_ids: int32 [m], in order, with repeats; empty without penalties. May be lazy.
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
        """The edits after the tokens in `generated_ids`; None without bias and penalties.

        Raises InvalidRequest if the bias has token ids that the model does not have.
        """
        if not params.logit_bias and not _has_penalties(params):
            return None
        for token_id in params.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"logit_bias contains token {token_id}, but the model's tokens are 0 to "
                    f"{vocab_size - 1}",
                    field="logit_bias",
                )
        penalised_prompt_ids = sorted(set(prompt_ids)) if params.repetition_penalty != 1.0 else []
        return RowEdits(
            params=params,
            bias_ids=mx.array(list(params.logit_bias), dtype=mx.int32),
            bias_values=mx.array(
                [value if value > BANNED_AT else -mx.inf for value in params.logit_bias.values()],
                mx.float32,
            ),
            # image placeholders may lie beyond the vocabulary
            prompt_ids=mx.array(
                [token_id for token_id in penalised_prompt_ids if 0 <= token_id < vocab_size],
                dtype=mx.int32,
            ),
            generated_ids=mx.array(
                list(generated_ids) if _has_penalties(params) else [], dtype=mx.int32
            ),
        )

    def with_tokens(self, tokens: mx.array) -> RowEdits:
        """The edits after further generated tokens. tokens: [n], any int dtype, may be lazy."""
        if not _has_penalties(self.params):
            return self
        return replace(
            self, generated_ids=mx.concatenate([self.generated_ids, tokens.astype(mx.int32)])
        )


def _has_penalties(params: SamplingParams) -> bool:
    """Whether the logits depend on the tokens that are generated."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def apply_edits(logits: mx.array, edits: Sequence[RowEdits]) -> mx.array:
    """Apply the bias, then the repetition penalty, then presence and frequency penalties. Lazy.

    logits: fp32 [rows, vocab], one row per entry of `edits`; rows do not depend on each other. The
    repetition penalty divides the positive logits, and multiplies the other logits, of prompt
    tokens and generated tokens. From the logits of generated tokens, the presence penalty is
    subtracted once, and the frequency penalty once per occurrence.
    """
    # each of the three lists: (row, the ids whose logits change there)
    biased_ids = [(row, edit.bias_ids) for row, edit in enumerate(edits)]
    if _count_ids(biased_ids):
        rows, ids = _rows_and_ids(biased_ids)
        logits = logits.at[rows, ids].add(mx.concatenate([edit.bias_values for edit in edits]))
    repeated_ids = [
        (row, ids)
        for row, edit in enumerate(edits)
        if edit.params.repetition_penalty != 1.0
        for ids in (edit.prompt_ids, edit.generated_ids)
    ]
    counted_ids = [
        (row, edit.generated_ids)
        for row, edit in enumerate(edits)
        if edit.params.presence_penalty != 0.0 or edit.params.frequency_penalty != 0.0
    ]
    return _subtract_counted(_penalise_repetition(logits, repeated_ids, edits), counted_ids, edits)


def _penalise_repetition(
    logits: mx.array, ids_of_rows: Sequence[tuple[int, mx.array]], edits: Sequence[RowEdits]
) -> mx.array:
    """Apply the repetition penalty. ids_of_rows: (row, penalised ids)."""
    if not _count_ids(ids_of_rows):
        return logits
    rows, ids = _rows_and_ids(ids_of_rows)
    penalty = _parameter_of_rows("repetition_penalty", edits, rows)
    original = logits[rows, ids]
    # a second handle: assigning to it leaves the caller's array unchanged
    edited = mx.array(logits)
    # an id that occurs twice is written twice with the same value
    edited[rows, ids] = _penalised(original, penalty)
    return edited


@fused_on_gpus
def _penalised(logits: mx.array, penalty: mx.array) -> mx.array:
    return mx.where(logits > 0, logits / penalty, logits * penalty)


def _subtract_counted(
    logits: mx.array, ids_of_rows: Sequence[tuple[int, mx.array]], edits: Sequence[RowEdits]
) -> mx.array:
    """Apply presence and frequency penalties. ids_of_rows: (row, generated ids, with repeats)."""
    if not _count_ids(ids_of_rows):
        return logits
    rows, ids = _rows_and_ids(ids_of_rows)
    edited = mx.array(logits)
    if any(edit.params.presence_penalty for edit in edits):
        presence = _parameter_of_rows("presence_penalty", edits, rows)
        edited[rows, ids] = logits[rows, ids] - presence
    if any(edit.params.frequency_penalty for edit in edits):
        edited = edited.at[rows, ids].add(-_parameter_of_rows("frequency_penalty", edits, rows))
    return edited


def _parameter_of_rows(name: str, edits: Sequence[RowEdits], rows: mx.array) -> mx.array:
    """A sampling parameter of each of these rows."""
    return mx.array([getattr(edit.params, name) for edit in edits], dtype=mx.float32)[rows]


def _count_ids(ids_of_rows: Sequence[tuple[int, mx.array]]) -> int:
    return sum(ids.size for _, ids in ids_of_rows)


def _rows_and_ids(ids_of_rows: Sequence[tuple[int, mx.array]]) -> tuple[mx.array, mx.array]:
    """Flatten (row, ids) pairs into two arrays that index single logits, int32 [all ids] each."""
    rows = mx.concatenate([mx.full(ids.shape, row, dtype=mx.int32) for row, ids in ids_of_rows])
    return rows, mx.concatenate([ids for _, ids in ids_of_rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """The tokens that may be sampled for each row.

    words: masks, int32 [rows, at least vocab / 32]; None if no row is masked. forced: maps a row to
    the token that it gets regardless of its logits.
    """

    words: Words | None
    forced: Mapping[int, int]


NO_LIMITS = RowLimits(words=None, forced={})


def limits_of(
    constraints: Iterable[SequenceConstraint | None], *, rows: int, words_per_row: int
) -> RowLimits:
    """The masks and forced tokens of all rows.

    constraints: one per row; None: any token may follow. Each is used before the next one is taken.
    If a constraint allows no token, its `failure` is set, and the row's mask is empty.
    """
    words = np.empty((rows, words_per_row), np.int32)
    forced: dict[int, int] = {}
    is_masked = False
    for row, constraint in enumerate(constraints):
        token = None if constraint is None else constraint.forced_token()
        if token is not None:
            forced[row] = token
        if constraint is not None and token is None and constraint.fill(words[row]):
            is_masked = True
        elif constraint is not None and constraint.failure:
            words[row] = 0
            is_masked = True
        else:
            words[row] = _ANY_TOKEN
    return RowLimits(words=words if is_masked else None, forced=forced)


def with_masks(logits: mx.array, limits: RowLimits) -> mx.array:
    """Set the logits of tokens that a row must not sample to -inf; NaN stays NaN. Lazy.

    logits: [rows, vocab], any float dtype.
    """
    if limits.words is None:
        return logits
    rows, columns = logits.shape
    additions = _mask_additions(logits.dtype)[mx.array(limits.words.view(np.uint8))]
    return logits + additions.reshape(rows, -1)[:, :columns]


def with_forced(tokens: mx.array, limits: RowLimits) -> mx.array:
    """Return the sampled tokens, uint32 [rows]; in rows with a forced token, that token replaces the
    sampled one. Lazy.
    """
    if not limits.forced:
        return tokens
    forced_or_negative = np.full(tokens.shape, -1, np.int32)
    forced_or_negative[list(limits.forced)] = list(limits.forced.values())
    forced_tokens = mx.array(forced_or_negative)
    return mx.where(forced_tokens >= 0, forced_tokens.astype(tokens.dtype), tokens)


@cache
def _mask_additions(dtype: mx.Dtype) -> mx.array:
    """A table [256, 8]: for each byte of a mask, what to add to the logits of its 8 tokens."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table = mx.array(np.where(bits, np.float32(0), np.float32(-np.inf))).astype(dtype)
    mx.eval(table)
    return table


@dataclass(slots=True, kw_only=True)
class RowState:
    """The sampling state of one sequence."""

    params: SamplingParams
    kind: SamplingKind
    seed: int
    position: int  # of the next token to sample, counted from the beginning of the prompt
    want_logprobs: bool = False
    top_logprobs: int = 0
    edits: RowEdits | None = None

    def advance(self, tokens: mx.array, count: int = 1) -> None:
        """Update the state after the sequence's next `count` tokens. tokens: int [count], may be
        lazy; ignored if the sequence has no edits.
        """
        self.position += count
        if self.edits is not None:
            self.edits = self.edits.with_tokens(tokens)

    def states_after(self, drafted: Sequence[int]) -> list[RowState]:
        """This state, and the states that it would have after each of the drafted tokens."""
        states = [self]
        for token in drafted:
            following = replace(states[-1])
            following.advance(mx.array([token], dtype=mx.int32))
            states.append(following)
        return states


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The result of `sample` for R rows. Lazy.

    tokens: uint32 [R].
    ok: bool [R], False if the logits contain NaN or inf, or if no token is left to sample. The
        token of such a row is a valid id without a meaning.
    empty: bool [R], whether no token is left to sample; None if no row is masked.
    scores: log-probabilities of the sampled tokens, and of the k likeliest tokens of each row,
        where k is the largest `top_logprobs` of any row. Without a meaning for rows without
        `want_logprobs`; None if no row wants log-probabilities.
    """

    tokens: mx.array
    ok: mx.array
    empty: mx.array | None = None
    scores: Scores | None = None

    def arrays(self) -> list[mx.array]:
        arrays = [self.tokens, self.ok]
        if self.empty is not None:
            arrays.append(self.empty)
        if self.scores is not None:
            arrays.extend(self.scores.arrays())
        return arrays


def row_state(
    request: SequenceRequest, *, generated: Sequence[int] = (), vocab_size: int
) -> RowState:
    """Create the sampling state of a sequence that has already generated the tokens in `generated`.

    vocab_size: the number of logits per position. Raises InvalidRequest if the logit bias has token
    ids that the model does not have.
    """
    params = request.sampling
    return RowState(
        params=params,
        kind=sampling_kind(params, vocab_size=vocab_size),
        seed=params.seed or 0,
        position=len(request.prompt_token_ids) + len(generated),
        want_logprobs=request.want_logprobs,
        top_logprobs=min(request.top_logprobs, vocab_size) if request.want_logprobs else 0,
        edits=RowEdits.of(
            params,
            prompt_ids=request.prompt_token_ids,
            generated_ids=generated,
            vocab_size=vocab_size,
        ),
    )


def sample(
    logits: mx.array,
    rows: Sequence[RowState],
    limits: RowLimits = NO_LIMITS,
    *,
    is_computed: bool = False,
) -> SampledRows:
    """Sample a token for each row. Changes neither `logits` nor `rows`; lazy unless numpy samples.

    logits: [R, vocab], any float dtype, R = len(rows) ≥ 1. is_computed: whether they are evaluated,
    on a CPU. Then numpy finds the maxima and samples greedy rows, because building and launching an
    MLX graph for one operation takes longer.
    """
    if any(row.edits is not None for row in rows):
        logits = _edited(logits.astype(mx.float32), rows)
    allowed = with_masks(logits, limits)
    if is_computed or any(_backend_sampler(row.kind, logits) is not None for row in rows):
        allowed = allowed.astype(mx.float32)
        maxima = evaluated(allowed).max(axis=-1)
        peaks, ok = mx.array(maxima), mx.array(np.isfinite(maxima))
    else:
        # NaN if the row contains one, as in numpy
        peaks = mx.max(allowed, axis=-1).astype(mx.float32)
        ok = mx.isfinite(peaks)
    tokens = with_forced(_sampled_tokens(allowed, rows, peaks, is_computed), limits)
    scores = _scores_of(tokens, logits, rows) if any(row.want_logprobs for row in rows) else None
    empty = None if limits.words is None else peaks == -mx.inf
    return SampledRows(tokens=tokens, ok=ok, empty=empty, scores=scores)


def score_tokens(logits: mx.array, token_ids: mx.array, *, top_logprobs: int) -> Scores:
    """Log-probabilities of one given token per row, and of each row's `top_logprobs` likeliest
    tokens. Lazy unless numpy computes them.

    logits: [n, vocab], any float dtype, before the temperature. token_ids: int [n], the given token
        of each row.
    """
    logits = logits.astype(mx.float32)
    top_logprobs = min(top_logprobs, logits.shape[-1])
    scores = in_use().score(logits, token_ids, top_logprobs=top_logprobs)
    if scores is not None:
        return scores
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(logits, token_ids[:, None], axis=-1) - total)[:, 0]
    if top_logprobs == 0:
        return Scores(chosen=chosen)
    values, ids = largest(logits, count=top_logprobs)
    return Scores(chosen=chosen, top=(ids, values - total))


def _edited(logits: mx.array, rows: Sequence[RowState]) -> mx.array:
    """Apply the bias and penalties of the rows that have any. Lazy."""
    edits = [row.edits for row in rows if row.edits is not None]
    if len(edits) == len(rows):
        return apply_edits(logits, edits)
    edited_rows = [index for index, row in enumerate(rows) if row.edits is not None]
    plain_rows = [index for index, row in enumerate(rows) if row.edits is None]
    return _concatenated_in_order(
        [
            (edited_rows, lambda: apply_edits(logits[mx.array(edited_rows)], edits)),
            (plain_rows, lambda: logits[mx.array(plain_rows)]),
        ]
    )


def _sampled_tokens(
    logits: mx.array, rows: Sequence[RowState], peaks: mx.array, is_computed: bool
) -> mx.array:
    """The tokens of all rows, uint32 [rows]. Rows of one `SamplingKind` are sampled together.

    peaks: the maximum of each row, fp32 [rows].
    """
    rows_of_kind: dict[SamplingKind, list[int]] = {}
    for index, row in enumerate(rows):
        rows_of_kind.setdefault(row.kind, []).append(index)
    if len(rows_of_kind) == 1:
        return _sample_kind(logits, rows, peaks, is_computed)

    def sampling_of(row_indices: list[int]) -> Callable[[], mx.array]:
        """A function that samples these rows."""
        row_index_array = mx.array(row_indices)
        return lambda: _sample_kind(
            logits[row_index_array],
            [rows[row] for row in row_indices],
            peaks[row_index_array],
            is_computed,
        )

    return _concatenated_in_order(
        [(row_indices, sampling_of(row_indices)) for row_indices in rows_of_kind.values()]
    )


def _sample_kind(
    logits: mx.array, rows: Sequence[RowState], peaks: mx.array, is_computed: bool
) -> mx.array:
    """Sample rows of one kind, by the backend if it samples that kind: uint32 [rows]."""
    kind = rows[0].kind
    if kind.greedy:
        if is_computed:
            return mx.array(evaluated(logits).argmax(axis=-1).astype(np.uint32))
        return mx.argmax(logits, axis=-1)
    keys = [random_key(seed=row.seed, position=row.position) for row in rows]
    params = [row.params for row in rows]
    backend_sampler = _backend_sampler(kind, logits)
    if backend_sampler is not None:
        return backend_sampler(logits, params=params, keys=keys)
    return sample_tokens(
        logits.astype(mx.float32), kind=kind, params=params, keys=keys, peaks=peaks
    )


def _backend_sampler(kind: SamplingKind, logits: mx.array) -> SampleRows | None:
    """What samples rows of this kind in place of MLX; None: MLX samples them."""
    return in_use().sampler_of(kind, vocab_size=logits.shape[-1])


def evaluated(logits: mx.array) -> npt.NDArray[np.float32]:
    """Evaluate float32 logits, [rows, vocab], and return a numpy view."""
    mx.eval(logits)
    return np.array(logits, copy=False)


def _concatenated_in_order(groups: Sequence[tuple[list[int], Callable[[], mx.array]]]) -> mx.array:
    """Compute the rows of each group and put all rows in order. groups: (indices of the rows,
    function that computes them in this order).
    """
    order = [row for row_indices, _ in groups for row in row_indices]
    index_in_order = sorted(range(len(order)), key=order.__getitem__)
    return mx.concatenate([compute() for _, compute in groups])[mx.array(index_in_order)]


def _scores_of(tokens: mx.array, logits: mx.array, rows: Sequence[RowState]) -> Scores:
    """Scores of the sampled tokens for all rows; those of rows that want none have no meaning."""
    wanting_rows = [index for index, row in enumerate(rows) if row.want_logprobs]
    count = max(rows[index].top_logprobs for index in wanting_rows)
    if len(wanting_rows) == len(rows):
        return score_tokens(logits, tokens, top_logprobs=count)
    indices = mx.array(wanting_rows)
    scores = score_tokens(logits[indices], tokens[indices], top_logprobs=count)
    score_index_of_row = {index: score_index for score_index, index in enumerate(wanting_rows)}
    score_indices = mx.array([score_index_of_row.get(index, 0) for index in range(len(rows))])
    top = (
        None if scores.top is None else (scores.top[0][score_indices], scores.top[1][score_indices])
    )
    return Scores(chosen=scores.chosen[score_indices], top=top)
