"""Runs a loaded model in every layout and takes the fastest one whose logits are right.

Three sequences of different lengths, prompt chunks and decoding rows mixed, joining one after the other, are compared with
one-by-one evaluation through mlx-lm's own caches. An error is judged against what it does to the logits when one token of the
context is another one, and against the noise of mlx-lm's own ways (prompt at once, in chunks, token by token) in the model's
precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from holdfast.errors import ModelLoadError
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams
from holdfast.wire.token_ids import TokenIds
from holdfast.worker.engine.head_seam import HeadSeam
from holdfast.worker.engine.layouts import LayoutError, RowsRunner, Runner, SoloRunner, SplitRunner, own_caches, own_kinds
from holdfast.worker.engine.plan import Span
from holdfast.worker.engine.sequence import EngineSequence, SequenceSpan
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.layer import LayerState
from holdfast.worker.kv.live import LiveState

RIGHT_RELATIVE_ERROR = 1e-3  # of the effect of one changed context token; wrong layouts are off by 0.1 and more
NOISE_FACTOR = 4.0
ROUNDINGS = 8.0  # so many steps of the logits' precision are no error either: a CPU rounds all of mlx-lm's ways alike
LARGEST_TOLERANCE = {2: 0.5, 4: 0.05}  # by the bytes of a logit; TF32 and the order of sums show in fp32 too
DECODED_TOKENS = 3
LONGEST_WINDOW_PROBED = 128

# What mlx-lm models raise when a layout does not fit them: wrong shapes, missing attributes, scalar offsets where arrays come.
_MISFITS = (LayoutError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How one layout did."""

    variant: str
    relative_error: float | None  # None: it raised
    note: str
    is_right: bool = False


@dataclass(frozen=True, slots=True)
class _Case:
    tokens: tuple[int, ...]
    chunks: tuple[int, ...]  # lengths of the prompt's chunks; the rest is decoded token by token


def choose_layout(model: Any, *, vocab_size: int, wanted: str = "auto") -> Runner:
    """Probe the layouts in order of speed and return the first right one, ready to run; device thread only.

    wanted: "auto", or the name of the layout to insist on. Raises ModelLoadError when no layout (or not the wanted one) is right.
    """
    trials: list[Trial] = []
    reference = _reference_of(model, vocab_size)
    for head in (HeadSeam(model), None):
        for runner in _candidates(model, head):
            trials.append(_try(runner, reference))
            if trials[-1].is_right and wanted in ("auto", runner.name):
                if head is not None:
                    head.hidden_size = reference.hidden_size_of(head)
                    head.projects_later = head.hidden_size > 0
                runner.reason = _reason(trials)
                return runner
        if head is not None:
            head.remove()
    solo_error = trials[-1].relative_error
    if wanted in ("auto", "solo") and reference.is_coarse and solo_error is not None and math.isfinite(solo_error):
        # mlx-lm's own code over its own caches; in 16 bits a near tie between experts can look like an error
        solo = SoloRunner(model, None)
        solo.reason = f"the last resort, since nothing is within the tolerance: {_reason(trials)}"
        return solo
    raise ModelLoadError(f"no layout{'' if wanted == 'auto' else f' {wanted!r}'} runs this model rightly: {_reason(trials)}")


def trial_of_each_layout(model: Any, *, vocab_size: int) -> tuple[Trial, ...]:
    """The relative error of every layout and variant, for the table in the documentation."""
    reference = _reference_of(model, vocab_size)
    head = HeadSeam(model)
    return tuple(_try(runner, reference) for runner in _candidates(model, head))


def _reference_of(model: Any, vocab_size: int) -> _Reference:
    try:
        return _Reference(model, _cases(model, vocab_size))
    except _MISFITS as misfit:
        raise ModelLoadError(f"mlx-lm itself cannot run this model here: {_first_line(misfit)}") from misfit


def _candidates(model: Any, head: HeadSeam | None) -> list[Runner]:
    split = [SplitRunner(model, head, gather_mask_dimensions=dimensions) for dimensions in (None, 4, 5)]
    return [RowsRunner(model, head), *split, SoloRunner(model, head)]


def _try(runner: Runner, reference: _Reference) -> Trial:
    try:
        error = reference.relative_error(_staggered(runner, reference.cases))
    except _MISFITS as misfit:
        return Trial(variant=runner.variant, relative_error=None, note=_first_line(misfit))
    right = error <= RIGHT_RELATIVE_ERROR or error <= reference.tolerance
    note = f"relative error {error:.1e}" + ("" if right else f", allowed {reference.tolerance:.1e}")
    return Trial(variant=runner.variant, relative_error=error, note=note, is_right=right)


def _first_line(error: Exception) -> str:
    line = str(error).split("\n", 1)[0][:160]
    return f"{type(error).__name__}: {line}"


def _reason(trials: Sequence[Trial]) -> str:
    *others, last = trials
    words = [f"{trial.variant} {'is right too' if trial.is_right else 'fails'} ({trial.note})" for trial in others]
    return "; ".join([*words, f"{last.variant}: {last.note}"])


