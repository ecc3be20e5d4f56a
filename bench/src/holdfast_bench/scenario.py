"""A scenario: cases, and a coroutine that measures one case on one server once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from holdfast_bench.contenders import Contender
from holdfast_bench.load import Client
from holdfast_bench.prompts import PromptMaker
from holdfast_bench.results import CaseResult, Sample
from holdfast_bench.servers import RunningServer, ServerStarter

Scale = Literal["quick", "normal", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A variant of a scenario. settings: input of `measure`, shown in the result file."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0  # 0: as many as the run specifies; long cases need fewer


class Closable(Protocol):
    """Something that a scenario keeps between rounds."""

    def close(self) -> None:
        """Release it."""
        ...


class Stage:
    """The servers of a run, started on demand and kept running."""

    def __init__(self, starter: ServerStarter, prompts: PromptMaker) -> None:
        self.starter, self.prompts = starter, prompts
        self._running: dict[Contender, RunningServer] = {}
        # what a scenario needs in every round of a case, by name
        self.kept: dict[str, Closable] = {}

    async def server(self, contender: Contender) -> RunningServer:
        """The contender's server. Raises ServerFailed, ServerUnreachable."""
        if contender not in self._running:
            self._running[contender] = await self.starter.start(contender)
        return self._running[contender]

    async def restart(self, contender: Contender) -> RunningServer:
        """Restart the server on its store, if the benchmark started it."""
        if contender.is_ours_to_start:
            self.drop(contender)
        return await self.server(contender)

    def drop(self, contender: Contender, *, kill: bool = False) -> None:
        """End the server. It is started again when needed."""
        if (running := self._running.pop(contender, None)) is not None:
            running.stop(kill=kill)

    def close(self) -> None:
        """End all servers."""
        for contender in list(self._running):
            self.drop(contender)
        self.let_go()

    def let_go(self) -> None:
        """Release what was kept between rounds."""
        while self.kept:
            self.kept.popitem()[1].close()

    def cpu_seconds_of_others(self, contender: Contender) -> float:
        """CPU time of all other contenders' servers so far."""
        others = (server for other, server in self._running.items() if other != contender)
        return sum(server.use().cpu_seconds for server in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A measurement. Equal seeds give equal prompts."""

    stage: Stage
    contender: Contender
    case: Case
    seed: str

    @property
    def settings(self) -> dict[str, Any]:
        """The case's settings."""
        return self.case.settings

    async def client(self) -> Client:
        """A client for the contender's server."""
        return (await self.stage.server(self.contender)).client

    def text(self, tokens: int, name: str = "") -> str:
        """A text of this many tokens. Equal names give equal texts."""
        return self.stage.prompts.text(tokens, seed=f"{self.seed}/{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to measure, and how."""

    name: str
    summary: str
    model: str  # default model
    cases: Callable[[Scale], Sequence[Case]]
    measure: Callable[[Trial], Awaitable[Sample]]
    rounds: int = 5
    more_models: tuple[str, ...] = ()  # further default models
    peers: tuple[str, ...] = ("mlx_lm",)  # default peers
    # runs once per server and case before the measurement
    prepare: Callable[[Trial], Awaitable[None]] | None = None
    # returns lines that compare figures with claims
    judge: Callable[[CaseResult], list[str]] | None = None
    # whether the noise of all servers is measured, not only that of the first one
    measures_all_noise: bool = False
    uses_store: bool = False  # whether servers have a store on disk
