"""The simulated device: a toy model in the real engine, over real states of keys and values.

The keys and values of a token depend only on the token and its position, and the next token is a
hash of the sums of all earlier keys and values. So any key or value that is wrong, foreign, missing
or duplicated changes the text. All are integers from 0 to 15, which survive any form of quantization
if they are rounded, so one oracle serves for all forms.

The model has an order of preference of all tokens, so under a grammar, the next token is the first
one in this order that the grammar allows.

A model may have a second layer, on which the hash then depends, too: sliding-window or chunked
attention, of which only the last tokens are summed, or a recurrent state, which depends on the
order of all tokens.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from holdfast.worker.engine.constraints import Constraints, Grammars
from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.mlx_lm_hooks import StepLogits
from holdfast.worker.engine.plan import BLOCK_TOKENS, SpanResult, StepPlan
from holdfast.worker.engine.sequence import SequenceSpan
from holdfast.worker.engine.views import StepContext
from holdfast.worker.kv.bits import BITS, KVBits
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import Layer, LayerKV
from holdfast.worker.kv.quantized import QuantizedKV
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.window import ChunkKV, WindowKV
from tests.simulation.vision import with_images
from tests.simulation.world import World

BUNDLED = Path(__file__).parents[2] / "src/holdfast/models/bundled/holdfast-demo"
DIMENSION = 32  # of a key, the size of one quantization group
LEVELS = 16
VOCAB_SIZE = 1536  # of the bundled tokenizer
END_TOKEN = 2  # <|im_end|>
_END_TOKENS = [2, 0]  # also <|endoftext|>
ONE_IN = 60  # one in 60 tokens ends the answer
TERSE_ONE_IN = 3  # the same, of a terse model
ONE_WIDE_IN = 6  # one in 6 groups of four tokens begins with a multi-byte character
PEAK = 1e6  # the logit of the token that is chosen without a grammar
_STEP = 50.0  # at least, between two other logits: no random number makes up for it
_PRIME = 1543  # the first one after the size of the vocabulary
_RELAXED_ONE_IN = 3  # one in 3 tokens under a grammar is not the one chosen without it
_HEAD_TOKENS = 40  # of a conversation, which decide whether it may be deadly
SEEN_TOKENS = 100  # the length of a window or a chunk
_MODULUS = 251  # of the numbers in a recurrent state
_FACTOR = 3  # by which a recurrent state is multiplied with every token
_PHRASE_TOKENS = 8  # of a model that repeats itself
_PHRASES = 8
_NEW_PHRASE_ONE_IN = 6  # one in 6 tokens starts another phrase

SecondLayer: TypeAlias = Literal["none", "window", "chunk", "recurrent"]


@cache
def tokenizer() -> Tokenizer:
    """The bundled model's."""
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


@cache
def plain_tokens() -> list[int]:
    """Tokens that are words or parts of words, so that no parser of answers reads them as markup."""
    found = tokenizer()
    size = found.get_vocab_size()
    texts = [found.decode([token], skip_special_tokens=False) for token in range(size)]
    return [token for token, text in enumerate(texts) if re.fullmatch(" ?[A-Za-z]+", text)]


@cache
def _followers() -> dict[int, int]:
    """The next token of each token in a phrase; the first follows the last."""
    plain = plain_tokens()
    found = {}
    for start in range(0, _PHRASES * _PHRASE_TOKENS, _PHRASE_TOKENS):
        phrase = plain[start : start + _PHRASE_TOKENS]
        found |= dict(zip(phrase, (*phrase[1:], phrase[0]), strict=True))
    return found


@dataclass(frozen=True)
class Weights:
    """The toy model.

    second: the layer after the one with full attention. repeats: it repeats a few phrases, so that
    they can be drafted. adapters: names and versions of the weights.
    """

    name: str = ""
    second: SecondLayer = "none"
    repeats: bool = False
    is_terse: bool = False  # most answers are short, and many are empty
    adapters: tuple[tuple[str, int], ...] = ()

    def with_adapter(self, adapter: str) -> Weights:
        """The model with one of its adapters, or the model itself if the name is empty."""
        versions = dict(self.adapters)
        name = f"{self.name} with {adapter} {versions[adapter]}" if adapter else self.name
        return replace(self, name=name, adapters=())


def fingerprint_of(weights: Weights) -> str:
    """The fingerprint of the toy model with these weights."""
    return f"the toy model with the weights {weights.name}"


