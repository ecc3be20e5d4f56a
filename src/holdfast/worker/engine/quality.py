"""Measures how much quantized keys and values degrade predictions: a model reads the same tokens
with each form of keys and values, and its predictions are compared with those of the native form.

The tokens are given (teacher forcing), in chunks that cross the borders of blocks. The engine's own
runner computes the predictions, so they are those that a request would get.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from holdfast.config import ModelSettings
from holdfast.models.file_hashing import FileHashing, HashCache
from holdfast.models.quality import NATIVE, FormQuality, Passage, QuantizedForm
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import SCORED_PIECE_BYTES
from holdfast.worker.engine.fingerprint import (
    identity_lister,
)
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.load import LoadedModel, Progress, load_model
from holdfast.worker.engine.mlx_lm_hooks import DeferredLogits
from holdfast.worker.engine.plan import BLOCK_TOKENS, Span
from holdfast.worker.engine.sequence import EngineSequence, SequenceSpan
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.live import LiveState, ModelForm

CHUNK_TOKENS = 384  # not a multiple of a block, so that chunks cross the borders of blocks
# difference of log-probabilities from which `_divergence` needs no rewritten formula
_LARGE_DIFFERENCE = 1.0


def load_with_fingerprint(
    settings: ModelSettings, *, hash_cache: str, progress: Progress
) -> tuple[LoadedModel, str]:
    """Load the model in the folder `settings.path`, and compute its fingerprint for the results of
    `measure`. Raises what `load_model` raises, and ModelChanged.

    hash_cache: the file that caches hashes of model files; empty: none.
    """
    folder = Path(settings.path)
    cache = HashCache(Path(hash_cache) if hash_cache else None)
    with FileHashing(identity_lister(folder, settings), cache=cache) as hashing:
        loaded = load_model(folder, settings, progress=progress)
        return loaded, loaded.fingerprints(folder, hashing.result()).model


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The result of `measure`."""

    forms: tuple[FormQuality, ...]  # native first
    text_tokens: int  # how many tokens of text were predicted
    quantized_tokens: int  # how many quantized tokens each of them saw, on average


@dataclass(slots=True)
class _Tally:
    """The figures of one form of keys and values. The arrays in each list have one number per
    predicted token of the text.
    """

    surprise: list[np.ndarray] = field(default_factory=list)  # in nats
    divergence: list[np.ndarray] = field(default_factory=list)  # from native, in nats
    agrees: list[np.ndarray] = field(default_factory=list)  # with native's most likely token
    right: int = 0  # answers of which every token is the most likely one
    bytes_per_token: int = 0

    def quality(self, form: str) -> FormQuality:
        """The figures of the whole text. form: the name of the form."""
        return FormQuality(
            form=form,
            perplexity=math.exp(float(np.concatenate(self.surprise).mean())),
            kl_divergence=float(np.concatenate(self.divergence).mean()),
            agreement=float(np.concatenate(self.agrees).mean()),
            right=self.right,
            bytes_per_token=self.bytes_per_token,
        )


def measure(
    runner: Runner,
    model_form: ModelForm | None,
    forms: Sequence[QuantizedForm],
    passages: Sequence[Passage],
    *,
    vocab_size: int,
    progress: Callable[[float], None],
) -> Quality:
    """Compare the predictions with each form of keys and values to those with the native form.

    model_form: the shapes of the model's states; None if they cannot be snapshotted, and so not be
    quantized. progress: called with the fraction that is done. Device thread only; blocks.
    """
    if model_form is None:
        refusal = "the state of this model cannot be copied out of mlx-lm's objects"
    else:
        runner.set_form(model_form)
        refusal = runner.refusal()
    tallies = {form: _Tally() for form in (_with_native(forms) if not refusal else (NATIVE,))}
    # for each token of text, how many quantized tokens it saw
    quantized_counts_by_passage: list[np.ndarray] = []
    for number, passage in enumerate(passages):
        quantized_counts_by_passage.append(
            _measure_passage(passage, runner, tallies, vocab_size=vocab_size)
        )
        progress((number + 1) / len(passages))
    quantized_counts = np.concatenate(quantized_counts_by_passage)
    return Quality(
        forms=tuple(
            tallies[form].quality(form)
            if form in tallies
            else FormQuality(form=form, refused=refusal)
            for form in _with_native(forms)
        ),
        text_tokens=len(quantized_counts),
        quantized_tokens=round(float(quantized_counts.mean())),
    )


def _with_native(forms: Sequence[QuantizedForm]) -> tuple[KVBits, ...]:
    return (NATIVE, *forms)


