"""`holdfast models …`: which models there are here; fetches, removes, judges and converts them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
    print_table,
    size_text,
)
from holdfast.cli.server_command import ApiKey, Url, address_of
from holdfast.config import LogSettings, ModelSettings, Settings, default_file, load_settings
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.cli.conversion import FloatType, Mode
    from holdfast.front.fleet.catalog import Catalog, CatalogEntry
    from holdfast.models.download import ModelSource

_NOT_USED_YET = "not used yet"

models = typer.Typer(help="List, pull, remove, inspect and convert models.", no_args_is_help=True)

Name: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hub id (owner/name), or a name in models.toml.")
]
AnyModel: TypeAlias = Annotated[
    str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, or a name in models.toml.")
]
ModelsFile: TypeAlias = Annotated[
    Path | None, typer.Option("--models", metavar="FILE", help="File of models; else models.toml.")
]
Revision: TypeAlias = Annotated[
    str, typer.Option("--revision", help="Branch, tag or commit on the Hub; else the main branch.")
]
TrustCode: TypeAlias = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Python files of the model may be fetched and run."),
]


@models.command("ls")
def list_models(
    models_file: ModelsFile = None, url: Url = None, api_key: ApiKey = None, as_json: Json = False
) -> None:
    """List the models that `holdfast serve` would serve, what is left out and why, and their state
    where a server runs.
    """
    with plain_errors():
        settings = _settings(models_file)
        catalog = _catalog(settings)
        server, served = _first_running(url, api_key)
        rows = [_row(entry, served) for entry in catalog.entries]
        left_out = [
            {"name": each.name, "reason": each.reason, "origin": each.origin}
            for each in catalog.left_out
        ]
        if as_json:
            print_json({"server": server, "models": rows, "left_out": left_out})
            return
        _print_table(rows, is_running=served is not None)
        if server is not None:
            typer.echo(f"state: in the server at {server}")
        for each in left_out:
            typer.echo(f"left out: {each['name']} ({each['origin']}): {each['reason']}")


@models.command("pull")
def pull(
    model: Name,
    revision: Revision = "",
    models_file: ModelsFile = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Fetch a model from the Hub into its cache.

    What is there already is kept and checked; what was cut off goes on.
    """
    from holdfast.models.hub_models import pull_model
    from holdfast.models.loadable import check_loadable

    with plain_errors():
        source = _hub_source(model, revision, _settings(models_file))
        with load_progress(LogSettings()) as progress:
            pulled = pull_model(
                source,
                with_code=trust_remote_code,
                on_step=lambda stage, done, total: progress(stage, done / max(total, 1)),
            )
            progress("ready", 1.0)
        what = f"{count_text(pulled.files, 'file')}, {size_text(pulled.file_bytes)}"
        typer.echo(f"{source.name}: {what}, as on the Hub, in {pulled.folder}")
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

    Folders of yours are never touched.
    """
    from holdfast.models.hub_cache import hub_cache_folder
    from holdfast.models.hub_models import removal_of

    with plain_errors():
        source = _hub_source(model, "", _settings(models_file))
        cache = hub_cache_folder(os.environ)
        removal = removal_of(source.name, cache)
        _refuse_loaded(source.name, _running(url, api_key))
        freed = size_text(removal.expected_freed_size)
        if not yes:
            typer.confirm(f"Remove {source.name} from {cache}? That frees {freed}.", abort=True)
        removal.execute()
        typer.echo(f"removed {source.name}; {freed} are free again")


@models.command("info")
def info(
    model: AnyModel, revision: Revision = "", models_file: ModelsFile = None, as_json: Json = False
) -> None:
    """Say how large a model is, whether it fits this machine, and how many agents it would hold.

    Fetches no weights.
    """
    from holdfast.cli.model_fit import fit_of, print_fit

    with plain_errors():
        found = fit_of(_any_source(model, revision, _settings(models_file)))
        if as_json:
            print_json(found.as_json())
        else:
            print_fit(found)


@models.command("convert")
def convert(
    model: AnyModel,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder that is not there yet.")
    ],
    bits: Annotated[
        int | None,
        typer.Option(
            "--bits", min=2, max=8, help="Quantize to so many bits; else nothing is packed."
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", help="Weights that share a scale: 32, 64 or 128.")
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="How weights are packed: affine, mxfp4, nvfp4 or mxfp8.")
    ] = "affine",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Of what is not packed: float16, bfloat16 or float32."),
    ] = None,
    revision: Revision = "",
    models_file: ModelsFile = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Convert a model to MLX's format, quantized or not, and check that the result loads and runs."""
    from msgspec import structs

    from holdfast.cli.conversion import Conversion, checked_target, convert_model
    from holdfast.models.download import resolve_model

    with plain_errors():
        source = _any_source(model, revision, _settings(models_file))
        wanted = ModelSettings(
            path=source.name, revision=source.revision, trust_remote_code=trust_remote_code
        )
        conversion = Conversion(
            source="",
            target=str(checked_target(folder)),  # before anything is fetched
            bits=bits,
            group_size=group_size,
            mode=_mode(mode),
            dtype=_dtype(dtype),
            trust_remote_code=trust_remote_code,
        )
        with load_progress(LogSettings()) as progress:
            place = resolve_model(wanted, progress=progress)
            progress("converting", 0.0)
            size = convert_model(structs.replace(conversion, source=str(place)))
            progress("ready", 1.0)
        typer.echo(
            f"{folder}: {size_text(size)} of weights; it loads and runs. To serve it: holdfast "
            f"serve {folder}"
        )


