"""Commands as they come over a link → as the loop obeys them: with whole prompts, in the order in
which they were sent.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from holdfast.wire.commands import (
    AbridgedRequest,
    Command,
    LinkCommand,
    SequenceRequest,
    WholePrompt,
    WorkerControl,
)
from holdfast.wire.prompt_keys import MOST_STEPS, steps_behind, tenant_key
from holdfast.wire.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class _PromptStep:
    before: bytes  # the key of the step before it, or of the tenant
    packed: bytes


class PromptMemory:
    """The prompts that came over a link, step by step: what several begin with is there once."""

    def __init__(self, *, most_steps: int = MOST_STEPS) -> None:
        self._most_steps = most_steps
        self._steps: OrderedDict[bytes, _PromptStep] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def remember(self, key: bytes, token_ids: TokenIds) -> None:
        """Keep the full steps of ids that follow the beginning of that key."""
        steps = steps_behind(key, token_ids)
        befores = [key, *(each for each, _ in steps)]
        for before, (own, packed) in reversed(list(zip(befores, steps, strict=False))):
            self._steps.setdefault(own, _PromptStep(before, packed))
            # the first one last: it is forgotten after all that goes on from it
            self._steps.move_to_end(own)
        for own, _ in self._path(key):
            self._steps.move_to_end(own)
        while len(self._steps) > self._most_steps:
            self._steps.popitem(last=False)

    def recall(self, key: bytes, *, tenant: str) -> TokenIds | None:
        """The beginning of that key, of a prompt of that tenant; None when it is not (or no longer)
        there.
        """
        path = list(self._path(key))
        if not path or path[-1][1].before != tenant_key(tenant):
            return None
        return TokenIds(b"".join([step.packed for _, step in reversed(path)]))

    def _path(self, key: bytes) -> Iterator[tuple[bytes, _PromptStep]]:
        """The steps up to that key, the last one first."""
        while (step := self._steps.get(key)) is not None:
            yield key, step
            key = step.before


class Arrivals:
    """Holds requests back whose prompts' beginnings are not known, and all that was sent after
    them, until they are.

    Only what concerns the worker as a whole overtakes them.
    """

    def __init__(self, prompts: PromptMemory | None = None) -> None:
        self._prompts = PromptMemory() if prompts is None else prompts
        self._held: deque[Command | AbridgedRequest] = deque()
        self._unknown: list[int] = []

    def take(self, command: LinkCommand) -> Iterator[Command]:
        """Add a command; all that can be obeyed now, in order."""
        if isinstance(command, WorkerControl):
            yield command
        elif isinstance(command, WholePrompt):
            self._held = deque(self._with(command, each) for each in self._held)
        else:
            self._held.append(
                self._with_beginning(command) if isinstance(command, AbridgedRequest) else command
            )
            if isinstance(command, SequenceRequest):
                self._prompts.remember(tenant_key(command.tenant), command.prompt_token_ids)
        while self._held and not isinstance(first := self._held[0], AbridgedRequest):
            self._held.popleft()
            yield first

    def take_unknown(self) -> list[int]:
        """The numbers of requests whose beginnings are not known, since the last call: the front
        has to send them whole.
        """
        unknown, self._unknown = self._unknown, []
        return unknown

    def _with_beginning(self, command: AbridgedRequest) -> SequenceRequest | AbridgedRequest:
        request = command.request
        beginning = self._prompts.recall(command.key, tenant=request.tenant)
        if beginning is None or len(beginning) != command.known_tokens:
            self._unknown.append(command.number)
            return command
        self._prompts.remember(command.key, request.prompt_token_ids)
        return msgspec.structs.replace(
            request, prompt_token_ids=beginning + request.prompt_token_ids
        )

    def _with(
        self, prompt: WholePrompt, held: Command | AbridgedRequest
    ) -> Command | AbridgedRequest:
        if not isinstance(held, AbridgedRequest) or held.number != prompt.number:
            return held
        self._prompts.remember(tenant_key(held.request.tenant), prompt.token_ids)
        return msgspec.structs.replace(held.request, prompt_token_ids=prompt.token_ids)
