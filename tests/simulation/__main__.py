"""Runs simulated worlds: `python -m tests.simulation --seconds 20`, or `--seed 7` for one."""

from __future__ import annotations

import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a seed's order
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

from tests.simulation import links, threads

threads.install()  # before anything else takes Python's own threads and clocks
links.install()

from tests.simulation import disk

disk.install()

from tests.simulation import checks, front, worker  # noqa: E402

front.install()
checks.install()
worker.install()

from tests.simulation.actions import scenario_of  # noqa: E402
from tests.simulation.simulation import run  # noqa: E402

if __name__ == "__main__":
    import faulthandler

    faulthandler.dump_traceback_later(150, exit=True)
    began = threads._REAL_MONOTONIC()
    events = 0
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        outcome = run(scenario_of(seed))
        events += outcome.events
        print(
            seed,
            f"{outcome.seconds:.0f} s",
            outcome.events,
            outcome.answers,
            outcome.trace_hash,
            f"{events / (threads._REAL_MONOTONIC() - began):.0f}/s",
            flush=True,
        )
        for violation in outcome.violations:
            print(violation)
            if "-v" in sys.argv:
                for at, text in outcome.story:
                    print(f"  {at:.3f} {text}")
    os._exit(0)
