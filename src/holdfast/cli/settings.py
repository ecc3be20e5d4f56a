"""Settings as options of commands; `holdfast config`, which shows the settings; and `holdfast keys
…`.

Each setting with a flag becomes an option; all others can be set with --set. `--help` shows the
options that most people need, `--help-all` shows all.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from holdfast.cli.output import Json, new_table, plain_errors, print_json, print_table
from holdfast.config import (
    EffectiveSettings,
    all_specs,
    default_file,
    load_settings,
    shown_value,
    value_of,
)
from holdfast.config_sources import SettingSpec, describe
from holdfast.errors import ConfigError
from holdfast.files import expanded
from holdfast.wire.requests import Priority

if TYPE_CHECKING:
    from holdfast.front.server.access import ApiKey

_PREFIX = "setting_"  # prefix of parameter names
_PANEL = "Settings"
# section of the settings → panel in the help
_PANELS = {"model": "Model", "server": "Server", "store": "Store", "log": "Log"}
_SHOWN_SETTINGS = (
    "model.path",
    "model.name",
    "model.context_tokens",
    "model.kv_bits",
    "model.memory_bytes",
    "server.host",
    "server.port",
    "server.api_key",
    "store.folder",
    "log.level",
    "log.file",
)

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Settings file; default: ./holdfast.toml.",
    ),
]
FurtherSettings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        rich_help_panel=_PANEL,
        help="Set any setting by its key; can be repeated.",
    ),
]


def _show_all(context: typer.Context, is_asked: bool) -> None:
    """Print the help with all settings and exit."""
    if not is_asked:
        return
    for parameter in context.command.params:
        if (parameter.name or "").startswith(_PREFIX):
            parameter.hidden = False  # type: ignore[attr-defined]
    typer.echo(context.get_help())
    raise typer.Exit


HelpAll: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--help-all", is_eager=True, callback=_show_all, help="Show all options and exit."
    ),
]


def settings_command(
    command: Callable[..., None],
    *,
    shown: Collection[str] = _SHOWN_SETTINGS,
    left_out: Collection[str] = (),
) -> Callable[..., None]:
    """Turn a function `(effective, **own options)` into a command with an option for each setting.

    `effective` gets the settings that result from the options, the variables and the file.

    The command prints an error as one line. shown: keys of the settings that `--help` shows.
    left_out: keys of settings that this command does not use.
    """
    own_options = own_parameters(command)
    specs = [spec for spec in all_specs().values() if spec.flag and spec.key not in left_out]
    added_options = [_parameter(spec, is_shown=spec.key in shown) for spec in specs]
    added_options += [
        option("config_file", ConfigFile),
        option("further", FurtherSettings),
        option("help_all", HelpAll),
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        file = arguments.pop("config_file")
        further = arguments.pop("further")
        del arguments["help_all"]
        flags = {spec.key: _comma_separated(arguments.pop(_parameter_name(spec))) for spec in specs}
        with plain_errors(flags["log.format"] or "text"):
            effective = read_settings(flags | _assignments(further or []), file=file)
            with plain_errors(effective.settings.log.format):
                command(effective, **arguments)

    return with_parameters(run, [*added_options, *own_options])


def _parameter_name(spec: SettingSpec) -> str:
    """The name of the parameter for a setting's option."""
    return _PREFIX + spec.key.replace(".", "_")


