"""`python -m holdfast.worker.loop`: the process that residency starts for each model."""

from __future__ import annotations

import sys

from holdfast.worker.loop.device import serve_model
from holdfast.worker.loop.process import run_process

if __name__ == "__main__":
    sys.exit(run_process(serve_model))
