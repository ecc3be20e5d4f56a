"""Separate environments for programs that test the server, so that their packages stay out of
Holdfast's.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment_of(folder: Path) -> Path:
    """The `bin` folder of an environment with the folder's requirements.txt, created on first use."""
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
