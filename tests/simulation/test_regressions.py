"""Shrunk scenarios that once failed: one test for each bug that the simulation has found."""

from __future__ import annotations

from tests.simulation.actions import Branch, Call, KeyChange, Scenario, Trouble, Turn
from tests.simulation.outcomes import Task
from tests.simulation.pool import Worlds
from tests.simulation.stories import story


def check(worlds: Worlds, scenario: Scenario) -> None:
    """Run the scenario: no invariant may be violated."""
    result = worlds.run(Task(scenario=scenario))
    assert not result.failures, "\n" + story(scenario, result)


def test_agents_share_a_prefix_while_their_worker_dies(worlds: Worlds) -> None:
    """An example: it has never failed."""
    check(
        worlds,
        Scenario(
            order=1,
            actions=(
                Turn(at=0.0, agent="a0", tokens=300, edge=0),
                Branch(at=3.0, agent="a1", source="a0", keep=2),
                Turn(at=3.0, agent="a0", choices=2),
                Turn(at=3.0, agent="a1", reader="breaks"),
                Trouble(at=3.1, kind="worker dies"),
                Call(at=9.0, method="GET", path="/v1/sessions?model=m"),
            ),
            options={"kv_bits": "8"},
        ),
    )


def test_json_and_calls_go_on_after_their_worker_dies(worlds: Worlds) -> None:
    """An example: it has never failed."""
    asks = {"max_tokens": 300, "choices": 2, "tools": True}
    check(
        worlds,
        Scenario(
            order=1,
            actions=(
                Turn(at=0.0, agent="a0", format="words", stop=("e ", "ing", "in"), prefills=True),
                Turn(at=0.0, agent="a1", tool_choice="required", **asks),
                Turn(at=0.0, agent="a2", tool_choice="strict", protocol="messages", **asks),
                Turn(at=0.0, agent="a3", tool_choice="single", protocol="responses", **asks),
                Trouble(at=0.25, kind="worker dies"),
                Turn(at=5.0, agent="a1", tool_choice="auto", **asks),
                Turn(at=5.0, agent="a2", tool_choice="named", protocol="messages", **asks),
                Turn(at=5.0, agent="a3", tool_choice="strict", protocol="responses", **asks),
            ),
            options={"repeats": True, "max_running": 4, "runs_ahead": True},
        ),
    )


def test_salvaged_blocks_survive_a_power_cut(worlds: Worlds) -> None:
    check(
        worlds,
        Scenario(
            order=1,
            actions=(
                Turn(at=0.0, agent="a0", tokens=800, max_tokens=60),
                Trouble(at=0.1, kind="worker dies after writes", number=2),
                Trouble(at=4.1, kind="power cut"),
            ),
            options={"cut_loses_all": True},
        ),
    )


def test_a_retried_request_gets_the_events_sent_while_its_model_was_loading(worlds: Worlds) -> None:
    """Found by a world with many repeated requests: a3-1.repeat had the events [2, 3, 4, 5, 6, 7, 8, 9]."""
    check(
        worlds,
        Scenario(
            order=304,
            actions=(
                Turn(
                    at=0.687,
                    agent="a3",
                    tokens=100,
                    max_tokens=1,
                    model="other",
                    protocol="responses",
                    idempotency="own",
                    repeats=True,
                ),
            ),
            options={"models": ["m", "other"], "step_seconds": 0.03},
        ),
    )


def test_callers_share_neither_answers_nor_stored_responses(worlds: Worlds) -> None:
    """An example: it has never failed."""
    check(
        worlds,
        Scenario(
            order=1,
            actions=(
                Turn(at=5.0, agent="a0", key="alice", idempotency="own", twins=3),
                Turn(at=6.0, agent="a0", protocol="responses", key="alice", stores=True),
                Trouble(at=7.0, kind="server restarts"),
                Turn(
                    at=20.0,
                    agent="a0",
                    protocol="responses",
                    key="alice",
                    stores=True,
                    chains=True,
                    looks="foreign",
                ),
                Turn(at=21.0, agent="a0", key="alice", looks="delete"),
                Turn(at=22.0, agent="a0", key="wrong"),
            ),
            options={"keys": True},
        ),
    )


def test_a_background_response_beyond_a_limit_is_refused_while_its_model_loads(
    worlds: Worlds,
) -> None:
    check(
        worlds,
        Scenario(
            order=3010,
            actions=(
                Turn(at=0.203, agent="a3", protocol="responses"),
                Turn(at=0.204, agent="a0", protocol="responses", stores=True, background=True),
            ),
            options={"address_requests": 1, "idle_seconds": 30.0},
        ),
    )


def test_a_new_limit_counts_the_answers_that_began_before_it(worlds: Worlds) -> None:
    check(
        worlds,
        Scenario(
            order=1,
            actions=(
                Turn(at=0.0, agent="a0", max_tokens=300, key="alice"),
                Turn(at=0.01, agent="a1", max_tokens=300, key="alice"),
                KeyChange(at=0.05, kind="limit", limit=1),
                Turn(at=0.1, agent="a2", key="alice"),
            ),
            options={"keys": True},
        ),
    )


def test_the_place_of_a_preempted_request_is_taken_at_once(worlds: Worlds) -> None:
    """The loop slept for up to five seconds after it had preempted the only running request."""
    check(
        worlds,
        Scenario(
            order=149,
            actions=(
                Turn(at=0.0, agent="a1", tokens=300, system="short", twins=1),
                Turn(at=10.0, agent="a1.1", tokens=800),
                Turn(at=13.0, agent="a1.1.7"),
                Turn(at=13.2, agent="a1.1.7.11", tokens=800, session="s-a0", twins=3),
                Call(
                    at=13.3,
                    method="DELETE",
                    path="/v1/sessions/s-a0?model=m&forget=true",
                    key="alice",
                ),
            ),
            options={
                "kv_tokens": 3000,
                "max_running": 1,
                "unread_bytes": 1024,
                "repeats": True,
                "runs_ahead": True,
            },
        ),
    )


def test_an_image_is_tried_again_if_its_process_dies_during_a_step(worlds: Worlds) -> None:
    """A process that had started and died between two polls counted as one that cannot start."""
    check(
        worlds,
        Scenario(
            order=0,
            actions=(
                Turn(at=0.0, agent="a0", max_tokens=60),
                Trouble(at=1.0, kind="image process dies", number=1),
                Turn(at=1.0, agent="a1", images=("red",)),
                Turn(at=20.0, agent="a2"),
            ),
            options={"step_seconds": 3.0, "sees_images": "one way"},
        ),
    )
