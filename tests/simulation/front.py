"""The server's process in the simulated world: the real residency, slots, gateway and application.
Only processes, sockets and the HTTP parser are simulated.
"""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.applications import Starlette

from holdfast.config import ModelSettings, Settings
from holdfast.errors import HoldfastError
from holdfast.front.fleet import process as worker_process
from holdfast.front.fleet import residency as residency_module
from holdfast.front.fleet.catalog import Catalog, CatalogEntry
from holdfast.front.fleet.memory_watch import MemoryMeter
from holdfast.front.fleet.residency import Residency
from holdfast.front.fleet.slot import ModelFiles, State
from holdfast.front.images.folder import images_folder
from holdfast.front.link import worker_link
from holdfast.front.prompt import template_process, template_worker
from holdfast.front.run.web import build_application
from holdfast.machine.memory_plan import MemoryShare
from holdfast.machine.process_time import Progress
from holdfast.wire.commands import Assignment, WorkerSettings
from tests.simulation.device import BUNDLED
from tests.simulation.event_loop import SimulatedLoop
from tests.simulation.worker import Machine, start_worker
from tests.simulation.world import Killed, Process, World, world


class _Child:
    """A worker's process, in place of `asyncio.subprocess.Process`."""

    def __init__(self, front: SimulatedFront, number: int) -> None:
        self._front = front
        self.process = front.world.process(f"worker{number}")
        self.pid = self.process.pid
        self.returncode: int | None = None
        self.stdin = self
        self.stderr = asyncio.StreamReader()
        self._ended = asyncio.Event()
        self._transport = self
        loop = asyncio.get_running_loop()
        self._assignment = b""
        self.process.ends.append(
            lambda: None if loop.is_closed() else loop.call_soon_threadsafe(self._end) and None
        )
        front.children[self.pid] = self.process

    def _end(self) -> None:
        self.returncode = self.process.exit_code
        self.stderr.feed_eof()
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    # standard input

    def write(self, data: bytes) -> None:
        self._assignment += data

    def close(self) -> None:
        assignment = msgspec.json.decode(self._assignment, type=Assignment)
        if not self.process.is_dead:
            start_worker(self._front.world, self._front.machine, assignment, self.process)

    async def wait_closed(self) -> None:
        pass

    # its transport

    def get_pipe_transport(self, number: int) -> _Child:
        return self


