"""Chunked prefill: decides which prompts are prefilled in a step, and how many tokens of each.

Within one flow (a client, see `ServiceClass`), prompts share a step as follows. One half of the
step is for the oldest prompt, the other half for prompts ahead of the oldest (shorter ones, and
ones that were passed over for a while). Which half is assigned first alternates, so that both sides
progress even if a step has room for only one chunk. Tokens that one side does not use go to the
other side, and then to the remaining prompts, shortest first. So a short prompt never waits for a
long one, short prompts at most halve the speed of a long one, and equal prompts are prefilled one
after the other, which lets the first answer start early.

If several flows have prompts, each flow gets an equal share of the step, including its decoding
rows, and the others take what a flow does not use; but short prompts of flows without prompts
until now go first (`SparseFlows`). Batch prompts get what interactive ones do not use, unless they
were passed over for a while.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from holdfast.worker.scheduler.cost_model import CostModel
from holdfast.worker.scheduler.sequence import ScheduledSequence

MOST_SECONDS = 0.5  # a sparse flow may be ahead of the others by this much prefill time
MOST_STEPS = 8  # longest run of steps in which only sparse flows prefill
# after more steps without prompts, all flows are new again; one decode-only step is allowed
_FRESH_STEPS = 2
NO_ROWS: Mapping[str, int] = MappingProxyType({})
PATIENCE_STEPS = 8  # a prompt that was passed over this often goes ahead of shorter ones
# smallest chunk of a prompt that is alone, on any device: smaller chunks are 2 to 3 times slower
LEAST_ALONE_TOKENS = 256
# Chunks that do not end at a boundary are multiples of this: fine enough to use most of a step's
# time, and coarse enough for whole vectors in matrix products.
GRAIN_TOKENS = 8
# After this many steps with chunks, one step only decodes: the cost of chunks is the time that they
# add to the duration of such a step.
MIXED_STEPS_IN_A_ROW = 32
# Chunks lengthen a step of decoding rows by at most this, so that streams still look fluent (with
# the step itself, less than 0.1 s between tokens). They may lengthen it more if decoding would
# otherwise take more than a tenth of the step, which would slow prefill down.
_FLUENT_SECONDS = 0.08
_CHUNK_TIME_PER_DECODE_TIME = 9  # then decoding takes a tenth of the step


class SparseFlows:
    """Lets the prompts of sparse flows (flows that had nothing to prefill until now) go first,
    unless a flow is too far ahead. This is deficit round robin with sparse flows, as in fq_codel.
    All other flows are established. A flow's deficit is the prefill time that it got by going first,
    less its share of the time that has passed since.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._established: frozenset[str] = frozenset()
        self._deficits: dict[str, float] = {}  # seconds of prefill, including ended flows
        self._last_step = 0
        self._steps_in_a_row = 0  # in which only sparse flows prefilled

    def first(
        self, groups: Sequence[list[ScheduledSequence]], *, step: int
    ) -> list[ScheduledSequence]:
        """The prompts of sparse flows, which get the whole step; empty if all flows share it.

        groups: the prompts of each flow, oldest first.
        """
        flows = {group[0].service.flow for group in groups}
        is_fresh = step <= self._last_step + _FRESH_STEPS
        if not (is_fresh and self._established & flows) or self._steps_in_a_row >= MOST_STEPS:
            return []
        candidates = [
            group[0]
            for group in groups
            if group[0].service.flow not in self._established and not group[0].is_batch
        ]
        deficits = {
            prompt: self._deficit_with(prompt, tokens=prompt.unplanned_tokens)
            for prompt in candidates
        }
        return sorted(
            (prompt for prompt in candidates if deficits[prompt] < MOST_SECONDS),
            key=lambda prompt: deficits[prompt],
        )

    def record(
        self,
        groups: Sequence[list[ScheduledSequence]],
        *,
        prefilled_first: Mapping[ScheduledSequence, int],
        step: int,
    ) -> None:
        """Record a planned step. prefilled_first: the prompts that went first, with the number of their
        tokens in this step.
        """
        flows = frozenset(group[0].service.flow for group in groups)
        self._last_step = step
        self._steps_in_a_row = self._steps_in_a_row + 1 if prefilled_first else 0
        self._established = self._established & flows if prefilled_first else flows
        for prompt, tokens in prefilled_first.items():
            self._deficits[prompt.service.flow] = self._deficit_with(prompt, tokens=tokens)
            if tokens == prompt.unplanned_tokens:
                self._established |= {prompt.service.flow}

    def pass_time(self, seconds: float) -> None:
        """Record the duration of a step: an equal share of it is taken off each deficit."""
        if self._deficits:
            share = seconds / len(self._established.union(self._deficits))
            self._deficits = {
                flow: deficit - share for flow, deficit in self._deficits.items() if deficit > share
            }

    def _deficit_with(self, prompt: ScheduledSequence, *, tokens: int) -> float:
        """The deficit of the prompt's flow after prefilling this many more tokens."""
        score_seconds = self._costs.score_seconds if prompt.scores_prompt else 0.0
        deficit = self._deficits.get(prompt.service.flow, 0.0)
        chunk_seconds = self._costs.seconds_per_chunk() + self._costs.more_chunk_seconds(
            prompt.position, tokens, score_seconds=score_seconds
        )
        return deficit + chunk_seconds


