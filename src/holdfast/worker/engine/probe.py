"""Tries a loaded model in the layouts, chooses the fastest one whose logits are right, and checks
the attention kernels that only long contexts use.

**Layouts.** Three sequences of different lengths join one after the other, so that prefill chunks
and decoding rows are mixed. Their logits are compared with evaluating the sequences one by one
through mlx-lm's own caches. Every error is relative to the effect of changing one token of the
context.

A layout is right if the largest error of any logit is within rounding. A layout with larger errors
may still be right: kernels that add in another order can make a mixture of experts choose another
expert if two are almost equal, and then many logits change. So such a layout is tried with several
prompts. Rounding changes the choice of experts for some prompts only, but a wrong mask, position or
KV causes an error at the same position for all prompts. At each position, the KL divergence of the
two distributions of the next token is computed for every prompt, and the median over the prompts is
taken; the worst position decides. The bounds are based on measurements (docs/lab-log.md).

**Long contexts.** The layouts are compared over some 30 tokens. With 1,024 or 4,096 keys or more,
and for chunks of many queries, a GPU runs other kernels, and some versions of MLX were silently
wrong exactly there (ml-explore/mlx#3586, #3797). So the attention shapes of the model are tried
over random keys, once per shape, and the attention of a few queries is computed again in float32
with plain matrix products. Each of these queries attends mostly to one key, and these keys are
spread over the whole context, including the boundaries between kernels: if a key is left out or
confused with another, the error is as large as a value. For 32 heads of dimension 128 and 8 key
heads in bf16, this takes 70 MB for a short time and 110 GFLOP, some 10 to 50 ms on a GPU
(calculated). If MLX lacks a fused kernel for a head dimension, the scores take 330 MB more.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from holdfast.errors import ModelLoadError
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.backend import in_use
from holdfast.worker.engine.engine import Engine, KVCosts
from holdfast.worker.engine.kv_forms import KVForms
from holdfast.worker.engine.layouts import (
    LayoutError,
    RowsRunner,
    Runner,
    SoloCachedRunner,
    SoloRunner,
    SplitRunner,
    empty_layers,
    mlx_lm_caches,
)
from holdfast.worker.engine.load import LoadedModel
from holdfast.worker.engine.lora import Adapters
from holdfast.worker.engine.mlx_lm_hooks import AttentionShape, ProjectionHook, recorded_shapes
from holdfast.worker.engine.mlx_lm_patches import patch
from holdfast.worker.engine.plan import Span
from holdfast.worker.engine.sequence import EngineSequence, SequenceSpan
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.layer import Layer
from holdfast.worker.kv.live import LiveState
from holdfast.worker.kv.quantized import wrong_over_slices

KEYS = (1_500, 5_000)  # lengths of the context: beyond 1,024 and 4,096
QUERIES = (1, 1_024)  # a decoding step, a chunk of a prompt
BOUNDARIES = (0, 1_023, 1_024, 4_095, 4_096)  # keys beside which another kernel begins
COMPARED_QUERIES = 4  # per head and call
# error of attention, as a share of the largest value, by the bytes of a number; in float32, the
# lower precision of TF32 is visible
ALLOWED_ERROR = {2: 0.05, 4: 0.01}
# relative to the effect of one changed context token; wrong layouts are off by 0.1 or more
RIGHT_RELATIVE_ERROR = 1e-3
ROUNDINGS = 8.0  # rounding steps of the logits' precision that do not count as an error
# prompts per length, if the first one does not decide; two of five may get other experts without an
# effect on the median
PROMPTS = 5
# Square roots of KL divergences, relative to that of one changed token, by the bytes of a logit (in
# float32, the lower precision of TF32 is visible here, too).
RIGHT_AT_FIRST_PROMPT = {2: 0.05, 4: 0.01}  # up to this, the first prompt is enough
RIGHT_DIVERGENCE = {2: 0.1, 4: 0.02}  # median of the prompts at the worst position
LARGEST_DIVERGENCE = {2: 0.2, 4: 0.04}  # allowed if mlx-lm's own results diverge by half as much
NOISE_FACTOR = 2.0
LEAST_AGREEMENT = 0.75  # share of positions, over all prompts, with the same most probable token
DECODED_TOKENS = 3
# With quantized keys and values, the largest divergence allowed, relative to the effect of one
# changed token: far above the effect of rounding to 4 bits, far below that of wrong code.
QUANTIZED_DIVERGENCE = 2.0
PROBED_BLOCK_TOKENS = 4  # so that short sequences have quantized blocks
LONGEST_WINDOW_PROBED = 128
# Attributes of mlx-lm's modules that set from how many tokens on other code is used, and the values
# that they get during the probe, whose sequences exceed them.
LOWERED_SWITCHES = {
    "index_topk": 8,
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "blocksparse_block_size": 4,
    "blocksparse_num_local_blocks": 2,
    "blocksparse_vert_stride": 3,
    "max_position_embeddings": 16,
    "floor_scale": 8,
}

# mlx-lm models raise these if a layout does not fit: bad shapes, missing attributes, scalar offsets
LAYOUT_ERRORS = (
    LayoutError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of running the model once in one batch layout (`worker/engine/layouts.py`).

    variant: `Runner.variant`. note: the measured errors, or the error that the layout raised.
    """

    variant: str
    relative_error: float | None  # None: the layout raised an error
    note: str
    is_right: bool = False


