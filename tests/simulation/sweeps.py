"""Sweeps, as in SQLite's tests: a recorded run is repeated, first with its first write failing, then
with its second, and so on to the last; and likewise for each kind of operation that can fail.

    python -m tests.simulation.sweeps [KIND…] [--every N] [--processes N]
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Iterator
from dataclasses import replace

from tests.simulation.actions import Scenario, Trouble, Turn
from tests.simulation.outcomes import Result, Task
from tests.simulation.pool import Worlds

# the kinds of operations, with the errors that they fail with
KINDS = {
    "open": (errno.EMFILE, errno.EIO),
    "read": (errno.EIO,),
    "write": (errno.ENOSPC, errno.EIO),
    "sync": (errno.EIO,),
    "rename": (errno.EIO,),
    "unlink": (errno.EACCES,),
    "stat": (errno.EIO, errno.ENOENT),
    "list": (errno.EIO,),
    "mkdir": (errno.ENOSPC,),
    "sqlite": (errno.EIO, errno.ENOSPC),
    "message": (0,),
    "spawn": (0,),
    "step": (0,),
    "allocation": (0,),
}
OPTIONS = {  # in addition to the defaults
    "kv_tokens": 6000,
    "ram_tokens": 2000,
    "max_running": 4,
    "max_queued": 16,
    "step_tokens": 256,
}
# two agents, one with a session; a restart between their turns; then the death of a worker
RECORDED = Scenario(
    order=1,
    options=OPTIONS,
    actions=(
        Turn(at=0.0, agent="a", tokens=700, max_tokens=20, session="s"),
        Turn(at=0.5, agent="b", tokens=300, max_tokens=40, protocol="messages", kv_bits="8"),
        Turn(at=2.0, agent="a", tokens=100, max_tokens=20, session="s"),
        Trouble(at=4.0, kind="server restarts"),
        Turn(at=9.0, agent="a", tokens=20, max_tokens=20, session="s"),
        Turn(at=9.0, agent="b", tokens=20, max_tokens=20, protocol="responses", kv_bits="8"),
        Trouble(at=11.0, kind="worker dies"),
        Turn(at=11.1, agent="b", tokens=20, max_tokens=20, choices=2),
    ),
)


def sweep(
    worlds: Worlds, kind: str, error: int, *, every: int = 1
) -> Iterator[tuple[Scenario, Result]]:
    """Run the recorded scenario once for each operation of a kind, which then fails. every: try only
    every n-th operation.
    """
    counts = worlds.run(Task(scenario=RECORDED)).counts
    scenarios = [
        replace(RECORDED, options={**OPTIONS, "failing": (kind, number, error)})
        for number in range(1, counts[kind] + 1, every)
    ]
    futures = [worlds.submit(Task(scenario=each)) for each in scenarios]
    for scenario, future in zip(scenarios, futures, strict=True):
        result = future.result()
        assert result is not None
        yield scenario, result


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> int:
    """Run sweeps and print a table. Return 1 after a violation."""
    parser = argparse.ArgumentParser(description="Let each operation of a kind fail, one per run.")
    parser.add_argument(
        "kinds",
        nargs="*",
        choices=[[], *KINDS],
        metavar="KIND",
        help=f"{', '.join(KINDS)}; default: all",
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try only every N-th")
    parser.add_argument("--processes", type=int, default=None, help="default: one for each core")
    given = parser.parse_args()
    told: set[str] = set()
    _say(f"{'kind':<12}{'error':<8}{'runs':>6}{'violations':>12}")
    with Worlds(given.processes) as worlds:
        for kind in given.kinds or KINDS:
            for error in KINDS[kind]:
                runs = violations = 0
                for scenario, result in sweep(worlds, kind, error, every=given.every):
                    runs += 1
                    violations += bool(result.failures)
                    for failure in result.failures:
                        if f"{kind} {failure.invariant}" not in told:
                            told.add(f"{kind} {failure.invariant}")
                            _say(
                                f"{scenario.options['failing']}: {failure.invariant}: {failure.what}"
                            )
                name = errno.errorcode.get(error, "")
                _say(f"{kind:<12}{name:<8}{runs:>6}{violations:>12}")
    return int(bool(told))


if __name__ == "__main__":
    sys.exit(main())
