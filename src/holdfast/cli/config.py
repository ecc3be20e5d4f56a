"""`holdfast config`: the settings in force, and where each came from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.output import new_table, print_json, print_table
from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings, all_specs, shown_value, value_of


@settings_command
def config(
    effective: EffectiveSettings,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: key → value and origin.")
    ] = False,
) -> None:
    """Show the settings in force.

    It says where each of them comes from. It takes the same options as `serve`.
    """
    if as_json:
        print_json(_rows(effective))
    else:
        _print_table(effective)


def _rows(effective: EffectiveSettings) -> dict[str, dict[str, Any]]:
    """Key → value (as a JSON value; what stands for no number as its word, a secret as whether it
    is set) and origin.
    """
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
