"""Commands that start, list and stop servers, show their logs, and install one as a service."""

from __future__ import annotations

import contextlib
import os
import plistlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote

import typer

from holdfast.cli.output import (
    FAILED,
    Json,
    complain,
    count_text,
    load_progress,
    new_table,
    plain_errors,
    print_json,
    print_table,
    size_text,
)
from holdfast.cli.server_client import (
    NO_SERVER,
    SERVER_OPTIONS,
    ApiKey,
    KeyRefused,
    NoSuchServer,
    Server,
    ServerClient,
    ServerFailed,
    chosen_server,
    client_of_own,
    own_servers,
    server_command,
)
from holdfast.cli.settings import read_settings, settings_command
from holdfast.config import EffectiveSettings, all_specs
from holdfast.errors import AddressInUse, ConfigError, HoldfastError
from holdfast.files import atomic_write
from holdfast.machine.device_memory import process_footprint
from holdfast.models.adapter_folder import SEPARATOR

if TYPE_CHECKING:
    from holdfast.front.run.running_servers import RunningServer

# timeout for the answers of a server: for `ps`, and for all other commands
_REPORT_SECONDS = 5.0
_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.1
_MOST_REQUESTS = 20  # of a model, as `ps` shows them; --json has all
_REQUEST_FIELDS = (
    "id",
    "path",
    "state",
    "age_seconds",
    "prompt_tokens",
    "prefilled_tokens",
    "answer_tokens",
)

ModelName: TypeAlias = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="The model's id or alias, as in `holdfast models ls`."),
]
_server_command = partial(server_command, options=SERVER_OPTIONS)


@settings_command
def serve(
    effective: EffectiveSettings,
    opens_page: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser as soon as it is ready.")
    ] = False,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
) -> None:
    """Serve models over HTTP.

    The server speaks the APIs of OpenAI, Anthropic and Ollama, and serves /health and /metrics.
    docs/reference/configuration.md lists all settings.
    """
    from holdfast.front.run import front

    if until_stdin_closes:
        threading.Thread(target=_stop_when_stdin_closes, name="stdin-watch", daemon=True).start()
    try:
        with load_progress(effective.settings.log) as progress:
            on_ready = _open_page if opens_page else None
            code = front.run(effective, progress=progress, on_ready=on_ready)
    except AddressInUse as error:
        raise ConfigError(port_in_use(error)) from None
    raise typer.Exit(code)


def _open_page(url: str) -> None:
    """Open the server's page in the user's browser. May block while a browser starts."""
    import webbrowser

    if not webbrowser.open(url):
        complain(f"no browser could be started; the page is at {url}")


def _stop_when_stdin_closes() -> None:
    """Stop this process when its parent has ended. The parent holds the other end of stdin."""
    # sys.stdin.read would hold a lock that the interpreter needs to exit
    while os.read(sys.stdin.fileno(), 1024):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


def port_in_use(error: AddressInUse) -> str:
    """Return one line that names the program on the port and says what to do.

    Sends that program a request.
    """
    port = error.port
    other_port = port + 1 if port < 65535 else port - 1
    hint = f"or use another port: -p {other_port} (-p 0: a free one)"
    models = _served_models(error.url)
    if models is None and any(server.port == port for server in own_servers()):
        return (
            f"port {port} on {error.host} is in use by another Holdfast, at {error.url}. Stop that "
            f"server (holdfast stop {port}), {hint}"
        )
    if models is None:
        return f"port {port} on {error.host} is in use by another program; stop it, {hint}"
    served = ", ".join(models) or "no model yet"
    return (
        f"port {port} on {error.host} is in use by another Holdfast, which serves {served} at "
        f"{error.url} (chat with it: holdfast chat --url {error.url}). Stop that server (holdfast "
        f"stop {port}), {hint}"
    )