def _mode(text: str) -> Mode:
    mode: Mode = _one_of(text, "--mode", ("affine", "mxfp4", "nvfp4", "mxfp8"))
    return mode


def _dtype(text: str | None) -> FloatType | None:
    dtype: FloatType | None = (
        None if text is None else _one_of(text, "--dtype", ("float16", "bfloat16", "float32"))
    )
    return dtype


def _one_of(text: str, option: str, allowed: tuple[str, ...]) -> Any:
    if text not in allowed:
        raise ConfigError(f"{option} {text} is not allowed; allowed: {', '.join(allowed)}")
    return text


def _settings(models_file: Path | None) -> Settings:
    flags = {"catalog.file": None if models_file is None else str(models_file)}
    return load_settings(file=default_file(os.environ), environ=os.environ, flags=flags).settings


def _catalog(settings: Settings) -> Catalog:
    from holdfast.front.fleet.chosen_catalog import catalog_of

    return catalog_of(settings, os.environ)


def _any_source(model: str, revision: str, settings: Settings) -> ModelSource:
    """The place of a model that is named by Hub id, folder or name. Raises ModelLoadError."""
    from holdfast.models.download import model_source

    entry = (
        _catalog(settings).find(model)
        or _catalog(replace(settings, model=replace(settings.model, path=model))).entries[0]
    )
    return model_source(entry.model.path, revision=revision or entry.model.revision)


def _hub_source(model: str, revision: str, settings: Settings) -> ModelSource:
    """The same for models of the Hub, also of those that are found in its cache.

    Raises ConfigError for others.
    """
    from holdfast.models.download import hub_source
    from holdfast.models.hub_cache import hub_cache_folder
    from holdfast.models.hub_models import hub_model_of

    entry = _catalog(settings).find(model)
    source = None if entry is None else hub_model_of(entry.model, hub_cache_folder(os.environ))
    source = (
        hub_source(model, revision=revision)
        if source is None
        else replace(source, revision=revision or source.revision)
    )
    if source is None:
        raise ConfigError(
            f"{model} is no id of the Hub (owner/name), and no name of one: this is for models of "
            "the Hub only"
        )
    return source


