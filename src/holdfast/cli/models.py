"""`holdfast models …`: lists, pulls, removes and inspects models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from holdfast.cli.output import (
    Json,
    Yes,
    complain,
    count_text,
    load_progress,
    new_table,
    plain_errors,
    print_json,
    print_rows,
    print_table,
    size_text,
)
from holdfast.cli.server_client import (
    ApiKey,
    ServerFailed,
    Url,
    client_of,
    client_of_own,
    own_servers,
)
from holdfast.cli.settings import read_settings
from holdfast.config import LogSettings, Settings
from holdfast.errors import ConfigError, ModelLoadError
from holdfast.models.adapter_folder import SEPARATOR, WEIGHTS
from holdfast.models.download import (
    hub_cache_folder,
    hub_model_of,
    hub_source,
    local_folder,
    model_source,
    pull_model,
    removal_of,
    source_of,
)
from holdfast.models.fit import (
    AS_IS,
    Choice,
    Need,
    StoredSize,
    choice_for,
    quantization_of,
    size_of_folder,
    size_on_hub,
)
from holdfast.models.hub import ModelSource
from holdfast.models.image_files import HOW_TO_INSTALL
from holdfast.models.loadable import check_loadable
from holdfast.models.model_folder import (
    UNKNOWN_CONTEXT_TOKENS,
    can_see,
    has_vision,
    known_context_tokens,
)

if TYPE_CHECKING:
    from holdfast.front.fleet.catalog import Catalog, CatalogEntry
    from holdfast.machine.device_memory import DeviceMemory

_GIB = 1 << 30
_TYPICAL_MEMORY_BYTES = (16 * _GIB, 32 * _GIB, 64 * _GIB)
_AGENT_TOKENS = (8192, 32768, 131072)  # context lengths of an agent to report about
_MAX_FLOAT32_SHARE = 0.75  # of the memory; on a CPU, larger models stay quantized (`weight_format`)

models = typer.Typer(help="List, pull, remove and inspect models.", no_args_is_help=True)

Name: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hub id (owner/name), or a name in models.toml.")
]
AnyModel: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, or a name in models.toml.")
]
ModelsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--models", metavar="FILE", help="File that lists models; default: models.toml."),
]
Revision: TypeAlias = Annotated[
    str, typer.Option("--revision", help="Branch, tag or commit on the Hub; default: main.")
]
TrustCode: TypeAlias = Annotated[
    bool, typer.Option("--trust-remote-code", help="Fetch and run Python files of the model.")
]


@models.command("ls")
def list_models(
    models_file: ModelsFile = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """List the models that `holdfast serve` would serve, and those that it skips, with the reason.

    If a server is running, the list also shows the state of its models, and the models and adapters
    that only this server has, because they were named on its command line.
    """
    with plain_errors():
        settings = _settings(models_file)
        catalog = _catalog(settings)
        server, served_models = _first_served_models(url, api_key)
        rows = [_catalog_row(entry, served_models) for entry in catalog.entries]
        left_out = [
            {"name": excluded.name, "reason": excluded.reason, "origin": excluded.origin}
            for excluded in catalog.excluded
        ]
        only_served = _only_served(rows, served_models or {})
        if as_json:
            print_json(
                {"server": server, "models": rows, "only_served": only_served, "left_out": left_out}
            )
            return
        _print_models(rows, only_served, with_state=served_models is not None)
        if server is not None:
            typer.echo(f"the states are those of the server at {server}")
        for excluded in left_out:
            typer.echo(f"left out: {excluded['name']} ({excluded['origin']}): {excluded['reason']}")


@models.command("pull")
def pull(
    model: Name,
    revision: Revision = "",
    models_file: ModelsFile = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Fetch a model from the Hub into the Hub's cache.

    Files that are already in the cache are checked and kept. An interrupted download is resumed.
    """
    with plain_errors():
        source = _hub_source(model, revision, _settings(models_file))
        with load_progress(LogSettings()) as progress:
            pulled = pull_model(
                source,
                with_code=trust_remote_code,
                on_step=lambda stage, done, total: progress(stage, done / max(total, 1)),
            )
            progress("ready", 1.0)
        pulled_text = f"{count_text(pulled.files, 'file')}, {size_text(pulled.file_bytes)}"
        typer.echo(f"{source.name}: {pulled_text}, as on the Hub, in {pulled.folder}")
        check_loadable(pulled.folder)


