"""Commands that take settings: every setting with a flag of its own becomes an option, all others are reached by --set."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from holdfast.cli.errors import plain_errors
from holdfast.cli.signatures import option, own_parameters, with_parameters
from holdfast.config import EffectiveSettings, all_specs, default_file, load_settings
from holdfast.config_sources import SettingSpec, describe
from holdfast.errors import ConfigError

_PANEL = "Settings"

ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", rich_help_panel=_PANEL, help="Settings file; else ./holdfast.toml."),
]
FurtherSettings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", rich_help_panel=_PANEL, help="Any setting by its key; may be repeated."),
]


def settings_command(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `(effective, **own options)` an option for each setting, and plain errors.

    Typer reads the signature that is put together here, so a new setting needs no line in the command line.
    """
    own = own_parameters(command)
    specs = [spec for spec in all_specs().values() if spec.flag]
    added = [_parameter(spec) for spec in specs]
    added += [option("config_file", ConfigFile), option("further", FurtherSettings)]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        file, further = given.pop("config_file"), given.pop("further")
        flags = {spec.key: given.pop(_name(spec)) for spec in specs}
        with plain_errors(flags["log.format"] or "text"):
            effective = _effective(file, further or [], flags)
            with plain_errors(effective.settings.log.format):
                command(effective, **given)

    return with_parameters(run, [*added, *own])


def _name(spec: SettingSpec) -> str:
    return "setting_" + spec.key.replace(".", "_")


def _parameter(spec: SettingSpec) -> inspect.Parameter:
    """The option (or the argument MODEL) of one setting. All are texts: `config` converts and checks, for all sources."""
    default = describe(spec, spec.default) or False  # as help shows it; False: nothing
    if spec.flag.startswith("--"):
        if spec.kind == "switch":
            switch = typer.Option(spec.flag, help=spec.doc, rich_help_panel=_PANEL)
            return option(_name(spec), Annotated[bool | None, switch])
        metavar = "|".join(spec.choices) if spec.choices else spec.key.rpartition(".")[2].rpartition("_")[2].upper()
        names = (spec.flag, spec.short) if spec.short else (spec.flag,)
        text = typer.Option(*names, metavar=metavar, help=spec.doc, show_default=default, rich_help_panel=_PANEL)
        annotation: Any = Annotated[str | None, text]
    else:
        annotation = Annotated[str | None, typer.Argument(metavar=spec.flag, help=spec.doc, show_default=default)]
    return option(_name(spec), annotation)


def _effective(file: Path | None, further: list[str], flags: Mapping[str, object]) -> EffectiveSettings:
    named = dict(flags)
    for assignment in further:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: write KEY=VALUE, such as --set scheduler.max_running=8")
        named[key.strip()] = value.strip()
    return load_settings(file=file or default_file(os.environ), environ=os.environ, flags=named)
