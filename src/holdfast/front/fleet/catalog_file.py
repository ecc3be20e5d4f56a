"""Reads `models.toml`: one table `[models.NAME]` per model.

What is wrong with a table leaves out that model, with the reason.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.config import Settings, all_specs
from holdfast.config_sources import Given, SettingSpec, convert, did_you_mean
from holdfast.errors import ConfigError, ModelLoadError
from holdfast.front.fleet.catalog import CatalogEntry, LeftOut
from holdfast.models.context_window import known_context_tokens
from holdfast.models.download import model_source
from holdfast.models.model_folder import check_loadable
from holdfast.wire.requests import RESERVED_TEMPLATE_ARGUMENTS, SAMPLING_RANGES

FILE_NAME = "models.toml"
_SECTION = "models"
# Keys whose kind and limits are those of a setting of the server.
_LIKE_SETTING = {
    "revision": "model.revision",
    "context": "model.context_tokens",
    "dtype": "model.dtype",
    "dequantize": "model.dequantize",
    "layout": "model.layout",
    "memory": "model.memory_bytes",
    "keep_thoughts": "model.keep_thoughts",
    "trust_remote_code": "model.trust_remote_code",
    "codec": "store.codec",
    "idle": "residency.idle_seconds",
    "aliases": "server.model_aliases",
}
_OWN_KEYS = ("path", "id", "draft", "pin", "sampling", "template")
_KEYS = (*_OWN_KEYS, *_LIKE_SETTING)
_SAMPLING = tuple(name for name in SAMPLING_RANGES if name != "logit_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFile:
    """What a file says: models to serve in its order, and what cannot be served."""

    entries: tuple[CatalogEntry, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


def check_catalog_file(file: Path) -> None:
    """Raise ConfigError for a file that cannot be read, or is not TOML."""
    try:
        tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the file of models {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def read_catalog_file(file: Path, settings: Settings) -> CatalogFile:
    """Read a file. A model that the file does not say all of is served with the server's own
    settings.

    Raises ConfigError when the file cannot be opened; what stands in it stops no start.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the file of models {file} cannot be read: {error.strerror or error}"
        ) from None
    except ValueError as error:
        return CatalogFile(left_out=(_left_out(file.name, file, f"the file is not TOML: {error}"),))
    left_out = [
        _left_out(
            key,
            file,
            f"unknown section [{key}]{did_you_mean(key, [_SECTION])}; models stand in "
            f"[{_SECTION}.NAME]",
        )
        for key in tables
        if key != _SECTION
    ]
    models = tables.get(_SECTION, {})
    if not isinstance(models, dict):
        return CatalogFile(
            left_out=(
                *left_out,
                _left_out(_SECTION, file, f"write each model as [{_SECTION}.NAME]"),
            )
        )
    entries = []
    for name, table in models.items():
        try:
            entries.append(_entry(name, table, file=file, settings=settings))
        except (ConfigError, ModelLoadError) as error:
            left_out.append(_left_out(name, file, str(error)))
    kept, clashing = _without_clashes(entries)
    return CatalogFile(entries=kept, left_out=(*left_out, *clashing))


def _entry(name: str, table: object, *, file: Path, settings: Settings) -> CatalogEntry:
    """One model. Raises ConfigError and ModelLoadError."""
    if not isinstance(table, dict):
        raise ConfigError(f"write [{_SECTION}.{name}] and its keys beneath")
    if not name.strip() or not name.isprintable():
        raise ConfigError("a name is a text that can be printed, and not empty")
    for key in table:
        if key not in _KEYS and isinstance(table[key], dict):
            raise ConfigError(
                f'{key} is no key; a name with a dot in it stands in quotes: [{_SECTION}."{name}.{key}"]'
            )
        if key not in _KEYS:
            raise ConfigError(
                f"unknown key {key}{did_you_mean(key, _KEYS)}; keys: {', '.join(_KEYS)}"
            )
    given = _given(table)
    aliases = tuple(dict.fromkeys(alias for alias in given.pop("aliases", ()) if alias != name))
    idle_seconds = given.pop("idle", settings.residency.idle_seconds)
    store = replace(settings.store, codec=given.pop("codec", settings.store.codec))
    model = {_LIKE_SETTING[key].partition(".")[2]: value for key, value in given.items()}
    place = _place(table, model, file)
    config = check_loadable(Path(place["path"])) if "path" in table else {}
    return CatalogEntry(
        name=name,
        model=replace(settings.model, **{**model, **place, "name": name}),
        store=store,
        origin=str(file),
        aliases=aliases,
        is_pinned=_of_type(table, "pin", bool, "true or false") or False,
        idle_seconds=idle_seconds,
        sampling=_sampling(
            _of_type(table, "sampling", dict, "a table such as { temperature = 0.2 }") or {}
        ),
        template_arguments=_template(
            _of_type(table, "template", dict, "a table such as { enable_thinking = false }") or {}
        ),
        own_context_tokens=known_context_tokens(config),
        draft=_of_type(table, "draft", str, "a text"),
    )