class SimulatedFront:
    """The server, from its start to its end. A restart makes another one."""

    def __init__(
        self, found: World, machine: Machine, settings: Settings, models: Sequence[CatalogEntry]
    ) -> None:
        self.world, self.machine, self.settings = found, machine, settings
        self.process: Process = found.process("front")
        self.loop = SimulatedLoop()
        self.loop.set_exception_handler(self._unhandled)
        self.children: dict[int, Process] = {}
        self.app: Starlette | None = None
        self.residency: Residency | None = None
        self.is_ready = False
        self.failed_first_starts = 0  # of loads: their first process could not be started
        self.began_at = found.now
        self._catalog = Catalog(
            entries=tuple(models), at_start=tuple(each.name for each in models if each.is_pinned)
        )
        self._numbers = 0
        self._requests: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self.process.ends.append(self._end_of_process)
        self.process.spawn(self._main, "loop")

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except (HoldfastError, OSError) as error:  # it cannot start or continue
            self.world.tell(f"the server gives up: {error}")
            self.process.exit(2)
            raise Killed from None
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.process.exit(0)
        raise Killed

    async def _serve(self) -> None:
        settings = self.settings
        self.residency = Residency(
            self._catalog,
            settings.residency,
            fetch=lambda entry: ModelFiles(folder=BUNDLED, weight_bytes=self.machine.weight_bytes),
            worker_of=self._worker_of,
            max_waiting_sequences=settings.scheduler.max_queued + settings.scheduler.max_running,
            meter=MemoryMeter(
                footprint=lambda pid: self.machine.weight_bytes + self.machine.excess_bytes,
                machine=lambda: self.machine.memory,
            ),
        )
        await self.residency.start()
        app = build_application(settings, self.residency)
        async with app.router.lifespan_context(app):
            self.app = app
            await self.residency.wait_ready()
            self.is_ready = True
            await self._stop.wait()
            await self._drained(app)
        await self.residency.stop()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an error that the event loop would only log."""
        error = context.get("exception")
        if error is not None and not self.process.is_dead:
            self.world.on_error(error)

    @property
    def is_running(self) -> bool:
        """Whether it is alive and was not asked to stop."""
        return not self.process.is_dead and not self._stop.is_set()

    def accept(self, exchange: Any) -> None:
        """Let the application answer a request."""
        task = self.loop.create_task(exchange.serve(), name="request")
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    def stop(self) -> None:
        """Ask it to stop, as by SIGTERM."""
        self.loop.call_soon_threadsafe(self._stop.set)

    async def _drained(self, app: Starlette) -> None:
        """Wait for running answers, as the HTTP server does."""
        services = app.state.services
        services.access.drain.begin(self.settings.server.shutdown_seconds)
        services.models.library.stop()
        await services.answers.resumable.cancel_lost()
        running = {*self._requests, *services.answers.resumable.tasks}
        if running:
            await asyncio.wait(running, timeout=services.access.drain.seconds_left)
        self.app = None
        for task in self._requests:
            task.cancel()
        if self._requests:
            await asyncio.wait(set(self._requests), timeout=5.0)

    def _worker_of(
        self, entry: CatalogEntry, files: ModelFiles, share: MemoryShare
    ) -> WorkerSettings:
        settings = self.settings
        return WorkerSettings(
            folder=f"/models/{entry.name}",
            images=str(images_folder(settings.store.folder)),
            model=replace(entry.model, name=entry.name),
            scheduler=settings.scheduler,
            store=settings.store,
            log=settings.log,
            residency=settings.residency,
            share=share,
        )

    async def start_child(self, *command: str, **more: Any) -> _Child:
        """In place of `asyncio.create_subprocess_exec`."""
        self._numbers += 1
        if self.machine.failing_starts:
            self.machine.failing_starts -= 1
            self.machine.starts.append(("", False))
            if self.residency is not None:
                slots = self.residency._slots.values()
                self.failed_first_starts += any(each.state is State.LOADING for each in slots)
            self.world.on_fault(self.process, "no process starts")
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if self.world.fails("spawn"):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return _Child(self, self._numbers)

    def _end_of_process(self) -> None:
        """Let the workers notice that their parent is gone, and kill those that do not end."""
        for child in self.children.values():
            worker = self.machine.workers.get(child.pid)
            if worker is not None:
                self.world.after(1.0, worker.wake.ring)
                self.world.after(12.0, child.kill)


def entry(
    name: str, *, is_pinned: bool = True, idle_seconds: float | None = None, **more: Any
) -> CatalogEntry:
    """A model of the simulated server."""
    model = ModelSettings(path=name, name=name, **more)
    return CatalogEntry(
        name=name, origin="", model=model, is_pinned=is_pinned, idle_seconds=idle_seconds
    )


_fronts: dict[Process, SimulatedFront] = {}


def _run_template(task: bytes, *, source: str) -> tuple[Any, bytes]:
    return template_worker._carry_out(pickle.loads(task))


def install() -> None:
    """Replace the calls that start processes, inspect them or send them signals."""
    create = asyncio.create_subprocess_exec
    kill = os.kill

    async def create_subprocess_exec(*command: Any, **more: Any) -> Any:
        front = _fronts.get(world().here)
        if front is None:
            return await create(*command, **more)
        return await front.start_child(*command, **more)

    def send_signal(pid: int, number: int) -> None:
        for process in world().processes:
            if process.pid == pid:
                if process.is_dead:
                    raise ProcessLookupError
                if number == signal.SIGKILL:
                    found = world()
                    found.on_kill(process)
                    process.kill(-9)
                return
        kill(pid, number)

    asyncio.create_subprocess_exec = create_subprocess_exec
    os.kill = send_signal
    worker_process.progress_of = lambda pid: _progress(pid)
    template_process.PROCESSES.run = _run_template  # type: ignore[method-assign]
    residency_module.WATCH_SECONDS = 5.0  # its thread is half of all events while nobody is there
    worker_link._takes_sockets = lambda folder: True
    residency_module.memory_report = lambda **_: _machine_of_world().memory


def _progress(pid: int) -> Progress:
    for process in world().processes:
        if process.pid == pid and not process.is_dead and not process.is_suspended:
            return Progress(processor_seconds=0.0)
    return Progress()


def _machine_of_world() -> Machine:
    (front,) = [each for each in _fronts.values() if not each.process.is_dead]
    return front.machine


def begin_front(
    found: World, machine: Machine, settings: Settings, models: Sequence[CatalogEntry]
) -> SimulatedFront:
    """Start a server."""
    front = SimulatedFront(found, machine, settings, models)
    _fronts[front.process] = front
    return front


_ = (Callable, Mapping)
