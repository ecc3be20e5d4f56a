"""When a sequence ends by what it drew. The only place that decides it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from holdfast.wire.events import FinishReason


@dataclass(frozen=True, slots=True)
class Ending:
    """What counts of a step's tokens, and whether the sequence is over with them."""

    # the first so many belong to the answer, a stop token included; the rest is dropped
    counted_tokens: int
    reason: FinishReason | None  # STOP, LENGTH, or None: it goes on


_GOES_ON = Ending(1, None)  # nearly every call ends here: one token, not the last


def ending(
    drawn: Sequence[int], *, stop_token_ids: Set[int], generated_before: int, max_tokens: int
) -> Ending:
    """Decide about the tokens that one step drew for one sequence.

    `generated_before`: tokens of the answer before these. A stop token in the last allowed place is
    a STOP, not a LENGTH.
    """
    allowed = max_tokens - generated_before
    if len(drawn) == 1 and allowed > 1 and drawn[0] not in stop_token_ids:
        return _GOES_ON
    for index, token_id in enumerate(drawn[: max(allowed, 0)]):
        if token_id in stop_token_ids:
            return Ending(index + 1, FinishReason.STOP)
    if len(drawn) >= allowed:
        return Ending(max(allowed, 0), FinishReason.LENGTH)
    return Ending(len(drawn), None)
