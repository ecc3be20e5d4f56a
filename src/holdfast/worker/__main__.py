"""`python -m holdfast.worker`: the process that residency starts for each model."""

from __future__ import annotations

import sys

from holdfast.worker.assignment import Assignment
from holdfast.worker.device import serve_model
from holdfast.worker.inbox import Inbox
from holdfast.worker.lifecycle import WorkerEnd
from holdfast.worker.process import run_process
from holdfast.worker.pulse import Pulse


def serve(inbox: Inbox, assignment: Assignment, pulse: Pulse) -> WorkerEnd:
    """Serve the assigned model on the calling thread."""
    return serve_model(
        inbox,
        folder=assignment.folder,
        hash_cache=assignment.hash_cache,
        model=assignment.model,
        scheduler=assignment.scheduler,
        store=assignment.store,
        pulse=pulse,
    )


if __name__ == "__main__":
    sys.exit(run_process(serve))
