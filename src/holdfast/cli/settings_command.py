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
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    specs = [spec for spec in all_specs().values() if spec.flag]
    parameters = [_parameter(spec) for spec in specs]
    parameters.append(inspect.Parameter("config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile))
    parameters.append(inspect.Parameter("further", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=FurtherSettings))
    parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        file, further = given.pop("config_file"), given.pop("further")
        flags = {spec.key: given.pop(_name(spec)) for spec in specs}
        with plain_errors(flags["log.format"] or "text"):
            effective = _effective(file, further or [], flags)
            with plain_errors(effective.settings.log.format):
                command(effective, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _name(spec: SettingSpec) -> str:
    return "setting_" + spec.key.replace(".", "_")


def _parameter(spec: SettingSpec) -> inspect.Parameter:
    """The option (or the argument MODEL) of one setting. All are texts: `config` converts and checks, for all sources."""
    default = describe(spec, spec.default) or False  # as help shows it; False: nothing
    if spec.flag.startswith("--"):
        if spec.kind == "switch":
            option = typer.Option(spec.flag, help=spec.doc, rich_help_panel=_PANEL)
            return inspect.Parameter(
                _name(spec), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[bool | None, option]
            )
        metavar = "|".join(spec.choices) if spec.choices else spec.key.rpartition(".")[2].rpartition("_")[2].upper()
        names = (spec.flag, spec.short) if spec.short else (spec.flag,)
        option = typer.Option(*names, metavar=metavar, help=spec.doc, show_default=default, rich_help_panel=_PANEL)
        annotation: Any = Annotated[str | None, option]
    else:
        annotation = Annotated[str | None, typer.Argument(metavar=spec.flag, help=spec.doc, show_default=default)]
    return inspect.Parameter(_name(spec), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _effective(file: Path | None, further: list[str], flags: Mapping[str, object]) -> EffectiveSettings:
    named = dict(flags)
    for assignment in further:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: write KEY=VALUE, such as --set scheduler.max_running=8")
        named[key.strip()] = value.strip()
    return load_settings(file=file or default_file(os.environ), environ=os.environ, flags=named)