@dataclass(frozen=True, slots=True)
class _ProbeSequence:
    """A sequence that layouts are tried with (below: a case)."""

    tokens: tuple[int, ...]  # the prompt, and the tokens that are decoded after it
    chunks: tuple[int, ...]  # lengths of the prompt's chunks; the rest is decoded token by token
    adapter: str = ""


def choose_layout(model: Any, *, vocab_size: int, wanted: str = "auto") -> Runner:
    """Probe the layouts in order of speed and return the first right one. Device thread only.

    wanted: "auto", or the name of the only layout to use. Raises ModelLoadError if no layout is
    right, or if the wanted one is not.
    """
    patch(model)
    with _lowered_switches(model):
        return _first_right_runner(model, vocab_size, wanted)


def _first_right_runner(model: Any, vocab_size: int, wanted_layout: str) -> Runner:
    """The first layout, or the wanted one, with which the model computes correctly. Each is tried
    with a hook into the vocabulary projection, and if none is right, without.
    """
    trials: list[Trial] = []
    judge = _judge_of(model, vocab_size)
    for head in (ProjectionHook(model), None):
        for runner in _runners_to_try(model, head):
            trials.append(_trial_of(runner, judge))
            if trials[-1].is_right and wanted_layout in ("auto", runner.name):
                if head is not None:
                    head.hidden_size = judge.first_reference.hidden_size_of(head)
                    head.can_project_later = head.hidden_size > 0
                runner.reason = _reason_for_choice(trials)
                return runner
        if head is not None:
            head.remove()
    solo_error = trials[-1].relative_error
    if (
        wanted_layout in ("auto", "solo")
        and judge.first_reference.is_coarse
        and solo_error is not None
        and math.isfinite(solo_error)
    ):
        # Solo is mlx-lm's own code: in 16 bits, a near tie between experts can look like an error.
        solo = SoloRunner(model, None)
        solo.reason = (
            "the last resort, because no layout is within the tolerance: "
            f"{_reason_for_choice(trials)}"
        )
        return solo
    raise ModelLoadError(
        f"no layout{'' if wanted_layout == 'auto' else f' {wanted_layout!r}'} runs this model "
        f"correctly: {_reason_for_choice(trials)}"
    )


def choose_runner(loaded: LoadedModel, *, wanted_layout: str) -> Runner:
    """Choose the layout of a loaded model (`choose_layout`), and let it apply the adapters."""
    runner = choose_layout(loaded.model, vocab_size=loaded.vocab_size, wanted=wanted_layout)
    runner.adapters = loaded.adapters
    choose_mixing(runner, vocab_size=loaded.vocab_size)
    return runner


