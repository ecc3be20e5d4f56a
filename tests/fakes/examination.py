"""Examines one architecture: whether it loads, which layout the probe chooses, and whether the
equalities hold. Every result is compared with mlx-lm's own caches and one sequence alone.

The prompts are longer than the windows, chunks and numbers of selected keys of the tiny models.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import TokenLogprob
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.load import load_model
from holdfast.worker.engine.plan import CopyPolicy, Span, StepPlan
from holdfast.worker.engine.probe import choose_layout, probe_kv_forms
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.codec import PayloadFormat, to_bytes
from holdfast.worker.kv.live import LiveState, Snapshot
from tests.fakes.interleaving import play, random_sequences
from tests.fakes.tiny_configs import VOCAB_SIZE
from tests.fakes.tiny_models import make_model, write_model

# in log-probability; float32 rounds to 1e-5 here, and a wrong mask or position moves it by 0.1
TOLERANCE = 2e-3
PROMPT_TOKENS = 45
BOUNDARY = 29  # where the cached prefix ends: no multiple of a block, chunk or window
DECODED = 5
BLOCK_TOKENS = 16
RIGHT = "right"
WRONG = "wrong"
ATTEMPTS = 3
KV_BITS: tuple[KVBits, ...] = ("8", "4")
# in log-probability: where rounding moves a value across the border of two codes, a key changes by a
# step of quantization
QUANTIZED_TOLERANCE = {"8": 5e-3, "4": 5e-2}
ROUNDINGS = 6
PRECISION = 3e-7
# in log-probability, from the same model with native keys and values; selecting another key or
# expert is a large change in a tiny model
LARGEST_LOSS = {"8": 1.0, "4": 3.0}


@dataclass(kw_only=True)
class Finding:
    """The result for one architecture.

    failed_at: "" or the stage at which an error ended the examination, with `error`.
    batched, cached, restored: the largest deviation of a log-probability from mlx-lm alone; None:
    not examined, because the model is not cached or an earlier stage failed.
    quantized: for each of KV_BITS RIGHT, the reason for its refusal, or the equalities that do not
        hold. Empty if no layer grows.
    """

    name: str
    layout: str = ""
    variant: str = ""
    reason: str = ""
    failed_at: str = ""
    error: str = ""
    remembers: bool = False
    batched: float | None = None
    cached: float | None = None
    restored: float | None = None
    kinds: list[str] = field(default_factory=list)
    quantized: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0  # of CPU time

    @property
    def wrong(self) -> list[str]:
        """The equalities that do not hold."""
        found = {"batched": self.batched, "cached": self.cached, "restored": self.restored}
        wrong = [name for name, error in found.items() if error is not None and error > TOLERANCE]
        return wrong + [
            f"{kv_bits} bit {text}" for kv_bits, text in self.quantized.items() if WRONG in text
        ]


def examine(
    name: str, config: Mapping[str, Any], folder: Path, *, wide: Mapping[str, Any] | None = None
) -> Finding:
    """Examine the tiny random model with this configuration; `folder` is written to.

    wide: the configuration with heads that can be quantized; None: only native states are examined.
    """
    finding = Finding(name=name)
    stage = "building"
    try:
        write_model(folder, config)
        stage = "loading"
        model = load_model(folder, ModelSettings(), progress=lambda *_: None).model
        stage = "probing"
        runner = choose_layout(model, vocab_size=VOCAB_SIZE)
        finding.layout, finding.variant, finding.reason = (
            runner.name,
            runner.variant,
            runner.reason,
        )
        live = LiveState(runner.fresh_layers())
        finding.kinds = sorted({leaf.kind for leaf in live.leaves})
        finding.remembers = not live.is_foreign
        grows = any(leaf.grows for leaf in live.leaves)
        stage = "batched"
        finding.batched = batched_deviation(model, runner, name)
        if finding.remembers:
            stage = "cached"
            finding.cached, finding.restored = remembered_deviations(
                Examined(runner), partial(deviation, model), name
            )
        if grows and wide is not None:
            stage = "quantized"
            wide_model = make_model(wide)
            wide_runner = choose_layout(wide_model, vocab_size=VOCAB_SIZE)
            finding.quantized = examine_quantized(wide_runner, name)
    except Exception as error:  # every failure is a result
        finding.failed_at = stage
        finding.error = _one_line(error)
    return finding


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, ModelLoadError) and error.__cause__ else error
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text[:300]}"


def alone(model: nn.Module, prompt: tuple[int, ...], tokens: list[int]) -> np.ndarray[Any, Any]:
    """Log-probabilities of mlx-lm itself for each token after the prompt: [tokens, vocabulary]."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    rows = [model(mx.array([prompt]), cache=caches)[0, -1:]]
    rows += [model(mx.array([[token]]), cache=caches)[0] for token in tokens[:-1]]
    logits = mx.concatenate(rows).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def deviation(
    model: nn.Module, prompt: tuple[int, ...], tokens: list[int], scored: list[TokenLogprob]
) -> float:
    """The largest deviation of a log-probability from mlx-lm alone, over the sampled tokens and
    their alternatives, and how much less probable a sampled token is than the most probable one.
    """
    largest = 0.0
    for row, token, each in zip(alone(model, prompt, tokens), tokens, scored, strict=True):
        pairs = [(token, each.logprob), *each.top]
        errors = [abs(float(row[one]) - logprob) for one, logprob in pairs]
        errors.append(float(row.max() - row[token]))
        if any(math.isnan(error) for error in errors):
            return math.inf
        largest = max(largest, *errors)
    return largest


