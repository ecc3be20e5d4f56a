from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.servers import ServiceSpec, launchd_plist, systemd_unit

SPEC = ServiceSpec(
    command=[
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "serve",
        "a model",
        "--set",
        'x=$HOME 100% "quoted" \\ back',
    ],
    folder=str(Path.home()),
    environment={"XDG_STATE_HOME": "/tmp/with space", "HOLDFAST_LOG_LEVEL": "debug"},
    shutdown_seconds=60.0,
)


def test_the_property_list_parses_and_contains_the_command() -> None:
    read = plistlib.loads(launchd_plist(SPEC))
    assert read["ProgramArguments"] == list(SPEC.command)
    assert read["EnvironmentVariables"] == SPEC.environment
    assert (read["RunAtLoad"], read["KeepAlive"], read["ExitTimeOut"]) == (
        True,
        {"SuccessfulExit": False},
        80,
    )


def test_the_unit_passes_the_check_of_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    (tmp_path / "holdfast.service").write_text(systemd_unit(SPEC))
    command = ["systemd-analyze", "verify", "--user", str(tmp_path / "holdfast.service")]
    environ = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_waits_for_answers_and_fails_on_invalid_settings() -> None:
    lines = systemd_unit(SPEC).splitlines()
    assert {
        "TimeoutStopSec=80",
        "KillMode=mixed",
        "RestartPreventExitStatus=2",
        "Restart=on-failure",
    } <= set(lines)


def test_the_words_of_the_command_survive_quoting() -> None:
    (line,) = [line for line in systemd_unit(SPEC).splitlines() if line.startswith("ExecStart=")]
    read = [
        word.replace("%%", "%").replace("$$", "$")
        for word in shlex.split(line.removeprefix("ExecStart="))
    ]
    assert read == list(SPEC.command)
