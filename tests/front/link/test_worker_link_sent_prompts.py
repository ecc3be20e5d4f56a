from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.link.worker_link import SentPrompts
from holdfast.wire.commands import (
    AbridgedRequest,
    Command,
    LinkCommand,
    SequenceRequest,
    WorkerControl,
)
from holdfast.wire.prompt_keys import STEP_TOKENS
from holdfast.wire.token_ids import TokenIds
from holdfast.worker.loop.inbox import Arrivals, PromptMemory
from tests.fakes.fake_worker import a_request
from tests.fakes.script_inbox import cancel

TELL = WorkerControl(action="tell_statistics")


def of_steps(request_id: str, steps: str, *, tenant: str = "", rest: int = 7) -> SequenceRequest:
    """Each letter is a step of one token; then `rest` more tokens."""
    ids = [ord(step) for step in steps for _ in range(STEP_TOKENS)] + [0] * rest
    request = a_request(request_id)
    return msgspec.structs.replace(request, prompt_token_ids=TokenIds.of(ids), tenant=tenant)


@dataclass
class Link:
    """Both ends with queues between them, which the test moves on message by message."""

    front: SentPrompts
    worker: Arrivals
    commands: deque[LinkCommand] = field(default_factory=deque)
    unknown: deque[int] = field(default_factory=deque)
    answers: deque[str] = field(default_factory=deque)
    obeyed: list[Command] = field(default_factory=list)
    asked: int = 0

    def send(self, request: SequenceRequest) -> LinkCommand:
        self.commands.append(self.front.abridge(request))
        return self.commands[-1]

    def receive(self) -> None:
        """The worker takes what came first, and answers what it obeys."""
        for command in self.worker.take(self.commands.popleft()):
            self.obeyed.append(command)
            if isinstance(command, SequenceRequest):
                self.answers.append(command.request_id)
        numbers = self.worker.take_unknown()
        self.asked += len(numbers)
        self.unknown += numbers

    def hear(self) -> None:
        """The front takes all that has come back."""
        while self.answers:
            self.front.answered(self.answers.popleft())
        while self.unknown:
            whole = self.front.whole(self.unknown.popleft())
            assert whole is not None
            self.commands.append(whole)

    def settle(self) -> None:
        while self.commands or self.unknown or self.answers:
            while self.commands:
                self.receive()
            self.hear()


def link(*, front_steps: int = 100, worker_steps: int = 100) -> Link:
    return Link(
        SentPrompts(most_steps=front_steps), Arrivals(PromptMemory(most_steps=worker_steps))
    )


def test_what_goes_on_from_an_earlier_prompt_is_sent_from_there_on() -> None:
    both = link()
    assert both.send(of_steps("a", "xy")) == of_steps("a", "xy")
    again = both.send(of_steps("b", "xyz"))
    assert isinstance(again, AbridgedRequest)
    assert again.known_tokens == 2 * STEP_TOKENS
    assert again.request == of_steps("b", "z")
    both.settle()
    assert both.obeyed == [of_steps("a", "xy"), of_steps("b", "xyz")]
    assert (both.front.figures.new_tokens, both.front.figures.known_tokens) == (
        3 * STEP_TOKENS + 14,
        2 * STEP_TOKENS,
    )


def test_another_tenants_prompt_is_sent_whole() -> None:
    both = link()
    both.send(of_steps("a", "xy"))
    assert both.send(of_steps("b", "xy", tenant="other")) == of_steps("b", "xy", tenant="other")


def test_a_key_of_another_tenant_is_not_known() -> None:
    both = link()
    both.send(of_steps("a", "xy"))
    stolen = both.send(of_steps("b", "xy"))
    assert isinstance(stolen, AbridgedRequest)
    as_other = msgspec.structs.replace(stolen.request, tenant="other")
    both.commands[-1] = msgspec.structs.replace(stolen, request=as_other)
    while both.commands:
        both.receive()
    assert both.asked == 1


def test_a_key_of_another_length_is_not_known() -> None:
    both = link()
    both.send(of_steps("a", "xy"))
    command = both.send(of_steps("b", "xy"))
    both.commands[-1] = msgspec.structs.replace(command, known_tokens=STEP_TOKENS)
    both.settle()
    assert (both.asked, both.obeyed[-1]) == (1, of_steps("b", "xy"))


def test_all_that_follows_an_unknown_prompt_waits_for_it_but_for_what_concerns_the_worker() -> None:
    both = link(worker_steps=0)
    both.send(of_steps("a", "xy"))
    both.send(of_steps("b", "xy"))
    both.commands += [cancel("b"), TELL]
    both.send(of_steps("c", "x"))
    while both.commands:
        both.receive()
    assert both.obeyed == [of_steps("a", "xy"), TELL]
    both.settle()
    assert both.obeyed[2:] == [of_steps("b", "xy"), cancel("b"), of_steps("c", "x")]


def test_a_request_id_that_is_used_again_gets_its_own_prompt() -> None:
    both = link(worker_steps=0)
    both.send(of_steps("a", "x"))
    both.commands.append(cancel("a"))
    both.send(of_steps("a", "xz"))
    both.settle()
    assert both.obeyed == [of_steps("a", "x"), cancel("a"), of_steps("a", "xz")]


@given(
    prompts=st.lists(
        st.tuples(st.text("xy", max_size=4), st.sampled_from(["", "t"]), st.integers(0, 2)),
        max_size=12,
    ),
    moves=st.lists(st.sampled_from(["receive", "hear"]), max_size=30),
    front_steps=st.integers(0, 6),
    worker_steps=st.integers(0, 6),
)
def test_requests_arrive_whole_and_in_order_whatever_is_forgotten(
    prompts: list[tuple[str, str, int]], moves: list[str], front_steps: int, worker_steps: int
) -> None:
    both = link(front_steps=front_steps, worker_steps=worker_steps)
    sent: list[Command] = []
    turns = iter(moves)
    for number, (steps, tenant, times) in enumerate(prompts):
        request = of_steps(str(number), steps, tenant=tenant)
        both.send(request)
        both.commands.append(cancel(str(number)))
        sent += [request, cancel(str(number))]
        for move in [next(turns, "hear") for _ in range(times)]:
            if move == "hear":
                both.hear()
            elif both.commands:
                both.receive()
    both.settle()
    assert both.obeyed == sent


@given(most_steps=st.integers(0, 6), prompts=st.lists(st.text("xyz", max_size=4), max_size=20))
def test_ends_that_remember_alike_never_have_to_ask(most_steps: int, prompts: list[str]) -> None:
    both = link(front_steps=most_steps, worker_steps=most_steps)
    for number, steps in enumerate(prompts):
        both.send(of_steps(str(number), steps))
        both.settle()
    assert both.asked == 0
