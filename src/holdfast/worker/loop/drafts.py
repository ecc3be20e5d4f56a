"""Drafts for the sequences that decode, so that a step can verify several tokens together.

A draft consists of the tokens that followed the same text before, in the prompt, the answer or other
answers (`SuffixDrafter`), of tokens that a grammar forces, or of tokens that a draft model (a small
model with the same vocabulary) generates. The scheduler chooses which of the offered drafts the next
step verifies. Device thread only. See docs/how-it-works/speculation.md.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from holdfast.lru_cache import LruCache
from holdfast.wire.commands import SequenceRequest
from holdfast.wire.requests import RequestId, TokenIds
from holdfast.worker.drafting.suffix import MOST_DRAFTED, DraftRates, SuffixDrafter
from holdfast.worker.engine.plan import BLOCK_TOKENS, NO_DRAFT, Draft
from holdfast.worker.loop.counters import Counters
from holdfast.worker.loop.device_steps import log_failure
from holdfast.worker.loop.sequences import LiveSequence
from holdfast.worker.scheduler.draft_gain import Offers
from holdfast.worker.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # these modules import MLX, which is not needed here at run time
    from holdfast.worker.drafting.draft_model import DraftModel, DraftState
    from holdfast.worker.engine.engine import Engine

logger = logging.getLogger("holdfast.worker")

# For models whose accepted tokens are computed again if others of the same draft are rejected: a draft
# ends before the chance that all of it is right falls below this.
_LEAST_CHANCE_IF_RECOMPUTED = 0.5
# the chance of a token that a grammar forces: the grammar may also allow other tokens for the same text
_FORCED_CHANCE = 0.9
_MOST_OTHER_TOKENS = 2048  # of other answers, for one sequence; they are indexed together
_MOST_ANSWERS = 8  # with the same beginning of the prompt
_MOST_BEGINNINGS = 64
_LEAST_REMEMBERED = 8  # tokens of an answer
# Making a draft takes about 0.03 ms. If none was verified in the last 16 steps, drafts are made only
# in every fourth step, except during the first 16 tokens of an answer.
_STEPS_BEFORE_RARE = 16
_STEPS_PER_RARE_DRAFT = 4


class RecentAnswers:
    """The latest answers, by the beginning of their prompts, because agents with the same instructions
    often write the same text. Tenants share no answers.
    """

    def __init__(self) -> None:
        self._by_beginning: LruCache[tuple[str, bytes], deque[TokenIds]] = LruCache(
            _MOST_BEGINNINGS
        )

    def add(self, request: SequenceRequest, answer: Sequence[int]) -> None:
        """Remember the answer to a request, unless it must not be kept."""
        if not request.is_kept or len(answer) < _LEAST_REMEMBERED:
            return
        answers = self._by_beginning.get_or_put(
            _prompt_beginning(request), deque(maxlen=_MOST_ANSWERS)
        )
        answers.append(TokenIds.of(answer[:_MOST_OTHER_TOKENS]))

    def of_similar_prompts(self, request: SequenceRequest) -> list[TokenIds]:
        """Answers to prompts with the same beginning, the latest one last."""
        answers: list[TokenIds] = []
        tokens = 0
        for answer in reversed(self._by_beginning.get(_prompt_beginning(request)) or ()):
            tokens += len(answer)
            if tokens > _MOST_OTHER_TOKENS:
                break
            answers.insert(0, answer)
        return answers


def _prompt_beginning(request: SequenceRequest) -> tuple[str, bytes]:
    """The key of `RecentAnswers`: the tenant, and the prompt's first tokens, packed."""
    return request.tenant, request.prompt_token_ids[:BLOCK_TOKENS].packed


