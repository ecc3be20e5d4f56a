"""A program in place of a coding agent: it records how it was started and exits as its last
argument says.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python}
import json, os, pathlib, signal, sys, time
variables = ("NODE_EXTRA_CA_CERTS", "QWEN_CODE_SYSTEM_DEFAULTS_PATH", "CLINE_PROVIDER_SETTINGS_PATH")
named = [*sys.argv[1:], *(os.environ.get(name, "") for name in variables)]
files = [pathlib.Path(part) for part in named if os.path.isabs(part) and os.path.isfile(part)]
# Cline also reads a second file beside the one that is named
files += [path.with_name("models.json") for path in files if path.name == "providers.json"]
record = {{
    "arguments": sys.argv[1:],
    "environment": dict(os.environ),
    "files": {{path.name: path.read_text() for path in files}},
    "modes": [oct(path.parent.stat().st_mode & 0o777) for path in files],
    "folder": os.getcwd(),
}}
pathlib.Path({record!r}).write_text(json.dumps(record))
how, _, number = sys.argv[-1].partition("=")
if how == "exit":
    sys.exit(int(number))
if how == "die":
    os.kill(os.getpid(), int(number))
if how == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("waiting", os.getpid(), flush=True)
    while True:
        time.sleep(0.05)  # a signal just before `signal.pause` would be handled after the next one
"""


@dataclass(frozen=True)
class RecordingAgent:
    """`record` exists after a run."""

    program: Path
    record_file: Path

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads(self.record_file.read_text()))

    @property
    def was_started(self) -> bool:
        return self.record_file.exists()


def install(folder: Path, name: str) -> RecordingAgent:
    """Put the program under an agent's name into a folder, which must then be on the PATH."""
    folder.mkdir(exist_ok=True)
    agent = RecordingAgent(folder / name, folder / f"{name}.json")
    agent.program.write_text(_PROGRAM.format(python=sys.executable, record=str(agent.record_file)))
    agent.program.chmod(0o755)
    return agent
