"""One run of a scenario: the world, the server, the agents, the injected faults, and the outcome."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config import (
    ImagesSettings,
    LimitsSettings,
    LogSettings,
    ResidencySettings,
    SchedulerSettings,
    ServerSettings,
    Settings,
    StoreSettings,
)
from holdfast.machine.device_memory import DeviceMemory
from tests.simulation import faults
from tests.simulation.actions import (
    DISK_OPERATIONS,
    Action,
    Branch,
    Call,
    KeyChange,
    Scenario,
    Trouble,
    Turn,
)
from tests.simulation.agents import Agent, drop_question
from tests.simulation.checks import Checks, Violation
from tests.simulation.conversations import Message
from tests.simulation.device import Costs, Deadly
from tests.simulation.disk import SimulatedDisk
from tests.simulation.front import SimulatedFront, begin_front, entry
from tests.simulation.keys import SERVER_KEY, Keys
from tests.simulation.network import Broken, ask
from tests.simulation.outcomes import BEGAN
from tests.simulation.worker import Machine
from tests.simulation.world import Stuck, World, a_world

TOKEN_BYTES = 256  # of keys and values, unquantized
RESTART_SECONDS = 2.0  # until the service manager restarts a dead server
STARTING_SECONDS = 60.0  # the longest wait for a server before the first action
SETTLING_SECONDS = 9000.0  # after the last action


@dataclass
class Outcome:
    """The outcome of a run. states: the reached coverage, as in `search.py`."""

    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0
    events: int = 0
    states: set[tuple[str, str]] = field(default_factory=set)
    story: list[tuple[float, str]] = field(default_factory=list)
    trace_hash: str = ""
    answers: int = 0
    counts: Counter[str] = field(default_factory=Counter)  # operations that a sweep can let fail


class Simulation:
    """A running scenario."""

    def __init__(self, world: World, scenario: Scenario, folder: Path) -> None:
        self.world, self.scenario, self.folder = world, scenario, folder
        self.options = scenario.options
        self.disk = SimulatedDisk(world, folder)
        self.machine = Machine(
            memory=DeviceMemory(total_bytes=1 << 30, available_bytes=1 << 29, unified=False),
            costs=Costs(step_seconds=self.options["step_seconds"]),
            second=self.options["second_layer"],
            repeats=self.options["repeats"],
            is_terse=self.options["is_terse"],
            has_draft_model=self.options["has_draft_model"],
            sees_images="" if self.options["adapters"] else self.options["sees_images"],
            adapters=tuple(self.options["adapters"]),
            runs_ahead=self.options["runs_ahead"],
            deadly=Deadly(kind=scenario.order % 3),
        )
        if failing := self.options.get("failing"):  # of a sweep
            self._plan(*failing)
        self.keys = Keys(self, folder.with_suffix(".keys"))
        self.checks = Checks(self)
        self.agents: dict[str, Agent] = {}
        self.fronts: list[SimulatedFront] = []
        self.is_stopping = False
        self.found: Violation | None = None
        self.front = self.begin_front()
        self._done = False
        world.outside.spawn(self._play, "scenario")
        world.on_kill = self.checks.workers.killed
        world.on_fault = self.checks.excuses.fault
        world.on_delete = self.checks.store.deleted
        world.on_error = self.checks.swallowed

    # -- the server

    def begin_front(self) -> SimulatedFront:
        """Start the server, and restart it whenever it ends."""
        models = [
            entry(
                name,
                is_pinned=name == "m"
                and self.options["max_loaded"] is self.options["idle_seconds"] is None,
                idle_seconds=self.options["idle_seconds"],
                adapters=tuple(f"{each}=/adapters/{each}" for each in self.options["adapters"]),
                kv_bits=self.options["kv_bits"],
                memory_bytes=self.options["kv_tokens"] * TOKEN_BYTES,
            )
            for name in self.options["models"]
        ]
        self.front = begin_front(self.world, self.machine, self._settings(), models)
        self.fronts.append(self.front)
        self.front.process.ends.append(self.keys.replace)
        self.front.process.ends.append(
            lambda: (
                None if self.is_stopping else self.world.after(RESTART_SECONDS, self.begin_front)
            )
        )
        return self.front

    def _settings(self) -> Settings:
        options = self.options
        ram_tokens = options["ram_tokens"]
        return Settings(
            server=ServerSettings(
                port=0,
                api_key=SERVER_KEY if options["has_key"] else "",
                reconnect_seconds=options["reconnect_seconds"],
                keys_file=str(self.keys.path) if options["keys"] else "off",
            ),
            scheduler=SchedulerSettings(
                max_running=options["max_running"],
                max_queued=options["max_queued"],
                step_tokens=options["step_tokens"],
                min_chunk_tokens=32,
            ),
            residency=ResidencySettings(
                max_loaded=options["max_loaded"],
                idle_seconds=options["idle_seconds"],
                unread_bytes=options["unread_bytes"],
            ),
            store=StoreSettings(
                folder=str(self.folder / "store") if options["has_store"] else "",
                ram_bytes=None if ram_tokens is None else ram_tokens * TOKEN_BYTES,
                max_sessions=options["max_sessions"],
                disk_bytes=options["store_bytes"],
            ),
            images=ImagesSettings()
            if options["image_bytes"] is None
            else ImagesSettings(disk_bytes=options["image_bytes"]),
            limits=LimitsSettings(
                max_requests_per_key=options["key_requests"],
                max_requests_per_address=options["address_requests"],
            ),
            log=LogSettings(level="warning"),
        )

    # -- the scenario

    def _play(self) -> None:
        if self.options["begins_ready"]:
            while not self.front.is_ready and self.world.now < BEGAN + STARTING_SECONDS:
                self._wait(0.1)
        began = self.world.now
        for action in self.scenario.actions:
            wait = began + action.at - self.world.now
            if wait > 0:
                self._wait(wait)
            self._act(action)
        deadline = self.world.now + SETTLING_SECONDS
        faults.end_all(self)
        while any(agent.is_busy for agent in self.agents.values()):
            if self.world.now > deadline:
                self.violation("bounded time", f"these agents never end: {self._busy()}")
            self._wait(5.0)
        self._wait(max(0.0, self.checks.excuses.recovered_at - self.world.now))
        for model in self.options["models"]:  # all models must work again
            last = self.agent(f"last {model}")
            last.give(Turn(at=0.0, agent=last.name, model=model))
            while last.is_busy:
                if self.world.now > deadline + SETTLING_SECONDS:
                    self.violation("it recovers", f"{last.name} never ends")
                self._wait(5.0)
        self.checks.answers.check_recovery()
        self._wait(120.0)  # until unfetched answers expire and delayed writes are done
        self.checks.at_rest()
        self.is_stopping = True
        self.front.stop()
        while not self.front.process.is_dead:
            if self.world.now > deadline + SETTLING_SECONDS:
                self.violation("bounded time", "the server does not stop")
            self._wait(1.0)
        self.checks.at_end()
        self._done = True

    def _wait(self, seconds: float) -> None:
        ends_at = self.world.now + seconds
        while self.world.now < ends_at:
            self.world.block(ends_at - self.world.now)

    def _busy(self) -> str:
        return ", ".join(name for name, agent in self.agents.items() if agent.is_busy)

    def agent(self, name: str) -> Agent:
        """The agent of this name."""
        if name not in self.agents:
            self.agents[name] = Agent(self, name)
        return self.agents[name]

    def _act(self, action: Action) -> None:
        match action:
            case Turn():
                self.agent(action.agent).give(action)
            case Branch():
                agent = self.agent(action.agent)
                if not agent.is_busy:
                    source = self.agent(action.source).messages
                    agent.messages[:] = _whole_turns(source[: action.keep])
            case Call():
                self.world.outside.spawn(lambda: self._call(action), "call")
            case KeyChange():
                self.keys.change(action)
            case Trouble():
                self.world.tell(f"trouble: {action.kind}")
                faults.cause(self, action)

    def _call(self, call: Call) -> None:
        front, began = self.front, self.world.now
        self.checks.answers.calls(call)
        try:
            headers = self.keys.headers(call.key)
            status, answer = ask(front, call.method, call.path, call.body, headers=headers)
        except (Broken, TimeoutError):
            return
        self.world.tell(f"{call.method} {call.path}: {status}")
        self.checks.answers.called(call, status, answer, began=began)

    # -- faults

    def _plan(self, kind: str, number: int, error: int = errno.EIO) -> None:
        if kind in DISK_OPERATIONS:
            self.disk.plan(kind, error, nth=number, count=1)
        else:
            self.world.failing = (kind, number)

    def trouble_disk(self, trouble: Trouble) -> None:
        """Inject a fault of the disk."""
        disk = self.disk
        match trouble.kind:
            case "disk error":  # of some calls, or for some time of all
                lasts = trouble.number == 1
                plan = disk.plan(
                    trouble.name,
                    trouble.error,
                    nth=trouble.number,
                    count=10**9 if lasts else trouble.number,
                    only=trouble.only,
                )
                if lasts:
                    self.world.after(trouble.seconds, lambda: setattr(plan, "left", 0))
            case "disk is full":
                disk.full_until = max(disk.full_until, self.world.now + trouble.seconds)
            case kind:
                files = [*disk.files(".block"), *disk.files(".session")]
                files += disk.files_in("images")
                files = [path for path in files if "quarantine" not in path]
                if not files:
                    return
                # every second or third file, or one
                step = trouble.number if trouble.number in (2, 3) else len(files)
                for path in files[trouble.number % step :: step]:
                    self.checks.store.damaged.add(Path(path))
                    (disk.vanish if kind == "file vanishes" else disk.damage)(path)

    def heal(self) -> None:
        """The disk works again."""
        self.disk.heal()

    def press(self, *, is_short: bool) -> None:
        """Make memory short or ample. If it is short, the workers take more than they should."""
        self.machine.excess_bytes = (1 << 30) if is_short else 0

    # -- outcome

    def violation(self, invariant: str, what: str) -> None:
        """Report a violated invariant, which ends the run."""
        found = Violation(invariant, what, at=self.world.now)
        self.found = self.found or found  # an event loop would swallow the exception
        raise found

    @property
    def is_over(self) -> bool:
        """Whether the scenario has run to its end or to its first violation."""
        return self._done or self.found is not None


def _whole_turns(messages: list[Message]) -> list[Message]:
    kept = list(messages)
    drop_question(kept)
    return kept


@contextmanager
def _a_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="simulation-"))
    try:
        yield folder
    finally:
        tempfile.tempdir = None
        folder.with_suffix(".keys").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def run(scenario: Scenario, *, most_events: int = 3_000_000) -> Outcome:
    """Run a scenario to its end, or to its first violation."""
    outcome = Outcome()
    logging.disable(logging.CRITICAL)
    gc.disable()  # finalizers would run at times that are not deterministic
    with _a_folder() as folder, a_world(scenario.order) as world:
        os.environ.update(
            HOME=str(folder),
            XDG_CACHE_HOME=str(folder / "cache"),
            XDG_STATE_HOME=str(folder / "state"),
            XDG_CONFIG_HOME=str(folder / "config"),
        )
        (folder / "tmp").mkdir()
        tempfile.tempdir = str(folder / "tmp")
        simulation = None
        random.seed(scenario.order)
        try:
            simulation = Simulation(world, scenario, folder)
            world.run(lambda: simulation.is_over or world.events > most_events)
            if not simulation.is_over:
                simulation.checks.answers.cut_off()
            outcome.answers = simulation.checks.answers.count
        except Violation as violation:
            outcome.violations.append(violation)
        except Stuck as stuck:
            outcome.violations.append(Violation("progress", str(stuck), at=world.now))
        except AssertionError as error:
            outcome.violations.append(Violation("assertion", _where(error), at=world.now))
        except Exception as error:
            outcome.violations.append(Violation("no exception", _where(error), at=world.now))
        if simulation is not None:
            if simulation.found is not None:
                outcome.violations = [simulation.found]
            outcome.states = simulation.checks.states
            outcome.counts = world.counts + Counter(simulation.disk.counts)
            simulation.disk.close()
        outcome.seconds = world.now - BEGAN
        outcome.events, outcome.story = world.events, world.story
        outcome.trace_hash = world.trace_hash
    gc.enable()
    return outcome


def _where(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error)[-6:])
