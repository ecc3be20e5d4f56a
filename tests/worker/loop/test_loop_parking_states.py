"""State machine of parking: a real worker and real requests in all orders, each answered as alone.
The set of open requests depends on the speed of the disk, so the next rule does not depend on it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.wire.commands import ReadAhead, SequenceControl
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.engine.engine import Engine
from holdfast.worker.loop import device_steps
from tests.fakes.caching_worker import (
    CachingWorker,
    RunningAhead,
    greedy,
    make_blocks_small,
    open_sequences,
    random_prompt,
)

picks = st.integers(0, 10**6)
lengths = st.sampled_from([3, 17, 33, 50, 70])
answers = st.sampled_from([0, 1, 5, 18])
tenants = st.sampled_from(["", "", "", "b"])


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch)
        patch.setattr(device_steps.logger, "exception", raise_again)
        yield


def raise_again(*_: object) -> None:
    """Even a harmless failure is a fault here."""
    raise


class ParkingStates(RuleBasedStateMachine):
    """name: of the tiny model."""

    name = "llama"
    answers_checked = 0

    @initialize(
        engine=st.sampled_from([Engine, RunningAhead]),
        budget_tokens=st.sampled_from([160, 240, 100_000]),
        most_parked_tokens=st.sampled_from([None, 0, 60, 200]),
        ram_tokens=st.sampled_from([0, 60, 200, 100_000]),
        has_disk=st.booleans(),
    )
    def start(
        self,
        engine: type[Engine],
        budget_tokens: int,
        most_parked_tokens: int | None,
        ram_tokens: int,
        has_disk: bool,
    ) -> None:
        token_bytes = 768  # about what a token of the tiny models takes
        self.folder = tempfile.TemporaryDirectory() if has_disk else None
        self.make_worker = partial(
            CachingWorker,
            self.name,
            folder=None if self.folder is None else Path(self.folder.name),
            engine=engine,
            has_measured_costs=True,
            budget_tokens=budget_tokens,
            ram_bytes=ram_tokens * token_bytes,
            most_parked_bytes=None
            if most_parked_tokens is None
            else most_parked_tokens * token_bytes,
        )
        self.subject = self.make_worker()
        self.paused: set[str] = set()
        self.forgotten: set[str] = set()
        self.count = 0

    def submit(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        tenant: str,
        what: str = "",
        session: str = "",
    ) -> None:
        self.count += 1
        more = {"is_kept": False} if what in ("unkept", "pooled") else {}
        if what == "pooled":
            more["pooling"] = "last"
            max_tokens = 0
        self.subject.send(
            greedy(
                f"r{self.count}",
                prompt[:120],
                max_tokens=max_tokens,
                tenant=tenant,
                session_id=session,
                **more,
            )
        )

    def tail(self, tokens: int) -> tuple[int, ...]:
        return random_prompt(tokens, str(self.count % 3))

    @rule(
        seed=st.sampled_from("ab"),
        tokens=lengths,
        max_tokens=answers,
        tenant=tenants,
        session=st.sampled_from(["", "s", "t"]),
    )
    def ask(self, seed: str, tokens: int, max_tokens: int, tenant: str, session: str) -> None:
        self.submit(random_prompt(120, seed)[:tokens], max_tokens, tenant=tenant, session=session)

    def known(self, request_id: str) -> tuple[int, ...]:
        return tuple(self.subject.sent[request_id].prompt_token_ids) + tuple(
            self.subject.inbox.tokens(request_id)
        )

    @precondition(lambda self: self.subject.sent)
    @rule(
        pick=picks,
        cut=st.sampled_from([0, 0, 1, 2, 7, 20]),
        tokens=st.sampled_from([0, 1, 4, 30]),
        max_tokens=answers,
        what=st.sampled_from(["", "", "", "unkept", "pooled"]),
    )
    def go_on(self, pick: int, cut: int, tokens: int, max_tokens: int, what: str) -> None:
        """The next turn of a running or ended request, or a fork shortly before its end."""
        request_id = self.pick(list(self.subject.sent)[-6:], pick)
        known = self.known(request_id)
        prompt = (known[: max(1, len(known) - cut)] + self.tail(tokens))[:120]
        self.submit(
            prompt,
            max_tokens,
            tenant=self.subject.sent[request_id].tenant,
            what=what,
            session=self.subject.sent[request_id].session_id,
        )

    @precondition(lambda self: self.subject.sent)
    @rule(pick=picks, forks=st.integers(2, 3), cut=st.sampled_from([0, 3, 9]))
    def ask_together(self, pick: int, forks: int, cut: int) -> None:
        """Several requests for the same state."""
        request_id = self.pick(list(self.subject.sent)[-4:], pick)
        known = self.known(request_id)
        for fork in range(forks):
            prompt = known[: max(1, len(known) - cut * fork)] + self.tail(5)
            self.submit(prompt, 5, tenant=self.subject.sent[request_id].tenant)

    @precondition(lambda self: self.subject.sent)
    @rule(pick=picks, cut=st.sampled_from([0, 1, 5, 18]), tokens=st.sampled_from([2, 20, 60]))
    def read_ahead(self, pick: int, cut: int, tokens: int) -> None:
        """The assumed beginning of a request's next turn, as idle work."""
        request_id = self.pick(list(self.subject.sent)[-6:], pick)
        known = self.known(request_id)[: max(1, len(self.known(request_id)) - cut)][:100]
        sent = self.subject.sent[request_id]
        more = {
            "tenant": sent.tenant,
            "session_id": sent.session_id,
            "read_ahead": ReadAhead(known_tokens=len(known)),
        }
        self.count += 1
        self.subject.send(
            greedy(f"ahead{self.count}", (known + self.tail(tokens))[:120], max_tokens=0, **more)
        )

    def pick(self, names: list[str], pick: int) -> str:
        return names[pick % len(names)]

    @precondition(lambda self: self.subject.sent)
    @rule(pick=picks, action=st.sampled_from(["cancel", "pause", "resume"]))
    def control(self, pick: int, action: str) -> None:
        """One of the latest requests, which may have ended."""
        request_id = self.pick(list(self.subject.sent)[-4:], pick)
        if action == "pause":
            self.paused.add(request_id)
        elif action == "resume":
            self.paused.discard(request_id)
        self.subject.send(SequenceControl(action=action, request_id=request_id))  # type: ignore[arg-type]

    @rule(steps=st.sampled_from([1, 2, 5, 20]))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.subject.step()

    @rule()
    def rest(self) -> None:
        ahead = (
            [name for name in self.subject.open() if name.startswith("ahead")]
            if self.paused
            else []
        )
        self.subject.run_to_end(but=(*self.paused, *ahead))

    @rule(session=st.sampled_from(["s", "t"]))
    def forget_session(self, session: str) -> None:
        self.count += 1
        self.subject.send(
            SessionCommand(
                call_id=f"c{self.count}",
                operation="close",
                tenant="",
                session_id=session,
                forget=True,
            )
        )

    @precondition(lambda self: self.folder is not None)
    @rule()
    def restart(self) -> None:
        self.subject.end()
        self.paused.clear()
        before, self.subject = self.subject, self.make_worker()
        self.subject.inbox, self.subject.sent = before.inbox, before.sent

    def teardown(self) -> None:
        if not hasattr(self, "subject"):
            return
        for request_id in self.paused & set(self.subject.open()):
            self.subject.send(SequenceControl(action="resume", request_id=request_id))
        self.subject.run_to_end()
        for request_id in self.subject.sent:
            self.subject.check_answer(request_id)
            type(self).answers_checked += 1
        assert open_sequences(self.subject.engine) == 0
        self.subject.end()
        assert self.subject.scheduler.statistics().reserved_bytes == 0
        self.subject.inbox.check_protocol()
        if self.folder is not None:
            self.folder.cleanup()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_parking_states(name: str) -> None:
    class States(ParkingStates):
        pass

    States.name = name
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        States, settings=settings(max_examples=60, stateful_step_count=25, deadline=None)
    )
    assert States.answers_checked > 0