def _running(url: str | None, api_key: str | None) -> dict[str, dict[str, Any]]:
    """What servers list, by their URL, then by id: the one at `url`, or else all of this user on
    this machine.

    Raises ServerFailed where one refuses to tell.
    """
    from holdfast.cli.server_command import address_of_running
    from holdfast.front.run.running_servers import running_servers

    if url is None:
        key = _settings(None).server.api_key if api_key is None else api_key
        addresses = [
            address_of_running(server, api_key=key) for server in running_servers(os.environ)
        ]
    else:
        addresses = [address_of(url, api_key)]
    served = {}
    for address in addresses:
        with address.client() as client:
            served[client.url] = {
                str(card["id"]): card
                for card in client.models()
                if card.get("owned_by") == "holdfast"
            }
    return served


def _first_running(
    url: str | None, api_key: str | None
) -> tuple[str | None, dict[str, Any] | None]:
    """The first of these servers and what it lists; none where one refuses to tell, which is
    complained of.
    """
    from holdfast.cli.server_client import ServerFailed

    try:
        return next(iter(_running(url, api_key).items()), (None, None))
    except ServerFailed as error:
        complain(f"what is loaded is not known: {error}")
        return None, None


def _refuse_loaded(hub_id: str, served: Mapping[str, Mapping[str, Any]]) -> None:
    for server, cards in served.items():
        for name, card in cards.items():
            if hub_id in (name, *card.get("aliases", ())) and card.get("state") not in (
                None,
                "unloaded",
                "failed",
            ):
                raise ConfigError(
                    f"{hub_id} is {card['state']} in the server at {server}; unload it first: "
                    f"holdfast unload {name}"
                )


def _row(entry: CatalogEntry, served: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    from holdfast.models.download import model_source
    from holdfast.models.hub_cache import local_folder

    folder = local_folder(model_source(entry.model.path, revision=entry.model.revision), os.environ)
    return {
        "name": entry.name,
        "state": None if served is None else served.get(entry.name, {}).get("state"),
        "aliases": list(entry.aliases),
        "model": entry.model.path or entry.name,
        "revision": entry.model.revision or None,
        "folder": None if folder is None else str(folder),
        "weight_bytes": None if folder is None else sum(_weights(folder)),
        "context_tokens": entry.model.context_tokens,
        "codec": entry.store.codec,
        "pinned": entry.is_pinned,
        "idle_seconds": entry.idle_seconds,
        "sampling": dict(entry.sampling),
        "template": dict(entry.template_arguments),
        "draft": entry.draft,
        "draft_use": None if entry.draft is None else _NOT_USED_YET,
        "origin": entry.origin,
    }


def _weights(folder: Path) -> Iterator[int]:
    from holdfast.models.model_folder import WEIGHT_FILES

    for file in folder.glob(WEIGHT_FILES):
        try:
            yield file.stat().st_size
        except OSError:  # a link into the cache that leads nowhere
            continue


def _print_table(rows: list[dict[str, Any]], *, is_running: bool) -> None:
    table = new_table(
        "name",
        *(["state"] if is_running else []),
        "weights",
        "aliases",
        "notes",
        "from",
        right=("weights",),
    )
    for row in rows:
        size = "not fetched" if row["folder"] is None else size_text(row["weight_bytes"])
        state = [row["state"] or "not served"] if is_running else []
        origin = row["origin"] or ("comes with Holdfast" if row["name"] == row["model"] else "")
        table.add_row(row["name"], *state, size, ", ".join(row["aliases"]), _notes(row), origin)
    print_table(table)


def _notes(row: Mapping[str, Any]) -> str:
    idle = row["idle_seconds"]
    notes = [
        "pinned" if row["pinned"] else "",
        "" if idle is None else f"idle {idle:g} s",
        "" if row["context_tokens"] is None else f"context {row['context_tokens']:,}",
        "" if row["codec"] == "native" else f"codec {row['codec']}",
        "" if row["draft"] is None else f"draft {row['draft']}: {_NOT_USED_YET}",
    ]
    return ", ".join(note for note in notes if note)