@cache
def wide_characters() -> list[list[int]]:
    """Multi-byte characters as tokens: one per byte, four at most."""
    return [tokenizer().encode(each).ids for each in "éßñ→日語🎉🦊"]


@lru_cache(maxsize=1 << 12)
def _wide_token(position: int, weights: Weights) -> int | None:
    """A token of a multi-byte character; these begin at some positions divisible by four."""
    group, place = divmod(position, 4)
    digest = hashlib.blake2b(f"{group} {weights.name} wide".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    characters = wide_characters()
    tokens = characters[number // ONE_WIDE_IN % len(characters)]
    return tokens[place] if number % ONE_WIDE_IN == 0 and place < len(tokens) else None


@lru_cache(maxsize=1 << 16)
def _digest(token: int, position: int, weights: str) -> bytes:
    """The bytes from which the key and the value of a token are made."""
    seed = f"{token} {position} {weights}".encode()
    return hashlib.blake2b(seed, digest_size=2 * DIMENSION).digest()


def rows_of(tokens: Sequence[int], start: int, weights: Weights) -> np.ndarray[Any, Any]:
    """Keys and values of the first layer: float32 [2, tokens, DIMENSION]."""
    digests = [_digest(token, start + place, weights.name) for place, token in enumerate(tokens)]
    numbers = np.frombuffer(b"".join(digests), np.uint8) % LEVELS
    rows = numbers.reshape(len(tokens), 2, DIMENSION).swapaxes(0, 1).astype(np.float32, order="C")
    rows[:, :, 0], rows[:, :, 1] = 0.0, LEVELS - 1.0  # every group has the whole range
    return rows


def _second_rows(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Keys and values of the second layer."""
    return np.roll(rows, 1, axis=0)


def _seen(second: SecondLayer, tokens: int) -> int:
    """How many of the last tokens the last one of `tokens` tokens sees in the second layer."""
    if second == "chunk":
        return 1 + (tokens - 1) % SEEN_TOKENS if tokens else 0
    return min(tokens, SEEN_TOKENS)


@cache
def _powers(tokens: int) -> np.ndarray[Any, Any]:
    """The factors of these tokens in a recurrent state: float64 [tokens, 1]."""
    powers = [pow(_FACTOR, tokens - 1 - place, _MODULUS) for place in range(tokens)]
    return np.array(powers, np.float64)[:, None]


def _advanced(state: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A recurrent state after more tokens. state: [2, DIMENSION]; rows: [2, tokens, DIMENSION]."""
    tokens = rows.shape[1]
    moved = state * pow(_FACTOR, tokens, _MODULUS) + (_powers(tokens) * rows).sum(axis=1)
    return np.asarray(moved % _MODULUS)


def next_token(sums: np.ndarray[Any, Any], position: int, last: int, weights: Weights) -> int:
    """The token after `position` tokens, of which `last` is the last.

    sums: of keys and values in the first layer, then the sums or the state of the second one, if
        there is one; [2 or 4, DIMENSION].
    """
    exact = np.rint(sums).astype(np.int64).tobytes()
    digest = hashlib.blake2b(exact + f"{position} {weights.name}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    plain = plain_tokens()
    one_in = TERSE_ONE_IN if weights.is_terse else ONE_IN
    if number % one_in == 0:
        return END_TOKEN
    number //= one_in
    if not weights.repeats:
        wide = _wide_token(position, weights)
        return plain[number % len(plain)] if wide is None else wide
    if number % _NEW_PHRASE_ONE_IN and last in _followers():
        return _followers()[last]
    return plain[number // _NEW_PHRASE_ONE_IN % (_PHRASES * _PHRASE_TOKENS)]


@cache
def _handicaps() -> np.ndarray[Any, Any]:
    """What is added to the places of tokens in every order. Those that end something move forwards, so
    that answers end; white space and special tokens come last.
    """
    found = np.zeros(VOCAB_SIZE, np.int64)
    for token in range(VOCAB_SIZE):
        text = tokenizer().decode([token], skip_special_tokens=False)
        if token == END_TOKEN or text.startswith(('"', "}", "]", "</tool", "<tool_call")):
            found[token] = -_PRIME // 2
        elif not text.strip() or re.fullmatch("<.*>", text):
            found[token] = _PRIME
    return found


def logits_of(
    sums: np.ndarray[Any, Any], position: int, last: int, weights: Weights, *, has_grammar: bool
) -> np.ndarray[Any, Any]:
    """The logits after `position` tokens, float32 [VOCAB_SIZE]. Without a grammar, `next_token` has the
    largest one; with a grammar, all are different.
    """
    logits = np.zeros(VOCAB_SIZE, np.float32)
    number = 1
    if has_grammar:
        exact = np.rint(sums).astype(np.int64).tobytes()
        seed = exact + f"{position} {weights.name} order".encode()
        digest = hashlib.blake2b(seed, digest_size=8).digest()
        number, factor = divmod(int.from_bytes(digest, "little"), _PRIME - 1)
        number, shift = divmod(number, _PRIME)
        places = (np.arange(VOCAB_SIZE) * (1 + factor) + shift) % _PRIME
        logits -= _STEP * (2 * (places + _handicaps()) + (_handicaps() < 0))
    if number % _RELAXED_ONE_IN:
        logits[next_token(sums, position, last, weights)] = PEAK
    return logits


@cache
def grammar_tokenizer() -> LLTokenizer:
    """The bundled model's, as llguidance's oracle needs it."""
    return LLTokenizer(tokenizer().to_str(), n_vocab=VOCAB_SIZE, eos_token=_END_TOKENS)


class Oracle:
    """The right answers of a model with these weights, computed from the tokens alone."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def answer(self, prompt: Sequence[int], *, max_tokens: int, grammar: str = "") -> list[int]:
        """The tokens of an answer, the end token included."""
        weights = self._weights
        matcher = LLMatcher(grammar_tokenizer(), grammar, log_level=0) if grammar else None
        rows = rows_of(prompt, 0, weights)
        sums = rows.sum(axis=1)
        state = _advanced(np.zeros((2, DIMENSION)), _second_rows(rows))
        tokens = list(prompt)
        answer: list[int] = []
        while len(answer) < max_tokens:
            parts = [sums]
            if weights.second == "recurrent":
                parts.append(state)
            elif weights.second != "none":
                parts.append(
                    _second_rows(rows[:, -_seen(weights.second, len(tokens)) :]).sum(axis=1)
                )
            seen = (np.concatenate(parts), len(tokens), tokens[-1], weights)
            answer.append(next_token(*seen) if matcher is None else _allowed(matcher, *seen))
            if answer[-1] == END_TOKEN:
                break
            row = rows_of(answer[-1:], len(tokens), weights)
            tokens.append(answer[-1])
            sums = sums + row[:, 0]
            state = _advanced(state, _second_rows(row))
            rows = np.concatenate((rows[:, -SEEN_TOKENS:], row), axis=1)
        return answer


def _allowed(matcher: LLMatcher, *seen: Any) -> int:
    """The next token under a grammar, which it adds to the matcher."""
    mask = np.frombuffer(matcher.compute_logit_bias(), np.uint8)
    token = int(np.where(mask, logits_of(*seen, has_grammar=True), -np.inf).argmax())
    assert matcher.consume_token(token), "the grammar refuses a token that it allows"
    return token


class ToyRunner(Runner):
    """Runs the toy model, one span after the other."""

    name = variant = "rows"
    mixes_chunks = True

    def __init__(self, weights: Weights) -> None:
        super().__init__(None, None)
        self._weights = weights
        self.is_poisoned = False  # the next step computes NaN
        self.is_failing = False  # the next step computes wrong keys and values

    def fresh_layers(
        self, form: KVBits = "native", *, block_tokens: int = BLOCK_TOKENS
    ) -> list[Layer]:
        first: Layer = FullKV()
        if form != "native":
            (pair,) = self._heads_forms
            first = QuantizedKV(BITS[form], form=pair, block_tokens=block_tokens)
        match self._weights.second:
            case "none":
                return [first]
            case "window":
                return [first, WindowKV(SEEN_TOKENS)]
            case "chunk":
                return [first, ChunkKV(SEEN_TOKENS)]
            case "recurrent":
                return [first, RecurrentState(1)]

    def refusal(self) -> str:
        return ""

    def forward(self, spans: Sequence[SequenceSpan], context: StepContext) -> StepLogits:
        passes = [self._pass_of(each) for each in spans]
        mx.eval([array for each in spans for array in each.sequence.live.arrays()])
        rows = [row for each in passes for row in self._logits(each)]
        self._end_pass(passes)
        if not rows:
            return StepLogits(is_computed=True)
        return StepLogits(to_sample=mx.array(np.stack(rows)), is_computed=True)

    _run = forward  # type: ignore[assignment]

    def _pass_of(self, each: SequenceSpan) -> _Pass:
        """Add the span's keys and values."""
        weights = self._weights.with_adapter(each.sequence.request.adapter)
        tokens = self._tokens(each)
        rows = rows_of(tokens, each.span.start, weights)
        if self.is_poisoned:
            rows = np.full_like(rows, np.nan)
        if self.is_failing:
            rows = LEVELS - 1 - rows
        found = _Pass(each, weights, tokens, rows)
        first, *second = each.sequence.live.layers
        assert isinstance(first, FullKV | QuantizedKV)
        first.append(mx.array(rows[:1, None]), mx.array(rows[1:, None]))
        for layer in second:
            rows = _second_rows(rows)
            if isinstance(layer, LayerKV):
                layer.append(mx.array(rows[:1, None]), mx.array(rows[1:, None]))
                continue
            assert isinstance(layer, RecurrentState)
            before = layer[0]
            state = np.zeros((2, DIMENSION)) if before is None else np.array(before)[0]
            certain = each.span.certain_tokens - 1
            found.states = [_advanced(state, rows[:, :certain])] if certain else [state]
            for place in range(certain, len(tokens)):
                found.states.append(_advanced(found.states[-1], rows[:, place : place + 1]))
            layer[0] = mx.array(found.states[-1][None].astype(np.float32))
        return found

    def _end_pass(self, passes: Sequence[_Pass]) -> None:
        """Leave the sequences' states as the real layouts do."""
        states = [each.layer for each in passes if each.span.is_row and each.states]
        if len(states) > 1:  # as rows of one array
            stack = mx.concatenate([layer[0] for layer in states])
            mx.eval(stack)
            for row, layer in enumerate(states):
                layer.set_row(0, stack, row)
        for each in passes:
            sequence = each.span.sequence
            sequence.is_trimmed = False
            if len(each.tokens) > 1:
                sequence.trim()
                mx.eval(list(sequence.live.arrays()))

    def _logits(self, each: _Pass) -> list[np.ndarray[Any, Any]]:
        span = each.span.span
        wanted = each.span.wanted_rows
        if not wanted:
            return []
        first, *second = each.span.sequence.live.layers
        sums = self._sums(first, span.start + span.tokens)
        found = []
        for row in wanted:
            end = span.start + row + 1
            past = each.rows[:, row + 1 :].sum(axis=1)  # tokens that this row does not see
            parts = [sums - past]
            if each.states:
                parts.append(each.states[row - wanted.start + 1])
            elif second:
                (layer,) = second
                later = span.start + span.tokens - end
                parts.append(self._window(layer, _seen(each.weights.second, end), later=later))
            if all(np.isfinite(part).all() for part in parts):
                seen = (np.concatenate(parts), end, each.tokens[row], each.weights)
                has_grammar = bool(each.span.sequence.request.grammar)
                found.append(logits_of(*seen, has_grammar=has_grammar))
            else:
                found.append(np.full(VOCAB_SIZE, np.nan, np.float32))
        return found

    def _window(self, layer: Layer, tokens: int, *, later: int) -> np.ndarray[Any, Any]:
        """The sums of `tokens` tokens, before the last `later` ones: [2, DIMENSION]."""
        assert isinstance(layer, WindowKV)
        ((buffers, low, high),) = layer.stored(tokens + later)
        assert low >= 0, "a window lacks tokens that are to be seen"
        views = [np.array(each, copy=False)[0, :, low : high - later] for each in buffers]
        return np.asarray(np.concatenate(views).sum(axis=1, dtype=np.float64))

    def _sums(self, layer: Layer, tokens: int) -> np.ndarray[Any, Any]:
        """The sums of all keys and of all values, [2, DIMENSION]."""
        sums = np.zeros((2, DIMENSION))
        if isinstance(layer, FullKV):  # without another computation on the device
            for buffers, low, high in layer.stored(tokens):
                views = [np.array(each, copy=False)[:, :, low:high] for each in buffers]
                sums += np.concatenate(views, axis=1)[0].sum(axis=1)
            return sums
        assert isinstance(layer, QuantizedKV)
        for keys, values in layer.parts(tokens):
            # quantization changes a number by less than a half
            sums += [np.rint(np.array(each)).sum((0, 1, 2)) for each in (keys, values)]
        return sums

    def _tokens(self, each: SequenceSpan) -> list[int]:
        span, sequence = each.span, each.sequence
        if not each.is_decoding:
            known = np.array(sequence.known_token_ids, copy=False)
            tokens: list[int] = known[span.start : span.start + span.tokens].tolist()
            return with_images(each, tokens)
        if span.tokens == 1:
            return [sequence.last_token]
        return [*sequence.repeated, sequence.last_token, *span.drafted]


@dataclass
class _Pass:
    """A span in a forward pass. rows: keys and values of its tokens in the first layer.

    states: of a recurrent layer, before the first wanted row and after each one; [2, DIMENSION].
    """

    span: SequenceSpan
    weights: Weights
    tokens: list[int]
    rows: np.ndarray[Any, Any]
    states: list[np.ndarray[Any, Any]] = field(default_factory=list)

    @property
    def layer(self) -> RecurrentState:
        layer = self.span.sequence.live.layers[1]
        assert isinstance(layer, RecurrentState)
        return layer


class SimulatedFailure(RuntimeError):
    """The simulated device fails, as a real one does with a RuntimeError."""


class Fault(enum.Enum):
    """How a step of the device fails."""

    ERROR = "raises an error"
    NAN = "computes NaN"
    SLOW = "is slow"
    HANG = "hangs"
    DIES = "kills its process"
    DEADLY = "computes a conversation that kills its process"


@dataclass(kw_only=True)
class Deadly:
    """Conversations that kill the worker that computes their tokens: of three kinds, which their first
    tokens decide, one. left: so many times.
    """

    kind: int = 0
    left: int = 0

    def is_hit(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt belongs to these conversations."""
        head = " ".join(map(str, prompt[:_HEAD_TOKENS]))
        return hashlib.blake2b(head.encode(), digest_size=1).digest()[0] % 3 == self.kind


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
    deadly: Deadly
    is_broken = False
    is_ahead = False

    @property
    def runs_ahead(self) -> bool:
        return self.is_ahead

    def dispatch(self, plan: StepPlan) -> PendingStep:
        fault = self.faults.pop(0) if self.faults else None
        if self.is_broken or self.world.fails("step"):
            fault = Fault.ERROR
        if fault is None and self.deadly.left and self._is_deadly(plan):
            self.deadly.left -= 1
            fault = Fault.DEADLY
        seconds = self.costs.of(plan) * self.world.random.uniform(0.8, 1.25)
        if fault is not None:
            self.world.tell(f"a step of {self.world.here.name} {fault.value}")
            self.world.on_fault(self.world.here, f"a step {fault.value}")
        if fault is Fault.SLOW:
            seconds += self.world.random.uniform(1.0, 20.0)
        if fault is Fault.HANG:
            seconds = 1e9
        runner = self._runner
        assert isinstance(runner, ToyRunner)
        runner.is_poisoned, runner.is_failing = fault is Fault.NAN, fault is Fault.ERROR
        pending = super().dispatch(plan)
        runner.is_poisoned = runner.is_failing = False
        self._later[id(pending)] = (seconds, fault)
        return pending

    def _is_deadly(self, plan: StepPlan) -> bool:
        requests = [self._sequences[span.request_id].request for span in plan.spans]
        return any(self.deadly.is_hit(each.prompt_token_ids) for each in requests)

    _later: dict[int, tuple[float, Fault | None]]

    def collect(self, pending: PendingStep) -> tuple[SpanResult, ...]:
        seconds, fault = self._later.pop(id(pending))
        self.world.block(seconds)
        if fault is Fault.ERROR:
            super().collect(pending)
            raise SimulatedFailure("the simulated device failed in this step")
        if fault in (Fault.DIES, Fault.DEADLY):
            self.world.here.kill()
            self.world.block()
        return super().collect(pending)

    def check_device(self) -> None:
        if self.is_broken:
            raise SimulatedFailure("the simulated device is broken")


def make_engine(
    world: World,
    *,
    weights: Weights,
    costs: Costs,
    runs_ahead: bool,
    deadly: Deadly,
) -> SimulatedEngine:
    """An engine on the toy model. runs_ahead: a step is dispatched before the last is collected."""
    grammars = Grammars(BUNDLED, vocab_size=VOCAB_SIZE)
    constraints = Constraints(grammars, vocab_size=VOCAB_SIZE)
    engine = SimulatedEngine(ToyRunner(weights), vocab_size=VOCAB_SIZE, constraints=constraints)
    engine.world, engine.costs, engine.faults, engine._later = world, costs, [], {}
    engine.is_ahead, engine.deadly = runs_ahead, deadly
    return engine
