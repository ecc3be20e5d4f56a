"""`holdfast service …`: runs a server as a user service of launchd or systemd."""

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
from holdfast.files import atomic_write

service = typer.Typer(help="Run a server as a system service.", no_args_is_help=True)

_FAILED = 1
# Variables that say where things are. Others may read a service's file, so no secrets.
_COPIED_VARIABLES = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_STATE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
)
_SECRETS_HINT = (
    "put it into your settings file, create keys with `holdfast keys add`, log in to the Hub with "
    "`hf auth login`"
)
_SECRETS = ("HOLDFAST_SERVER_API_KEY", "HF_TOKEN")

PrintOnly: TypeAlias = Annotated[
    bool, typer.Option("--print", help="Show the file instead of writing it.")
]
NoStart: TypeAlias = Annotated[
    bool, typer.Option("--no-start", help="Write the file, but do not start the service.")
]
LABEL = "io.holdfast.server"  # for launchd
UNIT = "holdfast.service"  # for systemd
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_GRACE_SECONDS = 20.0  # to save the cache after the last answer


class ServiceFailed(HoldfastError):
    """The service could not be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSystem:
    """How launchd or systemd manages a service. Commands run one after the other."""

    file: Path
    content: Callable[[ServiceSpec], bytes]
    start: Sequence[Sequence[str]]
    stop: Sequence[Sequence[str]]
    forget: Sequence[Sequence[str]]  # after the file was removed
    status: Sequence[str]
    hint: str = ""


def service_system(platform: str, environ: Mapping[str, str]) -> ServiceSystem:
    """The service system of this platform. Raises ServiceFailed if it is not supported."""
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
        hint="It stops when you log out, unless you run once: loginctl enable-linger",
    )


@service.command("install")
@settings_command
def install(
    effective: EffectiveSettings, print_only: PrintOnly = False, no_start: NoStart = False
) -> None:
    """Write the service's file and start the service.

    It takes the options of `serve`; the settings file is read at each start.
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
            with atomic_write(system.file) as file:
                file.write(content)
        typer.echo(f"wrote {system.file}")
        for name in _SECRETS:
            if os.environ.get(name):
                complain(f"{name} is not copied: others may read that file; {_SECRETS_HINT}")
        if not no_start:
            _run_all(system.start)
            started = "the service is running; see `holdfast ps` and `holdfast logs -f`."
            typer.echo(f"{started} {system.hint}".rstrip())


@service.command("uninstall")
def uninstall() -> None:
    """Stop the service and remove its file. Its cache stays."""
    with plain_errors():
        system = service_system(sys.platform, os.environ)
        if not system.file.exists():
            raise ServiceFailed(f"no service is installed: there is no {system.file}")
        has_program = shutil.which(system.status[0]) is not None  # else it cannot be running
        if has_program:
            _run_all(system.stop, may_fail=True)
        with _failures_of(system):
            system.file.unlink()
        if has_program:
            _run_all(system.forget, may_fail=True)
    typer.echo(f"removed {system.file}")


@service.command("status")
def status() -> None:
    """Show whether the service is installed and running. If not, exit with code 1."""
    with plain_errors():
        system = service_system(sys.platform, os.environ)
        if not system.file.exists():
            typer.echo(f"not installed: there is no {system.file}")
            raise typer.Exit(_FAILED)
        _require(system)
        done = _run(system.status)
    typer.echo(f"installed as {system.file}")
    if done.returncode != 0:
        typer.echo(f"it is not running: {_output(done) or 'unknown'}")
        raise typer.Exit(_FAILED)
    typer.echo("it is running; see `holdfast ps`")


def spec_of(effective: EffectiveSettings, environ: Mapping[str, str]) -> ServiceSpec:
    """A service with these settings: its file contains flags, variables and this folder.

    Raises ServiceFailed if a flag is a secret.
    """
    file = effective.sources.file
    flags = {key: str(value) for key, value in effective.sources.flags.items() if value is not None}
    specs = all_specs()
    for key in flags:
        if specs[key].secret:
            raise ServiceFailed(
                f"{key} is not written to a service's file, which others may read; {_SECRETS_HINT}"
            )
    arguments = []
    if file is not None:
        arguments += ["--config", str(file.absolute())]
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
    carried = {name: environ[name] for name in _COPIED_VARIABLES if environ.get(name)}
    return ServiceSpec(
        command=[*_program(), "serve", *arguments],
        environment=dict(sorted((named | carried).items())),
        folder=os.getcwd(),
        shutdown_seconds=effective.settings.server.shutdown_seconds,
    )


def _program() -> list[str]:
    """The command of this installation, by its absolute path."""
    script = Path(sys.executable).with_name("holdfast")
    return [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "holdfast.cli.main"]


def _run_all(commands: Sequence[Sequence[str]], *, may_fail: bool = False) -> None:
    for command in commands:
        done = _run(command)
        if done.returncode != 0 and not may_fail:
            raise ServiceFailed(
                f"the file is written, but `{' '.join(command)}` failed: {_output(done)}"
            )


def _require(system: ServiceSystem) -> None:
    if shutil.which(system.status[0]) is None:
        raise ServiceFailed(f"there is no {system.status[0]} on this machine to run the service")


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


def _output(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A server as a service."""

    command: Sequence[str]  # the program's absolute path and its arguments
    folder: str  # that it runs in, for relative paths
    environment: Mapping[str, str] = field(default_factory=dict)
    shutdown_seconds: float = 10.0

    @property
    def stop_seconds(self) -> int:
        """How long stopping may take; then the system kills the server."""
        return int(self.shutdown_seconds + _GRACE_SECONDS)


def launchd_plist(spec: ServiceSpec) -> bytes:
    """The property list of a launchd agent: started at login, restarted after a crash.

    It names no log file: launchd would never rotate it, so the server writes its own.
    """
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(spec.command),
            "EnvironmentVariables": dict(spec.environment),
            "WorkingDirectory": spec.folder,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,  # seconds between two starts
            "ExitTimeOut": spec.stop_seconds,
            "ProcessType": "Interactive",  # otherwise macOS throttles it as background work
        }
    )


def systemd_unit(spec: ServiceSpec) -> str:
    """A systemd user unit: started with the user's session, restarted after a crash."""
    lines = [
        "[Unit]",
        "Description=Holdfast, a server for language models",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in spec.environment.items()),
        f"WorkingDirectory={spec.folder.replace('%', '%%')}",
        "ExecStart=" + " ".join(_quoted(word, in_command=True) for word in spec.command),
        "ExecReload=kill -HUP $MAINPID",
        "# Only the front gets the signal: it finishes the answers, then stops its workers.",
        "KillMode=mixed",
        f"TimeoutStopSec={spec.stop_seconds}",
        "Restart=on-failure",
        "RestartSec=2",
        "# Invalid settings stay invalid after a restart.",
        "RestartPreventExitStatus=2",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str, *, in_command: bool = False) -> str:
    """Quote a word for systemd, with its specifiers (%) and, in commands, its variables ($)."""
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
