"""`make bench`: all scenarios against mlx_lm.server within ten minutes.

`python -m benchmarks [any options of holdfast bench run]`; the scenarios themselves are in src/holdfast/bench/scenarios.
"""

from __future__ import annotations

import sys

from holdfast.cli.main import app

MINUTES = "9"  # and some for starting, stopping and the last case

if __name__ == "__main__":
    if "--list" in sys.argv:
        app(["bench", "list"])
    named = [argument for argument in sys.argv[1:2] if not argument.startswith("-")]
    options = sys.argv[1 + len(named) :]
    app(["bench", "run", *(named or ["all"]), "--minutes", MINUTES, "--noise-rounds", "1", *options])
