"""Commands that take settings, and `holdfast config`, which shows the settings in force.

A setting with a flag becomes an option, any other is reached by --set. `--help` shows the options
that most people need, `--help-all` all of them.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from holdfast.cli.output import new_table, plain_errors, print_json, print_table
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

_PREFIX = "setting_"  # of parameter names
_PANEL = "Settings"
# section → panel
_PANELS = {"model": "Model", "server": "Server", "store": "Store", "log": "Log"}
_SHOWN = (
    "model.path",
    "model.name",
    "model.context_tokens",
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
        help="Any setting, by its key; can be repeated.",
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
    command: Callable[..., None], *, shown: Collection[str] = _SHOWN, left_out: Collection[str] = ()
) -> Callable[..., None]:
    """Give a command `(effective, **own options)` an option for each setting, and plain errors.

    shown: keys of the settings that `--help` shows. left_out: keys that this command ignores.
    """
    own = own_parameters(command)
    specs = [spec for spec in all_specs().values() if spec.flag and spec.key not in left_out]
    added = [_parameter(spec, is_shown=spec.key in shown) for spec in specs]
    added += [
        option("config_file", ConfigFile),
        option("further", FurtherSettings),
        option("help_all", HelpAll),
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        file, further = given.pop("config_file"), given.pop("further")
        del given["help_all"]
        flags = {spec.key: given.pop(_name(spec)) for spec in specs}
        with plain_errors(flags["log.format"] or "text"):
            effective = _effective(file, further or [], flags)
            with plain_errors(effective.settings.log.format):
                command(effective, **given)

    return with_parameters(run, [*added, *own])


def _name(spec: SettingSpec) -> str:
    return _PREFIX + spec.key.replace(".", "_")


def _parameter(spec: SettingSpec, *, is_shown: bool) -> inspect.Parameter:
    """The option (or the argument MODEL) of one setting.

    Values are texts, which `config` converts and checks, as it does for all sources.
    """
    default = describe(spec, spec.default) or False  # False: help shows no default
    if not spec.flag.startswith("--"):
        argument = typer.Argument(metavar=spec.flag, help=spec.doc, show_default=default)
        return option(_name(spec), Annotated[str | None, argument])
    section, _, name = spec.key.partition(".")
    panel = _PANELS.get(section, _PANEL)
    if spec.kind == "switch":
        switch = typer.Option(spec.flag, help=spec.doc, rich_help_panel=panel, hidden=not is_shown)
        return option(_name(spec), Annotated[bool | None, switch])
    text = typer.Option(
        *filter(None, (spec.flag, spec.short)),
        metavar="|".join(spec.choices) or name.rpartition("_")[2].upper(),
        help=spec.doc,
        show_default=default,
        rich_help_panel=panel,
        hidden=not is_shown,
    )
    return option(_name(spec), Annotated[str | None, text])


def _effective(
    file: Path | None, further: list[str], flags: Mapping[str, object]
) -> EffectiveSettings:
    named = dict(flags)
    for assignment in further:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(
                f"--set {assignment}: write KEY=VALUE, such as --set scheduler.max_running=8"
            )
        named[key.strip()] = value.strip()
    return read_settings(named, file=file)


def read_settings(
    flags: Mapping[str, object] | None = None, *, file: Path | None = None
) -> EffectiveSettings:
    """The settings from this process's environment. file: replaces the default one.

    Raises ConfigError.
    """
    return load_settings(
        file=file or default_file(os.environ), environ=os.environ, flags=flags or {}
    )


def option(name: str, annotation: Any) -> inspect.Parameter:
    """A keyword parameter for Typer with the default None."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def own_parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    """A command's parameters except the first, as keyword parameters."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]


def with_parameters(
    run: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Give a function that takes keywords this signature, which Typer reads."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@settings_command
def config(
    effective: EffectiveSettings,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: key → value and origin.")
    ] = False,
) -> None:
    """Show the settings in force, and the source of each.

    It takes the same options as `serve`.
    """
    if as_json:
        print_json(_rows(effective))
    else:
        _print_table(effective)


def _rows(effective: EffectiveSettings) -> dict[str, dict[str, Any]]:
    """Key → value and origin; "auto" and "off" are shown as words, a secret as "(set)"."""
    rows = {}
    for key, spec in all_specs().items():
        value, shown = value_of(effective.settings, key), shown_value(effective.settings, key)
        rows[key] = {
            "value": shown if spec.secret or shown in ("auto", "off") else value,
            "origin": effective.origins[key],
        }
    return rows


def _print_table(effective: EffectiveSettings) -> None:
    from rich.text import Text

    table = new_table("setting", "value", "from")
    for key, origin in effective.origins.items():
        style = "dim" if origin == "default" else ""
        table.add_row(
            Text(key), Text(shown_value(effective.settings, key)), Text(origin), style=style
        )
    print_table(table)
