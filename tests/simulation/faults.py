"""Fault injection: how each kind of `Trouble` is caused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.actions import Trouble
from tests.simulation.device import Fault
from tests.simulation.vision import ImageFault
from tests.simulation.worker import SimulatedWorker
from tests.simulation.world import Process

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_OF_STEPS = {
    "step fails": Fault.ERROR,
    "step computes NaN": Fault.NAN,
    "step is slow": Fault.SLOW,
    "step kills": Fault.DIES,
    "worker hangs": Fault.HANG,
}

_OF_IMAGES = {
    "image process dies": (ImageFault.DIES,),
    "image process hangs": (ImageFault.HANGS, ImageFault.SPINS),
    "image process is slow": (ImageFault.SLOW,),
    "image process does not start": (ImageFault.NO_START,),
    "vision tower fails": (ImageFault.NO_FEATURES,),
}
_OF_A_MODEL = {"worker dies", "worker is suspended"}
_CUT_SECONDS = (0.0, 0.0005, 0.005, 0.05)  # between a sync and a power cut


def cause(simulation: Simulation, trouble: Trouble) -> None:
    """Inject the fault. Raises AssertionError if its kind is unknown."""
    world, machine = simulation.world, simulation.machine
    worker = _worker_of(simulation, trouble.model)
    simulation.checks.excuses.add(
        trouble.kind, model=trouble.model if trouble.kind in _OF_A_MODEL else ""
    )
    match trouble.kind:
        case kind if kind in _OF_STEPS:
            if worker is not None and worker.engine is not None:
                engine = worker.engine
                if worker.draft_engine is not None and trouble.number % 3 == 0:
                    engine = worker.draft_engine
                engine.faults += [None] * (trouble.number - 1) + [_OF_STEPS[kind]]
        case kind if kind in _OF_IMAGES:
            faults = _OF_IMAGES[kind]
            machine.image_faults += [faults[trouble.number % len(faults)]] * trouble.number
        case "a conversation kills":
            machine.deadly.left = trouble.number
        case "worker dies":
            if worker is not None:
                worker.process.kill()
        case "worker dies after writes":
            if worker is not None:
                simulation.disk.after(
                    "write",
                    trouble.number,
                    lambda: world.after(0.0, lambda: _kill(simulation, worker)),
                )
        case "workers keep dying":
            machine.short_lives = trouble.number
            if worker is not None:
                worker.process.kill()
        case "worker is suspended":
            if worker is not None and not worker.process.is_suspended:
                process = worker.process
                process.suspend()
                world.after(trouble.seconds, lambda: _resume(simulation, process, trouble))
        case "load fails":
            machine.loads.append((Fault.ERROR, Fault.DIES, Fault.HANG)[trouble.number % 3])
        case "server dies":
            simulation.front.process.kill()
        case "server restarts":
            simulation.front.stop()
        case "power cut":
            _cut_power(simulation)
        case "power cut after syncs":  # soon after data has become durable
            delay = world.random.choice(_CUT_SECONDS)
            simulation.disk.after(
                "sync", trouble.number, lambda: world.after(delay, lambda: _cut_power(simulation))
            )
        case "weights change":
            _kill_all(simulation)
            if machine.adapters and trouble.number % 2:  # an adapter is retrained
                adapter = machine.adapters[trouble.number % len(machine.adapters)]
                machine.versions[f"{trouble.model}:{adapter}"] += 1
            else:
                machine.versions[trouble.model] += 1
        case "clock jumps":
            days = 3600.0 * 24 if trouble.number <= 3 else 1.0
            jump = trouble.seconds * days * (1 if trouble.number % 2 else -1)
            world.wall_shift += jump
            if jump > 0:
                simulation.checks.excuses.jumped_at = world.now
        case "machine sleeps":
            world.now += trouble.seconds
            simulation.checks.excuses.slept(trouble.seconds)
        case "no process starts":
            machine.failing_starts = 1 + trouble.number % 4
            if worker is not None and trouble.number % 4:
                _kill(simulation, worker)
        case "memory is short" | "memory is enough":
            simulation.press(is_short=trouble.kind == "memory is short")
        case "disk error" | "disk is full" | "file is damaged" | "file vanishes":
            simulation.trouble_disk(trouble)
        case kind:
            raise AssertionError(f"unknown trouble: {kind}")


def _kill(simulation: Simulation, worker: SimulatedWorker) -> None:
    simulation.checks.excuses.add("worker dies", model=worker.name)
    worker.process.kill()


def _kill_all(simulation: Simulation) -> None:
    simulation.front.process.kill()
    for each in list(simulation.machine.workers.values()):
        each.process.kill()


def _cut_power(simulation: Simulation) -> None:
    simulation.checks.excuses.add("power cut")
    _kill_all(simulation)
    simulation.disk.power_cut(loses_all=simulation.options["cut_loses_all"])
    simulation.checks.store.after_power_cut()


def _resume(simulation: Simulation, process: Process, trouble: Trouble) -> None:
    if not process.is_dead:
        simulation.checks.workers.suspended(process, seconds=trouble.seconds)
    process.resume()


def end_all(simulation: Simulation) -> None:
    """Cancel all faults that have not happened yet."""
    simulation.machine.loads.clear()
    simulation.machine.image_faults.clear()
    simulation.machine.deadly.left = 0
    simulation.machine.failing_starts = simulation.machine.short_lives = 0
    for worker in simulation.machine.workers.values():
        if worker.engine is not None:
            worker.engine.faults.clear()
        if worker.draft_engine is not None:
            worker.draft_engine.faults.clear()
    simulation.heal()


def _worker_of(simulation: Simulation, model: str) -> SimulatedWorker | None:
    for worker in simulation.machine.workers.values():
        if worker.name == model:
            return worker
    return None
