"""The catalog: which models a server serves, and with which settings.

Its sources are the settings, `models.toml`, and the models found on this machine.

`catalog_of` builds the catalog. `models.toml` has one table `[models.NAME]` per model. If a table
has an error, that model is left out, with the reason.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import starmap
from pathlib import Path
from typing import Any

from holdfast.config import ModelSettings, Settings, all_specs, config_folders
from holdfast.config_sources import RawValue, SettingSpec, convert, did_you_mean
from holdfast.errors import ConfigError, ModelLoadError, UnknownModel, nearest_names
from holdfast.files import read_text
from holdfast.front.request import RESERVED_TEMPLATE_ARGUMENTS
from holdfast.models.adapter_folder import (
    SEPARATOR,
    adapter_folders,
    checked_adapters,
    listed_adapter,
)
from holdfast.models.download import (
    cached_models,
    check_snapshot,
    hub_cache_folder,
    interrupted_downloads,
    local_folder,
    model_source,
    served_id,
    source_of,
)
from holdfast.models.draft_pairs import check_speculation, drafts_for_itself
from holdfast.models.hub import ModelSource
from holdfast.models.loadable import can_chat, check_loadable
from holdfast.models.model_folder import WEIGHT_FILES, can_see, known_context_tokens
from holdfast.models.weight_files import checked_tensor_bytes
from holdfast.wire.requests import SAMPLING_RANGES

FILE_NAME = "models.toml"
_SECTION = "models"
# key of a model's table → server setting that has the same type and limits
_SETTING_OF_KEY = {
    "revision": "model.revision",
    "context": "model.context_tokens",
    "dtype": "model.dtype",
    "dequantize": "model.dequantize",
    "layout": "model.layout",
    "memory": "model.memory_bytes",
    "keep_thoughts": "model.keep_thoughts",
    "trust_remote_code": "model.trust_remote_code",
    "kv_bits": "model.kv_bits",
    "speculation": "model.speculation",
    "idle": "residency.idle_seconds",
    "aliases": "server.model_aliases",
}
_KEYS = ("path", "id", "adapters", "pin", "sampling", "template", *_SETTING_OF_KEY)
_SAMPLING_KEYS = tuple(name for name in SAMPLING_RANGES if name != "logit_bias")
# a folder with a file whose name ends like this is a model
_MODEL_FILE_ENDINGS = ("config.json", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One model: where its files are, and how it is loaded and served."""

    name: str  # the model's id in /v1/models, /health and answers
    # `path` is a folder or a Hub id; what the entry does not set comes from the server's settings
    model: ModelSettings
    origin: str  # file or folder that lists the model
    aliases: tuple[str, ...] = ()  # other names that requests may use
    # whether the model is loaded at the start, and never unloaded to make room or when it is idle
    is_pinned: bool = False
    # the model is unloaded after this many seconds without a request; 0: immediately; None: never
    idle_seconds: float | None = None
    # defaults for requests; they take precedence over the model's own defaults
    sampling: Mapping[str, float] = field(default_factory=dict)
    # for the chat template; those of a request take precedence
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    # context window from config.json; 0: unknown
    own_context_tokens: int = 0
    reads_images: bool = False  # without adapters, as far as its config.json tells
    can_chat: bool = True  # whether it has a chat template; true if its files are not here yet

    @property
    def adapter_folders(self) -> Mapping[str, Path]:
        """The folders of the model's LoRA adapters, by name."""
        return adapter_folders(self.model.adapters)

    @property
    def can_see(self) -> bool:
        """Whether the model can be given images, as far as is known before the load."""
        return self.reads_images and not self.model.adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the model's LoRA adapters."""
        return tuple(self.adapter_folders)

    def weight_bytes(self, environ: Mapping[str, str]) -> int | None:
        """The size of the model's weight files; None if they are not on this machine."""
        folder = local_folder(source_of(self.model), environ)
        if folder is None:
            return None
        # a link in the Hub's cache may be broken
        return sum(file.stat().st_size for file in folder.glob(WEIGHT_FILES) if file.exists())

    def checked_bytes(self, folder: Path) -> int:
        """The size of the weights of the model in `folder`, with those of its adapters. Raises
        ModelLoadError if files are missing or damaged.
        """
        adapters = checked_adapters(self.model.adapters)
        return checked_tensor_bytes(folder) + sum(each.tensor_bytes for each in adapters)

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the model and of the model with each of its adapters."""
        return tuple(map(self.with_adapter, ("", *self.adapters)))

    def with_adapter(self, adapter: str) -> str:
        """The id of the model with an adapter; with an empty name, of the model itself."""
        return f"{self.name}{SEPARATOR}{adapter}" if adapter else self.name


def base_name(name: str) -> str:
    """The name of the model in a name with an adapter; empty if it is none."""
    return name.rpartition(SEPARATOR)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEntry:
    """What a name in a request refers to: a model, or a model with a LoRA adapter."""

    entry: CatalogEntry
    adapter: str = ""  # empty: the model itself

    @property
    def id(self) -> str:
        """The id in answers and lists."""
        return self.entry.with_adapter(self.adapter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedModel:
    """A model that is not served, and the reason."""

    name: str
    origin: str  # file or folder that lists it
    reason: str  # shown to users
    is_asked_for: bool  # whether it is listed in models.toml, not just found


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """All models of a server. Names and aliases are unique."""

    entries: tuple[CatalogEntry, ...]  # the first one serves requests that do not name a model
    excluded: tuple[ExcludedModel, ...] = ()
    # names of the models to load at the start: the pinned ones, and the one that the user named or
    # the only one
    at_start: tuple[str, ...] = ()
    # whether models pulled into the Hub's cache are served after a reload
    serves_pulled_models: bool = False

    @cached_property
    def _by_name(self) -> dict[str, NamedEntry]:
        """All names that requests may use, with what they refer to. Ids take precedence over
        aliases.
        """
        with_adapters = {
            f"{name}{SEPARATOR}{adapter}": NamedEntry(entry=entry, adapter=adapter)
            for entry in self.entries
            for adapter in entry.adapters
            for name in (*entry.aliases, entry.name)
        }
        by_alias = {
            alias: NamedEntry(entry=entry) for entry in self.entries for alias in entry.aliases
        }
        return (
            with_adapters
            | by_alias
            | {entry.name: NamedEntry(entry=entry) for entry in self.entries}
        )

    def named(self, name: str) -> NamedEntry | None:
        """Return what a name or alias, with or without an adapter, refers to; None if nothing."""
        return self._by_name.get(name)

    def find(self, name: str) -> CatalogEntry | None:
        """Return the model with that name or alias; None if there is none. Names of adapters are
        not found.
        """
        named = self._by_name.get(name)
        return None if named is None or named.adapter else named.entry

    def unknown(self, name: str) -> UnknownModel:
        """The error for a name that is not the name or alias of any model."""
        ids = [each for entry in self.entries for each in entry.ids]
        aliases = (alias for alias in self._by_name if alias not in ids)
        why = self.why_excluded(name)
        return UnknownModel(model=name, available=(*ids, *aliases), why=why)

    def why_excluded(self, name: str) -> str:
        """Why the model or adapter with this name is not served; empty if it is unknown."""
        base = name.partition(SEPARATOR)[0]
        return next((each.reason for each in self.excluded if each.name in (name, base)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogChange:
    """The difference between two catalogs, as names of models."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    excluded: tuple[ExcludedModel, ...] = ()  # newly left out, although models.toml lists them

    def __str__(self) -> str:
        """One line for the log."""
        changes = (
            ("added", self.added),
            ("removed", self.removed),
            ("changed, effective at the next load", self.changed),
        )
        texts = [f"{verb}: {', '.join(names)}" for verb, names in changes if names]
        texts += [f"left out: {each.name} ({each.reason})" for each in self.excluded]
        return "; ".join(texts) or "no changes"