def _served_models(url: str) -> list[str] | None:
    """Return the ids of the models that a Holdfast at this address serves.

    Returns None if no Holdfast answers, or if it shows them only with a key.
    """
    try:
        with ServerClient(url=url) as client:
            health = client.health(seconds=_ANSWER_SECONDS)
    except ServerFailed:
        return None
    models: Any = health.get("models")
    if "version" not in health or not isinstance(models, list):
        return None
    return [str(model["id"]) for model in models if isinstance(model, dict) and "id" in model]


def ps(as_json: Json = False, api_key: ApiKey = None) -> None:
    """List your servers on this machine.

    The list shows the servers' addresses, models, memory and running requests.
    """
    with plain_errors():
        key = read_settings().settings.server.api_key if api_key is None else api_key
    servers = [_server_report(server, api_key=key) for server in own_servers()]
    if as_json:
        print_json(servers)
    elif servers:
        _print_servers(servers)
    else:
        typer.echo(NO_SERVER)


def _server_report(server: RunningServer, *, api_key: str) -> dict[str, Any]:
    """Describe a server for `ps`. memory_bytes: memory of its front process.

    If the server does not accept the key, the models and requests are left out and a line says why.
    """
    health = health_of(server, seconds=_REPORT_SECONDS, api_key=api_key)
    if not health:
        health = {"status": "does not answer"}
    elif "models" not in health:
        complain(f"the models are unknown: {KeyRefused(server.url, has_key=bool(api_key))}")
    models = health.get("models", [])
    requests: list[dict[str, Any]] = []
    if any(model.get("running") or model.get("queued") for model in models):
        try:
            with client_of_own(server, api_key=api_key) as client:
                answer = client.call("GET", "/admin/requests", timeout=_REPORT_SECONDS)
            requests = answer.get("requests", [])
        except KeyRefused as error:
            complain(f"the running requests are unknown: {error}")
        except ServerFailed:  # the server does not answer in time
            pass
    return {
        "pid": server.pid,
        "url": server.url,
        "up_seconds": max(0.0, time.time() - server.started_at),
        "state": health.get("status", ""),
        "memory_bytes": process_footprint(server.pid),
        "log_file": server.log_file,
        "models": [_model_report(model, requests) for model in models],
    }


