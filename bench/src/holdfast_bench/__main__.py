"""`make bench`: all scenarios against mlx_lm.server within ten minutes.

`python -m holdfast_bench [NAME] [any options of holdfast bench run]`; the scenarios themselves are
in `scenarios/`.
"""

from __future__ import annotations

import sys

from holdfast.cli.main import app

MINUTES = "9"  # and some for starting, stopping and the last case

if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:2] if not argument.startswith("-")]
    options = sys.argv[1 + len(named) :]
    wanted = (
        ["list"]
        if "--list" in options
        else ["run", *(named or ["all"]), "--minutes", MINUTES, "--noise-rounds", "1", *options]
    )
    sys.argv = ["holdfast", "bench", *wanted]  # what the report names as its command
    app()
