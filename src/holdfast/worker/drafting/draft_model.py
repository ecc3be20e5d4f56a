"""Drafts from a draft model: a smaller model with the same tokens, in a second engine of the worker.

All sequences that want a draft get it together, one forward pass per drafted token. A pass samples
with the parameters, the seed and the position of the request, so it uses the same random numbers as
the model that verifies, and a sampled token is often the same in both.

The draft model has a separate state for each sequence. It is opened late, because a short answer
never pays for prefilling a long prompt twice: `Drafts` asks for it when the answer has become long
enough. Before each draft, the state follows the sequence: rejected tokens are dropped, and the new
ones are part of the first pass. When a sequence ends or is preempted, its state is cached for a while,
so that the next turn of the conversation, or the resumed sequence, need not prefill again. States of
a draft model are never stored: prefilling with it is cheap by comparison, and only the speed of
answers depends on it.

Device thread only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.drafting.suffix import MOST_DRAFTED, DraftRates
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.kv.live import LiveBase, LiveState, Snapshot

# how often a drafted token is right, by the number of right ones before it, before any is measured
_FIRST_RATES = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
_MOST_BEHIND = 32  # tokens that the first pass of a draft may add to a state
_CAPACITY_STEP_TOKENS = 256  # capacities are multiples of this
_LEAST_SHARED = 64  # tokens that a cached state must share with a sequence
_MOST_CACHED = 8  # states of sequences that have ended
_LATEST_SHARE = 0.2  # of a new measurement in a mean
_CATCH_UP_SECONDS = 0.02  # by how much prefilling with the draft model may delay a step
_WARM_UP_TOKENS = 256


class DraftModelFailed(Exception):
    """The draft model computes something that is not a number."""


@dataclass(slots=True, kw_only=True, eq=False)
class DraftState:
    """The state of one sequence in the draft model, and its last draft."""

    name: str  # the request id of the sequence in the draft model's engine
    request: SequenceRequest
    rates: DraftRates
    live: LiveState
    tokens: npt.NDArray[np.int32]  # ids of the tokens in the state, and possibly of further ones
    capacity_tokens: int
    checkpoint: Snapshot | None = None  # before the last draft, if not every layer can rewind
    is_catching_up: bool = False  # whether prefill has begun; a part of it runs before each step
    right_in_a_row: int = 0  # how many drafted tokens were right since the last wrong one
    drafted: list[int] = field(default_factory=list)  # the last draft
    drafted_at: int = 0  # the length of the sequence when it was made


class DraftModel:
    """Drafts the next tokens of sequences with a model."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        vocab_size: int,
        context_tokens: int,
        most_cached_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """vocab_size, context_tokens: of the draft model. most_cached_bytes: limit for the states of
        sequences that have ended.
        """
        self.name = name
        self._engine = engine
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._most_cached_bytes = most_cached_bytes
        self._clock = clock
        self._rates = DraftRates(first_rates=_FIRST_RATES)
        self._drafts: dict[str, DraftState] = {}  # of running sequences, by name
        self._cached: dict[str, DraftState] = {}  # of ended sequences, the oldest first
        self._numbers = itertools.count()
        # mean duration of a pass, by the bit length of the number of sequences in it
        self._pass_seconds: dict[int, float] = {}
        self.seconds_per_token = 0.0  # of prefill
        self._is_alone = True  # whether the device does nothing else, so that times can be measured
        self._may_prefill = True  # whether no sequence was prefilled since `begin_step`
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile the kernels, and measure passes and prefill for the first time."""
        request = SequenceRequest(
            request_id="warm-up",
            prompt_token_ids=TokenIds.of([1 + index % 3 for index in range(_WARM_UP_TOKENS)]),
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0, seed=0),
        )
        for _ in range(2):  # the first time takes longer
            draft = self.open(request, ())
            if draft is None:
                return
            began_at = self._clock()
            while not self.catch_up(draft, ()):
                self.begin_step()
            self.seconds_per_token = (self._clock() - began_at) / _WARM_UP_TOKENS
            self._pass_seconds.clear()
            self.extend([(draft, ())], depth=4)
            self._forget(draft)

    def begin_step(self, *, is_alone: bool = True) -> None:
        """Call this before the drafts of each step. is_alone: whether the device is otherwise
        idle, so that what the draft model does can be timed.
        """
        self._is_alone = is_alone
        self._may_prefill = True

    # -- what drafts cost

    def pass_seconds(self, sequences: int) -> float:
        """The duration of a pass for this many sequences, about."""
        wanted_bits = sequences.bit_length()
        measured_bits = min(
            self._pass_seconds, key=lambda bits: abs(bits - wanted_bits), default=None
        )
        if measured_bits is None:
            return 0.0
        # Of n bits are about 2^n / 2 sequences. In addition to a pass, each costs about as much as a
        # token of a prompt.
        more_sequences = (1 << wanted_bits) - (1 << measured_bits)
        return max(
            self._pass_seconds[measured_bits] + 0.5 * more_sequences * self.seconds_per_token, 0.0
        )

    def seconds_behind(
        self, request: SequenceRequest, generated: Sequence[int], draft: DraftState | None
    ) -> float:
        """Estimate how long the draft model must prefill before it can draft for a sequence; 0 if it can
        draft immediately.
        """
        missing_tokens = len(request.prompt_token_ids) + len(generated)
        if draft is not None:
            missing_tokens -= draft.live.tokens
        elif self._cached:
            missing_tokens -= self._best_cached(request, _token_ids_of(request, generated))[1]
        return 0.0 if missing_tokens <= _MOST_BEHIND else missing_tokens * self.seconds_per_token

    def chances(self, draft: DraftState | None) -> tuple[float, ...]:
        """For each token that the model would draft for a sequence, the chance that it and all tokens
        before it are right. None: no state yet.
        """
        rates = self._rates if draft is None else draft.rates
        right_in_a_row = 0 if draft is None else draft.right_in_a_row
        chances = []
        chance = 1.0
        for count in range(right_in_a_row, right_in_a_row + MOST_DRAFTED):
            chance *= rates.chance(count)
            chances.append(chance)
        return tuple(chances)

    # -- states

    @property
    def states(self) -> int:
        """The number of states, including the cached ones."""
        return len(self._drafts) + len(self._cached)

    def can_draft(self, tokens: int) -> bool:
        """Whether the draft model's context has room for a sequence of this length and a draft."""
        return tokens + MOST_DRAFTED <= self._context_tokens

    def open(self, request: SequenceRequest, generated: Sequence[int]) -> DraftState | None:
        """Make a state for a sequence, from a cached one if one begins with the same tokens. None if
        the draft model's context is too small, or the prompt has images.
        """
        if request.images:
            return None
        token_ids = _token_ids_of(request, generated)
        if not self.can_draft(len(token_ids)):
            return None
        request = self._draft_request(request)
        cached, shared_tokens = self._best_cached(request, token_ids)
        if cached is not None:
            self._engine.close(cached.name)
            del self._cached[cached.name]
        capacity_tokens = _capacity_for(len(token_ids))
        draft = DraftState(
            name=request.request_id,
            request=request,
            rates=DraftRates(self._rates),
            live=self._open_in_engine(
                request, generated, capacity_tokens, cached=cached, shared_tokens=shared_tokens
            ),
            tokens=token_ids,
            capacity_tokens=capacity_tokens,
        )
        self._drafts[draft.name] = draft
        return draft

    def _open_in_engine(
        self,
        request: SequenceRequest,
        generated: Sequence[int],
        capacity_tokens: int,
        *,
        cached: DraftState | None,
        shared_tokens: int,
    ) -> LiveState:
        """Open a sequence that takes over the first `shared_tokens` tokens of a cached state, or those
        before its checkpoint if the state cannot go back to them. cached: None: begin with no tokens.
        """
        base = None
        snapshots: tuple[Snapshot, ...] = ()
        if cached is not None:
            if not cached.live.can_rewind(shared_tokens):
                assert cached.checkpoint is not None, "the state cannot go back"
                shared_tokens = cached.checkpoint.start
                snapshots = (cached.checkpoint,)
            base = LiveBase(state=cached.live, tokens=shared_tokens, use="moved")
        return self._engine.open(
            request,
            generated=tuple(generated),
            capacity_tokens=capacity_tokens,
            base=base,
            snapshots=snapshots,
        )

    def _draft_request(self, request: SequenceRequest) -> SequenceRequest:
        """A copy of the request with its own id and only the fields that affect drafts."""
        sampling = request.sampling
        bias = {
            token: value
            for token, value in sampling.logit_bias.items()
            if 0 <= token < self._vocab_size
        }
        if len(bias) < len(sampling.logit_bias):
            sampling = msgspec.structs.replace(sampling, logit_bias=bias)
        return SequenceRequest(
            request_id=str(next(self._numbers)),
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            sampling=sampling,
            tenant=request.tenant,
            is_kept=request.is_kept,
        )

    def _best_cached(
        self, request: SequenceRequest, token_ids: npt.NDArray[np.int32]
    ) -> tuple[DraftState | None, int]:
        """The cached state of the same tenant that shares the most tokens with a sequence, if it can go
        back to them; and their number. None and 0: no state shares enough.
        """
        best: DraftState | None = None
        longest = 0
        for draft in self._cached.values():
            if draft.request.tenant != request.tenant:
                continue
            shared_tokens = min(
                _common_length(draft.tokens, token_ids), draft.live.tokens, len(token_ids) - 1
            )
            if shared_tokens > max(longest, _LEAST_SHARED) and _can_return(draft, shared_tokens):
                best = draft
                longest = shared_tokens
        return best, longest

    def retain_only(self, drafts: Collection[DraftState]) -> None:
        """Close all other states, because their sequences have ended or wait; those of requests whose
        state may be kept (`is_kept`) are cached.
        """
        if len(drafts) == len(self._drafts):
            return
        names = {each.name for each in drafts}
        for draft in [each for each in self._drafts.values() if each.name not in names]:
            del self._drafts[draft.name]
            if draft.request.is_kept:
                self._cached[draft.name] = draft
            else:
                self._engine.close(draft.name)
        self.evict_cached(self._most_cached_bytes)

    def evict_cached(self, most_bytes: int) -> None:
        """Drop the oldest cached states, so that the others take at most this many bytes."""
        sizes = {name: _bytes_of(draft.live) for name, draft in self._cached.items()}
        for name in list(self._cached):
            if len(self._cached) <= _MOST_CACHED and sum(sizes.values()) <= most_bytes:
                return
            del sizes[name]
            del self._cached[name]
            self._engine.close(name)

    def _forget(self, draft: DraftState) -> None:
        """Close the state of a running sequence."""
        del self._drafts[draft.name]
        self._engine.close(draft.name)

    # -- drafts

    def learn(self, draft: DraftState, generated: Sequence[int]) -> None:
        """Learn from the last draft of a sequence, when the real tokens at its positions are known."""
        new_tokens = generated[draft.drafted_at - len(draft.request.prompt_token_ids) :]
        for drafted, token in zip(draft.drafted, new_tokens, strict=False):
            is_right = drafted == token
            draft.rates.learn_match(draft.right_in_a_row, is_right=is_right)
            draft.right_in_a_row = draft.right_in_a_row + 1 if is_right else 0
            if not is_right:
                break
        if new_tokens:
            draft.drafted = []

    def catch_up(self, draft: DraftState, generated: Sequence[int]) -> bool:
        """Prefill some missing tokens, for one sequence per step. Returns whether a draft can be made."""
        sequence_tokens = self._follow_sequence(draft, generated)
        missing_tokens = sequence_tokens - draft.live.tokens
        draft.is_catching_up = missing_tokens > _MOST_BEHIND
        if not draft.is_catching_up:
            return True
        if not self._may_prefill:
            return False
        self._may_prefill = False
        prefill_tokens = missing_tokens - 1
        if self.seconds_per_token:
            prefill_tokens = min(
                prefill_tokens, max(_MOST_BEHIND, int(_CATCH_UP_SECONDS / self.seconds_per_token))
            )
        began_at = self._clock()
        start = draft.live.tokens
        self._run([Span(request_id=draft.name, start=start, tokens=prefill_tokens, samples=False)])
        self._measure_prefill((self._clock() - began_at) / prefill_tokens)
        draft.is_catching_up = missing_tokens - prefill_tokens > _MOST_BEHIND
        return not draft.is_catching_up

    def extend(self, drafts: Sequence[tuple[DraftState, Sequence[int]]], *, depth: int) -> None:
        """Draft `depth` tokens for each of these sequences, which `catch_up` allows. Each comes with
        the tokens that it has generated.
        """
        began_at = self._clock()
        spans = []
        for draft, generated in drafts:
            sequence_tokens = self._follow_sequence(draft, generated)
            start = draft.live.tokens
            draft.checkpoint = None
            if start and not all(leaf.grows for leaf in draft.live.leaves):
                draft.checkpoint = draft.live.copy_checkpoint()
                mx.eval(list(draft.checkpoint.arrays))
            spans.append(
                Span(
                    request_id=draft.name, start=start, tokens=sequence_tokens - start, samples=True
                )
            )
            draft.drafted = []
            draft.drafted_at = sequence_tokens
        for _ in range(depth):
            for (draft, _), result in zip(drafts, self._run(spans), strict=True):
                draft.drafted += result.token_ids
            spans = [
                Span(request_id=draft.name, start=draft.live.tokens, tokens=1, samples=True)
                for draft, _ in drafts
            ]
        for draft, _ in drafts:
            draft.tokens = np.append(draft.tokens, np.array(draft.drafted, np.int32))
        self._measure_passes(len(drafts), (self._clock() - began_at) / depth)

    def _run(self, spans: Iterable[Span]) -> tuple[SpanResult, ...]:
        """Run one step of the draft model. Waits for it. Raises DraftModelFailed."""
        results = self._engine.collect(self._engine.dispatch(StepPlan(spans=tuple(spans))))
        for result in results:
            if result.failure or result.refusal:
                raise DraftModelFailed(result.failure or result.refusal)
        return results

    def _follow_sequence(self, draft: DraftState, generated: Sequence[int]) -> int:
        """Drop the tokens of a state that its sequence does not have. Returns the sequence's length."""
        sequence_tokens = len(draft.request.prompt_token_ids) + len(generated)
        token_ids = _token_ids_of(draft.request, generated)
        shared_tokens = min(
            _common_length(draft.tokens, token_ids), draft.live.tokens, sequence_tokens - 1
        )
        if not draft.live.can_rewind(shared_tokens):
            self._reopen(draft, generated, shared_tokens)
        else:
            self._engine.replace_answer(draft.name, generated=generated, kept_tokens=shared_tokens)
        draft.tokens = token_ids
        if sequence_tokens + MOST_DRAFTED > draft.capacity_tokens:
            draft.capacity_tokens = _capacity_for(sequence_tokens)
            self._engine.reserve_tokens(draft.name, draft.capacity_tokens)
        return sequence_tokens

    def _reopen(self, draft: DraftState, generated: Sequence[int], shared_tokens: int) -> None:
        """Go back to the checkpoint before the last draft; if it is after `shared_tokens`, begin with no
        tokens.

        shared_tokens: the first tokens, which the state has in common with the sequence.
        """
        self._engine.close(draft.name)  # the state stays in `draft.live`
        reusable = draft if _can_return(draft, shared_tokens) else None
        draft.live = self._open_in_engine(
            draft.request,
            generated,
            draft.capacity_tokens,
            cached=reusable,
            shared_tokens=shared_tokens,
        )

    def _measure_passes(self, sequences: int, seconds: float) -> None:
        """Update the mean duration of a pass for this many sequences."""
        if not self._is_alone:
            return
        bits = sequences.bit_length()
        mean_seconds = self._pass_seconds.get(bits, seconds)
        # an interruption is not the cost of a pass
        new_seconds = min(seconds, 4.0 * mean_seconds)
        self._pass_seconds[bits] = mean_seconds + _LATEST_SHARE * (new_seconds - mean_seconds)

    def _measure_prefill(self, seconds: float) -> None:
        """Update the mean duration of prefill. seconds: per token."""
        if not self._is_alone:
            return
        mean_seconds = self.seconds_per_token or seconds
        self.seconds_per_token = mean_seconds + _LATEST_SHARE * (
            min(seconds, 4.0 * mean_seconds) - mean_seconds
        )


def _token_ids_of(request: SequenceRequest, generated: Sequence[int]) -> npt.NDArray[np.int32]:
    """The tokens of a sequence: its prompt, and what it has generated."""
    packed = request.prompt_token_ids.packed + TokenIds.of(generated).packed
    return np.frombuffer(packed, dtype="<i4")


def _capacity_for(tokens: int) -> int:
    """The capacity, in tokens, for a sequence of this length and its draft."""
    return -(-(tokens + MOST_DRAFTED + 1) // _CAPACITY_STEP_TOKENS) * _CAPACITY_STEP_TOKENS


def _common_length(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    """The length of the longest common beginning."""
    length = min(len(first), len(second))
    differences = np.flatnonzero(first[:length] != second[:length])
    return int(differences[0]) if len(differences) else length


def _can_return(draft: DraftState, tokens: int) -> bool:
    """Whether a state can go back to its first `tokens` tokens, or to a checkpoint before them."""
    checkpoint = draft.checkpoint
    return draft.live.can_rewind(tokens) or (checkpoint is not None and checkpoint.start <= tokens)


def _bytes_of(live: LiveState) -> int:
    return sum(array.nbytes for array in live.arrays())