def change_between(before: Catalog, after: Catalog) -> CatalogChange:
    """Compare two catalogs. The result keeps the order of the catalogs."""
    old_entries = {entry.name: entry for entry in before.entries}
    new_entries = {entry.name: entry for entry in after.entries}
    return CatalogChange(
        added=tuple(name for name in new_entries if name not in old_entries),
        removed=tuple(name for name in old_entries if name not in new_entries),
        changed=tuple(
            name
            for name, entry in new_entries.items()
            if name in old_entries and entry != old_entries[name]
        ),
        excluded=tuple(
            each for each in after.excluded if each.is_asked_for and each not in before.excluded
        ),
    )


def catalog_of(settings: Settings, environ: Mapping[str, str]) -> Catalog:
    """Build the catalog to serve. Reads files, but never asks the Hub.

    If `model.path` is the name of a model in models.toml, that model comes first, and the others
    follow. If `model.path` is another model, the catalog contains that model, followed by the
    models of `catalog.file` if that setting is not empty. Without `model.path`, the catalog
    contains every model in models.toml and on this machine; if there is none, the bundled model.

    A table of models.toml whose `speculation` names no model is left out.

    Raises ConfigError if `models.toml` cannot be read or is not TOML. Raises ModelLoadError if
    `model.path` is not a model, `model.adapters` lists a folder that is not an adapter, or
    `model.speculation` names no model.
    """
    catalog_file = _catalog_file(settings, environ)
    from_file = Catalog(entries=())
    # The settings name adapters of one model: that of `model.path`, or the only one. Relative paths
    # are made absolute.
    adapters = tuple(starmap(listed_adapter, adapter_folders(settings.model.adapters).items()))
    checked_adapters(adapters)
    without_adapters = replace(settings, model=settings.model.of_base_model())
    settings = replace(settings, model=replace(settings.model, adapters=adapters))
    if catalog_file is not None:
        from_file = read_catalog_file(catalog_file, without_adapters)
    entries = from_file.entries
    if settings.model.path:
        named_entry = from_file.find(settings.model.path)
        if named_entry is None:
            named_entry = _entry_outside_file(from_file, settings, environ)
            if not settings.catalog.file:
                check_speculation(named_entry.model)
                return Catalog(entries=(named_entry,), at_start=(named_entry.name,))
        elif adapters:
            named_entry = replace(named_entry, model=replace(named_entry.model, adapters=adapters))
        entries = (named_entry, *(entry for entry in entries if entry.name != named_entry.name))
    entries, unusable = _with_found_models(_with_hub_id_aliases(entries), without_adapters, environ)
    entries, lacking_draft = _without_missing_drafts(entries, settings)
    if not entries:
        entries = (_entry_of_settings(settings),)
        check_speculation(entries[0].model)
    elif adapters and not settings.model.path:
        raise ConfigError(
            f"model.adapters = {', '.join(adapters)} needs the name of its model: holdfast serve "
            "MODEL --adapter NAME=FOLDER; or set adapters in the model's table of models.toml"
        )
    at_start = entries[:1] if settings.model.path or len(entries) == 1 else ()
    pinned = (entry for entry in entries if entry.is_pinned)
    return Catalog(
        entries=entries,
        excluded=(*from_file.excluded, *unusable, *lacking_draft),
        at_start=tuple(dict.fromkeys(entry.name for entry in (*at_start, *pinned))),
        serves_pulled_models=settings.catalog.hub_cache,
    )


