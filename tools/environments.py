"""Environments of their own for programs that tests put before a server: what they need stays out of Holdfast's."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment_of(folder: Path) -> Path:
    """The `bin` of an environment with what the folder's requirements.txt asks for; made when it is first asked for."""
    wanted, versions = folder / "requirements.txt", folder / "constraints.txt"
    content = hashlib.sha256(wanted.read_bytes() + versions.read_bytes()).hexdigest()[:12]
    made = ROOT / ".make" / f"{folder.name}-{content}"
    if not (made / "done").exists():
        _run(sys.executable, "-m", "venv", str(made))
        python = str(made / "bin" / "python")
        _run(python, "-m", "pip", "install", "--quiet", "--requirement", str(wanted), "--constraint", str(versions))
        (made / "done").touch()
    return made / "bin"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
