from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.errors import ModelLoadError
from holdfast.wire.events import LoadProgress, ModelInfo, WorkerFailed, WorkerReady
from holdfast.worker.loop.inbox import Inbox
from holdfast.worker.loop.loop import WorkerLoop
from holdfast.worker.loop.process import Progress, WorkerEnd, live
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.fake_worker import INFO
from tests.fakes.looped_worker import make_loop, request
from tests.fakes.script_inbox import ScriptInbox


def test_a_worker_reports_ready_serves_and_closes_its_inbox() -> None:
    inbox = ScriptInbox([[request("a", max_tokens=2)]])
    assert (
        live(inbox, lambda given, progress: (make_loop(FakeEngine(), inbox), INFO))
        is WorkerEnd.IN_ORDER
    )
    assert isinstance(inbox.events[0], WorkerReady)
    assert inbox.finished("a").completion_tokens == 2
    assert inbox.is_closed


def test_a_models_fault_is_reported_to_the_front() -> None:
    def build(given: Inbox, progress: Progress) -> tuple[WorkerLoop, ModelInfo]:
        raise ModelLoadError("no weights")

    inbox = ScriptInbox([])
    assert live(inbox, build) is WorkerEnd.BAD_INPUT
    assert inbox.events == [WorkerFailed(message="no weights", fatal_input=True)]
    assert inbox.is_closed


def test_a_bug_while_loading_is_raised_and_closes_the_inbox() -> None:
    def build(given: Inbox, progress: Progress) -> tuple[WorkerLoop, ModelInfo]:
        raise ZeroDivisionError

    inbox = ScriptInbox([])
    with pytest.raises(ZeroDivisionError):
        live(inbox, build)
    assert inbox.is_closed


def test_progress_is_reported_per_stage_not_per_tensor() -> None:
    def build(given: Inbox, progress: Progress) -> tuple[WorkerLoop, ModelInfo]:
        for stage in ("reading", "probing"):
            for part in range(1001):
                progress(stage, part / 1000)
        raise ModelLoadError("enough")

    inbox = ScriptInbox([])
    live(inbox, build)
    told = [
        (event.stage, event.fraction) for event in inbox.events if isinstance(event, LoadProgress)
    ]
    assert {("reading", 0.0), ("reading", 1.0), ("probing", 0.0), ("probing", 1.0)} <= set(told)
    assert len(told) < 50


def test_the_process_imports_mlx_after_choosing_a_blas() -> None:
    """MLX uses the BLAS that is loaded when it is imported, which is chosen during the load."""
    code = "import sys, holdfast.worker.loop.process; print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("hidden", ["", "holdfast.worker.loop.serving"])
@pytest.mark.parametrize("switch", ["enable", "disable"])
def test_loading_leaves_garbage_collection_as_it_was(switch: str, hidden: str) -> None:
    """The library loads a model on a thread of the user's program."""
    code = f"""
import contextlib, gc, sys
from holdfast.worker.loop.process import serve_model
from tests.fakes.fake_worker import fake_settings
from tests.fakes.script_inbox import ScriptInbox
gc.{switch}()
if {hidden!r}:
    sys.modules[{hidden!r}] = None
with contextlib.suppress(ImportError):
    serve_model(ScriptInbox([]), fake_settings())
print(gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(switch == "enable")
