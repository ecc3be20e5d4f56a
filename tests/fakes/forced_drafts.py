"""Drafts for tests: parts of the right answer mixed with wrong tokens, always verified."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from holdfast.wire.requests import RequestId
from holdfast.worker.engine.plan import Draft
from holdfast.worker.loop import drafts, loop
from holdfast.worker.loop.sequences import LiveSequence
from holdfast.worker.scheduler import scheduler
from holdfast.worker.scheduler.draft_gain import DraftGain, Offers


class EagerGain(DraftGain):
    """Verifies every draft."""

    def choose(self, offers: Offers, *, rows: int, most: int) -> dict[RequestId, Draft]:
        chosen = {}
        for request_id, draft in offers.items():
            if tokens := min(len(draft.chances), most):
                chosen[request_id] = draft.cut(tokens)
                most -= tokens
        return chosen


def force(
    monkeypatch: pytest.MonkeyPatch, answers: Mapping[RequestId, Sequence[int]], *, seed: str
) -> None:
    """Make workers draft these answers, with mistakes, and verify all drafts."""
    rng = random.Random(seed)

    class MixedDrafts(drafts.Drafts):
        def _draft_from_text(self, sequence: LiveSequence, most: int) -> Draft:
            done = len(sequence.answer.token_ids)
            right = answers.get(sequence.id, ())[done : done + min(most, rng.randrange(10))]
            mixed = tuple(token if rng.random() < 0.85 else rng.randrange(200) for token in right)
            return Draft(mixed, (0.9,) * len(mixed))

    monkeypatch.setattr(loop, "Drafts", MixedDrafts)
    monkeypatch.setattr(scheduler, "DraftGain", EagerGain)