def choose_mixing(runner: Runner, *, vocab_size: int) -> None:
    """Decide whether sequences with different adapters share a forward pass, and append the reason
    to `runner.reason`. Device thread only.

    Tries each adapter together with another one and with the model itself.
    """
    adapters = runner.adapters
    if adapters is None:
        return
    if not adapters.can_mix:
        why = "an adapter changes the output head, an embedding or experts"
        runner.reason += f"; adapters run in separate forward passes: {why}"
        return
    names = adapters.names
    runner.mixes_adapters = True
    for name, other in zip(names, (*names[1:], names[0]), strict=True):
        try:
            judge = _Judge(
                runner.model, vocab_size, adapters=adapters, adapter_names=(name, "", other)
            )
            trial = _trial_of(runner, judge)
        except ModelLoadError as error:
            raise ModelLoadError(f"adapter {name}: {error}") from error
        if not trial.is_right:
            runner.mixes_adapters = False
            runner.reason += f"; adapters run in separate forward passes: {trial.note}"
            return
    runner.reason += "; adapters share forward passes"


def why_form_is_unusable(form: KVBits, runner: Runner, *, vocab_size: int) -> str:
    """Test a form of quantized keys and values. Returns why it cannot be used, or an empty text.

    The results may differ from those of the native form by rounding, but only as much as
    `QUANTIZED_DIVERGENCE` allows. Requires `Runner.set_form`. Device thread only.
    """
    shortest = _probe_sequences(runner.model, vocab_size, seed=0)[1:2]
    reference = _Reference(runner.model, shortest)
    try:
        logits = _run_staggered(runner, shortest, form)
    except LAYOUT_ERRORS as error:
        return _first_line(error)
    divergence = float(np.median(reference.divergences(logits)))
    allowed = QUANTIZED_DIVERGENCE * reference.divergence_effect
    return (
        "" if divergence <= allowed else f"its results are wrong ({divergence:.2g} > {allowed:.2g})"
    )


def probe_kv_forms(engine: Engine, runner: Runner, *, vocab_size: int) -> KVForms:
    """Which forms of keys and values a model supports, and the memory of each. Device thread only."""
    native = engine.measure_costs()
    costs: dict[KVBits, KVCosts] = {"native": native}
    if native.form is None:
        reason = "the state of this model cannot be copied out of mlx-lm's objects"
    else:
        runner.set_form(native.form)
        reason = runner.refusal()
    if not reason:
        costs |= {form: engine.measure_costs(form) for form in BITS}
    return KVForms(
        costs=costs,
        refused=dict.fromkeys(BITS, reason) if reason else {},
        test_form=partial(why_form_is_unusable, runner=runner, vocab_size=vocab_size),
    )


def warnings_about(runner: Runner) -> tuple[str, ...]:
    """Warnings if the chosen layout is slow; otherwise empty."""
    if runner.name != "solo":
        return ()
    if isinstance(runner, SoloRunner):
        memory = ", and there is no prefix cache, so every prompt is prefilled from its first token"
    else:
        memory = "; cached prefixes are reused"
    return (
        "this model runs in the layout solo: its requests are computed one at a time instead of "
        f"together{memory}. "
        f"Why: {runner.reason}. What to do: if model.layout is set to solo, remove it; otherwise "
        "try a newer mlx-lm, or another quantization or --dtype of the model, and report the model "
        "with the output of `holdfast doctor MODEL`",
    )


@contextmanager
def _lowered_switches(model: Any) -> Iterator[None]:
    """Within the `with` block, make the probe's short sequences use the code that models otherwise
    use only for long contexts: sparse attention, and positions beyond the trained context.
    """
    original_values: list[tuple[Any, str, int]] = []
    for part in model.modules():
        for name, lowered in LOWERED_SWITCHES.items():
            value = getattr(part, name, None)
            if type(value) is int and value > lowered:
                original_values.append((part, name, value))
                setattr(part, name, lowered)
    try:
        yield
    finally:
        for part, name, value in original_values:
            setattr(part, name, value)


def _judge_of(model: Any, vocab_size: int) -> _Judge:
    """A judge of the model's layouts. Raises ModelLoadError if mlx-lm cannot run the model alone."""
    try:
        return _Judge(model, vocab_size)
    except LAYOUT_ERRORS as error:
        raise ModelLoadError(
            f"mlx-lm itself cannot run this model here: {_first_line(error)}"
        ) from error


def _runners_to_try(model: Any, head: ProjectionHook | None) -> list[Runner]:
    """One runner for each layout and variant, the fastest first."""
    split_runners = [
        SplitRunner(model, head, gather_mask_dimensions=dimensions) for dimensions in (None, 4, 5)
    ]
    return [
        RowsRunner(model, head),
        *split_runners,
        SoloCachedRunner(model, head),
        SoloRunner(model, head),
    ]