def _without_missing_drafts(
    entries: tuple[CatalogEntry, ...], settings: Settings
) -> tuple[tuple[CatalogEntry, ...], list[ExcludedModel]]:
    """Leave out the entries of models.toml whose `speculation` names no model.

    Raises ModelLoadError if the server's setting names none, or if the model that the user named
    would be left out.
    """
    served = []
    excluded = []
    listed = [entry.model for entry in entries]
    for position, entry in enumerate(entries):
        is_named = position == 0 and bool(settings.model.path)
        has_own_setting = entry.model.speculation != settings.model.speculation
        try:
            # the server's setting may name one of several models, to draft for all the others
            is_one_of_several = not (has_own_setting or is_named) and len(entries) > 1
            if is_one_of_several and drafts_for_itself(entry.model, listed=listed):
                entry = replace(entry, model=replace(entry.model, speculation="auto"))
            check_speculation(entry.model, listed=listed)
        except ModelLoadError as error:
            if is_named or not has_own_setting:
                raise
            excluded.append(_excluded_entry(entry.name, Path(entry.origin), str(error)))
        else:
            served.append(entry)
    return tuple(served), excluded


def read_catalog_file(file: Path, settings: Settings) -> Catalog:
    """Read the models of a file, in the order of the file. The server's settings are the defaults.

    Raises ConfigError if the file cannot be opened or is not TOML. A model whose entry has an error
    is left out.
    """
    try:
        tables = tomllib.loads(read_text(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deep") from None
    excluded = []
    for key in tables:
        if key != _SECTION:
            hint = did_you_mean(key, [_SECTION])
            reason = f"unknown section [{key}]{hint}; list models as [{_SECTION}.NAME]"
            excluded.append(_excluded_entry(key, file, reason))
    models = tables.get(_SECTION, {})
    if not isinstance(models, dict):
        excluded.append(_excluded_entry(_SECTION, file, f"write each model as [{_SECTION}.NAME]"))
        models = {}
    entries = []
    for name, table in models.items():
        try:
            entries.append(_entry(name, table, file=file, settings=settings))
        except (ConfigError, ModelLoadError) as error:
            excluded.append(_excluded_entry(name, file, str(error)))
    unique, clashing = _without_clashes(entries, file)
    return Catalog(entries=unique, excluded=(*excluded, *clashing))


def _entry(name: str, table: object, *, file: Path, settings: Settings) -> CatalogEntry:
    """Read the entry of one model. Raises ConfigError and ModelLoadError."""
    if not isinstance(table, dict):
        raise ConfigError(
            f"must be a table: write the header [{_SECTION}.{name}] and put its keys on the lines "
            "below"
        )
    if not name.strip() or not name.isprintable():
        raise ConfigError("a model's name must not be empty and must be printable")
    _check_keys(name, table)
    specs = _key_specs()
    values = {
        key: convert(specs[key], RawValue(value=value, origin=FILE_NAME))
        for key, value in table.items()
        if key in specs
    }
    aliases = tuple(dict.fromkeys(alias for alias in values.pop("aliases", ()) if alias != name))
    idle_seconds = values.pop("idle", settings.residency.idle_seconds)
    model_values = {
        _SETTING_OF_KEY[key].removeprefix("model."): value for key, value in values.items()
    }
    file_settings = _file_settings(table, revision=model_values.get("revision", ""), file=file)
    model_values["adapters"] = _adapters(table, file=file)
    if "speculation" in model_values and (file.parent / model_values["speculation"]).is_dir():
        model_values["speculation"] = str(file.parent / model_values["speculation"])
    config = check_loadable(Path(file_settings["path"])) if "path" in table else {}
    return CatalogEntry(
        name=name,
        model=replace(settings.model, **{**model_values, **file_settings, "name": name}),
        origin=str(file),
        aliases=aliases,
        is_pinned=_typed_value(table, "pin", bool, "true or false") or False,
        idle_seconds=idle_seconds,
        sampling=_sampling(table),
        template_arguments=_template(table),
        own_context_tokens=known_context_tokens(config),
        reads_images=can_see(config),
        can_chat="path" not in table or can_chat(Path(file_settings["path"])),
    )


def _check_keys(name: str, table: Mapping[str, Any]) -> None:
    """Raise ConfigError if the table of a model has an unknown key."""
    for key, value in table.items():
        if key in _KEYS:
            continue
        if isinstance(value, dict):
            quoted = f'[{_SECTION}."{name}.{key}"]'
            raise ConfigError(f"unknown key {key}; quote a name that contains a dot: {quoted}")
        hint = did_you_mean(key, _KEYS)
        raise ConfigError(f"unknown key {key}{hint}; keys: {', '.join(_KEYS)}")


@cache
def _key_specs() -> dict[str, SettingSpec]:
    """The specs of the table's keys that have the type and limits of a server setting."""
    settings = all_specs()
    return {key: replace(settings[setting], key=key) for key, setting in _SETTING_OF_KEY.items()}


def _file_settings(table: Mapping[str, Any], *, revision: str, file: Path) -> dict[str, str]:
    """Return the settings that say where a model's files are: `path` and `revision`.

    `path` is a folder or a Hub id.
    """
    path = _typed_value(table, "path", str, "a string")
    hub_id = _typed_value(table, "id", str, "a string")
    if bool(path) == bool(hub_id):
        raise ConfigError("set either path (a folder) or id (owner/name on the Hub), not both")
    if hub_id:
        source = model_source(hub_id, revision=revision)
        if source.kind == "folder":
            raise ConfigError(f"id = {hub_id} is a folder; use path for folders")
        return {"path": source.name, "revision": source.revision}
    if revision:
        raise ConfigError("revision can be set only together with id, not with path")
    folder = file.absolute().parent / os.path.expanduser(path or "")
    return {"path": str(folder), "revision": ""}


def _adapters(table: Mapping[str, Any], *, file: Path) -> tuple[str, ...]:
    """Return a table's adapters as `NAME=FOLDER` texts. Raises ConfigError and ModelLoadError."""
    allowed = 'a table such as { sql = "adapters/sql" }'
    folders: dict[str, Any] = _typed_value(table, "adapters", dict, allowed) or {}
    for name, folder in folders.items():
        if not isinstance(folder, str):
            raise ConfigError(f"adapters.{name} = {folder} is not allowed; allowed: a folder")
    adapters = tuple(
        listed_adapter(name, file.absolute().parent / os.path.expanduser(folder))
        for name, folder in folders.items()
    )
    checked_adapters(adapters)
    return adapters


def _sampling(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the default sampling parameters, named as in requests."""
    table = _typed_value(entry, "sampling", dict, "a table such as { temperature = 0.2 }") or {}
    sampling: dict[str, float] = {}
    for key, value in table.items():
        if key not in _SAMPLING_KEYS:
            hint = did_you_mean(key, _SAMPLING_KEYS)
            raise ConfigError(
                f"unknown key sampling.{key}{hint}; keys: {', '.join(_SAMPLING_KEYS)}"
            )
        allowed_range = SAMPLING_RANGES[key]
        if (number := allowed_range.accepted(value)) is None:
            raise ConfigError(
                f"sampling.{key} = {value} is not allowed; allowed: a number from "
                f"{allowed_range.lowest:g} to {allowed_range.highest:g}"
            )
        sampling[key] = number
    return sampling


def _template(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default arguments of the chat template."""
    allowed = "a table such as { enable_thinking = false }"
    table: dict[str, Any] = _typed_value(entry, "template", dict, allowed) or {}
    if reserved := sorted(RESERVED_TEMPLATE_ARGUMENTS & table.keys()):
        raise ConfigError(f"template.{reserved[0]} cannot have a default: each request sets it")
    for key, value in table.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ConfigError(
                f"template.{key} = {value} is not allowed; allowed: JSON values (dates as strings)"
            ) from None
    return table


def _typed_value(table: Mapping[str, Any], key: str, value_type: type[Any], allowed: str) -> Any:
    """The value of a key, or None. Raises ConfigError, which says what is allowed, for another
    type.
    """
    value = table.get(key)
    if value is not None and not isinstance(value, value_type):
        raise ConfigError(f"{key} = {value} is not allowed; allowed: {allowed}")
    return value


def _without_clashes(
    entries: list[CatalogEntry], file: Path
) -> tuple[tuple[CatalogEntry, ...], list[ExcludedModel]]:
    """Leave out entries with an alias that is another model's name, or an alias of an earlier
    entry.
    """
    names = {entry.name for entry in entries}
    owner_of_alias: dict[str, str] = {}
    unique = []
    excluded = []
    for entry in entries:
        reason = ""
        adapter_ids = entry.ids[1:]
        for alias in (*entry.aliases, *adapter_ids):
            noun = "adapter" if alias in adapter_ids else "alias"
            if alias in names:
                reason = f"its {noun} {alias} is the name of another model"
                break
            if alias in owner_of_alias:
                reason = f"its {noun} {alias} is already an alias of {owner_of_alias[alias]}"
                break
        if reason:
            excluded.append(_excluded_entry(entry.name, file, reason))
        else:
            unique.append(entry)
            owner_of_alias |= dict.fromkeys(entry.aliases, entry.name)
    return tuple(unique), excluded


def _excluded_entry(name: str, file: Path, reason: str) -> ExcludedModel:
    """An entry of models.toml that is left out."""
    return ExcludedModel(name=name, origin=str(file), reason=reason, is_asked_for=True)


def _catalog_file(settings: Settings, environ: Mapping[str, str]) -> Path | None:
    """Return the path in `catalog.file`, or else that of the user's own models.toml.

    Returns None if the setting is empty and the user has no such file.
    """
    if settings.catalog.file:
        return Path(os.path.expanduser(settings.catalog.file))
    files = (folder / FILE_NAME for folder in config_folders(environ))
    return next((file for file in files if os.path.lexists(file)), None)


def _entry_of_settings(settings: Settings) -> CatalogEntry:
    """Return the model of `model.path`, or the bundled one. Raises ModelLoadError."""
    model = replace(settings.model, name=served_id(settings.model))
    return CatalogEntry(
        name=model.name, model=model, origin="", idle_seconds=settings.residency.idle_seconds
    )


def _entry_outside_file(
    from_file: Catalog, settings: Settings, environ: Mapping[str, str]
) -> CatalogEntry:
    """Return the model of `model.path`, which models.toml does not list.

    The model may be in a watched folder or elsewhere. Raises ModelLoadError if it cannot be served.
    """
    name = settings.model.path
    for excluded in from_file.excluded:
        if excluded.name == name:
            raise ModelLoadError(
                f"model {name} of {excluded.origin} cannot be served: {excluded.reason}"
            )
    if not (os.path.exists(name) or settings.model.revision):
        watched = replace(settings, catalog=replace(settings.catalog, hub_cache=False))
        found_entries, _ = _with_found_models((), watched, environ)
        if (entry := Catalog(entries=found_entries).find(name)) is not None:
            model = replace(entry.model, name=settings.model.name or name)
            settings = replace(settings, model=model)
    try:
        return _entry_of_settings(settings)
    except ModelLoadError as error:
        listed_names = (
            listed_name
            for entry in from_file.entries
            for listed_name in (entry.name, *entry.aliases)
        )
        if similar_names := nearest_names(name, listed_names):
            hints = [f"did you mean {' or '.join(similar_names)}?"]
        else:
            hints = [f"{each.origin}: {each.reason}" for each in from_file.excluded[:1]]
        raise ModelLoadError("; ".join([str(error), *hints])) from None


def _with_hub_id_aliases(entries: tuple[CatalogEntry, ...]) -> tuple[CatalogEntry, ...]:
    """Add each entry's Hub id to its aliases.

    If several entries have the same id, the first one gets it.
    """
    taken_names = {name for entry in entries for name in (entry.name, *entry.aliases)}
    with_aliases = []
    for entry in entries:
        source = source_of(entry.model)
        if source.kind == "hub" and source.name not in taken_names:
            taken_names.add(source.name)
            entry = replace(entry, aliases=(*entry.aliases, source.name))
        with_aliases.append(entry)
    return tuple(with_aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundModel:
    name: str  # owner/name if that is known
    folder: Path
    origin: str  # the folder in which it was found
    is_from_hub: bool = False  # found in the Hub's cache

    def checked_config(self) -> Mapping[str, Any]:
        """The configuration. Raises ModelLoadError if the model cannot be loaded."""
        if self.is_from_hub:
            return check_snapshot(ModelSource(kind="hub", name=self.name), self.folder)
        return check_loadable(self.folder)


def _with_found_models(
    listed: tuple[CatalogEntry, ...], settings: Settings, environ: Mapping[str, str]
) -> tuple[tuple[CatalogEntry, ...], list[ExcludedModel]]:
    """Append the models found on this machine.

    Also returns the found models that cannot be served.
    """
    served = list(listed)
    excluded = []
    entry_of_name = {name: entry for entry in listed for name in (entry.name, *entry.aliases)}
    # folders and Hub ids
    listed_places = {source_of(entry.model).place for entry in listed}
    excluded += _unfinished_downloads(settings, environ, except_names=entry_of_name)
    for model in _found_models(settings, environ):
        if {model.name, str(model.folder.resolve())} & listed_places:
            continue
        try:
            config = model.checked_config()
            if (other := entry_of_name.get(model.name)) is not None:
                raise ModelLoadError(f"{other.name} of {other.origin} already has this name")
        except ModelLoadError as error:
            excluded.append(
                ExcludedModel(
                    name=model.name, origin=model.origin, reason=str(error), is_asked_for=False
                )
            )
            continue
        entry = CatalogEntry(
            name=model.name,
            model=replace(settings.model, path=str(model.folder), name=model.name, revision=""),
            origin=model.origin,
            idle_seconds=settings.residency.idle_seconds,
            own_context_tokens=known_context_tokens(config),
            reads_images=can_see(config),
            can_chat=can_chat(model.folder),
        )
        entry_of_name[model.name] = entry
        served.append(entry)
    return tuple(served), excluded


def _unfinished_downloads(
    settings: Settings, environ: Mapping[str, str], *, except_names: Container[str]
) -> list[ExcludedModel]:
    """Partially downloaded models in the Hub's cache, except those in `except_names`."""
    if not settings.catalog.hub_cache:
        return []
    cache = hub_cache_folder(environ)
    reason = "its download was interrupted; to complete it: holdfast models pull"
    return [
        ExcludedModel(name=name, origin=str(cache), reason=f"{reason} {name}", is_asked_for=False)
        for name in interrupted_downloads(cache)
        if name not in except_names
    ]


def _found_models(settings: Settings, environ: Mapping[str, str]) -> Iterator[_FoundModel]:
    """Find the models in the Hub's cache, then those in the watched folders, in the order of the
    setting. Within the cache and within each folder, the models are sorted by name.
    """
    if settings.catalog.hub_cache:
        hub_cache = hub_cache_folder(environ)
        for hub_id, folder in cached_models(hub_cache).items():
            yield _FoundModel(name=hub_id, folder=folder, origin=str(hub_cache), is_from_hub=True)
    for watched in settings.catalog.folders:
        # unlike Path.expanduser, this does not raise for a user without a home
        parent = Path(os.path.expanduser(watched))
        for folder in _model_folders(parent):
            name = folder.relative_to(parent).as_posix()
            yield _FoundModel(name=name, folder=folder, origin=str(parent))


def _model_folders(parent: Path) -> Iterator[Path]:
    """Return the folders of models: `parent/MODEL` and `parent/OWNER/MODEL`."""
    for folder in _folders(parent):
        if _is_model_folder(folder):
            yield folder
        else:
            yield from (inner for inner in _folders(folder) if _is_model_folder(inner))


def _folders(parent: Path) -> list[Path]:
    """The visible subfolders, sorted; empty if the folder cannot be read."""
    try:
        with os.scandir(parent) as entries:
            folders = [each for each in entries if each.is_dir() and not each.name.startswith(".")]
            return sorted(Path(each.path) for each in folders)
    except OSError:
        return []


def _is_model_folder(folder: Path) -> bool:
    """Whether the folder has a file of a model; false if it cannot be read."""
    try:
        return any(name.endswith(_MODEL_FILE_ENDINGS) for name in os.listdir(folder))
    except OSError:
        return False