def _given(table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of keys that are like settings, by key. Raises ConfigError."""
    specs = _specs()
    return {
        key: convert(specs[key], Given(value=table[key], origin=FILE_NAME))
        for key in table
        if key in specs
    }


@cache
def _specs() -> dict[str, SettingSpec]:
    """What is known of the keys that are like settings."""
    settings = all_specs()
    return {key: replace(settings[like], key=key) for key, like in _LIKE_SETTING.items()}


def _place(table: Mapping[str, Any], model: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Folder, or Hub id and revision.

    Raises ConfigError, and ModelLoadError for what cannot be an id.
    """
    path, hub_id = (_of_type(table, key, str, "a text") for key in ("path", "id"))
    if bool(path) == bool(hub_id):
        raise ConfigError(
            "it needs either path (a folder) or id (owner/name on the Hub), and not both"
        )
    if hub_id:
        source = model_source(hub_id, revision=model.get("revision", ""))
        if source.kind == "folder":
            raise ConfigError(f"id = {hub_id} is a folder here; name it by path")
        return {"path": source.name, "revision": source.revision}
    if model.get("revision"):
        raise ConfigError("revision goes with id, not with path")
    folder = file.absolute().parent / os.path.expanduser(path or "")
    return {"path": str(folder), "revision": ""}


def _sampling(table: Mapping[str, Any]) -> dict[str, float]:
    """Defaults for sampling, named as in requests. Raises ConfigError."""
    for key, value in table.items():
        if key not in _SAMPLING:
            raise ConfigError(
                f"unknown key sampling.{key}{did_you_mean(key, _SAMPLING)}; keys: "
                f"{', '.join(_SAMPLING)}"
            )
        lowest, highest = SAMPLING_RANGES[key]
        is_number = isinstance(value, int if key == "top_k" else int | float) and not isinstance(
            value, bool
        )
        if not is_number or not math.isfinite(value) or not lowest <= value <= highest:
            raise ConfigError(
                f"sampling.{key} = {value} is not allowed; allowed: a number from {lowest:g} to "
                f"{highest:g}"
            )
    return {key: int(value) if key == "top_k" else float(value) for key, value in table.items()}


def _template(table: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the chat template. Raises ConfigError."""
    if clash := sorted(RESERVED_TEMPLATE_ARGUMENTS & table.keys()):
        raise ConfigError(f"template.{clash[0]} is what each request brings itself")
    for key, value in table.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ConfigError(
                f"template.{key} = {value} is not allowed; allowed: what JSON has (a date as a "
                "text)"
            ) from None
    return table


def _of_type(table: Mapping[str, Any], key: str, kind: type[Any], words: str) -> Any:
    value = table.get(key)
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{key} = {value} is not allowed; allowed: {words}")
    return value


def _without_clashes(entries: list[CatalogEntry]) -> tuple[tuple[CatalogEntry, ...], list[LeftOut]]:
    """Names are unique by TOML.

    An entry goes whose alias is a model's name, or an alias of one that stands before it.
    """
    names = {entry.name for entry in entries}
    taken: dict[str, str] = {}
    kept, left_out = [], []
    for entry in entries:
        reasons = [
            f"its alias {alias} is the name of another model"
            for alias in entry.aliases
            if alias in names
        ]
        reasons += [
            f"its alias {alias} is one of {taken[alias]} already"
            for alias in entry.aliases
            if alias in taken
        ]
        if reasons:
            left_out.append(
                LeftOut(name=entry.name, origin=entry.origin, reason=reasons[0], is_asked_for=True)
            )
            continue
        kept.append(entry)
        taken |= dict.fromkeys(entry.aliases, entry.name)
    return tuple(kept), left_out


def _left_out(name: str, file: Path, reason: str) -> LeftOut:
    return LeftOut(name=name, origin=str(file), reason=reason, is_asked_for=True)
