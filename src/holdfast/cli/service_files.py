"""What launchd (macOS) and systemd (Linux) have to be told to run a server as a service of one
user.
"""

from __future__ import annotations

import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LABEL = "io.holdfast.server"  # for launchd
UNIT = "holdfast.service"  # for systemd
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_GRACE_SECONDS = 20.0  # to write down what was read, once no answer runs any more


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A server as a service: what is run, with which variables, and how long its running answers
    may go on at its end.
    """

    command: Sequence[str]  # the program's absolute path and its arguments
    folder: str  # in which it runs: what is meant by relative paths
    environment: Mapping[str, str] = field(default_factory=dict)
    shutdown_seconds: float = 10.0

    @property
    def stop_seconds(self) -> int:
        """How long an end in order may take in all; afterwards the system ends it by force."""
        return int(self.shutdown_seconds + _GRACE_SECONDS)


def launchd_plist(spec: ServiceSpec) -> bytes:
    """The property list of an agent: started at login, again after a crash, and left alone after an
    end in order.

    Its log is in the state folder; launchd would write one that nobody rotates.
    """
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(spec.command),
            "EnvironmentVariables": dict(spec.environment),
            "WorkingDirectory": spec.folder,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,  # seconds between two starts: settings that are wrong stay so
            "ExitTimeOut": spec.stop_seconds,
            "ProcessType": "Interactive",  # else macOS slows it down as work in the background
        }
    )


def systemd_unit(spec: ServiceSpec) -> str:
    """A user's unit: started with the user's session, again after a crash, and left alone after an
    end in order.
    """
    lines = [
        "[Unit]",
        "Description=Holdfast, a server of language models",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in spec.environment.items()),
        f"WorkingDirectory={spec.folder.replace('%', '%%')}",
        "ExecStart=" + " ".join(_quoted(word, in_command=True) for word in spec.command),
        "ExecReload=kill -HUP $MAINPID",
        "# The front alone is asked to end: it lets answers end, then its workers.",
        "KillMode=mixed",
        f"TimeoutStopSec={spec.stop_seconds}",
        "Restart=on-failure",
        "RestartSec=2",
        "# Settings that cannot be used do not become better by trying again.",
        "RestartPreventExitStatus=2",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str, *, in_command: bool = False) -> str:
    """A word as systemd reads it back: quotes, its specifiers (%), and in commands its variables
    ($).
    """
    if _PLAIN.fullmatch(word):
        return word
    escaped = (
        word.replace("\\", "\\\\")
        .replace('"', '\\"')
        .replace("\n", "\\n")
        .replace("\t", "\\t")
        .replace("%", "%%")
    )
    if in_command:
        escaped = escaped.replace("$", "$$")
    return f'"{escaped}"'