def _parameter(spec: SettingSpec, *, is_shown: bool) -> inspect.Parameter:
    """Create the option (or the argument MODEL) of one setting.

    The values are texts; `holdfast.config` converts and checks them, as for all sources of
    settings.
    """
    if not spec.flag.startswith("--"):
        argument = typer.Argument(metavar=spec.flag, help=spec.doc)
        return option(_parameter_name(spec), Annotated[str | None, argument])
    section, _, name = spec.key.partition(".")
    panel = _PANELS.get(section, _PANEL)
    if spec.kind == "switch":
        name = f" /{spec.flag}" if spec.default else spec.flag  # Typer: the flag means false
        switch = typer.Option(name, help=spec.doc, rich_help_panel=panel, hidden=not is_shown)
        return option(_parameter_name(spec), Annotated[bool | None, switch])
    default = describe(spec, spec.default)
    doc = f"{spec.doc} Can be repeated." if spec.kind == "list" else spec.doc
    option_of_text = typer.Option(
        *filter(None, (spec.flag, spec.short)),
        metavar="|".join(spec.choices) or name.rpartition("_")[2].upper(),
        help=f"{doc} Default: {default}." if default else doc,
        rich_help_panel=panel,
        hidden=not is_shown,
    )
    if spec.kind == "list":
        return option(_parameter_name(spec), Annotated[list[str] | None, option_of_text])
    return option(_parameter_name(spec), Annotated[str | None, option_of_text])


def _comma_separated(value: Any) -> Any:
    """Join the values of a repeated option with commas; None if the option was not given."""
    if isinstance(value, list):
        return ",".join(value) if value else None
    return value


def _assignments(texts: Sequence[str]) -> dict[str, str]:
    """Parse the options --set into key → value."""
    value_of_key = {}
    for text in texts:
        key, equals_sign, value = text.partition("=")
        if not equals_sign:
            raise ConfigError(
                f"--set {text}: must be KEY=VALUE, such as --set scheduler.max_running=8"
            )
        value_of_key[key.strip()] = value.strip()
    return value_of_key


def read_settings(
    flags: Mapping[str, object] | None = None, *, file: Path | None = None
) -> EffectiveSettings:
    """Read the settings, using this process's environment. file: replaces the default settings
    file.

    Raises ConfigError.
    """
    return load_settings(
        file=file or default_file(os.environ), environ=os.environ, flags=flags or {}
    )


def option(name: str, annotation: Any) -> inspect.Parameter:
    """Create a keyword parameter for Typer with the default None."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def own_parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    """Return a command's parameters except the first one, as keyword parameters."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]


def with_parameters(
    run: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Set the signature of a function with keyword arguments; Typer derives the options from it."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@settings_command
def config(effective: EffectiveSettings, as_json: Json = False) -> None:
    """Show the settings in force, and the source of each.

    The options are the same as for `serve`.
    """
    from rich.text import Text

    shown = {key: shown_value(effective.settings, key) for key in effective.origins}
    if as_json:
        rows = {}
        for key, origin in effective.origins.items():
            value: object = shown[key]
            if not all_specs()[key].secret and value not in ("auto", "off"):
                value = value_of(effective.settings, key)
            rows[key] = {"value": value, "origin": origin}
        print_json(rows)
        return
    table = new_table("setting", "value", "from")
    for key, origin in effective.origins.items():
        style = "dim" if origin == "default" else ""
        table.add_row(Text(key), Text(shown[key]), Text(origin), style=style)
    print_table(table)


keys = typer.Typer(help="Add, list and remove named API keys.", no_args_is_help=True)

Name: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the key; cached data belongs to this name.")
]
File: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="File with the keys; default: server.keys_file in your settings.",
    ),
]


@keys.command("add")
def add(
    name: Name,
    admin: Annotated[
        bool,
        typer.Option(
            "--admin",
            help="Allow the key to load and unload models, and to see and cancel all requests.",
        ),
    ] = False,
    priority: Annotated[
        Priority,
        typer.Option(help="Highest priority of the key's requests; batch yields to interactive."),
    ] = "interactive",
    max_requests: Annotated[
        int | None,
        typer.Option(
            "--max-requests",
            metavar="N",
            help="How many answers may run and wait at once.",
        ),
    ] = None,
    file: File = None,
) -> None:
    """Create a key and print it; it is not shown again.

    As soon as a key exists, the server refuses requests without a key.
    """
    from holdfast.front.server.access import named_key, new_secret, write_keys

    with plain_errors():
        path, api_keys = _read_keys(file)
        if any(key.name == name for key in api_keys):
            raise ConfigError(
                f"there is already a key named {name}; `holdfast keys rotate {name}` replaces its "
                "secret"
            )
        secret = new_secret()
        new_key = named_key(
            name, secret, is_admin=admin, priority=priority, max_requests=max_requests
        )
        write_keys(path, (*api_keys, new_key))
        _print_secret(secret, f"This is the key of {name}; it is not shown again.", path)


