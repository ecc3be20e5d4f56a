"""Lets schemathesis call every operation in /openapi.json on a server with the bundled model.

`python -m tools.schemathesis` (`make schemathesis`, with ARGS="--max-examples 500" for more)
creates an environment for it (`tests/schemathesis/`) and takes about two minutes. Requests follow
the schemas or break them; responses must have a described status, type and schema, and must not be
internal errors. Endless operations are left out. Output appears at the end of each phase; the
coverage phase has nine thousand cases, regardless of the number of examples.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from holdfast.front.server.dialect import ENDLESS_MARK
from tools.clients import ROOT, environment_of

FOLDER = ROOT / "tests" / "schemathesis"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = 10  # generated per operation; slow, because the schemas of chats are large


def run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Test the server at this address; exit status 0 if all checks pass."""
    options = (
        f"--checks {CHECKS} --warnings off --workers 1 --generation-database none "
        f"--request-timeout 120 --continue-on-failure --max-examples {EXAMPLES} "
        "--suppress-health-check filter_too_much"  # conversation items are often filtered out
    ).split()
    command = [str(environment_of(FOLDER) / "schemathesis"), "run", f"{url}/openapi.json", *options]
    variables = {
        "SCHEMATHESIS_HOOKS": "hooks",
        "PYTHONPATH": str(FOLDER),
        "NO_PROXY": "127.0.0.1",
    }
    # it writes examples into the working folder
    with tempfile.TemporaryDirectory(prefix="schemathesis-") as scratch:
        return subprocess.run(
            [*command, "--exclude-by", f"/{ENDLESS_MARK} == true", *arguments],
            cwd=scratch,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def main(arguments: Sequence[str]) -> int:
    """Test a new server. Returns 1 if a check failed."""
    from tests.fakes.server_process import running_server

    with running_server("--store", "off", "--name", "demo", "--log-level", "error") as server:
        done = run(server.url, *arguments)
    print(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
