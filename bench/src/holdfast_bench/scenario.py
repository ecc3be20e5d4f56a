"""What a scenario is: cases, and a coroutine that measures one case on one server once.

Everything else is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from holdfast_bench.answers import Answer
from holdfast_bench.contenders import Contender
from holdfast_bench.load import Client
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.results import CaseResult, Sample
from holdfast_bench.servers import RunningServer, ServerStarter

Scale = Literal["quick", "normal", "full"]
# the error of a scenario that needs the processes of a server that was given as a URL
NOT_STARTED_HERE = "only a server that the benchmark starts can be measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One variant of a scenario.

    `settings` are what its `measure` reads, and what the result file shows.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0  # 0: as many as the run says; long cases ask for fewer


class Closable(Protocol):
    """Something that a scenario keeps beside the servers."""

    def close(self) -> None:
        """End it."""
        ...


class Stage:
    """The servers of a run: each started when first needed, and kept while the others have their
    turn.
    """

    def __init__(self, starter: ServerStarter, prompts: PromptMaker) -> None:
        self._starter, self.prompts = starter, prompts
        self._running: dict[Contender, RunningServer] = {}
        self.model_folder, self.threads = starter.model_folder, starter.threads
        # what a scenario needs in every round of a case, by a name of its own
        self.kept: dict[str, Closable] = {}

    async def server(self, contender: Contender) -> RunningServer:
        """The running server of this contender. Raises ServerFailed, ServerUnreachable."""
        running = self._running.get(contender)
        if running is None:
            running = self._running[contender] = await self._starter.start(contender)
        return running

    async def restart(self, contender: Contender, *, kill: bool = False) -> RunningServer | None:
        """End the server and start it on the same store folder; None when it is not ours to start."""
        if not contender.is_ours_to_start:
            return None
        self.drop(contender, kill=kill)
        return await self.server(contender)

    def drop(self, contender: Contender, *, kill: bool = False) -> None:
        """End the server; the next one who needs it starts it again."""
        running = self._running.pop(contender, None)
        if running is not None:
            running.stop(kill=kill)

    def close(self) -> None:
        """End all servers."""
        for running in list(self._running.values()):
            self.drop(running.contender)
        self.let_go()

    def let_go(self) -> None:
        """End what was kept for the rounds of a case."""
        while self.kept:
            self.kept.popitem()[1].close()

    def cpu_seconds_of_others(self, contender: Contender) -> float:
        """Processor time that the servers of all other contenders have used so far."""
        uses = [running.use() for other, running in self._running.items() if other != contender]
        return sum(use.cpu_seconds for use in uses if use is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measurement to make. Equal seeds mean equal prompts."""

    stage: Stage
    contender: Contender
    case: Case
    seed: str

    @property
    def settings(self) -> dict[str, Any]:
        """Of the case."""
        return self.case.settings

    async def client(self) -> Client:
        """A client of the contender's running server."""
        return (await self.stage.server(self.contender)).client

    def text(self, tokens: int, name: str = "") -> str:
        """A text of this many tokens that belongs to this trial; equal names give equal texts."""
        return self.stage.prompts.text(tokens, seed=f"{self.seed}/{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Something worth measuring."""

    name: str
    summary: str
    model: str  # the one it is measured on unless another is asked for
    cases: Callable[[Scale], Sequence[Case]]
    measure: Callable[[Trial], Awaitable[Sample]]
    rounds: int = 5
    more_models: tuple[str, ...] = ()  # that it is measured on as well, unless one is asked for
    peers: tuple[str, ...] = ("mlx_lm",)  # unless others are asked for
    # once for each server and case, before anything is measured
    prepare: Callable[[Trial], Awaitable[None]] | None = None
    # what the figures say about what is claimed, in lines
    judge: Callable[[CaseResult], list[str]] | None = None
    # whose noise is measured before
    against_itself: Literal["first", "everybody", "nobody"] = "first"
    # short enough to be run on mlx_lm.server with the BLAS of its wheel as well
    as_installed_too: bool = False
    uses_store: bool = False  # what is kept on disk is a part of the subject
    # of Holdfast's command, where it is to be measured with settings that are not usual
    options: tuple[str, ...] = ()
    only_by_name: bool = False  # its cases are those of others, so it is not among all scenarios
    needs_start: bool = False  # of no use against a server that cannot be started from here


def errors_of(answers: Sequence[Answer]) -> list[str]:
    """Why answers are no good, each reason once."""
    return list(
        dict.fromkeys(
            answer.error or "the answer did not end" for answer in answers if not answer.is_good
        )
    )


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """So far."""
        return time.perf_counter() - self._began
