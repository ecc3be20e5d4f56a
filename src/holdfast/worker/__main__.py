"""`python -m holdfast.worker`: the process that the front starts for each model."""

from __future__ import annotations

import sys

from holdfast.worker.loop.process import run_process, serve_model

if __name__ == "__main__":
    sys.exit(run_process(serve_model))