def _free_garbage() -> None:
    """Free a model that was just dropped. Models contain reference cycles, and the collection skips
    what was loaded before the worker began to serve.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class Drafts:
    """The drafts of all sequences of a worker."""

    def __init__(
        self,
        engine: Engine,
        *,
        scheduler: Scheduler,
        counters: Counters,
        model: DraftModel | None = None,
    ) -> None:
        """model: a draft model, which is dropped when it fails; None: there is none."""
        self._engine = engine
        self._scheduler = scheduler
        self._model = model
        self._recomputes_accepted = engine.recomputes_accepted
        self._counters = counters
        counters.draft_model = "" if model is None else model.name
        self._rates = DraftRates()
        self._recent_answers = RecentAnswers()
        self._unused_steps = 0  # since a draft was verified

    def offers(
        self, sequences: Iterable[LiveSequence], *, under_way: Collection[LiveSequence]
    ) -> Offers:
        """The draft of each sequence that has one.

        under_way: the sequences in the dispatched step whose results are not known yet, and which
        samples their last token. Their drafts begin after that token, and can be verified if the
        scheduler leaves the sequence out of the next step.
        """
        offers: dict[RequestId, Draft] = {}
        sequences = list(sequences)
        self._unused_steps += 1
        if self._model is None and not under_way and self._should_skip_drafts(sequences):
            return offers
        for sequence in sequences:
            if not sequence.is_open:
                continue
            if not sequence.answer.token_ids:
                # the prompt is prefilled: nothing to draft yet, but the drafter can index some of it
                self._drafter(sequence).extend(())
                continue
            if sequence in under_way:
                # without the first token, which the step under way samples
                chances = self._draft_from_text(sequence, MOST_DRAFTED + 1).chances[1:]
                if chances:
                    offers[sequence.id] = Draft(chances=chances)
                continue
            draft = self._suffix_draft(sequence)
            if draft.token_ids:
                offers[sequence.id] = draft
        if self._model is not None:
            with log_failure(
                "the draft model %s failed, and is not used any more",
                self._model.name,
                otherwise=partial(self._drop_model, sequences),
            ):
                self._add_model_drafts(self._model, sequences, offers, under_way=under_way)
            if not self._counters.draft_model:  # it was dropped
                _free_garbage()  # not before, because the exception refers to the model
        return offers

    def _should_skip_drafts(self, sequences: Iterable[LiveSequence]) -> bool:
        """Whether to make no drafts for the next step, because none was verified recently."""
        steps = self._unused_steps
        if steps <= _STEPS_BEFORE_RARE or steps % _STEPS_PER_RARE_DRAFT == 0:
            return False
        lengths = [len(sequence.answer.token_ids) for sequence in sequences if sequence.is_open]
        return not any(0 < length <= _STEPS_BEFORE_RARE for length in lengths)

    def _drop_model(self, sequences: Iterable[LiveSequence], error: Exception) -> None:
        """Stop using the draft model, which has failed, and drop what refers to it."""
        self._model = None
        self._counters.draft_model = ""
        for sequence in sequences:
            sequence.drafts.model_state = None

    def free_memory(self) -> None:
        """Drop the draft model's states that no sequence uses, because memory is short."""
        if self._model is not None:
            self._model.evict_cached(0)

    def _add_model_drafts(
        self,
        model: DraftModel,
        sequences: Collection[LiveSequence],
        offers: dict[RequestId, Draft],
        *,
        under_way: Collection[LiveSequence],
    ) -> None:
        """Add drafts of the draft model to the offers, if they are worth the time that they take."""
        ready: dict[RequestId, LiveSequence] = {}
        model_drafts: dict[RequestId, Draft] = {}
        states: list[DraftState] = []
        model.begin_step(is_alone=not under_way)
        for sequence in sequences:
            drafts = sequence.drafts
            generated_tokens = len(sequence.answer.token_ids)
            if drafts.model_state is None and not drafts.is_model_due(generated_tokens):
                continue
            if not sequence.is_open or sequence.scheduled.is_paused:
                drafts.model_state = None
                continue
            if self._prepare_model_draft(model, sequence) and (
                chances := self._model_chances(model, sequence)
            ):
                ready[sequence.id] = sequence
                model_drafts[sequence.id] = Draft(chances=chances, is_by_model=True)
            if drafts.model_state is not None:
                states.append(drafts.model_state)
        model.retain_only(states)
        if not model_drafts:
            return
        count = self._scheduler.passes_of_draft_model(
            offers, model_drafts, pass_seconds=model.pass_seconds(len(model_drafts))
        )
        to_draft = []
        for request_id, sequence in ready.items():
            model_draft = model_drafts[request_id].cut(count)
            suffix_draft = offers.get(request_id, NO_DRAFT)
            if model_draft.expected_tokens <= suffix_draft.expected_tokens:
                continue
            if sequence in under_way:  # drafted when its last token is known
                offers[request_id] = model_draft
            else:
                to_draft.append(sequence)
        if to_draft:
            self._draft_with_model(model, to_draft, offers, count=count)

    def _prepare_model_draft(self, model: DraftModel, sequence: LiveSequence) -> bool:
        """Bring the draft model up to the end of a sequence, if that is worth it, by prefilling some of
        the sequence. Returns whether the model can draft for it immediately.
        """
        state = sequence.drafts.model_state
        request = sequence.request
        generated = sequence.answer.token_ids
        if state is not None:
            model.learn(state, generated)
        seconds = model.seconds_behind(request, generated, state)
        if seconds and not (state is not None and state.is_catching_up):
            if not sequence.drafts.is_model_due(len(generated)):
                return False
            sequence.drafts.consider_model_later(len(generated))
            pays = model.can_draft(sequence.known_tokens) and self._scheduler.approve_draft_prefill(
                model.chances(state),
                pass_seconds=model.pass_seconds(1),
                seconds=seconds,
                generated=len(generated),
            )
            if not pays:
                return False
        if state is None:
            state = sequence.drafts.model_state = model.open(request, generated)
        return state is not None and (not seconds or model.catch_up(state, generated))

    def _model_chances(self, model: DraftModel, sequence: LiveSequence) -> tuple[float, ...]:
        """The chances of the draft that the draft model would make for a sequence; see `Draft`."""
        # the step samples a token after the draft, and at least one token is left for a later step
        most_tokens = sequence.request.max_tokens - len(sequence.answer.token_ids) - 2
        if most_tokens < 1:
            return ()
        chances = model.chances(sequence.drafts.model_state)[:most_tokens]
        if self._recomputes_accepted:
            likely_tokens = sum(chance >= _LEAST_CHANCE_IF_RECOMPUTED for chance in chances)
            # at least one, so that it is tried now and then
            chances = chances[: max(1, likely_tokens)]
        return chances

    def _draft_with_model(
        self,
        model: DraftModel,
        sequences: Collection[LiveSequence],
        offers: dict[RequestId, Draft],
        *,
        count: int,
    ) -> None:
        """Let the draft model draft `count` tokens for each of these sequences, and offer them."""
        states = [
            (each, each.drafts.model_state)
            for each in sequences
            if each.drafts.model_state is not None
        ]
        # a draft that no step has verified yet is still good
        to_extend = [
            (state, each.answer.token_ids)
            for each, state in states
            if not state.drafted or state.drafted_at != each.known_tokens
        ]
        if to_extend:
            model.extend(to_extend, depth=count)
        for sequence, state in states:
            chances = model.chances(state)[:count]
            draft = Draft(tuple(state.drafted), chances, is_by_model=True)
            draft = self._verifiable_part(sequence, draft)
            # a grammar may have shortened it
            if draft.expected_tokens > offers.get(sequence.id, NO_DRAFT).expected_tokens:
                offers[sequence.id] = draft

    def count(self, sequence: LiveSequence, draft: Draft, *, accepted: int) -> None:
        """Count the tokens of a draft that was verified, and those that were accepted."""
        self._unused_steps = 0
        drafted = len(draft.token_ids)
        sequence.drafts.count(drafted=drafted, accepted=accepted)
        self._counters.drafted_tokens += drafted
        self._counters.accepted_tokens += accepted
        if draft.is_by_model:
            self._counters.model_drafted_tokens += drafted
            self._counters.model_accepted_tokens += accepted

    def remember(self, sequence: LiveSequence) -> None:
        """Remember the answer of a sequence that ends, for drafts of later ones."""
        self._recent_answers.add(sequence.request, sequence.answer.token_ids)

    def _suffix_draft(self, sequence: LiveSequence) -> Draft:
        """The draft from earlier text; with a grammar, at least the tokens that it forces."""
        draft = self._draft_from_text(sequence, MOST_DRAFTED)
        if not draft.token_ids and not sequence.request.grammar:
            return NO_DRAFT
        return self._verifiable_part(sequence, draft)

    def _verifiable_part(self, sequence: LiveSequence, draft: Draft) -> Draft:
        """The part of a draft that a step can verify, or the tokens that the grammar forces."""
        token_ids = draft.token_ids
        stop_token_ids = sequence.answer.stop_token_ids
        if not stop_token_ids.isdisjoint(token_ids):
            # a drafted token that ends the answer would save nothing
            end = next(index for index, token in enumerate(token_ids) if token in stop_token_ids)
            token_ids = token_ids[:end]
        # with a grammar, the engine returns what it allows of the draft, or tokens that it forces
        allowed = self._engine.draft(sequence.id, token_ids)[:MOST_DRAFTED]
        chances = draft.chances
        if allowed != token_ids[: len(allowed)]:
            chances = tuple(_FORCED_CHANCE ** (index + 1) for index in range(len(allowed)))
        if self._recomputes_accepted:
            chances = tuple(chance for chance in chances if chance >= _LEAST_CHANCE_IF_RECOMPUTED)
        count = min(len(allowed), len(chances))
        return Draft(allowed[:count], chances[:count], draft.is_by_model)

    def _draft_from_text(self, sequence: LiveSequence, most: int) -> Draft:
        """The draft from earlier text, of at most `most` tokens. The sequence's drafter first gets the
        sequence's new tokens.
        """
        drafter = self._drafter(sequence)
        drafter.extend(sequence.answer.token_ids[len(drafter) - sequence.prompt_tokens :])
        return drafter.draft(most)

    def _drafter(self, sequence: LiveSequence) -> SuffixDrafter:
        """The sequence's index of earlier text, which is created at the first use."""
        if sequence.drafts.drafter is None:
            request = sequence.request
            sequence.drafts.drafter = SuffixDrafter(
                request.prompt_token_ids,
                rates=self._rates,
                others=self._recent_answers.of_similar_prompts(request),
                expected=request.predicted_token_ids,
            )
        return sequence.drafts.drafter
