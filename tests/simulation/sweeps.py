"""Sweeps, as SQLite's tests do them: in one recorded run, the first write fails, then the second,
and so on to the last; and so for every kind of thing that can fail.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace

from tests.simulation.actions import Scenario, Trouble, Turn
from tests.simulation.simulation import Outcome, run

# kinds and the errors with which they fail
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
}
OPTIONS = {  # the others are the default ones
    "kv_tokens": 6000,
    "ram_tokens": 2000,
    "max_running": 4,
    "max_queued": 16,
    "step_tokens": 256,
}
# two agents with sessions, a restart between their turns, and a crowd at the end
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


def sweep(*kinds: str, every: int = 1) -> Iterator[tuple[str, int, int, Outcome]]:
    """Run the recorded scenario once for each thing that fails. Yields the kind, the error, which
    one failed, and what came of it. every: of how many only one is tried.
    """
    counts = run(RECORDED).counts
    for kind in kinds or tuple(KINDS):
        for error in KINDS[kind]:
            for number in range(1, counts[kind] + 1, every):
                options = {**OPTIONS, "failing": (kind, number, error)}
                yield kind, error, number, run(replace(RECORDED, options=options))
