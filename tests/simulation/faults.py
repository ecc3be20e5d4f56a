"""What can go wrong in the simulated world, and how it is made to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.actions import Trouble
from tests.simulation.device import Fault
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


def cause(simulation: Simulation, trouble: Trouble) -> None:
    """Make it happen."""
    world, machine = simulation.world, simulation.machine
    worker = _worker_of(simulation, trouble.model)
    simulation.checks.excuse(trouble)
    match trouble.kind:
        case kind if kind in _OF_STEPS:
            if worker is not None and worker.engine is not None:
                worker.engine.faults += [None] * (trouble.number - 1) + [_OF_STEPS[kind]]
        case "worker dies":
            if worker is not None:
                worker.process.kill()
        case "workers keep dying":
            machine.short_lives = trouble.number
            if worker is not None:
                worker.process.kill()
        case "worker is suspended":
            if worker is not None:
                process = worker.process
                process.suspend()
                world.after(trouble.seconds, lambda: _resume(simulation, process, trouble))
        case "load fails":
            machine.loads.append((Fault.ERROR, Fault.DIES, Fault.HANG)[trouble.number % 3])
        case "server dies":
            simulation.front.process.kill()
        case "server restarts":
            simulation.front.stop()
        case "power cut" | "weights change":
            simulation.front.process.kill()
            for each in list(machine.workers.values()):
                each.process.kill()
            if trouble.kind == "power cut":
                simulation.power_cut()
            else:
                machine.versions[trouble.model] += 1
        case "clock jumps":
            days = 3600.0 * 24 if trouble.number % 3 == 0 else 1.0
            jump = trouble.seconds * days * (1 if trouble.number % 2 else -1)
            world.wall_shift += jump
            if jump > 0:
                simulation.checks.jumped_at = world.now
        case "machine sleeps":
            simulation.checks.slept.append((world.now, trouble.seconds))
            world.now += trouble.seconds
        case "no process starts":
            machine.failing_starts = trouble.number
        case "memory is short" | "memory is enough":
            simulation.press(is_short=trouble.kind == "memory is short")
        case "disk error" | "disk is full" | "block is damaged" | "block vanishes":
            simulation.trouble_disk(trouble)
        case kind:
            raise AssertionError(f"unknown trouble: {kind}")


def _resume(simulation: Simulation, process: Process, trouble: Trouble) -> None:
    if not process.is_dead:
        simulation.checks.suspended(process, seconds=trouble.seconds)
    process.resume()


def end_all(simulation: Simulation) -> None:
    """Let nothing more go wrong."""
    simulation.machine.loads.clear()
    simulation.machine.failing_starts = simulation.machine.short_lives = 0
    for worker in simulation.machine.workers.values():
        if worker.engine is not None:
            worker.engine.faults.clear()
    simulation.heal()


def _worker_of(simulation: Simulation, model: str) -> SimulatedWorker | None:
    for worker in simulation.machine.workers.values():
        if worker.name == model:
            return worker
    return None
