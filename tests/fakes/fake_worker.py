"""A worker process with a fake engine: the real link, loop and signals, but no model. Its settings,
whose folder's name determines its behaviour.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.config import (
    LogSettings,
    ModelSettings,
    ResidencySettings,
    SchedulerSettings,
    StoreSettings,
)
from holdfast.errors import ModelLoadError, UnusableModel
from holdfast.machine.memory_plan import MemoryPlan
from holdfast.wire.commands import SequenceRequest, WorkerSettings
from holdfast.wire.events import ModelInfo
from holdfast.wire.kv import KVHealth
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.loop.inbox import Inbox, Progress, Pulse
from holdfast.worker.loop.loop import WorkerLoop
from holdfast.worker.loop.memory_budget import MemoryBudget
from holdfast.worker.loop.process import WorkerEnd, live, run_process
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import SequenceCosts
from tests.fakes.fake_engine import FakeEngine, hold_the_lock

ROOT = Path(__file__).parents[2]
SETTINGS = SchedulerSettings(step_tokens=64, max_running=16)
# detects within a second what otherwise takes ten
IMPATIENT = ResidencySettings(heartbeat_seconds=0.05, hang_seconds=1.0)


def fake_settings(
    behaviour: str = "good",
    *,
    residency: ResidencySettings | None = None,
    place: str = "/nowhere",
    crash_reports: str = "",
) -> WorkerSettings:
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"  # the worker inherits it
    return WorkerSettings(
        folder=f"{place}/{behaviour}",
        crash_reports=crash_reports,
        model=ModelSettings(),
        scheduler=SETTINGS,
        store=StoreSettings(),
        log=LogSettings(level="warning"),
        residency=residency or ResidencySettings(),
        command=(sys.executable, "-m", "tests.fakes.fake_worker"),
    )


def a_request(
    request_id: str = "a", *, max_tokens: int = 10, prompt: tuple[int, ...] = (1, 2, 3)
) -> SequenceRequest:
    return SequenceRequest(
        request_id=request_id,
        prompt_token_ids=TokenIds.of(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=1),
    )


INFO = ModelInfo(
    model_type="fake",
    layout="rows",
    layout_reason="",
    parameters=0,
    weight_bytes=0,
    compute_dtype="float32",
    context_tokens=1_000_000,
    vocab_size=601,
    kv=KVHealth(bits="native", bytes_per_token=1, forms={}, refused={}),
    fixed_bytes_per_sequence=0,
    kv_budget_bytes=10_000_000,
    device="none",
)

MAC_INFO = msgspec.structs.replace(
    INFO,
    weight_bytes=1_000_000,
    reserve_bytes=500_000,
    wired_bytes=1_000_000,
    device_memory_bytes=20_000_000,
)


def fake_loop(
    inbox: Inbox, settings: WorkerSettings, progress: Progress, pulse: Pulse
) -> tuple[WorkerLoop, ModelInfo]:
    behaviour = Path(settings.folder).name
    if behaviour == "bad":
        raise ModelLoadError("the folder is bad")
    if behaviour == "damaged":
        raise UnusableModel("a file is damaged")
    if behaviour == "good-once" and not _is_first(Path(settings.folder)):
        behaviour = "dies-loading"
    if behaviour == "dies-loading":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "has-a-child":
        # it has our standard error too
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    if behaviour == "signalled-at-exit":
        globals()["signal_at_exit"] = SignalAtExit()
    if behaviour == "holds-the-lock":
        hold_the_lock(processor_seconds=0.6)
    if behaviour == "hangs":
        os.read(os.pipe()[0], 1)
    progress("reading", 1.0)
    costs = SequenceCosts(kv_bytes_per_token=1, fixed_bytes_per_sequence=0)
    scheduler = Scheduler(
        settings.scheduler,
        costs,
        budget_bytes=INFO.kv_budget_bytes,
        context_tokens=INFO.context_tokens,
        mixes_chunks=True,
    )
    engine = FakeEngine(is_broken=behaviour == "broken-device", remembers_plans=False)
    info = MAC_INFO if behaviour == "on-a-mac" else INFO
    plan = MemoryPlan(kv_bytes=info.kv_budget_bytes, ram_tier_bytes=0)
    memory = MemoryBudget(
        plan,
        scheduler=scheduler,
        cache=None,
        plan_for=lambda state_bytes: MemoryPlan(kv_bytes=state_bytes, ram_tier_bytes=0),
        contexts_of=lambda kv_bytes: {"native": min(kv_bytes // 10, INFO.context_tokens)},
    )
    return WorkerLoop(
        engine=engine, scheduler=scheduler, inbox=inbox, pulse=pulse, memory=memory
    ), info


class SignalAtExit:
    """Sends SIGTERM to its process when Python clears its module, after the signal handlers."""

    def __del__(self, kill: Callable[[int, int], None] = os.kill, pid: int = os.getpid()) -> None:
        kill(pid, 15)


def _is_first(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def serve(inbox: Inbox, settings: WorkerSettings, pulse: Pulse) -> WorkerEnd:
    return live(inbox, lambda inbox, progress: fake_loop(inbox, settings, progress, pulse))


if __name__ == "__main__":
    sys.exit(run_process(serve))
