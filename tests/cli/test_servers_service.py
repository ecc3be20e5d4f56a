"""`holdfast service` with stand-ins for the system's programs, which record their arguments."""

from __future__ import annotations

import os
import plistlib
import sys
from pathlib import Path

import pytest

from holdfast.cli.servers import ServiceFailed, service_system, spec_of
from holdfast.config import load_settings
from tests.fakes.command_line import holdfast_here, only_line


@pytest.fixture
def system(tmp_path: Path) -> dict[str, str]:
    """Variables for a `systemctl` that only records its arguments, and fails for those in `fails`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "systemctl"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n! grep -qxF -- "$2" {tmp_path}/fails || {{ echo no bus >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    (tmp_path / "fails").touch()
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }


def asked(folder: Path) -> list[str]:
    lines = (folder / "asked").read_text().splitlines()
    (folder / "asked").unlink()
    return [line.removeprefix("--user ") for line in lines]


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux'")
def test_a_service_is_installed_updated_shown_and_removed(
    tmp_path: Path, system: dict[str, str]
) -> None:
    unit = tmp_path / "config" / "systemd" / "user" / "holdfast.service"
    missing = holdfast_here("service", "status", cwd=tmp_path, variables=system)
    assert (missing.returncode, "not installed" in missing.stdout) == (1, True)
    installed = holdfast_here(
        "service", "install", "--port", "9000", cwd=tmp_path, variables=system
    )
    assert installed.returncode == 0, installed.stderr
    assert asked(tmp_path) == ["daemon-reload", "enable --now holdfast.service"]
    assert "serve --log-file auto --set server.port=9000\n" in unit.read_text()
    assert unit.stat().st_mode & 0o077 == 0
    assert (
        holdfast_here("service", "status", cwd=tmp_path, variables=system)
        .stdout.splitlines()[1]
        .startswith("the service is running")
    )
    asked(tmp_path)
    (tmp_path / "fails").write_text("enable\n")
    failed = holdfast_here(
        "service", "install", cwd=tmp_path, variables=system | {"HF_TOKEN": "hf_x"}
    )
    assert failed.returncode == 2
    assert "HF_TOKEN is not copied" in failed.stderr.splitlines()[0]
    assert (
        "`systemctl --user enable --now holdfast.service` failed: no bus"
        in failed.stderr.splitlines()[1]
    )
    assert asked(tmp_path)[0] == "disable --now holdfast.service"
    assert "hf_x" not in unit.read_text()
    assert holdfast_here("service", "uninstall", cwd=tmp_path, variables=system).returncode == 0
    assert asked(tmp_path) == ["disable --now holdfast.service", "daemon-reload"]
    assert not unit.exists()
    assert "no service is installed" in only_line(
        holdfast_here("service", "uninstall", cwd=tmp_path, variables=system).stderr
    )


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux'")
def test_without_systemd_a_service_is_written_but_not_started(
    tmp_path: Path,
) -> None:
    variables = {"PATH": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    refused = holdfast_here("service", "install", cwd=tmp_path, variables=variables)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "there is no systemctl on this machine" in only_line(refused.stderr)
    assert (
        holdfast_here(
            "service", "install", "--no-start", cwd=tmp_path, variables=variables
        ).returncode
        == 0
    )
    assert holdfast_here("service", "uninstall", cwd=tmp_path, variables=variables).returncode == 0
    assert not list((tmp_path / "config").rglob("*.service"))


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux'")
def test_an_unwritable_folder_is_reported(tmp_path: Path, system: dict[str, str]) -> None:
    (tmp_path / "config").write_text("a file")
    refused = holdfast_here("service", "install", "--no-start", cwd=tmp_path, variables=system)
    assert refused.returncode == 2
    assert "holdfast.service cannot be changed: Not a directory" in only_line(refused.stderr)


def test_on_macos_it_is_an_agent_of_the_user(tmp_path: Path) -> None:
    system = service_system("darwin", {"HOME": str(tmp_path)})
    assert system.file == tmp_path / "Library" / "LaunchAgents" / "io.holdfast.server.plist"
    assert system.start == (("launchctl", "bootstrap", f"gui/{os.getuid()}", str(system.file)),)
    effective = load_settings(file=None, environ={}, flags={"model.path": "some/model"})
    read = plistlib.loads(system.content(spec_of(effective, {})))
    assert read["ProgramArguments"][-4:] == ["serve", "--log-file", "auto", "some/model"]


def test_unknown_systems_do_not_support_services() -> None:
    with pytest.raises(ServiceFailed, match="not supported on plan9"):
        service_system("plan9", {"HOME": "/"})


def test_a_service_has_the_same_settings_and_no_written_secret(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.toml").write_text('[log]\nfile = "/var/tmp/own.log"\n')
    environ = {
        "HOLDFAST_LOG_LEVEL": "debug",
        "HOLDFAST_SERVER_API_KEY": "k",
        "HF_HOME": "/hub",
        "HF_TOKEN": "t",
    }
    effective = load_settings(
        file=tmp_path / "own.toml",
        environ=environ,
        flags={"log.file": "/tmp/l", "server.port": None},
    )
    spec = spec_of(effective, environ)
    assert list(spec.command[-5:]) == [
        "serve",
        "--config",
        str(tmp_path / "own.toml"),
        "--set",
        "log.file=/tmp/l",
    ]
    without_flag = spec_of(load_settings(file=tmp_path / "own.toml", environ={}, flags={}), {})
    assert list(without_flag.command[-3:]) == ["serve", "--config", str(tmp_path / "own.toml")]
    assert spec.environment == {"HF_HOME": "/hub", "HOLDFAST_LOG_LEVEL": "debug"}
    with pytest.raises(ServiceFailed, match=r"server\.api_key is not written to a service"):
        spec_of(load_settings(file=None, environ={}, flags={"server.api_key": "secret"}), {})