def _trial_of(runner: Runner, judge: _Judge) -> Trial:
    """Try a layout. If the model raises an error in it, the trial has no relative error."""
    try:
        return judge.trial_of(runner)
    except LAYOUT_ERRORS as error:
        return Trial(variant=runner.variant, relative_error=None, note=_first_line(error))


def _first_line(error: Exception) -> str:
    """The type and the first line of an error, for the reason of a choice."""
    line = str(error).split("\n", 1)[0][:160]
    return f"{type(error).__name__}: {line}"


def _reason_for_choice(trials: Sequence[Trial]) -> str:
    """What was found out about each layout, the chosen one last."""
    *others, last = trials
    texts = [
        f"{trial.variant} {'is right too' if trial.is_right else 'fails'} ({trial.note})"
        for trial in others
    ]
    return "; ".join([*texts, f"{last.variant}: {last.note}"])


def _probe_sequences(model: Any, vocab_size: int, *, seed: int) -> tuple[_ProbeSequence, ...]:
    """The three sequences that a layout is tried with. seed: for their tokens. The longest exceeds
    the model's windows, and one has chunks of several lengths.
    """
    leaves = [leaf for layer in empty_layers(model) for leaf in layer.leaves()]
    windows = [size for leaf in leaves for size in (leaf.window, leaf.chunk) if size is not None]
    longest = max([24, *(size + 8 for size in windows if size <= LONGEST_WINDOW_PROBED)])
    lengths = (longest, 5, longest // 2 + 5)
    chunks = ((longest - longest // 3, longest // 3), (5,), (3, 1, longest // 2 + 1))
    generator = random.Random(seed)
    cases = []
    for length, chunk_tokens in zip(lengths, chunks, strict=True):
        tokens = generator.choices(range(min(vocab_size, 1009)), k=length + DECODED_TOKENS)
        cases.append(_ProbeSequence(tokens=tuple(tokens), chunks=chunk_tokens))
    return tuple(cases)


class _Judge:
    """Decides whether a layout is right, with one prompt per length, or several if in doubt."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        *,
        adapters: Adapters | None = None,
        adapter_names: Sequence[str] = ("", "", ""),
    ) -> None:
        """adapter_names: the adapter of each of the probe's three sequences; empty: none."""
        self._model = model
        self._vocab_size = vocab_size
        self._adapters = adapters
        self._adapter_names = adapter_names
        self.first_reference = self._reference(0)

    def _reference(self, seed: int) -> _Reference:
        """The expected logits of three sequences. seed: for their tokens."""
        cases = _probe_sequences(self._model, self._vocab_size, seed=seed)
        with_adapters = (
            replace(case, adapter=name)
            for case, name in zip(cases, self._adapter_names, strict=True)
        )
        return _Reference(self._model, tuple(with_adapters), self._adapters)

    def trial_of(self, runner: Runner) -> Trial:
        """Try a layout. Raises the exceptions of the model in this layout."""
        logits = _run_staggered(runner, self.first_reference.cases)
        error = self.first_reference.relative_error(logits)
        note = f"relative error {error:.1e}"
        first_prompt_bound = RIGHT_AT_FIRST_PROMPT[self.first_reference.logit_bytes]
        is_right = error <= max(RIGHT_RELATIVE_ERROR, self.first_reference.rounding)
        if not is_right and math.isfinite(error):
            is_right = (
                float(self.first_reference.divergences(logits).max())
                <= first_prompt_bound * self.first_reference.divergence_effect
            )
            if not is_right:
                is_right, why = self._judge_several_prompts(runner, logits)
                note += f", {why}"
        return Trial(variant=runner.variant, relative_error=error, note=note, is_right=is_right)

    def _judge_several_prompts(
        self, runner: Runner, first_logits: list[mx.array]
    ) -> tuple[bool, str]:
        """Try further prompts. Returns whether the layout is right, and the measurements as text.

        first_logits: the logits of the three sequences of the first prompt.
        """
        other_logits = [
            _run_staggered(runner, reference.cases) for reference in self._references[1:]
        ]
        divergence, agreement = self._divergence_and_agreement([first_logits, *other_logits])
        is_right = divergence <= self._allowed_divergence and agreement >= LEAST_AGREEMENT
        figures = (
            f"divergence {divergence:.2f} (median of {PROMPTS} prompts at the worst position; "
            f"allowed {self._allowed_divergence:.2f})"
        )
        return is_right, f"{figures}, the most probable token agrees in {agreement:.0%}"

    def _divergence_and_agreement(
        self, logits_by_prompt: list[list[mx.array]]
    ) -> tuple[float, float]:
        """Returns the median divergence at the worst position, relative to the effect of a changed
        token, and the share of positions at which the most probable tokens agree.

        logits_by_prompt: for each of `_references`, what `_run_staggered` returned.
        """
        pairs = list(zip(self._references, logits_by_prompt, strict=True))
        by_position = np.stack([reference.divergences(logits) for reference, logits in pairs])
        agreement = np.stack([reference.agreements(logits) for reference, logits in pairs])
        effect = np.median([reference.divergence_effect for reference in self._references])
        worst = float(np.median(by_position, axis=0).max()) / float(effect or 1.0)
        return (worst if math.isfinite(worst) else math.inf), float(agreement.mean())

    @cached_property
    def _references(self) -> list[_Reference]:
        """The expected logits for all prompts; computed only if the first prompt does not decide."""
        return [self.first_reference, *(self._reference(seed) for seed in range(1, PROMPTS))]

    @cached_property
    def _allowed_divergence(self) -> float:
        """The allowed divergence. It is larger than usual if the results of mlx-lm itself change
        when a prompt is prefilled in chunks instead of whole.
        """
        mlx_lm_runner = SoloRunner(self._model, None)
        mlx_lm_runner.adapters = self._adapters
        noise, _ = self._divergence_and_agreement(
            [_run_staggered(mlx_lm_runner, reference.cases) for reference in self._references]
        )
        size = self.first_reference.logit_bytes
        if not math.isfinite(noise):
            return RIGHT_DIVERGENCE[size]
        return max(RIGHT_DIVERGENCE[size], min(NOISE_FACTOR * noise, LARGEST_DIVERGENCE[size]))


class _Reference:
    """The expected logits, computed by mlx-lm for one sequence at a time, and the scale by which
    errors of a layout's logits are divided.
    """

    def __init__(
        self, model: Any, cases: tuple[_ProbeSequence, ...], adapters: Adapters | None = None
    ) -> None:
        """cases: the sequences. adapters: those of the model, if the cases use adapters."""
        self.cases = cases
        self._model = model
        self._expected = [_expected_logits(model, case, adapters) for case in cases]
        changed = [
            _expected_logits(
                model,
                replace(case, tokens=(case.tokens[0], case.tokens[1] ^ 1, *case.tokens[2:])),
                adapters,
            )
            for case in cases
        ]
        mx.eval(self._expected, changed)
        effects = [_distance(a, b) for a, b in zip(self._expected, changed, strict=True)]
        # the effect of changing one token: the largest change of a logit, and the largest divergence
        self._token_effect = max(filter(math.isfinite, effects), default=0.0) or 1.0
        divergences = self.divergences(changed)
        self.divergence_effect = (
            float(divergences.max(initial=0.0, where=np.isfinite(divergences))) or 1.0
        )

    @property
    def logit_bytes(self) -> int:
        return self._expected[0].dtype.size

    @property
    def is_coarse(self) -> bool:
        """Whether the model rounds to 16 bits, so that correct results may differ a lot."""
        return self.logit_bytes < mx.float32.size

    @property
    def rounding(self) -> float:
        """The relative error that rounding the logits alone may cause."""
        return ROUNDINGS * float(mx.finfo(self._expected[0].dtype).eps)

    def hidden_size_of(self, head: ProjectionHook) -> int:
        """The size of the hidden states of rows whose projection the hook can defer; 0 if it
        cannot, or if projecting them later does not give the model's logits.
        """
        ids = mx.array([self.cases[1].tokens])
        with head.selecting(None, deferred=mx.arange(ids.size)):
            direct_logits = self._model(ids, cache=mlx_lm_caches(self._model))[0]
        deferred = head.take_deferred()
        if deferred is None:
            return 0
        try:
            error = _distance(direct_logits, head.project(deferred)) / self._token_effect
        except LAYOUT_ERRORS:
            return 0
        return deferred.shape[-1] if error <= RIGHT_DIVERGENCE[self.logit_bytes] else 0

    def relative_error(self, got: list[mx.array]) -> float:
        """The largest deviation of a logit, relative to the effect of a changed token; infinite if
        a logit is not a number. got: what `_run_staggered` returned.
        """
        return (
            max(_distance(a, b) for a, b in zip(self._expected, got, strict=True))
            / self._token_effect
        )

    def divergences(self, got: list[mx.array]) -> Numbers:
        """Square root of the KL divergence from the expected distribution of the next token:
        [cases, sampled tokens].
        """
        return np.stack([_divergence(a, b) for a, b in zip(self._expected, got, strict=True)])

    def agreements(self, got: list[mx.array]) -> NDArray[np.bool_]:
        """Whether the most probable token is the expected one, bool [cases, compared positions]."""
        pairs = zip(self._expected, got, strict=True)
        return np.stack([np.array(a.argmax(axis=-1) == b.argmax(axis=-1)) for a, b in pairs])


def is_close(got: mx.array, expected: mx.array, *, changed: mx.array) -> bool:
    """Whether logits, [vocabulary], are the expected ones except for rounding. changed: the logits
    after a change of the prompt, whose effect is the scale of errors.
    """
    rounding = ROUNDINGS * float(mx.finfo(expected.dtype).eps)
    if _distance(got, expected) <= max(RIGHT_RELATIVE_ERROR, rounding) * _distance(
        changed, expected
    ):
        return True
    divergence = float(_divergence(expected[None], got[None])[0])
    allowed = RIGHT_DIVERGENCE[expected.dtype.size]
    return divergence <= allowed * float(_divergence(expected[None], changed[None])[0])


def _divergence(expected: mx.array, got: mx.array) -> Numbers:
    """Square root of the KL divergence of each row; NaN if a logit is not a number."""
    p = _log_probabilities(expected)
    q = _log_probabilities(got)
    # -inf in both: no difference
    difference = np.subtract(p, q, out=np.zeros_like(p), where=p != q)
    weights = np.exp(p)
    terms = np.multiply(weights, difference, out=np.zeros_like(p), where=weights > 0)
    roots: Numbers = np.sqrt(np.maximum(terms.sum(axis=-1), 0.0))
    return roots


def _log_probabilities(logits: mx.array) -> Numbers:
    """The log-softmax of each row, in double precision."""
    wide = np.array(logits.astype(mx.float32)).astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    result: Numbers = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _distance(a: mx.array, b: mx.array) -> float:
    """The largest absolute difference; infinite if one is NaN. Equal infinities do not differ: some
    models mask tokens with them.
    """
    a = a.astype(mx.float32)
    b = b.astype(mx.float32)
    distance = float(mx.where(a == b, 0.0, mx.abs(a - b)).max())
    return math.inf if math.isnan(distance) else distance


def _expected_logits(model: Any, case: _ProbeSequence, adapters: Adapters | None) -> mx.array:
    """Logits after the prompt and after each later token, computed through mlx-lm's own caches.

    Returns [1 + later tokens, vocabulary].
    """
    caches = mlx_lm_caches(model)
    prompt_tokens = sum(case.chunks)
    run = model if adapters is None else partial(adapters.call, case.adapter, model)
    pieces = [case.tokens[:prompt_tokens], *((token,) for token in case.tokens[prompt_tokens:])]
    return mx.concatenate([run(mx.array([piece]), cache=caches)[0, -1:] for piece in pieces])


def _run_staggered(
    runner: Runner, cases: tuple[_ProbeSequence, ...], form: KVBits = "native"
) -> list[mx.array]:
    """Run the cases in steps, as the scheduler would. Returns, for each case, logits of the same
    shape as `_expected_logits`.
    """
    sequences = [
        _engine_sequence(case, runner.fresh_layers(form, block_tokens=PROBED_BLOCK_TOKENS), index)
        for index, case in enumerate(cases)
    ]
    queues = [
        _spans(
            case,
            str(index),
            range(0, len(case.tokens), PROBED_BLOCK_TOKENS)
            if sequences[0].live.is_quantized and runner.ends_spans_at_blocks
            else (),
        )
        for index, case in enumerate(cases)
    ]
    logits_of_case: list[list[mx.array]] = [[] for _ in cases]
    step = 0
    while any(queues):
        # each sequence joins one step after the previous one
        active = [index for index, queue in enumerate(queues) if queue and index <= step]
        spans = [SequenceSpan(sequences[index], queues[index].pop(0)) for index in active]
        for index, each in zip(active, spans, strict=True):
            sequences[index].sampled = mx.array([cases[index].tokens[each.span.start]])
        # The backend may leave attention over short contexts to MLX, so it is made to compute it in
        # every other step.
        backend_context = StepContext(backend=runner.backend.eager(), computes_whole_steps=False)
        context = backend_context if step % 2 == 0 else StepContext()
        logits = runner.forward(spans, context).to_sample
        mx.eval(logits, [list(each.sequence.live.arrays()) for each in spans])
        row = 0
        for index, each in zip(active, spans, strict=True):
            if each.span.samples and logits is not None:
                logits_of_case[index].append(logits[row : row + 1])
                row += 1
        step += 1
    return [mx.concatenate(rows) for rows in logits_of_case]


def _engine_sequence(case: _ProbeSequence, layers: list[Layer], index: int) -> EngineSequence:
    """An empty sequence that runs this case. index: of the case; also its request id."""
    request = SequenceRequest(
        request_id=str(index),
        prompt_token_ids=TokenIds.of(case.tokens[: sum(case.chunks)]),
        max_tokens=DECODED_TOKENS,
        sampling=SamplingParams(temperature=0.0, seed=0),
        adapter=case.adapter,
    )
    sequence = EngineSequence.begin(request, live=LiveState(layers), vocab_size=1)
    sequence.live.reserve(len(case.tokens))
    return sequence


def _spans(case: _ProbeSequence, request_id: str, boundaries: Iterable[int]) -> list[Span]:
    """The spans of the prompt's chunks and of the decoded tokens, also cut at `boundaries`."""
    prompt_tokens = sum(case.chunks)
    ends = {*itertools.accumulate(case.chunks), *range(prompt_tokens + 1, len(case.tokens) + 1)}
    edges = sorted({0, *ends, *boundaries})
    return [
        Span(request_id=request_id, start=start, tokens=end - start, samples=end >= prompt_tokens)
        for start, end in itertools.pairwise(edges)
    ]


# -- kernels for long contexts


def warnings_about_kernels(model: Any, *, force: bool = False) -> tuple[str, ...]:
    """Warnings if this model's attention over long contexts is wrong on this device; else empty.

    Device thread only. force: check even if MLX has no fused kernels here; only fused kernels
    differ between short and long contexts.
    """
    if in_use().composes_attention and not force:
        return ()
    with recorded_shapes() as shapes:
        mx.eval(model(mx.array([[0]]), cache=mlx_lm_caches(model)))
    faults = [
        fault
        for shape in sorted(shapes)
        for keys in KEYS
        for queries in QUERIES
        for fault in _faults(shape, keys, queries)
    ]
    mx.clear_cache()
    warnings = [
        f"decoding over quantized keys and values is slower on this device. Why: {name} is wrong "
        "over slices of an array or refuses them, so they are copied first. What to do: install "
        "another version of mlx"
        for name in sorted(wrong_over_slices())
    ]
    if not faults:
        return tuple(warnings)
    return (
        *warnings,
        "answers after long prompts may be wrong on this device. Why: compared with float32, "
        f"{'; '.join(faults)}. What to do: "
        "install another version of mlx, or run the model with --device cpu",
    )


def _faults(shape: AttentionShape, keys: int, queries: int) -> list[str]:
    """What is wrong with attention of this shape, as a list of at most one text."""
    dimensions = (
        f"{shape.heads} heads, {shape.kv_heads} key heads, dimension {shape.head_dimension}"
    )
    count = "1 query" if queries == 1 else f"{queries:,} queries"
    what = f"attention of {count} over {keys:,} keys ({dimensions})"
    try:
        error = attention_error(shape, keys=keys, queries=queries)
    except (RuntimeError, ValueError, TypeError) as refusal:  # an unsupported operation
        first_line = str(refusal).partition("\n")[0]
        return [f"{what} fails ({first_line})"]
    if error <= ALLOWED_ERROR[shape.dtype_bytes]:
        return []
    return [f"{what} is off by {error:.2f} of the largest value"]


def attention_error(shape: AttentionShape, *, keys: int, queries: int) -> float:
    """The largest error of the fused attention kernel, relative to the largest float32 value."""
    dtype = mx.bfloat16 if shape.dtype_bytes == 2 else mx.float32
    shape_of_keys = (1, shape.kv_heads, keys, shape.head_dimension)
    random_keys = mx.random.normal(shape_of_keys, key=mx.random.key(0)).astype(dtype)
    values = mx.random.normal(shape_of_keys, key=mx.random.key(1)).astype(dtype)
    compared_queries = min(queries, COMPARED_QUERIES)
    queries_per_call = shape.heads * compared_queries
    target_keys = _target_keys(queries_per_call, visible_keys=keys - compared_queries + 1)
    errors = []
    for start in range(0, len(target_keys), queries_per_call):
        queries_of_call = _queries_at_keys(
            shape, random_keys, target_keys[start : start + queries_per_call]
        ).astype(dtype)
        all_queries = mx.tile(queries_of_call, (1, 1, -(-queries // compared_queries), 1))[
            :, :, -queries:
        ]
        mask = "causal" if queries > 1 else None
        fused = mx.fast.scaled_dot_product_attention(
            all_queries, random_keys, values, scale=shape.scale, mask=mask
        )
        exact = _exact_attention(queries_of_call, random_keys, values, scale=shape.scale)
        difference = mx.abs(fused[:, :, -compared_queries:].astype(mx.float32) - exact).max()
        errors.append(float(difference / mx.abs(exact).max()))
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _target_keys(queries_per_call: int, *, visible_keys: int) -> list[int]:
    """The index of the key that each query shall attend to. Half of them are at the boundaries or
    the last key; the other half is spread evenly over the keys that all queries see.

    queries_per_call: the number of keys returned is a multiple of this.
    """
    special = [key for key in (*BOUNDARIES, visible_keys - 1) if key < visible_keys]
    count = -(-2 * len(special) // queries_per_call) * queries_per_call
    spread = [index * visible_keys // count for index in range(count)]
    return [
        special[index // 2 % len(special)] if index % 2 else key for index, key in enumerate(spread)
    ]


def _queries_at_keys(
    shape: AttentionShape, random_keys: mx.array, target_keys: list[int]
) -> mx.array:
    """Queries that each give about half of their attention to their target key: [1, heads, queries,
    head_dim]. The score of that key is the logarithm of the number of keys; the others are near 0.
    """
    compared_queries = len(target_keys) // shape.heads
    queries_per_kv_head = shape.heads // shape.kv_heads
    kv_head_of_query = mx.array(
        [index // compared_queries // queries_per_kv_head for index in range(len(target_keys))]
    )
    keys = random_keys[0, kv_head_of_query, mx.array(target_keys)].astype(mx.float32)
    wanted_score = math.log(random_keys.shape[2]) / shape.scale
    queries = keys * (wanted_score / (keys * keys).sum(axis=-1, keepdims=True))
    return queries.reshape(1, shape.heads, compared_queries, shape.head_dimension)


def _exact_attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float
) -> mx.array:
    """Attention by plain products in float32. The queries belong to the last tokens, and each sees
    the keys up to its own token.
    """
    _, heads, query_count, size = queries.shape
    _, kv_heads, tokens, _ = keys.shape
    grouped = queries.astype(mx.float32).reshape(1, kv_heads, -1, size)
    last_visible = mx.tile(mx.arange(tokens - query_count, tokens), heads // kv_heads)[:, None]
    with mx.stream(mx.cpu):  # not on the GPU that is checked
        scores = (grouped * scale) @ keys.astype(mx.float32).swapaxes(-1, -2)
        masked_scores = mx.where(mx.arange(tokens) <= last_visible, scores, -mx.inf)
        attended = mx.softmax(masked_scores, axis=-1) @ values.astype(mx.float32)
    return attended.reshape(queries.shape)