@keys.command("rotate")
def rotate(name: Name, file: File = None) -> None:
    """Replace the key of a name and print the new key; it is not shown again.

    The name keeps its permissions and its cache.
    """
    from holdfast.front.server.access import named_key, new_secret, write_keys

    with plain_errors():
        path, api_keys = _read_keys(file)
        old_key = _key_named(api_keys, name, path)
        secret = new_secret()
        new_key = named_key(
            name,
            secret,
            is_admin=old_key.is_admin,
            priority=old_key.priority,
            max_requests=old_key.max_requests,
        )
        write_keys(path, tuple(new_key if key is old_key else key for key in api_keys))
        _print_secret(
            secret,
            f"This is the new key of {name}; it replaces the old one and is not shown again.",
            path,
        )


@keys.command("ls")
def list_keys(file: File = None) -> None:
    """List the names of the keys and their permissions. The keys themselves are not stored."""
    with plain_errors():
        path, api_keys = _read_keys(file)
    if not api_keys:
        typer.echo(f"no keys in {path}")
        return
    width = max(len(key.name) for key in api_keys)
    for key in api_keys:
        words = ["admin"] if key.is_admin else []
        words.append(key.priority)
        if key.max_requests is not None:
            words.append(f"at most {key.max_requests} requests")
        if key.created:
            words.append(f"since {key.created}")
        typer.echo(f"{key.name:<{width}}  {', '.join(words)}")


@keys.command("rm")
def remove(name: Name, file: File = None) -> None:
    """Remove a key.

    The cache is kept for a later key with the same name.
    """
    from holdfast.front.server.access import write_keys

    with plain_errors():
        path, api_keys = _read_keys(file)
        removed = _key_named(api_keys, name, path)
        remaining_keys = tuple(key for key in api_keys if key is not removed)
        write_keys(path, remaining_keys)
    typer.echo(f"{name} is removed. {_how_to_apply(path)}")
    if not remaining_keys:
        typer.echo(
            f"No keys are left, but clients still need one. To serve without keys, delete {path}."
        )


def _read_keys(file: Path | None) -> tuple[Path, tuple[ApiKey, ...]]:
    """Return the file of keys, which may not exist yet, and the keys in it. Raises ConfigError."""
    from holdfast.front.server.access import OFF, key_file_of, own_key_file, read_keys

    path = None if file is None else expanded(file)
    if path is None:
        setting = read_settings().settings.server.keys_file
        path = key_file_of(setting, os.environ)
        if path is None and setting not in ("", OFF):
            path = own_key_file(os.environ)
    if path is None:
        raise ConfigError(
            "there is no file for keys: name one with --file FILE, or as server.keys_file in the "
            "settings"
        )
    return path, read_keys(path) if path.exists() else ()


def _key_named(keys: Sequence[ApiKey], name: str, path: Path) -> ApiKey:
    """The key with this name. path: the file of the keys, for the error. Raises ConfigError."""
    for key in keys:
        if key.name == name:
            return key
    names = ", ".join(key.name for key in keys) or "none"
    raise ConfigError(f"there is no key named {name} in {path}; there are: {names}")


def _how_to_apply(path: Path) -> str:
    """Tell how running servers get to know a changed file of keys."""
    from holdfast.front.run.running_servers import running_servers

    command = " ".join(("kill -HUP", *(str(each.pid) for each in running_servers(os.environ))))
    return f"A running server reads {path} again on SIGHUP (`{command}`) or after a restart."


def _print_secret(secret: str, notice: str, path: Path) -> None:
    """Print a new key."""
    # stdout gets only the key, for use in pipes
    typer.echo(f"{notice} {_how_to_apply(path)}", err=True)
    typer.echo(secret)
