"""Runs real clients against a server with the bundled model: tools, reasoning and structured
output, streamed or not.

`python -m tools.clients` (`make clients`, with ARGS="openai anthropic" for some) creates an
environment for them (`tests/clients/requirements.txt`), starts a server, runs
`tests/clients/with_*.py` one after another and prints a table; with npm, it also runs
`tests/clients/vercel/`.
"""

from __future__ import annotations

import hashlib
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

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "clients"
WAITING_MODEL = "demo/tiny"
ALIASES = "claude-*,gpt-*"  # some clients derive abilities from the name
_LIMIT_SECONDS = 600
# Only this server is called: no proxy, and no download of litellm's price table.
_ALONE = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@dataclass(frozen=True)
class CheckOfClient:
    """The result of a check. problem: empty if it passed."""

    client: str
    check: str
    problem: str
    versions: dict[str, str]


def scripts() -> list[Path]:
    """One script per client; those in JavaScript only if npm is installed."""
    return sorted(
        [
            *SCRIPTS.rglob("with_*.py"),
            *(SCRIPTS.glob("*/with_*.mjs") if shutil.which("npm") else ()),
        ]
    )


def waiting_scripts() -> list[Path]:
    """The scripts for a server that stays silent for long."""
    return [SCRIPTS / "waits.py", *(script for script in scripts() if script.suffix == ".mjs")]


# -- their environments, so that their packages stay out of Holdfast's


def environment_of(folder: Path) -> Path:
    """The `bin` folder of an environment with the folder's requirements.txt, created on first use."""
    wanted, versions = folder / "requirements.txt", folder / "constraints.txt"
    made = _made_of(wanted, versions)
    if not (made / "done").exists():
        _run(sys.executable, "-m", "venv", str(made))
        pip = (str(made / "bin" / "python"), "-m", "pip", "install", "--quiet")
        _run(*pip, "--requirement", str(wanted), "--constraint", str(versions))
        (made / "done").touch()
    return made / "bin"


def modules_of(folder: Path) -> Path:
    """A folder with the node_modules of the folder's package-lock.json, created on first use. Needs
    npm.
    """
    given = folder / "package.json", folder / "package-lock.json"
    made = _made_of(*given)
    if not (made / "done").exists():
        made.mkdir(parents=True, exist_ok=True)
        for file in given:
            shutil.copy(file, made)
        _run("npm", "ci", "--silent", "--no-fund", "--no-audit", "--prefix", str(made))
        (made / "done").touch()
    return made


def _made_of(*files: Path) -> Path:
    content = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return ROOT / ".make" / f"{files[0].parent.name}-{content}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


# -- the checks


@contextmanager
def waiting_server() -> Iterator[str]:
    """The base URL of a server that stays silent for long; its model is `WAITING_MODEL`."""
    command = [sys.executable, "-m", "tests.fakes.waiting_server"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"{process.stdout.readline().strip()}/v1"


def checked(
    script: Path, *, base_url: str, model: str, waits: bool = False
) -> Iterator[CheckOfClient]:
    """Run a client's script and yield its checks."""
    folder = script.parent
    if script.suffix == ".mjs":
        folder, program = modules_of(folder), "node"
        shutil.copy(script, folder)  # node resolves modules relative to it
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
    """Run the named clients, or all. Returns 1 if a check failed."""
    from tests.fakes.server_process import running_server

    failed: list[CheckOfClient] = []

    def check(script: Path, **server: Any) -> None:
        found = list(checked(script, **server))
        failed.extend(each for each in found if each.problem)
        print(_row(found), flush=True)

    aliases = ("--set", f"server.model_aliases={ALIASES}")
    with running_server("--store", "off", "--name", "demo", *aliases) as server:
        for script in scripts():
            if not names or script.stem.removeprefix("with_") in names:
                check(script, base_url=f"{server.url}/v1", model="demo")
    with waiting_server() as base_url:
        for script in waiting_scripts() if not names or "waits" in names else ():
            check(script, base_url=base_url, model=WAITING_MODEL, waits=True)
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
