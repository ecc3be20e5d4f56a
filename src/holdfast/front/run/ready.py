"""What is printed when the server is ready."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from holdfast.config import LogSettings
from holdfast.wire.events import ModelInfo
from holdfast.wire.figures import CacheFigures

logger = logging.getLogger("holdfast.front.run")
OPEN = (
    "whoever reaches this machine over its network can use this server, for no API key is set; "
    "set HOLDFAST_SERVER_API_KEY, or listen on 127.0.0.1"
)


_MOST_SHOWN = 8  # names of models


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyModel:
    """One of the models that can be asked for."""

    name: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyServer:
    """What a user wants to know of a server that is ready."""

    url: str
    model: str  # the first one, which is that of requests that name none
    info: ModelInfo | None  # of the first one; None: it is not loaded yet
    models: tuple[ReadyModel, ...] = ()
    ready_seconds: float
    needs_key: bool
    store_folder: str  # empty: what is read is kept in RAM only
    memory: CacheFigures | None  # None: this model's layout does not allow to keep anything
    lan_urls: tuple[str, ...] = ()  # for other machines, where it listens on all addresses
    log_file: str = ""  # empty: none
    is_open: bool = False  # others than this machine can come in, and without a key


def announce(ready: ReadyServer, log: LogSettings) -> None:
    """A short block on standard output for people; one log line where logs are JSON, or kept in a
    file.
    """
    warnings = [OPEN] if ready.is_open else []
    if ready.info is not None:
        warnings += ready.info.warnings
    if log.format == "json" or ready.log_file:
        urls = ", ".join((ready.url, *ready.lan_urls))
        what = (
            f"model {ready.model}, layout {ready.info.layout}"
            if ready.info
            else f"models {_names(ready)}"
        )
        logger.info("ready in %.2f s: %s, at %s", ready.ready_seconds, what, urls)
        for warning in warnings:
            logger.warning("%s", warning)
    if log.format == "json":
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    rows.add_column(overflow="fold")
    for name, value in _rows(ready):
        rows.add_row(name, escape(value))
    console = Console(highlight=False)
    console.print(f"[bold]Holdfast[/bold] is ready at [bold]{escape(ready.url)}[/bold]")
    console.print(rows)
    for warning in warnings:
        console.print(f"[bold yellow]warning[/bold yellow]: {escape(warning)}", soft_wrap=True)
    console.print()
    print(_example(ready), flush=True)  # noqa: T201 - as it is, so that it can be copied whole


def _rows(ready: ReadyServer) -> list[tuple[str, str]]:
    info = ready.info
    rows = [("for others", url) for url in ready.lan_urls]
    if info is not None:
        rows += [
            (
                "model",
                f"{ready.model} ({info.model_type}, {info.parameters / 1e6:,.1f} M parameters, "
                f"{info.compute_dtype})",
            ),
            (
                "context",
                f"{info.context_tokens:,} tokens; up to {info.kv_budget_bytes / 2**30:,.1f} GiB "
                "for the KV cache",
            ),
            (
                "layout",
                info.layout if info.layout == "rows" else f"{info.layout} ({info.layout_reason})",
            ),
            ("device", info.device),
        ]
    if info is not None and info.blas:
        rows.append(("BLAS", info.blas))
    if len(ready.models) > 1 or info is None:
        rows.append(("models", f"{_names(ready)}; each is loaded when it is asked for"))
    rows.append(("store", _store(ready)))
    if ready.log_file:
        rows.append(("log", ready.log_file))
    rows.append(("ready in", f"{ready.ready_seconds:.2f} s"))
    return rows


def _names(ready: ReadyServer) -> str:
    """The models, the first of them by name, with what is not usual about them."""
    shown = [
        model.name + ("" if model.state == "unloaded" else f" ({model.state})")
        for model in ready.models[:_MOST_SHOWN]
    ]
    more = len(ready.models) - len(shown)
    return ", ".join([*shown, *([f"{more:,} more"] if more else [])])


def _store(ready: ReadyServer) -> str:
    """Where what is read is kept, and whether it can be."""
    if ready.info is None:
        return ready.store_folder or "off: what is read is kept in RAM, until its model is unloaded"
    if ready.memory is None:
        return f"nothing is kept: the layout {ready.info.layout} does not allow it"
    store = ready.memory.store
    if store is None:
        return "off: what is read is kept in RAM, until the server ends"
    if store.mode != "writing":
        return (
            f"{ready.store_folder} CANNOT BE WRITTEN: what is read is kept in RAM only, until the "
            "server ends; see the log"
        )
    return (
        f"{ready.store_folder} ({store.blocks:,} {'block' if store.blocks == 1 else 'blocks'} of "
        "this model)"
    )


def _example(ready: ReadyServer) -> str:
    key = ' -H "Authorization: Bearer $HOLDFAST_SERVER_API_KEY"' if ready.needs_key else ""
    body = f'{{"model": "{ready.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return (
        f"curl {ready.url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n  -d "
        f"'{body}'"
    )