def examine_quantized(runner: Runner, seed: str) -> dict[str, str]:
    """The equalities with quantized keys and values, as in `Finding.quantized`."""
    runner = in_short_blocks(runner)
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    forms = probe_kv_forms(engine, runner, vocab_size=VOCAB_SIZE)
    return {
        kv_bits: (
            f"refused: {forms.refusal(kv_bits)}"
            if forms.refusal(kv_bits)
            else _examine_form(runner, kv_bits, seed)
        )
        for kv_bits in KV_BITS
    }


def _examine_form(runner: Runner, kv_bits: KVBits, seed: str) -> str:
    """Try other prompts if the first ones deviate: rounding may make a mixture of experts choose
    another expert for some prompts, but a wrong mask or position shows in all prompts.
    """
    text = ""
    for attempt in range(ATTEMPTS):
        text = _examine_prompts(runner, kv_bits, f"{seed} {attempt}")
        if text == RIGHT or "restored" in text:
            break
    return text


def _examine_prompts(runner: Runner, kv_bits: KVBits, seed: str) -> str:
    """Sequences are compared with the same ones alone, prefilled in one chunk, in the same form.
    The loss is the deviation of these from native ones.
    """
    examined = Examined(runner, kv_bits=kv_bits)

    tolerance = QUANTIZED_TOLERANCE[kv_bits]

    def from_alone(prompt: tuple[int, ...], tokens: list[int], scored: list[TokenLogprob]) -> float:
        expected = examined.alone(prompt, len(tokens))
        error = from_expected(expected, tokens, scored)
        is_rounding = error > tolerance and error <= examined.moved_by_rounding(prompt, expected)
        return 0.0 if is_rounding else error

    rng = random.Random(f"{seed} quantized")
    sequences = random_sequences(rng, vocab_size=VOCAB_SIZE, count=3, longest_prompt=56)
    play(
        examined.engine,
        sequences,
        rng,
        depth=1,
        kv_bits=kv_bits,
        block_tokens=examined.block_tokens,
    )
    found = {
        "batched": max(
            from_alone(each.prompt, each.tokens, each.logprobs) for each in sequences if each.tokens
        )
    }
    found["cached"], found["restored"] = remembered_deviations(
        examined, from_alone, f"{seed} quantized"
    )
    prompt = _random_prompt(rng, PROMPT_TOKENS)
    loss = from_expected(Examined(runner).alone(prompt, 1), *examined.alone(prompt, 1))
    wrong = [f"{name} {error:.0e}" for name, error in found.items() if error > tolerance]
    if not 0.0 < loss <= LARGEST_LOSS[kv_bits]:
        wrong.append(f"loss {loss:.0e}")
    return f"{WRONG}: {', '.join(wrong)}" if wrong else RIGHT