@models.command("rm")
def remove(
    model: Name,
    yes: Yes = False,
    models_file: ModelsFile = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """Remove a model, with all its revisions, from the Hub's cache.

    Other folders are never deleted.
    """
    with plain_errors():
        source = _hub_source(model, "", _settings(models_file))
        cache = hub_cache_folder(os.environ)
        removal = removal_of(source.name, cache)
        _check_not_loaded(source.name, _served_models(url, api_key))
        freed_text = size_text(removal.expected_freed_size)
        if not yes:
            typer.confirm(
                f"Remove {source.name} from {cache}? This frees {freed_text}.", abort=True
            )
        removal.execute()
        typer.echo(f"removed {source.name}; {freed_text} are free again")


@models.command("info")
def info(
    model: AnyModel, revision: Revision = "", models_file: ModelsFile = None, as_json: Json = False
) -> None:
    """Show a model's size, whether the model fits on this machine, and for how many agents.

    No weights are fetched.
    """
    with plain_errors():
        entry, catalog = _any_entry(model, _settings(models_file))
        source = model_source(entry.model.path, revision=revision or entry.model.revision)
        fit = fit_of(source)
        draft = _draft_model(entry, source, catalog)
        if as_json:
            print_json(fit.as_json() | {"draft_model": draft or None})
        else:
            _print_fit(fit, draft)


def _settings(models_file: Path | None) -> Settings:
    """Read the settings. models_file: replaces the default models.toml."""
    flags = {"catalog.file": None if models_file is None else str(models_file)}
    return read_settings(flags).settings


def _catalog(settings: Settings) -> Catalog:
    from holdfast.front.fleet.catalog import catalog_of

    return catalog_of(settings, os.environ)


def _any_entry(model: str, settings: Settings) -> tuple[CatalogEntry, Catalog]:
    """Return a model that is named by Hub id, folder or name, and its catalog.

    Raises ModelLoadError.
    """
    catalog = _catalog(settings)
    entry = catalog.find(model)
    if entry is None:
        settings_for_model = replace(settings, model=replace(settings.model, path=model))
        catalog = _catalog(settings_for_model)
        entry = catalog.entries[0]
    return entry, catalog


def _draft_model(entry: CatalogEntry, source: ModelSource, catalog: Catalog) -> str:
    """The model that would draft for a model; empty if there is none, or if that is not known before
    the files are fetched. Raises ModelLoadError if the model that is named cannot draft.
    """
    from holdfast.models.draft_pairs import LocalModel, draft_of, named_draft

    setting = entry.model.speculation
    listed = [each.model for each in catalog.entries]
    folder = _complete_folder(source)
    if setting not in ("auto", "off"):
        draft = named_draft(setting, listed)
        draft_folder = _complete_folder(source_of(draft))
        if folder is None or draft_folder is None:
            return setting
    if folder is None:
        return ""
    found_draft = draft_of(
        LocalModel(name=entry.name, folder=folder), setting, listed=listed, environ=os.environ
    )
    return "" if found_draft is None else found_draft.name


def _hub_source(model: str, revision: str, settings: Settings) -> ModelSource:
    """Return the source of a Hub model that is named by id or name.

    Raises ConfigError for other models.
    """
    entry = _catalog(settings).find(model)
    if entry is not None:
        hub_model = hub_model_of(entry.model, hub_cache_folder(os.environ))
        if hub_model is not None:
            return replace(hub_model, revision=revision or hub_model.revision)
    source = hub_source(model, revision=revision)
    if source is None:
        raise ConfigError(f"{model} is not the id (owner/name) or name of a Hub model")
    return source


def _served_models(url: str | None, api_key: str | None) -> dict[str, dict[str, Any]]:
    """The models of the server at `url`, or else of all the user's servers on this machine: URL →
    id → model.

    Raises ServerFailed if a server does not answer.
    """
    if url is None:
        key = _settings(None).server.api_key if api_key is None else api_key
        clients = [client_of_own(server, api_key=key) for server in own_servers()]
    else:
        clients = [client_of(url, api_key)]
    served = {}
    for client in clients:
        with client:
            served[client.url] = {
                str(card["id"]): card
                for card in client.models()
                if card.get("owned_by") == "holdfast"
            }
    return served


def _first_served_models(
    url: str | None, api_key: str | None
) -> tuple[str | None, dict[str, Any] | None]:
    """Return the URL and the models of the first running server; two Nones if there is none.

    If a server does not answer, prints a line and also returns two Nones.
    """
    try:
        return next(iter(_served_models(url, api_key).items()), (None, None))
    except ServerFailed as error:
        complain(f"the state of the models is unknown: {error}")
        return None, None


def _check_not_loaded(hub_id: str, served: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError if a running server has the Hub model loaded.

    served: the models of each server, as URL → id → model.
    """
    for server, cards in served.items():
        for name, card in cards.items():
            is_hub_model = hub_id in (name, *card.get("aliases", ()))
            if is_hub_model and card.get("state") not in (None, "unloaded", "failed"):
                raise ConfigError(
                    f"{hub_id} is {card['state']} in the server at {server}; unload it first: "
                    f"holdfast unload {name}"
                )


def _catalog_row(
    entry: CatalogEntry, served: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, Any]:
    """Describe a model of the catalog, as `--json` prints it. served: the models of a running
    server; None: none runs.
    """
    folder = local_folder(source_of(entry.model), os.environ)
    return {
        "name": entry.name,
        "state": None if served is None else served.get(entry.name, {}).get("state"),
        "aliases": list(entry.aliases),
        "model": entry.model.path or entry.name,
        "revision": entry.model.revision or None,
        "folder": None if folder is None else str(folder),
        "weight_bytes": entry.weight_bytes(os.environ),
        "context_tokens": entry.model.context_tokens,
        "kv_bits": entry.model.kv_bits,
        "adapters": {name: str(place) for name, place in entry.adapter_folders.items()},
        "pinned": entry.is_pinned,
        "idle_seconds": entry.idle_seconds,
        "sampling": dict(entry.sampling),
        "template": dict(entry.template_arguments),
        "speculation": entry.model.speculation,
        "origin": entry.origin,
    }


def _only_served(
    rows: Iterable[Mapping[str, Any]], served: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The models and adapters that a server has, but that are not in the rows of the catalog."""
    listed_names = set()
    for row in rows:
        listed_names |= {row["name"], *(_adapter_id(row["name"], name) for name in row["adapters"])}
    return [
        {"name": name, **{key: card.get(key) for key in ("state", "aliases", "parent")}}
        for name, card in served.items()
        if name not in listed_names
    ]


def _adapter_id(model: str, adapter: str) -> str:
    return f"{model}{SEPARATOR}{adapter}"


def _adapter_bytes(folder: Path) -> int:
    file = folder / WEIGHTS
    return file.stat().st_size if file.exists() else 0


def _print_models(
    rows: list[dict[str, Any]], only_served: list[dict[str, Any]], *, with_state: bool
) -> None:
    """Print the rows of the catalog, with their adapters, and what only the server has."""
    state_column = ["state"] if with_state else []
    table = new_table(
        "name", *state_column, "weights", "aliases", "notes", "from", right=("weights",)
    )
    for row in rows:
        size = "not fetched" if row["folder"] is None else size_text(row["weight_bytes"])
        state_cell = [row["state"] or "not served"] if with_state else []
        origin = row["origin"] or ("comes with Holdfast" if row["name"] == row["model"] else "")
        table.add_row(
            row["name"], *state_cell, size, ", ".join(row["aliases"]), _notes(row), origin
        )
        for adapter, adapter_folder in row["adapters"].items():
            name = _adapter_id(row["name"], adapter)
            table.add_row(
                name,
                *state_cell,
                size_text(_adapter_bytes(Path(adapter_folder))),
                "",
                "adapter",
                adapter_folder,
            )
    for card in only_served:
        notes = "adapter" if card["parent"] else ""
        aliases = ", ".join(card["aliases"] or ())
        table.add_row(card["name"], card["state"] or "", "", aliases, notes, "only in the server")
    print_table(table)


def _notes(row: Mapping[str, Any]) -> str:
    """The settings of a model that differ from the defaults, in words."""
    notes = []
    if row["pinned"]:
        notes.append("pinned")
    if row["idle_seconds"] is not None:
        notes.append(f"idle {row['idle_seconds']:g} s")
    if row["context_tokens"] is not None:
        notes.append(f"context {row['context_tokens']:,}")
    if row["kv_bits"] != "auto":
        notes.append(f"KV bits {row['kv_bits']}")
    if row["speculation"] != "auto":
        notes.append(f"speculation {row['speculation']}")
    return ", ".join(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """A model's size, and how it fits on this machine and on others."""

    name: str
    place: str  # where its files are
    stored: StoredSize
    context_tokens: int  # the context that it was trained for
    here: Need  # in the number format that this machine computes with
    usable_bytes: int  # usable memory of this machine now
    memory: DeviceMemory
    agents_here: dict[int, int]  # tokens of each agent → number of agents
    choices: tuple[Choice, ...]  # one for each typical memory size

    @property
    def fits(self) -> bool:
        """Whether the weights and one agent with a short context fit here."""
        return next(iter(self.agents_here.values()), 0) > 0

    def as_json(self) -> dict[str, Any]:
        """All figures, in bytes and tokens."""
        return {
            "model": self.name,
            "place": self.place,
            "model_type": self.stored.config.get("model_type"),
            "parameters": self.stored.parameters,
            "weight_bytes": self.stored.weight_bytes,
            "bits_per_weight": round(self.stored.bits_per_weight, 2),
            "context_tokens": self.context_tokens,
            "this_machine": {
                "memory_bytes": self.memory.total_bytes,
                "usable_bytes": self.usable_bytes,
                **asdict(self.here),
                "fits": self.fits,
                "agents": {str(tokens): agents for tokens, agents in self.agents_here.items()},
            },
            "choices": [asdict(choice) for choice in self.choices],
        }


def fit_of(source: ModelSource) -> ModelFit:
    """Read a model's headers and config.json, locally or from the Hub. Raises ModelLoadError."""
    from holdfast.machine.device_memory import memory_report
    from holdfast.worker.engine.sequence_size import sequence_size_of

    folder = _complete_folder(source)
    stored = size_on_hub(source) if folder is None else size_of_folder(folder)
    sequence_size = sequence_size_of(stored.config)
    context_tokens = known_context_tokens(stored.config) or UNKNOWN_CONTEXT_TOKENS
    memory = memory_report(working_set_bytes=sequence_size.working_set_bytes)
    usable_bytes = sequence_size.working_set_bytes or memory.available_bytes
    weight_bytes = stored.weight_bytes
    float32_bytes = 4 * stored.parameters
    if (
        sequence_size.is_on_cpu
        and float32_bytes <= usable_bytes * _MAX_FLOAT32_SHARE
        and not _keeps_weights(stored)
    ):
        weight_bytes = float32_bytes
    here = Need(
        weight_bytes=weight_bytes,
        bytes_per_token=sequence_size.bytes_per_token,
        fixed_bytes=sequence_size.fixed_bytes,
    )
    gpu_divisor = 2 if sequence_size.is_on_cpu else 1  # KV takes 32 bits on a CPU and 16 on a GPU
    on_gpu = Need(
        weight_bytes=stored.weight_bytes,
        bytes_per_token=sequence_size.bytes_per_token // gpu_divisor,
        fixed_bytes=sequence_size.fixed_bytes // gpu_divisor,
    )
    agent_tokens = [tokens for tokens in _AGENT_TOKENS if tokens <= context_tokens] or [
        context_tokens
    ]
    return ModelFit(
        name=source.name,
        place="on the Hub, not fetched" if folder is None else str(folder),
        stored=stored,
        context_tokens=context_tokens,
        here=here,
        usable_bytes=usable_bytes,
        memory=memory,
        agents_here={
            tokens: here.agents(tokens, memory_bytes=usable_bytes) for tokens in agent_tokens
        },
        choices=tuple(
            choice_for(
                memory_bytes, on_gpu, parameters=stored.parameters, context_tokens=context_tokens
            )
            for memory_bytes in _TYPICAL_MEMORY_BYTES
        ),
    )


def _keeps_weights(stored: StoredSize) -> bool:
    """Whether a CPU computes this model with its stored weights."""
    from holdfast.worker.cpu.kernels import packed_products

    if packed_products.unavailable():
        return False
    packing = quantization_of(stored.config)
    if not packing:
        return stored.weight_bytes < 3 * stored.parameters  # 16 bits
    return (
        packing.get("bits") in packed_products.BITS
        and packing.get("group_size") in packed_products.GROUP_SIZES
        and packing.get("mode", "affine") == "affine"
    )


def _complete_folder(source: ModelSource) -> Path | None:
    """Return the model's folder on this machine; None if the files have to come from the Hub."""
    folder = local_folder(source, os.environ)
    if folder is None or source.kind != "hub":
        return folder
    try:
        check_loadable(folder)
    except ModelLoadError:
        return None
    return folder


def _images_text(config: Mapping[str, Any]) -> str:
    return "read" if can_see(config) else f"read with the extra vision; {HOW_TO_INSTALL}"


def _print_fit(fit: ModelFit, draft_model: str) -> None:
    """Print a model's size, and whether it fits into the memory of this and of typical machines."""
    stored = fit.stored
    weights = f"{size_text(stored.weight_bytes)}, {stored.bits_per_weight:.1f} bits each"
    if fit.here.weight_bytes != stored.weight_bytes:
        weights += f"; {size_text(fit.here.weight_bytes)} in memory here, in float32"
    kv = f"{size_text(fit.here.bytes_per_token)} per token"
    if fit.here.fixed_bytes:
        kv += f", and {size_text(fit.here.fixed_bytes)} per agent"
    verdict = "it does not fit"
    if fit.fits:
        agents = [f"{count:,} of {tokens:,} tokens" for tokens, count in fit.agents_here.items()]
        verdict = f"it fits; room for agents: {', '.join(agents)}"
    model_type = stored.config.get("model_type")
    usable = f"{size_text(fit.usable_bytes)} usable of {size_text(fit.memory.total_bytes)}"
    print_rows(
        [
            ("model", f"{fit.name} ({fit.place})"),
            ("type", f"{model_type}, {stored.parameters / 1e6:,.1f} million parameters"),
            ("weights", weights),
            ("context", f"{fit.context_tokens:,} tokens"),
            ("KV", kv),
            *([("images", _images_text(stored.config))] if has_vision(stored.config) else []),
            ("draft model", draft_model),
            ("this machine", usable),
            ("", verdict),
        ]
    )
    typer.echo("\nOn machines whose GPU shares their memory:")
    for choice in fit.choices:
        advice = "too large, even quantized"
        if choice.agents > 0:
            form = choice.form if choice.form == AS_IS else f"quantized to {choice.form}"
            advice = (
                f"{form} ({size_text(choice.need.weight_bytes)}), room for "
                f"{count_text(choice.agents, 'agent')} with {choice.tokens:,} tokens each"
            )
        typer.echo(f"{f'{choice.total_bytes // _GIB} GB':<12}  {advice}")
