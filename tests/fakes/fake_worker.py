"""Settings for worker processes with a fake engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast.config import (
    LogSettings,
    ModelSettings,
    ResidencySettings,
    SchedulerSettings,
    StoreSettings,
)
from holdfast.wire.commands import SequenceRequest, WorkerSettings
from holdfast.wire.requests import SamplingParams, TokenIds

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
        command=(sys.executable, "-m", "tests.fakes.worker_main"),
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