def in_short_blocks(runner: Runner) -> Runner:
    """A copy of the runner that quantizes blocks of `BLOCK_TOKENS` tokens."""
    short: Any = copy.copy(runner)
    short.fresh_layers = partial(type(runner).fresh_layers, short, block_tokens=BLOCK_TOKENS)
    return short  # type: ignore[no-any-return]


Drawn = tuple[list[int], list[TokenLogprob]]


def from_expected(expected: Drawn, tokens: list[int], scored: list[TokenLogprob]) -> float:
    """The largest deviation of a log-probability up to the first different token, and that token's
    loss in log-probability, which is at least that of the last known alternative.
    """
    largest = 0.0
    for token, score, other, got in zip(*expected, tokens, scored, strict=True):
        known = {token: score.logprob, **dict(score.top)}
        pairs = [(other, got.logprob), *got.top]
        errors = [abs(known[one] - logprob) for one, logprob in pairs if one in known]
        if token != other:
            errors.append(score.logprob - known.get(other, min(known.values())))
        if any(math.isnan(error) for error in errors):
            return math.inf
        largest = max(largest, *errors)
        if token != other:
            break
    return largest


def batched_deviation(model: nn.Module, runner: Runner, seed: str) -> float:
    """Play random sequences in a batch; compare each with mlx-lm alone."""
    rng = random.Random(seed)
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    sequences = random_sequences(rng, vocab_size=VOCAB_SIZE, count=6, longest_prompt=64)
    play(engine, sequences, rng, depth=1)
    return max(
        deviation(model, each.prompt, each.tokens, each.logprobs)
        for each in sequences
        if each.tokens
    )


@dataclass
class Saved:
    """The snapshots of one sequence."""

    blocks: list[Snapshot] = field(default_factory=list)
    states: dict[int, Snapshot] = field(default_factory=dict)

    def put(self, kept: Iterable[Snapshot]) -> None:
        for each in kept:
            if each.tokens:
                self.blocks.append(each)
            else:
                self.states[each.start] = each

    def prefix(self, tokens: int) -> list[Snapshot]:
        """The snapshots of the first `tokens` tokens."""
        blocks = [block for block in self.blocks if block.start + block.tokens <= tokens]
        return [*blocks, *([self.states[tokens]] if tokens in self.states else ())]

    def from_bytes(self, tokens: int, payloads: PayloadFormat, form: KVBits) -> list[Snapshot]:
        """As `prefix`, but each snapshot is written as bytes and read again."""
        return [
            payloads.snapshot(
                _bytes(to_bytes(each)),
                start=each.start,
                tokens=each.tokens,
                form=form if each.is_quantized or not each.tokens else "native",
            )
            for each in self.prefix(tokens)
        ]


def _bytes(views: tuple[memoryview, ...]) -> list[bytes]:
    return [bytes(view) for view in views]


