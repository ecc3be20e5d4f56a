"""The simulated device: a toy model in the real engine, over real states of keys and values.

The keys and values of a token depend on the token and its position alone, and the next token is a
hash of the sums of all keys and values before it. So any key or value that is wrong, foreign,
missing or twice there changes the text. All are whole numbers from 0 to 15, which survive any form of
quantization if they are rounded, so that the same oracle holds for all forms.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.mlx_lm_hooks import StepLogits
from holdfast.worker.engine.plan import BLOCK_TOKENS, SpanResult, StepPlan
from holdfast.worker.engine.sequence import SequenceSpan
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import Layer
from holdfast.worker.kv.quantized import QuantizedKV
from tests.simulation.world import World

BUNDLED = Path(__file__).parents[2] / "src/holdfast/models/bundled/holdfast-demo"
DIMENSION = 32  # numbers in a key, as many as one group of quantized ones
LEVELS = 16
END_TOKEN = 2  # <|im_end|>
ONE_IN = 60  # so many answers end after a token
ONE_WIDE_IN = 6  # so many groups of four tokens begin with a character of several bytes
PEAK = 1e4  # the logit of the only token that is possible
_PRIME = np.uint64(0x9E3779B97F4A7C15)


@cache
def tokenizer() -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@cache
def plain_tokens() -> list[int]:
    """Tokens that are words or parts of words, which no parser of answers reads as markup."""
    found = tokenizer()
    size = found.get_vocab_size()
    texts = [found.decode([token], skip_special_tokens=False) for token in range(size)]
    return [token for token, text in enumerate(texts) if re.fullmatch(" ?[A-Za-z]+", text)]


@cache
def wide_characters() -> list[list[int]]:
    """Characters of several bytes, each as its tokens: of four at most, one for each byte."""
    return [tokenizer().encode(each).ids for each in "éßñ→日語🎉🦊"]


@lru_cache(maxsize=1 << 12)
def _wide_token(position: int, weights: str) -> int | None:
    """A token of a character of several bytes, which begin at some positions divisible by four."""
    group, place = divmod(position, 4)
    digest = hashlib.blake2b(f"{group} {weights} wide".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    characters = wide_characters()
    tokens = characters[number // ONE_WIDE_IN % len(characters)]
    return tokens[place] if number % ONE_WIDE_IN == 0 and place < len(tokens) else None


@lru_cache(maxsize=1 << 16)
def _rows(token: int, position: int, weights: str) -> np.ndarray[Any, Any]:
    """The key and the value of a token: float32 [2, DIMENSION]."""
    seed = f"{token} {position} {weights}".encode()
    digest = np.frombuffer(hashlib.blake2b(seed, digest_size=2 * DIMENSION).digest(), np.uint8)
    rows = (digest % LEVELS).astype(np.float32).reshape(2, DIMENSION)
    rows[:, 0], rows[:, 1] = 0.0, LEVELS - 1.0  # every group has the whole range
    return rows


def rows_of(tokens: Sequence[int], start: int, weights: str) -> np.ndarray[Any, Any]:
    """Keys and values: float32 [2, tokens, DIMENSION]."""
    if not len(tokens):
        return np.zeros((2, 0, DIMENSION), np.float32)
    return np.stack(
        [_rows(token, start + place, weights) for place, token in enumerate(tokens)], axis=1
    )


def next_token(sums: np.ndarray[Any, Any], position: int, weights: str) -> int:
    """The token after `position` tokens with these sums of keys and values, [2, DIMENSION]."""
    exact = np.rint(sums).astype(np.int64).tobytes()
    digest = hashlib.blake2b(exact + f"{position} {weights}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    if number % ONE_IN == 0:
        return END_TOKEN
    wide = _wide_token(position, weights)
    if wide is not None:
        return wide
    plain = plain_tokens()
    return plain[number // ONE_IN % len(plain)]


class Oracle:
    """What the model with these weights would say, computed from the tokens alone."""

    def __init__(self, weights: str) -> None:
        self._weights = weights

    def answer(self, prompt: Sequence[int], *, max_tokens: int) -> list[int]:
        """The tokens of an answer, the end token included."""
        sums = rows_of(prompt, 0, self._weights).sum(axis=1)
        position = len(prompt)
        answer: list[int] = []
        while len(answer) < max_tokens:
            answer.append(next_token(sums, position, self._weights))
            if answer[-1] == END_TOKEN:
                break
            sums = sums + _rows(answer[-1], position, self._weights)
            position += 1
        return answer


class ToyRunner(Runner):
    """Runs the toy model, one span after the other."""

    name = variant = "rows"
    mixes_chunks = True

    def __init__(self, weights: str, *, vocab_size: int) -> None:
        super().__init__(None, None)
        self._weights = weights
        self._vocab_size = vocab_size
        self.is_poisoned = False  # the next step computes NaN

    def fresh_layers(
        self, kv_bits: KVBits = "native", *, block_tokens: int = BLOCK_TOKENS
    ) -> list[Layer]:
        if kv_bits == "native":
            return [FullKV()]
        (pair,) = self._heads_forms
        return [QuantizedKV(BITS[kv_bits], form=pair, block_tokens=block_tokens)]

    def refusal(self) -> str:
        return ""

    def forward(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        fresh = [self._append(each) for each in spans]
        mx.eval([array for each in spans for array in each.sequence.live.arrays()])
        rows = [
            row for each, new in zip(spans, fresh, strict=True) for row in self._logits(each, new)
        ]
        if not rows:
            return StepLogits(is_computed=True)
        return StepLogits(to_sample=mx.array(np.stack(rows)), is_computed=True)

    _run = forward  # type: ignore[assignment]

    def _append(self, each: SequenceSpan) -> np.ndarray[Any, Any]:
        """Add the span's keys and values; returns them, [2, tokens, DIMENSION]."""
        (layer,) = each.sequence.live.layers
        assert isinstance(layer, FullKV | QuantizedKV)
        fresh = rows_of(self._tokens(each), each.span.start, self._weights)
        if self.is_poisoned:
            fresh = np.full_like(fresh, np.nan)
        layer.append(mx.array(fresh[:1, None]), mx.array(fresh[1:, None]))
        return fresh

    def _logits(
        self, each: SequenceSpan, fresh: np.ndarray[Any, Any]
    ) -> list[np.ndarray[Any, Any]]:
        span = each.span
        if not each.wanted_rows:
            return []
        sums = self._sums(each.sequence.live.layers[0], span.start + span.tokens)
        found = []
        for row in reversed(each.wanted_rows):
            past = fresh[:, row + 1 :].sum(axis=1)  # tokens that this row does not see
            logits = np.zeros(self._vocab_size, np.float32)
            if np.isfinite(sums).all():
                logits[next_token(sums - past, span.start + row + 1, self._weights)] = PEAK
            else:
                logits[:] = np.nan
            found.append(logits)
        return found[::-1]

    def _sums(self, layer: Layer, tokens: int) -> np.ndarray[Any, Any]:
        """The sums of all keys and of all values, [2, DIMENSION]."""
        sums = np.zeros((2, DIMENSION))
        if isinstance(layer, FullKV):  # without a further computation on the device
            for buffers, low, high in layer.stored(tokens):
                views = [np.array(each, copy=False)[:, :, low:high] for each in buffers]
                sums += np.concatenate(views, axis=1)[0].sum(axis=1)
            return sums
        assert isinstance(layer, QuantizedKV)
        for keys, values in layer.parts(tokens):
            # quantization moves a number by less than a half
            sums += [np.rint(np.array(each)).sum((0, 1, 2)) for each in (keys, values)]
        return sums

    def _tokens(self, each: SequenceSpan) -> list[int]:
        span, sequence = each.span, each.sequence
        if not each.is_decoding:
            known = np.array(sequence.known, copy=False)
            tokens: list[int] = known[span.start : span.start + span.tokens].tolist()
            return tokens
        if span.tokens == 1:
            return [sequence.last_token]
        return [*sequence.repeated, sequence.last_token, *span.drafted]


