"""What the worker of a link was sent of prompts, so that a prompt that goes on from one before is
sent from there on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import msgspec

from holdfast.wire.commands import AbridgedRequest, SequenceRequest, WholePrompt
from holdfast.wire.figures import LinkFigures
from holdfast.wire.prompt_keys import MOST_STEPS, STEP_TOKENS, steps_behind, tenant_key
from holdfast.wire.requests import RequestId


@dataclass(frozen=True, slots=True)
class _Unanswered:
    number: int
    request: SequenceRequest


class SentPrompts:
    """For the life of one worker, whose memory for prompts it mirrors.

    Should the worker know less, the whole prompt follows.
    """

    def __init__(self, *, most_steps: int = MOST_STEPS) -> None:
        self._most_steps = most_steps
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        # neither accepted nor rejected yet, in the order of sending
        self._unanswered: deque[_Unanswered] = deque()
        self._number = 0
        self.figures = LinkFigures()

    def abridge(self, request: SequenceRequest) -> SequenceRequest | AbridgedRequest:
        """The command to send for a request: without the beginning of its prompt that the worker
        was sent before.
        """
        self._number += 1
        self._unanswered.append(_Unanswered(self._number, request))
        token_ids = request.prompt_token_ids
        keys = [key for key, _ in steps_behind(tenant_key(request.tenant), token_ids)]
        known = next(
            (steps for steps in range(len(keys), 0, -1) if keys[steps - 1] in self._keys), 0
        )
        self._remember(keys)
        self._count(new=len(token_ids) - known * STEP_TOKENS, known=known * STEP_TOKENS)
        if not known:
            return request
        new = msgspec.structs.replace(request, prompt_token_ids=token_ids[known * STEP_TOKENS :])
        return AbridgedRequest(
            number=self._number, key=keys[known - 1], known_tokens=known * STEP_TOKENS, request=new
        )

    def whole(self, number: int) -> WholePrompt | None:
        """The whole prompt of a request whose beginning the worker does not know; None when it was
        answered long ago.
        """
        for each in self._unanswered:
            if each.number == number:
                tokens = len(each.request.prompt_token_ids)
                self._count(new=tokens, known=0)
                return WholePrompt(number=number, token_ids=each.request.prompt_token_ids)
        return None

    def answered(self, request_id: RequestId) -> None:
        """The worker has accepted or rejected a request; it does so in the order of sending."""
        while self._unanswered and self._unanswered.popleft().request.request_id != request_id:
            pass

    def _remember(self, keys: list[bytes]) -> None:
        for key in reversed(keys):  # a beginning is forgotten after all that goes on from it
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most_steps:
            self._keys.popitem(last=False)

    def _count(self, *, new: int, known: int) -> None:
        self.figures.new_tokens += new
        self.figures.known_tokens += known