def _cases(model: Any, vocab_size: int) -> tuple[_Case, ...]:
    windows = [leaf.window for layer in own_kinds(model) for leaf in layer.leaves() if leaf.window is not None]
    longest = max([24, *(size + 8 for size in windows if size <= LONGEST_WINDOW_PROBED)])
    lengths = (longest, 5, longest // 2 + 5)
    chunks = ((longest - longest // 3, longest // 3), (5,), (3, longest // 2 + 2))
    return tuple(
        _Case(
            tokens=tuple(
                (7 + 13 * index * (case + 1) + case) % min(vocab_size, 1009) for index in range(length + DECODED_TOKENS)
            ),
            chunks=chunks[case],
        )
        for case, length in enumerate(lengths)
    )


class _Reference:
    """Logits of one-by-one evaluation, and the scale on which to judge others."""

    def __init__(self, model: Any, cases: tuple[_Case, ...]) -> None:
        self.cases = cases
        self._model = model
        self._expected = [_one_by_one(model, case.tokens, sum(case.chunks)) for case in cases]
        changed = [_one_by_one(model, (case.tokens[0], case.tokens[1] ^ 1, *case.tokens[2:]), sum(case.chunks)) for case in cases]
        mx.eval(self._expected, changed)
        effects = [_distance(a, b) for a, b in zip(self._expected, changed, strict=True)]
        self._effect = max((effect for effect in effects if math.isfinite(effect)), default=0.0) or 1.0

    @property
    def is_coarse(self) -> bool:
        """Whether the model rounds to 16 bits, so that right ways may differ much."""
        return self._expected[0].dtype.size < mx.float32.size

    @cached_property
    def tolerance(self) -> float:
        """Largest relative error that a right layout may have. Costs some passes: asked for only when there is an error."""
        slowly = _one_by_one(self._model, self.cases[1].tokens, 1)
        noise = _distance(self._expected[1], slowly[-self._expected[1].shape[0] :]) / self._effect
        in_chunks = self.relative_error(_staggered(SoloRunner(self._model, None), self.cases))
        precision = self._expected[0].dtype
        rounding = ROUNDINGS * float(mx.finfo(precision).eps)
        noises = [NOISE_FACTOR * error for error in (noise, in_chunks) if math.isfinite(error)]
        return max(RIGHT_RELATIVE_ERROR, rounding, min(max(noises, default=0.0), LARGEST_TOLERANCE[precision.size]))

    def hidden_size_of(self, head: HeadSeam) -> int:
        """The size of what is set aside in front of the head; 0 unless, projected later, it gives the logits of the model."""
        ids = mx.array([self.cases[1].tokens])
        with head.selecting(None, aside=mx.arange(ids.size)):
            at_once = self._model(ids, cache=own_caches(self._model))[0]
        set_aside = head.take_aside()
        if set_aside is None:
            return 0
        try:
            error = _distance(at_once, head.project(set_aside)) / self._effect
        except _MISFITS:
            return 0
        return set_aside.shape[-1] if error <= RIGHT_RELATIVE_ERROR or error <= self.tolerance else 0

    def relative_error(self, got: list[mx.array]) -> float:
        """Largest deviation of any logit, relative to the effect of a changed token; infinite when a logit is not a number."""
        return max(_distance(a, b) for a, b in zip(self._expected, got, strict=True)) / self._effect


def _distance(a: mx.array, b: mx.array) -> float:
    """Largest difference. Infinities that agree do not differ: some models mask tokens out with them."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    distance = float(mx.where(a == b, 0.0, mx.abs(a - b)).max())
    return distance if distance == distance else math.inf


def _one_by_one(model: Any, tokens: tuple[int, ...], prompt: int) -> mx.array:
    """Logits after the prompt and after each later token, through mlx-lm's own caches. [1 + later tokens, vocabulary]"""
    caches = own_caches(model)
    after_prompt = model(mx.array([tokens[:prompt]]), cache=caches)[0, -1:]
    return mx.concatenate([after_prompt, *(model(mx.array([[token]]), cache=caches)[0] for token in tokens[prompt:])])


def _staggered(runner: Runner, cases: tuple[_Case, ...]) -> list[mx.array]:
    """Play the cases as the scheduler would; logits as `_one_by_one` gives them, per case."""
    live = [_sequence(case, runner.fresh_layers(), index) for index, case in enumerate(cases)]
    queues = [_spans(case, str(index)) for index, case in enumerate(cases)]
    got: list[list[mx.array]] = [[] for _ in cases]
    step = 0
    while any(queues):
        active = [index for index, queue in enumerate(queues) if queue and index <= step]  # each joins a step later
        spans = [SequenceSpan(live[index], queues[index].pop(0)) for index in active]
        for index, each in zip(active, spans, strict=True):
            live[index].drawn = mx.array([cases[index].tokens[each.span.start]])
        # prompts of these lengths are too short for numpy, which reads the real ones on a CPU: it gets every other step
        logits = runner.forward(spans, StepContext(host_scores=0) if step % 2 == 0 else StepContext()).drawn
        mx.eval(logits, [list(each.sequence.arrays()) for each in spans])
        row = 0
        for index, each in zip(active, spans, strict=True):
            if each.span.draws and logits is not None:
                got[index].append(logits[row : row + 1])
                row += 1
        step += 1
    return [mx.concatenate(rows) for rows in got]


def _sequence(case: _Case, layers: list[LayerState], index: int) -> EngineSequence:
    request = SequenceRequest(
        request_id=str(index),
        prompt_token_ids=TokenIds.of(case.tokens[: sum(case.chunks)]),
        max_tokens=DECODED_TOKENS,
        sampling=SamplingParams(temperature=0.0, seed=0),
    )
    sequence = EngineSequence.begin(request, live=LiveState(layers), vocab_size=1)
    sequence.reserve(len(case.tokens))
    return sequence


def _spans(case: _Case, request_id: str) -> list[Span]:
    spans: list[Span] = []
    start = 0
    for tokens in case.chunks:
        spans.append(Span(request_id=request_id, start=start, tokens=tokens, draws=start + tokens == sum(case.chunks)))
        start += tokens
    decoding = [Span(request_id=request_id, start=at, tokens=1, draws=True) for at in range(start, len(case.tokens))]
    return spans + decoding