def _measure_passage(
    passage: Passage,
    runner: Runner,
    tallies: Mapping[KVBits, _Tally],
    *,
    vocab_size: int,
) -> np.ndarray:
    """Read a passage with every form of keys and values, and add the predictions to the tallies.

    Returns how many quantized tokens there were before each token that counts as text.
    """
    request = SequenceRequest(
        request_id="quality",
        prompt_token_ids=TokenIds.of(passage.token_ids),
        max_tokens=1,
        sampling=SamplingParams(temperature=0.0, seed=0),
        want_prompt_logprobs=True,
    )
    sequences = {
        form: EngineSequence.begin(
            request, live=LiveState(runner.fresh_layers(form)), vocab_size=vocab_size
        )
        for form in tallies
    }
    predicted_tokens = len(passage.token_ids) - 1
    figures_of_form: dict[KVBits, list[np.ndarray]] = {form: [] for form in tallies}
    spans_end_at_blocks = runner.ends_spans_at_blocks and any(
        each.live.is_quantized for each in sequences.values()
    )
    chunk_tokens = BLOCK_TOKENS if spans_end_at_blocks else CHUNK_TOKENS
    for start in range(0, predicted_tokens, chunk_tokens):
        tokens = min(chunk_tokens, predicted_tokens - start)
        logits = {
            form: _logits_of(runner, sequences[form], start=start, tokens=tokens)
            for form in tallies
        }
        targets = passage.token_ids[start + 1 : start + tokens + 1]
        for form, figures in _compare_predictions(logits, targets, vocab_size=vocab_size):
            figures_of_form[form].append(figures)
    # no query of the first block sees quantized tokens
    text_positions = slice(BLOCK_TOKENS if passage.is_text else predicted_tokens, predicted_tokens)
    # index i of the figures: the prediction of token i + 1
    for form, figures_of_chunks in figures_of_form.items():
        surprise, divergence, agrees, is_right = np.concatenate(figures_of_chunks, axis=1)
        tally = tallies[form]
        tally.surprise.append(surprise[text_positions])
        tally.divergence.append(divergence[text_positions])
        tally.agrees.append(agrees[text_positions])
        tally.right += sum(
            bool(is_right[answer_start - 1 : answer_end - 1].all())
            for answer_start, answer_end in passage.answers
        )
        tally.bytes_per_token = sequences[form].live.bytes_per_token()
    growing_layers = [leaf for each in sequences.values() for leaf in each.live.growing]
    return np.array(
        [
            max((leaf.quantized_before(position) for leaf in growing_layers), default=0)
            for position in range(text_positions.start, predicted_tokens)
        ]
    )


def _logits_of(
    runner: Runner, sequence: EngineSequence, *, start: int, tokens: int
) -> DeferredLogits:
    """Read the next tokens of a sequence. Returns the logits after each of them."""
    name = sequence.request.request_id
    span = Span(request_id=name, start=start, tokens=tokens, samples=False)
    result = runner.forward([SequenceSpan(sequence, span)], StepContext())
    sequence.live.tokens = start + tokens
    mx.eval([result.scored[name].source, *sequence.live.arrays()])
    return result.scored[name]


def _compare_predictions(
    logits: Mapping[KVBits, DeferredLogits], targets: Sequence[int], *, vocab_size: int
) -> Iterator[tuple[KVBits, np.ndarray]]:
    """Compare predictions, a few positions together, because logits are large.

    Yields a form and its figures, float32 [4, positions]: the surprise at the token that follows,
    the divergence from native, whether the most likely token is the same as with native, and
    whether it is the token that follows.
    """
    rows = max(1, SCORED_PIECE_BYTES // (4 * vocab_size))
    for start in range(0, len(targets), rows):
        following = mx.array(list(targets[start : start + rows]), dtype=mx.int32)
        end = start + following.size
        native_log_probabilities = _log_probabilities(logits[NATIVE].of(start, end))
        native_token_ids = native_log_probabilities.argmax(axis=-1)
        for form, form_logits in logits.items():
            form_log_probabilities = (
                native_log_probabilities
                if form == NATIVE
                else _log_probabilities(form_logits.of(start, end))
            )
            predicted_ids = form_log_probabilities.argmax(axis=-1)
            figures = mx.stack(
                [
                    -mx.take_along_axis(form_log_probabilities, following[:, None], axis=-1)[:, 0],
                    _divergence(native_log_probabilities, form_log_probabilities),
                    (predicted_ids == native_token_ids).astype(mx.float32),
                    (predicted_ids == following).astype(mx.float32),
                ]
            )
            yield form, np.array(figures)


def _log_probabilities(logits: mx.array) -> mx.array:
    logits_float32 = logits.astype(mx.float32)
    return logits_float32 - mx.logsumexp(logits_float32, axis=-1, keepdims=True)


def _divergence(native_log_probabilities: mx.array, form_log_probabilities: mx.array) -> mx.array:
    """The Kullback-Leibler divergence KL(native || form) of each row, from log-probabilities.

    The terms are p·(d − 1 + e^−d) with d = log p − log q, whose sum is the same as that of p·d.
    They are never negative, so the rounding errors of float32 do not hide small divergences.
    """
    probability = mx.exp(native_log_probabilities)
    difference = native_log_probabilities - form_log_probabilities
    is_large = mx.abs(difference) > _LARGE_DIFFERENCE
    small_difference = mx.where(is_large, 0.0, difference)
    terms = mx.where(
        is_large,
        probability * difference - probability + mx.exp(form_log_probabilities),
        probability * (small_difference + mx.expm1(-small_difference)),
    )
    return mx.where(probability > 0, terms, mx.exp(form_log_probabilities)).sum(axis=-1)
