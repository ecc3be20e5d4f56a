"""The device thread's end of the link: commands in, events out.

The thread that computes also speaks to the socket.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from holdfast.wire.commands import (
    SHUT_DOWN,
    AbridgedRequest,
    Command,
    LinkCommand,
    SequenceRequest,
    WholePrompt,
    WorkerControl,
)
from holdfast.wire.events import Event, LinkEvent, PromptUnknown
from holdfast.wire.prompt_keys import MOST_STEPS, steps_behind, tenant_key
from holdfast.wire.token_ids import TokenIds

# the last events (Finished of cancelled requests) must leave before the process does
LINGER_MILLISECONDS = 2_000


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


class Inbox(Protocol):
    """Where the worker's loop gets its commands from. Device thread only."""

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        """All commands that are there; waits for the first one up to the timeout (0: polls)."""
        ...

    def send(self, events: Sequence[Event]) -> None:
        """Give the front all events of one step as one message."""
        ...

    def close(self) -> None:
        """Let go of the link; nothing may be sent afterwards."""
        ...


class ZmqInbox:
    """Inbox over a ZeroMQ PAIR socket.

    A front that is gone, and a byte on `wake_fd`, read as `SHUT_DOWN`.
    """

    def __init__(self, endpoint: str, *, wake_fd: int, arrivals: Arrivals | None = None) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # a front that closed is gone for good; a new one starts a new worker
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._wake_fd = wake_fd
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, wake_fd):
            self._poller.register(source, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(list[LinkCommand])
        self._encoder = msgspec.msgpack.Encoder()
        self._arrivals = arrivals or Arrivals()
        self._over = False

    def receive(self, *, timeout_seconds: float) -> list[Command]:
        """All commands that are there; waits for the first one up to the timeout (0: polls)."""
        if self._over:
            return [SHUT_DOWN]
        ready = dict(self._poller.poll(int(timeout_seconds * 1000)))
        commands: list[Command] = []
        if self._socket in ready:
            commands = self._drain()
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            self._over = True
        if self._wake_fd in ready:
            self._over = True
        if self._over:
            commands.append(SHUT_DOWN)
        return commands

    def send(self, events: Sequence[LinkEvent]) -> None:
        """Give the front all events of one step as one message."""
        if not events:
            return
        try:
            self._socket.send(self._encoder.encode(events), zmq.NOBLOCK)
        except zmq.Again:
            self._over = True  # without a high-water mark only a missing peer refuses a message

    def close(self) -> None:
        """Let go of the link; waits until the last message has left, bounded by the linger time."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()

    def _drain(self) -> list[Command]:
        commands: list[Command] = []
        with contextlib.suppress(zmq.Again):
            while True:
                for command in self._decoder.decode(self._socket.recv(zmq.NOBLOCK)):
                    commands += self._arrivals.take(command)
        self.send([PromptUnknown(number=number) for number in self._arrivals.take_unknown()])
        return commands