class Examined:
    """An engine that runs sequences in one form of keys and values."""

    def __init__(self, runner: Runner, *, kv_bits: KVBits = "native") -> None:
        self.runner = runner
        self.engine = Engine(runner, vocab_size=VOCAB_SIZE)
        self.kv_bits: KVBits = kv_bits
        # spans end where blocks end; None: anywhere
        self.block_tokens = (
            BLOCK_TOKENS if kv_bits != "native" and runner.ends_spans_at_blocks else None
        )

    def alone(self, prompt: tuple[int, ...], tokens: int) -> Drawn:
        """The tokens of a sequence alone, with its prompt prefilled in one chunk."""
        return self.run("alone", prompt, edges=(), decoded=tokens)

    def moved_by_rounding(self, prompt: tuple[int, ...], expected: Drawn) -> float:
        """The deviation of the sequence alone if the weights change by the precision of float32."""
        model = self.runner.model
        weights = model.parameters()
        deviations = []
        for seed in range(ROUNDINGS):
            model.update(tree_map(partial(_rounded_otherwise, key=mx.random.key(seed)), weights))
            drawn = self.alone(prompt, len(expected[0]))
            deviations.append(from_expected(expected, *drawn))
        model.update(weights)
        return max(deviations)

    def run(
        self,
        request_id: str,
        prompt: tuple[int, ...],
        *,
        prefix: Sequence[Snapshot] = (),
        copy_policy: CopyPolicy | None = None,
        saved: Saved | None = None,
        edges: tuple[int, ...] = (11, BOUNDARY, BOUNDARY + 4),
        decoded: int = DECODED,
    ) -> Drawn:
        """Prefill in chunks with these edges, and decode. Returns tokens and their scores."""
        request = SequenceRequest(
            request_id=request_id,
            prompt_token_ids=TokenIds.of(prompt),
            max_tokens=64,
            sampling=SamplingParams(temperature=0.0, seed=0),
            want_logprobs=True,
            top_logprobs=4,
        )
        live = self.engine.open(
            request,
            capacity_tokens=64,
            form=self.kv_bits,
            snapshots=prefix,
            copy_policy=copy_policy,
        )
        assert live.tokens == (BOUNDARY if prefix else 0)
        within = range(0, len(prompt), self.block_tokens or len(prompt))
        cuts = sorted({live.tokens, *edges, *within, len(prompt)})
        spans = [
            Span(request_id=request_id, start=start, tokens=end - start, samples=end == len(prompt))
            for start, end in itertools.pairwise(at for at in cuts if at >= live.tokens)
        ]
        spans += [
            Span(request_id=request_id, start=len(prompt) + index, tokens=1, samples=True)
            for index in range(decoded - 1)
        ]
        tokens: list[int] = []
        scored: list[TokenLogprob] = []
        for span in spans:
            pending = self.engine.dispatch(StepPlan(spans=(span,)))
            (result,) = self.engine.collect(pending)
            assert not result.failure, result.failure
            tokens.extend(result.token_ids)
            scored.extend(result.logprobs)
            if saved is not None:
                saved.put(self.engine.take_copies(pending).get(request_id, ()))
        self.engine.close(request_id)
        return tokens, scored


def _rounded_otherwise(weight: mx.array, *, key: mx.array) -> mx.array:
    if weight.dtype != mx.float32:
        return weight
    return weight * (1 + PRECISION * mx.random.normal(weight.shape, key=key))


def remembered_deviations(
    examined: Examined,
    deviate: Callable[[tuple[int, ...], list[int], list[TokenLogprob]], float],
    seed: str,
) -> tuple[float, float]:
    """Save a sequence at a boundary; continue another prompt, and the same one, from the snapshots.

    deviate: how far the tokens and scores of a prompt are from the expected ones. Returns the
    largest deviation of the cached sequences, and that of sequences restored from bytes from the
    ones that were kept, which must be 0.
    """
    rng = random.Random(f"{seed} remembered")
    form = examined.engine.measure_costs().form
    assert form is not None
    payloads = PayloadFormat(model=form)
    prompt = _random_prompt(rng, PROMPT_TOKENS)
    saved = Saved()
    policy = CopyPolicy(block_tokens=BLOCK_TOKENS, boundaries=frozenset({BOUNDARY}))
    examined.run("kept", prompt, copy_policy=policy, saved=saved)
    cached = 0.0
    restored = 0.0
    for number, end in enumerate((prompt[BOUNDARY:], _random_prompt(rng, 9))):
        turn = prompt[:BOUNDARY] + end
        tokens, scored = examined.run(f"cached {number}", turn, prefix=saved.prefix(BOUNDARY))
        cached = max(cached, deviate(turn, tokens, scored))
        prefix = saved.from_bytes(BOUNDARY, payloads, examined.kv_bits)
        again = examined.run(f"restored {number}", turn, prefix=prefix)
        restored = max(restored, 0.0 if again == (tokens, scored) else 1.0)
    return cached, restored


def _random_prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))
