"""`python -m holdfast_bench [NAME] [options of holdfast bench run]`: without arguments, all
scenarios against mlx_lm.server within ten minutes (`make bench`).
"""

from __future__ import annotations

import sys

from holdfast.cli.main import app

MINUTES = "9"  # leaves time for starting, stopping and the last case

if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:2] if not argument.startswith("-")]
    options = sys.argv[1 + len(named) :]
    wanted = (
        ["list"]
        if "--list" in options
        else ["run", *(named or ["all"]), "--minutes", MINUTES, "--noise-rounds", "1", *options]
    )
    sys.argv = ["holdfast", "bench", *wanted]  # the report shows it as the command
    app()