def _model_report(
    model: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Describe one of a server's models for `ps`.

    memory_bytes: memory of its worker process.

    written_today_bytes: written to its store folder since midnight (UTC), by all models that share
    the folder.
    """
    pid = model.get("pid")
    store = (model.get("memory") or {}).get("store") or {}
    adapters = [f"{model.get('id')}{SEPARATOR}{name}" for name in model.get("adapters", ())]
    return {
        "id": model.get("id"),
        "state": model.get("state"),
        "draft_model": model.get("draft_model"),
        "adapters": adapters,
        "running": model.get("running", 0),
        "queued": model.get("queued", 0),
        "context_length": model.get("context_length"),
        "max_context_length": model.get("max_context_length"),
        "pid": pid,
        "memory_bytes": 0 if pid is None else process_footprint(pid),
        "written_today_bytes": store.get("written_today_bytes", 0),
        "requests": [
            {name: request.get(name, 0) for name in _REQUEST_FIELDS}
            for request in requests
            if request.get("model") in (model.get("id"), *adapters)
        ],
    }


def health_of(server: RunningServer, *, seconds: float, api_key: str = "") -> dict[str, Any]:
    """Return the content of a server's /health; {} if the server does not answer in time."""
    try:
        with client_of_own(server, api_key=api_key) as client:
            return client.health(seconds=seconds)
    except ServerFailed:
        return {}


def _print_servers(servers: Sequence[Mapping[str, Any]]) -> None:
    """Print the reports as a table: each server, then its models, adapters and requests."""
    numbers = ("running", "queued", "context", "memory", "written today")
    table = new_table("pid", "where", "up", "state", *numbers, right=numbers)
    for server in servers:
        models = server["models"]
        # models usually share one store folder, and each model reports the writes to the whole
        # folder
        written = max((model["written_today_bytes"] for model in models), default=0)
        table.add_row(
            str(server["pid"]),
            server["url"],
            duration_text(server["up_seconds"]),
            server["state"],
            str(sum(model["running"] for model in models)),
            str(sum(model["queued"] for model in models)),
            "",
            size_text(server["memory_bytes"]),
            size_text(written) if written else "",
        )
        for model in models:
            table.add_row(
                str(model["pid"] or ""),
                f"  {model['id']}",
                "",
                model["state"],
                str(model["running"]),
                str(model["queued"]),
                f"{model['context_length']:,}" if model["context_length"] else "",
                size_text(model["memory_bytes"]) if model["memory_bytes"] else "",
            )
            if model["draft_model"]:
                table.add_row("", f"    {model['draft_model']}", "", "draft model")
            for adapter in model["adapters"]:
                table.add_row("", f"    {adapter}", "", "adapter")
            for cells in request_rows(model["requests"]):
                table.add_row("", *cells)
    print_table(table)


def request_rows(requests: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The first requests, in a row each, and how many more there are."""
    rows: list[tuple[str, ...]] = []
    for request in requests[:_MOST_REQUESTS]:
        age = duration_text(request["age_seconds"])
        rows.append((f"    {request['path']}", age, progress_text(request)))
    if len(requests) > _MOST_REQUESTS:
        rows.append((f"    … and {len(requests) - _MOST_REQUESTS:,} more",))
    return rows


def progress_text(request: Mapping[str, Any]) -> str:
    """Describe the progress of a request."""
    if request["answer_tokens"]:
        return f"{request['answer_tokens']:,} tokens generated"
    if request["prefilled_tokens"]:
        return f"prefill {request['prefilled_tokens']:,} of {request['prompt_tokens']:,}"
    return str(request["state"])


def duration_text(seconds: float) -> str:
    """Format a duration in its two largest units: `3 min 20 s`."""
    remaining_seconds = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, remaining_seconds = divmod(remaining_seconds, size)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2]) or "0 s"


def stop(
    server: Server = None,
    all_servers: Annotated[
        bool, typer.Option("--all", help="Stop all your servers on this machine.")
    ] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Cut running answers off instead of waiting for them.")
    ] = False,
) -> None:
    """Stop a server.

    The server accepts no new requests, finishes running ones (for at most
    `server.shutdown_seconds`) and saves its cache.
    """
    with plain_errors():
        if all_servers and server is not None:
            raise NoSuchServer(f"name a server ({server}) or use --all, not both")
        servers = own_servers() if all_servers else [chosen_server(server)]
    for running_server in servers:
        _terminate(running_server)
    for running_server in servers:
        _wait_until_stopped(running_server, cuts_answers_off=now)
    if not servers:
        typer.echo(NO_SERVER)


def _terminate(server: RunningServer) -> None:
    """Tell a server to stop, unless it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)


def _wait_until_stopped(server: RunningServer, *, cuts_answers_off: bool) -> None:
    """Wait for the exit of a server that got SIGTERM. cuts_answers_off: send a second SIGTERM,
    which ends running answers.
    """
    printed_requests = 0
    # a running server holds a lock; its process id may already belong to another process
    while server in own_servers():
        requests = _unfinished_requests(server)
        if requests != 0 and cuts_answers_off:
            _terminate(server)
            cuts_answers_off = (
                False  # one more would also end the workers, which are saving their cache
            )
        elif requests and requests != printed_requests:
            typer.echo(f"{server.url} waits for {count_text(requests, 'request')}")
            printed_requests = requests
        time.sleep(_POLL_SECONDS)
    typer.echo(f"stopped {server.url} (pid {server.pid})")


def _unfinished_requests(server: RunningServer) -> int | None:
    """How many requests a stopping server still has to answer; None if it tells the number only
    with a key.

    It answers only until the last request is finished.
    """
    health = health_of(server, seconds=_ANSWER_SECONDS)
    if health.get("status") != "stopping":
        return 0
    models = health.get("models")
    return None if models is None else sum(int(model["leases"]) for model in models)


@_server_command
def load(
    server: ServerClient,
    name: ModelName,
    pin: Annotated[
        bool, typer.Option("--pin", help="Keep the model loaded even if others need memory.")
    ] = False,
) -> None:
    """Load a model into a running server, and wait until it is ready."""
    state = _change_model(server, name, "pin" if pin else "load")
    typer.echo(f"{name} is {state}{', and stays loaded' if pin else ''}")


@_server_command
def unload(
    server: ServerClient,
    name: ModelName,
    unpin: Annotated[bool, typer.Option("--unpin", help="Unpin the model first.")] = False,
) -> None:
    """Unload a model from a running server.

    The server finishes the model's answers first. The model's cache stays on disk.
    """
    if unpin:
        _change_model(server, name, "pin", json={"pinned": False})
    typer.echo(f"{name} is {_change_model(server, name, 'unload')}")


def _change_model(server: ServerClient, name: str, action: str, **request: Any) -> str:
    """Change a model and return its new state. Raises ServerFailed."""
    return str(server.call("POST", f"/admin/models/{quote(name)}/{action}", **request)["state"])


service = typer.Typer(help="Run a server as a system service.", no_args_is_help=True)

# Variables that say where files are. Secrets are left out, because others may read a service's
# file.
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
    "put a server's key into your settings file or create keys with `holdfast keys add`; log in to "
    "the Hub with `hf auth login`"
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
_UNQUOTED_WORD = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_GRACE_SECONDS = 20.0  # time to save the cache after the last answer


class ServiceFailed(HoldfastError):
    """The service could not be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSystem:
    """How launchd or systemd manages a service: lists of commands that run one after the other."""

    file: Path  # describes the service to the system
    content: Callable[[ServiceSpec], bytes]  # the text of the file
    start: Sequence[Sequence[str]]
    stop: Sequence[Sequence[str]]
    forget: Sequence[Sequence[str]]  # run after the file was removed
    status: Sequence[str]  # succeeds if the service runs
    hint: str = ""  # shown after the start


def service_system(platform: str, environ: Mapping[str, str]) -> ServiceSystem:
    """Return the service system of this platform.

    Raises ServiceFailed if the platform is not supported.
    """
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
        hint="The service stops when you log out, unless you run once: loginctl enable-linger",
    )


@service.command("install")
@settings_command
def install(
    effective: EffectiveSettings, print_only: PrintOnly = False, no_start: NoStart = False
) -> None:
    """Write the service's file and start the service.

    The options are those of `serve`. The settings file is read at each start.
    """
    with plain_errors():
        system = service_system(sys.platform, os.environ)
        content = system.content(spec_of(effective, os.environ))
        if print_only:
            typer.echo(content.decode(), nl=False)
            return
        was_installed = system.file.exists()
        if not no_start:
            _check_has_program(system)
        if was_installed and not no_start:
            _run_all(system.stop, may_fail=True)
        with _plain_file_errors(system):
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
    """Stop the service and remove its file. The server's cache is kept."""
    with plain_errors():
        system = service_system(sys.platform, os.environ)
        if not system.file.exists():
            raise ServiceFailed(f"no service is installed: there is no {system.file}")
        # without this program, the service cannot be running
        has_program = shutil.which(system.status[0]) is not None
        if has_program:
            _run_all(system.stop, may_fail=True)
        with _plain_file_errors(system):
            system.file.unlink()
        if has_program:
            _run_all(system.forget, may_fail=True)
    typer.echo(f"removed {system.file}")


@service.command("status")
def status() -> None:
    """Show whether the service is installed and running. If it is not, exit with code 1."""
    with plain_errors():
        system = service_system(sys.platform, os.environ)
        if not system.file.exists():
            typer.echo(f"not installed: there is no {system.file}")
            raise typer.Exit(FAILED)
        _check_has_program(system)
        process = _run(system.status)
    typer.echo(f"installed as {system.file}")
    if process.returncode != 0:
        typer.echo(f"the service is not running: {_output_text(process) or 'unknown'}")
        raise typer.Exit(FAILED)
    typer.echo("the service is running; see `holdfast ps`")


def spec_of(effective: EffectiveSettings, environ: Mapping[str, str]) -> ServiceSpec:
    """Describe a service with these settings.

    Its file will contain flags, variables and this folder. Raises ServiceFailed if a flag is a
    secret.
    """
    file = effective.file
    flags = {key: str(value) for key, value in effective.flags.items() if value is not None}
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
    model = flags.pop("model.path", "")
    for key, value in flags.items():
        arguments += ["--set", f"{key}={value}"]
    if model:
        arguments.append(model)
    holdfast_variables = {
        name: value
        for name, value in environ.items()
        if name.startswith("HOLDFAST_") and name not in _SECRETS
    }
    holdfast_variables.pop("HOLDFAST_CONFIG", None)  # it is passed as an argument
    copied_variables = {name: environ[name] for name in _COPIED_VARIABLES if environ.get(name)}
    return ServiceSpec(
        command=[*_holdfast_command(), "serve", *arguments],
        environment=dict(sorted((holdfast_variables | copied_variables).items())),
        folder=os.getcwd(),
        shutdown_seconds=effective.settings.server.shutdown_seconds,
    )


def _holdfast_command() -> list[str]:
    """The command of this installation, with its absolute path."""
    script = Path(sys.executable).with_name("holdfast")
    return [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "holdfast.cli.main"]


def _run_all(commands: Sequence[Sequence[str]], *, may_fail: bool = False) -> None:
    """Run commands one after the other. Raises ServiceFailed if one fails, unless `may_fail`."""
    for command in commands:
        process = _run(command)
        if process.returncode != 0 and not may_fail:
            raise ServiceFailed(
                f"the file is written, but `{' '.join(command)}` failed: {_output_text(process)}"
            )


def _check_has_program(system: ServiceSystem) -> None:
    """Raise ServiceFailed if the system's program, such as systemctl, is missing."""
    if shutil.which(system.status[0]) is None:
        raise ServiceFailed(f"there is no {system.status[0]} on this machine to run the service")


@contextlib.contextmanager
def _plain_file_errors(system: ServiceSystem) -> Iterator[None]:
    """Turn an OSError about the service's file into ServiceFailed."""
    try:
        yield
    except OSError as error:
        raise ServiceFailed(f"{system.file} cannot be changed: {error.strerror or error}") from None


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _output_text(process: subprocess.CompletedProcess[str]) -> str:
    """What a command has printed, in one line."""
    return " ".join((process.stderr or process.stdout).split())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A server that runs as a service."""

    command: Sequence[str]  # the program's absolute path and its arguments
    folder: str  # working folder of the server, for relative paths
    environment: Mapping[str, str] = field(default_factory=dict)  # variables for the server
    shutdown_seconds: float = 10.0  # before the system kills it

    @property
    def stop_seconds(self) -> int:
        """How long stopping may take before the system kills the server."""
        return int(self.shutdown_seconds + _GRACE_SECONDS)


def launchd_plist(spec: ServiceSpec) -> bytes:
    """Create the property list of a launchd agent: started at login, restarted after a crash.

    The list names no log file: launchd would never rotate it, so the server writes its own.
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
            "ProcessType": "Interactive",  # otherwise macOS throttles the server as background work
        }
    )


def systemd_unit(spec: ServiceSpec) -> str:
    """Create a systemd user unit: started with the user's session, restarted after a crash."""
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
    """Quote a word for systemd.

    Also quotes systemd's specifiers (%) and, in commands, its variables ($).
    """
    if _UNQUOTED_WORD.fullmatch(word):
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
