"""Has schemathesis call every operation that /openapi.json describes, on a server with the bundled
model.

Operations marked as endless are left out: their answer ends only when the client leaves.

`python -m tools.schemathesis` makes an environment for it (`tests/schemathesis/`) if there is none
of that content. What it sends follows the schemas, or breaks them; what comes back must have a
status, a type and a form that are described, and never be the server's fault. `make schemathesis`
calls it, with ARGS="--max-examples 500" for more. It takes about two minutes, and prints what came
of a phase when the phase ends: that of coverage has nine thousand cases, whatever the number of
examples.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from holdfast.front.server.dialect import ENDLESS_MARK
from tools.environments import ROOT, environment_of

FOLDER = ROOT / "tests" / "schemathesis"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = 10  # drawn for each operation, and slowly: the schemas of chats are large


def run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call everything at this address; its exit status is 0 where all checks hold."""
    # it keeps examples where it runs
    with tempfile.TemporaryDirectory(prefix="schemathesis-") as scratch:
        return subprocess.run(
            [
                str(environment_of(FOLDER) / "schemathesis"),
                *(
                    "run",
                    f"{url}/openapi.json",
                    "--checks",
                    CHECKS,
                    "--warnings",
                    "off",
                    "--workers",
                    "1",
                ),
                *(
                    "--generation-database",
                    "none",
                    "--request-timeout",
                    "120",
                    "--continue-on-failure",
                ),
                *(
                    "--max-examples",
                    str(EXAMPLES),
                    "--exclude-by",
                    f"/{ENDLESS_MARK} == true",
                    *arguments,
                ),
            ],
            cwd=scratch,
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": "hooks",
                "PYTHONPATH": str(FOLDER),
                "NO_PROXY": "127.0.0.1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def main(arguments: Sequence[str]) -> int:
    """Call everything on a server of its own. Returns 1 when a check failed."""
    from tests.fakes.server_process import ServerProcess

    server = ServerProcess("--store", "off", "--name", "demo", "--log-level", "error")
    try:
        server.wait_ready()
        done = run(server.url, *arguments)
    finally:
        server.stop()
    print(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
