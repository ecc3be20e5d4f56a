"""Puts real clients before a real server on the bundled model: tools, thinking and structure,
streamed and whole.

`python -m tools.clients` makes an environment for the clients (`tests/clients/requirements.txt`) if
there is none of that content, starts a server, runs `tests/clients/with_*.py` one after the other,
and prints a table; with npm also what `tests/clients/vercel/` has. `make clients` calls it, with
ARGS="openai anthropic" for some of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.environments import ROOT, environment_of, modules_of

SCRIPTS = ROOT / "tests" / "clients"
WAITING_MODEL = "demo/tiny"
ALIASES = "claude-*,gpt-*"  # some clients know by the name what a model can do
_LIMIT_SECONDS = 600
# Nothing but this server is called: no proxy, and litellm fetches a table of prices from the web
# unless it is told not to.
_ALONE = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True)
class CheckOfClient:
    """What came of one check: `problem` is empty when it passed."""

    client: str
    check: str
    problem: str
    versions: dict[str, str]


def scripts() -> list[Path]:
    """One for each client; those in JavaScript only where there is npm."""
    return sorted(
        [
            *SCRIPTS.rglob("with_*.py"),
            *(SCRIPTS.glob("*/with_*.mjs") if shutil.which("npm") else ()),
        ]
    )


def waiting_scripts() -> list[Path]:
    """Those that speak to a server that is silent for long."""
    return [SCRIPTS / "waits.py", *(script for script in scripts() if script.suffix == ".mjs")]


@contextmanager
def waiting_server() -> Iterator[str]:
    """The base URL of a server that is silent for long; its model is `WAITING_MODEL`."""
    command = [sys.executable, "-m", "tests.fakes.waiting_server"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"{process.stdout.readline().strip()}/v1"


def checked(
    script: Path, *, base_url: str, model: str, waits: bool = False
) -> Iterator[CheckOfClient]:
    """Run a client's script; what it was checked for, as far as it came."""
    folder = script.parent
    if script.suffix == ".mjs":
        folder, program = modules_of(folder), "node"
        shutil.copy(script, folder)  # modules are looked for beside it
    else:
        program = str(environment_of(folder) / "python")
    done = subprocess.run(
        [program, script.name, base_url, model, *(["waits"] if waits else [])],
        cwd=folder,
        env={**os.environ, **_ALONE, "PYTHONPATH": str(SCRIPTS)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    client = script.stem.removeprefix("with_")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    said = [CheckOfClient(client=client, **line) for line in lines]
    yield from said
    if not said or (done.returncode and not any(each.problem for each in said)):
        yield CheckOfClient(
            client, "the script", f"ended with {done.returncode}: {done.stdout}{done.stderr}", {}
        )


def main(names: Sequence[str]) -> int:
    """Run the clients that are named, or all. Returns 1 when a check failed."""
    from tests.fakes.server_process import ServerProcess

    server, failed = (
        ServerProcess(
            "--store", "off", "--name", "demo", "--set", f"server.model_aliases={ALIASES}"
        ),
        [],
    )
    try:
        server.wait_ready()
        for script in [
            each for each in scripts() if not names or each.stem.removeprefix("with_") in names
        ]:
            found = list(checked(script, base_url=f"{server.url}/v1", model="demo"))
            failed += [each for each in found if each.problem]
            print(_row(found), flush=True)
    finally:
        server.stop()
    with waiting_server() as base_url:
        for script in waiting_scripts() if not names or "waits" in names else ():
            found = list(checked(script, base_url=base_url, model=WAITING_MODEL, waits=True))
            failed += [each for each in found if each.problem]
            print(_row(found), flush=True)
    for each in failed:
        print(f"\n{each.client}: {each.check}\n{each.problem}")
    return bool(failed)


def _row(found: list[CheckOfClient]) -> str:
    versions: dict[str, Any] = found[0].versions
    names = ", ".join(f"{package} {version}" for package, version in versions.items())
    checks = ", ".join(
        f"{each.check.replace('_', ' ')}{' FAILED' if each.problem else ''}" for each in found
    )
    return f"| {found[0].client} | {names} | {checks} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
