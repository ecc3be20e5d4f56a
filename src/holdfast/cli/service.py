"""`holdfast service …`: a server that the system starts for one user, through launchd or systemd."""

from __future__ import annotations

import contextlib
import os
import plistlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from holdfast.cli.output import complain, plain_errors
from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings, all_specs
from holdfast.errors import HoldfastError
from holdfast.whole_file import whole_file

service = typer.Typer(help="Run a server as a service of the system.", no_args_is_help=True)

FAILED = 1
# What says where things are; secrets are not among them, since others may read what a system keeps
# of a service.
_CARRIED = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_STATE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
)
_WAY_OF_SECRETS = (
    "put it into your settings file, make keys with `holdfast keys add`, log in to the Hub with "
    "`hf auth login`"
)
_SECRETS = ("HOLDFAST_SERVER_API_KEY", "HF_TOKEN")

PrintOnly: TypeAlias = Annotated[
    bool, typer.Option("--print", help="Show the file that would be written, and do nothing.")
]
NoStart: TypeAlias = Annotated[
    bool, typer.Option("--no-start", help="Write the file, and start nothing.")
]
LABEL = "io.holdfast.server"  # for launchd
UNIT = "holdfast.service"  # for systemd
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_GRACE_SECONDS = 20.0  # to write down what was read, once no answer runs any more


class ServiceFailed(HoldfastError):
    """The system did not do what it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSystem:
    """How one system is told of services. Commands are run one after the other."""

    file: Path
    content: Callable[[ServiceSpec], bytes]
    start: Sequence[Sequence[str]]
    stop: Sequence[Sequence[str]]
    forget: Sequence[Sequence[str]]  # after the file is gone
    status: Sequence[str]
    hint: str = ""


def service_system(platform: str, environ: Mapping[str, str]) -> ServiceSystem:
    """The system that runs services here. Raises ServiceFailed where there is none that is known."""
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    if platform == "darwin":
        domain = f"gui/{os.getuid()}"
        file = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        return ServiceSystem(
            file=file,
            content=launchd_plist,
            start=(("launchctl", "bootstrap", domain, str(file)),),
            stop=(("launchctl", "bootout", f"{domain}/{LABEL}"),),
            forget=(),
            status=("launchctl", "print", f"{domain}/{LABEL}"),
        )
    if platform != "linux":
        raise ServiceFailed(f"services are not supported on {platform}")
    configuration = (
        Path(environ["XDG_CONFIG_HOME"]) if environ.get("XDG_CONFIG_HOME") else home / ".config"
    )
    systemctl = ("systemctl", "--user")
    return ServiceSystem(
        file=configuration / "systemd" / "user" / UNIT,
        content=lambda spec: systemd_unit(spec).encode(),
        start=((*systemctl, "daemon-reload"), (*systemctl, "enable", "--now", UNIT)),
        stop=((*systemctl, "disable", "--now", UNIT),),
        forget=((*systemctl, "daemon-reload"),),
        status=(*systemctl, "is-active", UNIT),
        hint="It ends when you log out, unless you run once: loginctl enable-linger",
    )


@service.command("install")
@settings_command
def install(
    effective: EffectiveSettings, print_only: PrintOnly = False, no_start: NoStart = False
) -> None:
    """Write the service's file and start it.

    Takes the flags of `serve`; settings files are read at each start.
    """
    with plain_errors():
        system = service_system(sys.platform, os.environ)
        content = system.content(spec_of(effective, os.environ))
        if print_only:
            typer.echo(content.decode(), nl=False)
            return
        is_renewed = system.file.exists()
        if not no_start:
            _require(system)
        if is_renewed and not no_start:
            _run_all(system.stop, may_fail=True)
        with _failures_of(system):
            system.file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(system.file) as file:
                file.write(content)
        typer.echo(f"wrote {system.file}")
        for name in _SECRETS:
            if os.environ.get(name):
                complain(
                    f"{name} is not written there, where others may read it; {_WAY_OF_SECRETS}"
                )
        if not no_start:
            _run_all(system.start)
            typer.echo(
                f"the service runs; `holdfast ps` shows it, `holdfast logs -f` its log. {system.hint}".rstrip()
            )


@service.command("uninstall")
def uninstall() -> None:
    """End the service in order, and remove its file. What it has kept stays."""
    with plain_errors():
        system = service_system(sys.platform, os.environ)
        if not system.file.exists():
            raise ServiceFailed(f"no service is installed: there is no {system.file}")
        is_there = shutil.which(system.status[0]) is not None  # else nothing can run it
        if is_there:
            _run_all(system.stop, may_fail=True)
        with _failures_of(system):
            system.file.unlink()
        if is_there:
            _run_all(system.forget, may_fail=True)
    typer.echo(f"removed {system.file}")


@service.command("status")
def status() -> None:
    """Say whether a service is installed and runs. The exit code is 1 when it does not."""
    with plain_errors():
        system = service_system(sys.platform, os.environ)
        if not system.file.exists():
            typer.echo(f"not installed: there is no {system.file}")
            raise typer.Exit(FAILED)
        _require(system)
        done = _run(system.status)
    runs = done.returncode == 0
    typer.echo(f"installed as {system.file}")
    typer.echo(
        "it runs; `holdfast ps` shows what it does"
        if runs
        else f"it does not run: {_said(done) or 'nothing is known'}"
    )
    if not runs:
        raise typer.Exit(FAILED)


def spec_of(effective: EffectiveSettings, environ: Mapping[str, str]) -> ServiceSpec:
    """A service with these settings: flags and variables are written down, and run in this folder.

    Raises ServiceFailed.
    """
    file = effective.sources.file
    flags = {key: str(value) for key, value in effective.sources.flags.items() if value is not None}
    if told := [key for key in flags if all_specs()[key].secret]:
        raise ServiceFailed(
            f"{told[0]} is not written into a service, where others may read it; {_WAY_OF_SECRETS}"
        )
    arguments = [*(("--config", str(file.absolute())) if file is not None else ())]
    if effective.origins["log.file"] == "default":
        arguments += ["--log-file", "auto"]
    path = flags.pop("model.path", "")
    for key, value in flags.items():
        arguments += ["--set", f"{key}={value}"]
    if path:
        arguments.append(path)
    named = {
        name: value
        for name, value in environ.items()
        if name.startswith("HOLDFAST_") and name not in _SECRETS
    }
    named.pop("HOLDFAST_CONFIG", None)  # it is an argument
    carried = {name: environ[name] for name in _CARRIED if environ.get(name)}
    return ServiceSpec(
        command=[*_program(), "serve", *arguments],
        environment=dict(sorted((named | carried).items())),
        folder=os.getcwd(),
        shutdown_seconds=effective.settings.server.shutdown_seconds,
    )


def _program() -> list[str]:
    """This very installation's command, as systems want it: by its absolute path."""
    script = Path(sys.executable).with_name("holdfast")
    return [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "holdfast.cli.main"]


def _run_all(commands: Sequence[Sequence[str]], *, may_fail: bool = False) -> None:
    for command in commands:
        done = _run(command)
        if done.returncode != 0 and not may_fail:
            raise ServiceFailed(
                f"the file is written, but `{' '.join(command)}` failed: {_said(done)}"
            )


def _require(system: ServiceSystem) -> None:
    if shutil.which(system.status[0]) is None:
        raise ServiceFailed(
            f"there is no {system.status[0]} on this machine, which would run the service"
        )


@contextlib.contextmanager
def _failures_of(system: ServiceSystem) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ServiceFailed(f"{system.file} cannot be changed: {error.strerror or error}") from None


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split())


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
