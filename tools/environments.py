"""Environments of their own for programs that tests put before a server: what they need stays out
of Holdfast's.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment_of(folder: Path) -> Path:
    """The `bin` of an environment with what the folder's requirements.txt asks for; made when it is
    first asked for.
    """
    wanted, versions = folder / "requirements.txt", folder / "constraints.txt"
    made = _made_of(wanted, versions)
    if not (made / "done").exists():
        _run(sys.executable, "-m", "venv", str(made))
        python = str(made / "bin" / "python")
        _run(
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--requirement",
            str(wanted),
            "--constraint",
            str(versions),
        )
        (made / "done").touch()
    return made / "bin"


def modules_of(folder: Path) -> Path:
    """A folder with the node_modules that the folder's package-lock.json names; made when it is
    first asked for. Needs npm.
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