class Allowance:
    """The part of a step that is left for prompt chunks: tokens and, if the step also decodes,
    seconds (otherwise infinite). Some of it may be reserved for prompts that are served later.
    """

    __slots__ = ("_quantum_tokens", "_reserved_seconds", "_reserved_tokens", "seconds", "tokens")

    def __init__(self, *, tokens: int, seconds: float, quantum_tokens: int) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self._quantum_tokens = quantum_tokens
        self._reserved_tokens = 0
        self._reserved_seconds = 0.0

    def reserve_half(self) -> None:
        """Offer half of the tokens and seconds to the next prompts, and reserve the rest."""
        self.offer_only(tokens=self.tokens - self.tokens // 2, seconds=self.seconds / 2)

    def offer_only(self, *, tokens: int, seconds: float) -> None:
        """Offer this much to the next prompts, and reserve the rest."""
        self._reserved_tokens = max(0, self.tokens - tokens)
        self._reserved_seconds = (
            0.0 if math.isinf(self.seconds) else max(0.0, self.seconds - seconds)
        )

    def offer_all(self) -> None:
        """Reserve nothing any longer."""
        self._reserved_tokens = 0
        self._reserved_seconds = 0.0

    def take_tokens(
        self,
        costs: CostModel,
        sequence: ScheduledSequence,
        *,
        taken: int,
        at_least_quantum: bool = False,
    ) -> int:
        """Take tokens for a prompt that already has `taken` tokens of the step; returns how many.

        The number is at least the quantum (`min_chunk_tokens`) and a multiple of `GRAIN_TOKENS`,
        unless the chunk reaches a boundary or the end of the prompt. at_least_quantum: take a
        quantum even if that takes too long, so that the prompt progresses.
        """
        position = sequence.position + taken
        wanted_tokens = largest_chunk(costs, sequence) - taken
        fixed_seconds = 0.0 if taken else costs.seconds_per_chunk()
        score_seconds = costs.score_seconds if sequence.scores_prompt else 0.0
        tokens = max(0, min(wanted_tokens, self.tokens - self._reserved_tokens))
        if not math.isinf(self.seconds):
            seconds = self.seconds - self._reserved_seconds - fixed_seconds
            tokens = min(
                tokens, costs.tokens_within(seconds, position, score_seconds=score_seconds)
            )
        if tokens < wanted_tokens:
            tokens = _rounded_chunk(tokens, self._quantum_tokens)
        if at_least_quantum:
            tokens = max(tokens, min(self._quantum_tokens, wanted_tokens, self.tokens))
        if tokens > 0 and sequence.is_indivisible(position):
            tokens = wanted_tokens  # even if that is more than the step has left
        if tokens > 0:
            self.tokens -= tokens
            self.seconds -= fixed_seconds + costs.more_chunk_seconds(
                position, tokens, score_seconds=score_seconds
            )
        return max(tokens, 0)


def _rounded_chunk(tokens: int, quantum_tokens: int) -> int:
    """The size of a chunk for which there is room for `tokens` tokens; 0 if a quantum is too much."""
    grain = min(GRAIN_TOKENS, quantum_tokens)
    return tokens - tokens % grain if tokens >= quantum_tokens else 0


def largest_chunk(costs: CostModel, sequence: ScheduledSequence) -> int:
    """The largest chunk of a prompt: up to the next boundary, within the bounds of the device."""
    if sequence.is_indivisible(sequence.position):
        return sequence.longest_span
    return min(sequence.longest_span, costs.most_chunk_tokens(sequence.position))


class ChunkSharing:
    """Divides each step among prompts. Remembers which flow and which prompt are next, and when the
    last step without chunks was.
    """

    def __init__(self, costs: CostModel, *, min_chunk_tokens: int, stall_seconds: float) -> None:
        """min_chunk_tokens, stall_seconds: as in `SchedulerSettings`."""
        self._costs = costs
        self._min_chunk_tokens = min_chunk_tokens
        self._most_stall_seconds = stall_seconds
        self._oldest_is_first = True
        self._last_mixed_step = -2  # the last step that could mix prompt chunks with decoding
        self._mixed_steps = MIXED_STEPS_IN_A_ROW  # with chunks, since the last step without
        self._flow_turns = 0  # counts up: which flow is served first
        self._sparse_flows = SparseFlows(costs)

    def share(
        self,
        prompts: list[ScheduledSequence],
        *,
        tokens: int,
        seconds: float,
        step: int,
        rows: Mapping[str, int] = NO_ROWS,
    ) -> list[tuple[ScheduledSequence, int]]:
        """Plan the chunks of step number `step`: at least one, unless the step should only decode.

        prompts: oldest first, each with unread tokens. tokens, seconds: what the step has left for
        chunks; the seconds are infinite if no sequence decodes. rows: the decoding rows of the step
        by flow; not needed if all prompts belong to one flow. Returns prompts and chunk sizes.
        """
        groups, batch = self._group_by_flow(prompts, step)
        if math.isinf(seconds):
            seconds = self._costs.seconds_without_decoding
            if len(prompts) == 1:
                self._sparse_flows.record(groups, prefilled_first={}, step=step)
                return [(prompts[0], self._only_chunk(prompts[0], tokens=tokens, seconds=seconds))]
        elif self._count_mixed_step(step):
            return []
        allowance = Allowance(tokens=tokens, seconds=seconds, quantum_tokens=self._min_chunk_tokens)
        chunk_tokens: dict[ScheduledSequence, int] = {}
        sparse = self._sparse_flows.first(groups, step=step)
        if sparse:
            self._give_chunks(allowance, sparse, chunk_tokens, must_progress=True)
            batch = []
        elif len(groups) == 1:
            self._share_within(groups[0], allowance, chunk_tokens, step)
        elif groups:
            self._share_between(groups, allowance, chunk_tokens, step=step, rows=rows)
        self._give_chunks(allowance, batch, chunk_tokens, must_progress=not groups)
        self._sparse_flows.record(groups, prefilled_first=chunk_tokens if sparse else {}, step=step)
        return list(chunk_tokens.items())

    def _only_chunk(self, prompt: ScheduledSequence, *, tokens: int, seconds: float) -> int:
        """The chunk of the only prompt in a step without decoding rows: at most `tokens`, and as many
        as take at most `seconds`.
        """
        longest = largest_chunk(self._costs, prompt)
        if prompt.is_indivisible(prompt.position):
            return longest
        most_tokens = min(tokens, longest)
        if math.isinf(seconds):
            return most_tokens
        in_time = self._costs.tokens_within(seconds, prompt.position)
        return min(most_tokens, max(in_time - in_time % LEAST_ALONE_TOKENS, LEAST_ALONE_TOKENS))

    def stall_seconds(self, rows: int) -> float:
        """By how much chunks may lengthen a step with this many decoding rows."""
        efficient_seconds = _CHUNK_TIME_PER_DECODE_TIME * self._costs.decode_seconds(rows)
        return min(self._most_stall_seconds, max(_FLUENT_SECONDS, efficient_seconds))

    def idle_work_tokens(self, position: int) -> int:
        """The chunk size, at this position of the prompt, of idle work (prefill of a prompt that is
        expected later): a new request waits for it no longer than for other chunks.
        """
        in_time = self._costs.tokens_within(self._most_stall_seconds, position)
        return max(self._min_chunk_tokens, in_time)

    def pass_time(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._sparse_flows.pass_time(seconds)

    def _group_by_flow(
        self, prompts: list[ScheduledSequence], step: int
    ) -> tuple[list[list[ScheduledSequence]], list[ScheduledSequence]]:
        """The prompts of each flow, and the batch prompts that can wait. If there are only the latter,
        they are the one group.
        """
        by_flow: dict[str, list[ScheduledSequence]] = {}
        batch: list[ScheduledSequence] = []
        for prompt in prompts:
            if prompt.is_batch and step - prompt.last_step <= PATIENCE_STEPS:
                batch.append(prompt)
            else:
                by_flow.setdefault(prompt.service.flow, []).append(prompt)
        if not by_flow:
            return [batch], []
        return list(by_flow.values()), batch

    def _share_between(
        self,
        groups: list[list[ScheduledSequence]],
        allowance: Allowance,
        chunk_tokens: dict[ScheduledSequence, int],
        *,
        step: int,
        rows: Mapping[str, int],
    ) -> None:
        """Give each flow an equal share. The flow that comes first changes with each step, so that
        every flow makes progress.
        """
        rounds, first_group = divmod(self._flow_turns, len(groups))
        self._flow_turns += 1
        # in each round, every flow comes first once; so this alternates for each flow
        oldest_is_first = rounds % 2 == 0
        in_turn = groups[first_group:] + groups[:first_group]
        shares = self._equal_shares(in_turn, allowance.tokens, rows)
        is_first = True
        for group, (share_tokens, time_fraction) in zip(in_turn, shares, strict=True):
            if is_first:
                share_tokens = max(self._min_chunk_tokens, share_tokens)
            allowance.offer_only(tokens=share_tokens, seconds=allowance.seconds * time_fraction)
            ordered = self._in_turn_order(group, step, oldest_is_first)
            self._give_chunks(allowance, ordered, chunk_tokens, must_progress=is_first)
            is_first = False
        allowance.offer_all()
        for group in in_turn:
            self._give_chunks(
                allowance, self._in_turn_order(group, step, oldest_is_first), chunk_tokens
            )

    def _equal_shares(
        self, groups: list[list[ScheduledSequence]], tokens: int, rows: Mapping[str, int]
    ) -> list[tuple[int, float]]:
        """The tokens of each group, and its fraction of the time that the groups before it leave.
        With these shares, all flows get the same time of a step, including their decoding rows.
        """
        token_seconds = [self._costs.prompt_token_seconds_at(group[0].position) for group in groups]
        row_seconds = self._costs.decode_row_seconds(sum(rows.values()))
        decode_seconds = [row_seconds * rows.get(group[0].service.flow, 0) for group in groups]
        # Each flow gets `equal` seconds, decoding included. Solved for `equal`: the sum of
        # (equal - decode) / token_seconds over all flows is `tokens`.
        decode_tokens = sum(map(operator.truediv, decode_seconds, token_seconds))
        equal = (tokens + decode_tokens) / sum(1 / seconds for seconds in token_seconds)
        prefill_seconds = [max(0.0, equal - seconds) for seconds in decode_seconds]
        # for each group, the seconds of this group and of all groups after it
        remaining_seconds = list(itertools.accumulate(reversed(prefill_seconds)))[::-1]
        return [
            (int(seconds / per_token), seconds / remaining if remaining else 0.0)
            for seconds, per_token, remaining in zip(
                prefill_seconds, token_seconds, remaining_seconds, strict=True
            )
        ]

    def _in_turn_order(
        self, prompts: list[ScheduledSequence], step: int, oldest_is_first: bool
    ) -> list[ScheduledSequence]:
        """The prompts in the order of `_share_within`, without splitting the step into halves."""
        ahead, behind = self._ahead_and_behind(prompts, step)
        first = [prompts[0], *ahead] if oldest_is_first else [*ahead, prompts[0]]
        return first + behind

    def _share_within(
        self,
        prompts: list[ScheduledSequence],
        allowance: Allowance,
        chunk_tokens: dict[ScheduledSequence, int],
        step: int,
    ) -> None:
        """Divide an allowance among the prompts of one group: half for the oldest, half for those
        ahead of it, alternating which of them comes first; what remains is for the others.
        """
        ahead, behind = self._ahead_and_behind(prompts, step)
        oldest = prompts[:1]
        if not ahead:
            self._give_chunks(allowance, oldest, chunk_tokens, must_progress=True)
        else:
            first, second = (oldest, ahead) if self._oldest_is_first else (ahead, oldest)
            self._oldest_is_first = not self._oldest_is_first
            allowance.reserve_half()
            self._give_chunks(allowance, first, chunk_tokens, must_progress=True)
            allowance.offer_all()
            self._give_chunks(allowance, second, chunk_tokens)
            self._give_chunks(allowance, first, chunk_tokens)
        self._give_chunks(allowance, behind, chunk_tokens)

    def _count_mixed_step(self, step: int) -> bool:
        """Count a step that could mix prompts with decoding. Returns whether it must only decode, so
        that the duration of such a step stays known.
        """
        if step > self._last_mixed_step + 1 and self._costs.knows_decoding:
            self._mixed_steps = 0
        self._last_mixed_step = step
        must_decode = self._mixed_steps >= MIXED_STEPS_IN_A_ROW
        self._mixed_steps = 0 if must_decode else self._mixed_steps + 1
        return must_decode

    def _ahead_and_behind(
        self, prompts: list[ScheduledSequence], step: int
    ) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
        """The prompts but the oldest, in order: those that go ahead of it, and the others."""
        oldest = prompts[0]
        passed_over = [other for other in prompts[1:] if step - other.last_step > PATIENCE_STEPS]
        passed_over.sort(key=lambda other: other.last_step)
        patient = [other for other in prompts[1:] if step - other.last_step <= PATIENCE_STEPS]
        patient.sort(key=lambda other: other.unplanned_tokens)
        shorter = [other for other in patient if other.unplanned_tokens < oldest.unplanned_tokens]
        return passed_over + shorter, patient[len(shorter) :]

    def _give_chunks(
        self,
        allowance: Allowance,
        prompts: Iterable[ScheduledSequence],
        chunk_tokens: dict[ScheduledSequence, int],
        *,
        must_progress: bool = False,
    ) -> None:
        """Give each prompt a chunk, or a larger one, in this order, until nothing is left.
        chunk_tokens: the chunks so far, which this updates. must_progress: the first prompt gets at
        least a quantum (`min_chunk_tokens`).
        """
        for sequence in prompts:
            taken = chunk_tokens.get(sequence, 0)
            if taken == sequence.longest_span:
                continue
            more_tokens = allowance.take_tokens(
                self._costs, sequence, taken=taken, at_least_quantum=must_progress
            )
            must_progress = False
            if more_tokens == 0:
                return
            chunk_tokens[sequence] = taken + more_tokens