class SimulatedFailure(RuntimeError):
    """The simulated device fails, as a real one does with a RuntimeError."""


class Fault(enum.Enum):
    """What a step of the device may do instead."""

    ERROR = "raises an error"
    NAN = "computes NaN"
    SLOW = "is slow"
    HANG = "hangs"
    DIES = "kills its process"


@dataclass(kw_only=True)
class Costs:
    """How long a step takes."""

    step_seconds: float = 0.004
    row_seconds: float = 0.0005
    token_seconds: float = 0.0002

    def of(self, plan: StepPlan) -> float:
        tokens = sum(span.tokens for span in plan.spans)
        return self.step_seconds + self.row_seconds * len(plan.spans) + self.token_seconds * tokens


class SimulatedEngine(Engine):
    """The real engine on the toy model; a step takes time and may fail."""

    world: World
    costs: Costs
    faults: list[Fault | None]  # of the next steps
    is_broken = False

    def dispatch(self, plan: StepPlan) -> PendingStep:
        fault = self.faults.pop(0) if self.faults else None
        if self.is_broken or self.world.fails("step"):
            fault = Fault.ERROR
        seconds = self.costs.of(plan) * self.world.random.uniform(0.8, 1.25)
        if fault is not None:
            self.world.tell(f"a step of {self.world.here.name} {fault.value}")
        if fault is Fault.SLOW:
            seconds += self.world.random.uniform(1.0, 20.0)
        if fault is Fault.HANG:
            seconds = 1e9
        runner = self._runner
        assert isinstance(runner, ToyRunner)
        runner.is_poisoned = fault is Fault.NAN
        pending = super().dispatch(plan)
        runner.is_poisoned = False
        self._later[id(pending)] = (seconds, fault)
        return pending

    _later: dict[int, tuple[float, Fault | None]]

    def collect(self, pending: PendingStep) -> tuple[SpanResult, ...]:
        seconds, fault = self._later.pop(id(pending))
        self.world.block(seconds)
        if fault is Fault.ERROR:
            super().collect(pending)
            raise SimulatedFailure("the simulated device failed in this step")
        if fault is Fault.DIES:
            self.world.here.kill()
            self.world.block()
        return super().collect(pending)

    def check_device(self) -> None:
        if self.is_broken:
            raise SimulatedFailure("the simulated device is broken")


def make_engine(world: World, *, weights: str, vocab_size: int, costs: Costs) -> SimulatedEngine:
    """An engine on the toy model."""
    engine = SimulatedEngine(ToyRunner(weights, vocab_size=vocab_size), vocab_size=vocab_size)
    engine.world, engine.costs, engine.faults, engine._later = world, costs, [], {}
    return engine
