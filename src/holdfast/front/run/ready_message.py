"""The message of `holdfast serve` when the server is ready."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from holdfast.config import LogSettings
from holdfast.front.fleet.residency import ModelStatus
from holdfast.wire.events import CacheFigures, ModelInfo

logger = logging.getLogger("holdfast.front.run")
OPEN = (
    "anyone who can reach this machine over the network can use this server, because no API key is "
    "set; create one (holdfast keys add NAME), set HOLDFAST_SERVER_API_KEY, or listen on 127.0.0.1"
)
_MAX_SHOWN_MODELS = 8
_MAX_ADDRESSES = 4
_DOCUMENTATION_ADDRESS = ("192.0.2.1", 9)  # RFC 5737: no real machine has this address


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyServer:
    """The facts that a user needs when the server is ready."""

    url: str
    models: Sequence[ModelStatus]  # the first one is for requests that name none
    ready_seconds: float
    needs_key: bool
    store_folder: str  # empty: the cache is in RAM only
    cache: CacheFigures | None  # None: this model's layout has no cache
    lan_urls: tuple[str, ...] = ()  # for other machines, if it listens on all addresses
    log_file: str = ""  # empty: there is none
    is_open: bool = False  # reachable from other machines without a key

    @property
    def model(self) -> ModelStatus:
        """The model for requests that name none."""
        return self.models[0]

    @property
    def info(self) -> ModelInfo | None:
        """About the first model; None: it is not loaded yet."""
        return self.model.info


def announce(ready: ReadyServer, log: LogSettings) -> None:
    """Print a summary for people. If the log is JSON or in a file, also log one line."""
    warnings = [OPEN] if ready.is_open else []
    if ready.info is not None:
        warnings += ready.info.warnings
    if log.format == "json" or ready.log_file:
        urls = ", ".join((ready.url, *ready.lan_urls))
        served = f"models {_names(ready)}"
        if ready.info is not None:
            served = f"model {ready.model.id}, layout {ready.info.layout}"
        logger.info("ready in %.2f s: %s, at %s", ready.ready_seconds, served, urls)
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
    print(_example(ready), flush=True)  # noqa: T201 - not wrapped, so that it can be copied


def _rows(ready: ReadyServer) -> list[tuple[str, str]]:
    """The rows of the summary, as name and value."""
    info = ready.info
    rows = [("for others", url) for url in ready.lan_urls]
    if info is not None:
        parameters = f"{info.parameters / 1e6:,.1f} M parameters"
        context = context_text(info.context_tokens, own_tokens=info.own_context_tokens)
        kv = f"{info.kv_budget_bytes / 2**30:,.2f} GiB"
        layout = info.layout if info.layout == "rows" else f"{info.layout} ({info.layout_reason})"
        rows += [
            ("model", f"{ready.model.id} ({info.model_type}, {parameters}, {info.compute_dtype})"),
            ("context", f"{context}; up to {kv} for the KV cache"),
            ("layout", layout),
            *([("draft model", info.draft_model)] if info.draft_model else []),
            ("device", info.device),
        ]
        if info.blas:
            rows.append(("BLAS", info.blas))
    if len(ready.models) > 1 or info is None:
        rows.append(("models", f"{_names(ready)}; each is loaded on its first request"))
    if ready.model.adapters:
        ids = [each.id for each in ready.model.variants()[1:]]
        rows.append(("adapters", ", ".join(ids)))
    rows.append(("store", _store(ready)))
    if ready.log_file:
        rows.append(("log", ready.log_file))
    rows.append(("ready in", f"{ready.ready_seconds:.2f} s"))
    return rows


def context_text(tokens: int, *, own_tokens: int) -> str:
    """Describe the context that fits: `8,192 of the model's 32,768 tokens`, or only its length.

    own_tokens: the context that the model was trained for; 0: unknown.
    """
    of_own_context = f" of the model's {own_tokens:,}" if tokens < own_tokens else ""
    return f"{tokens:,}{of_own_context} tokens"


def _names(ready: ReadyServer) -> str:
    """The names of the first models, each with its state unless that is `unloaded`."""
    shown = [
        each.id if each.state == "unloaded" else f"{each.id} ({each.state})"
        for each in ready.models[:_MAX_SHOWN_MODELS]
    ]
    if more := len(ready.models) - len(shown):
        shown.append(f"{more:,} more")
    return ", ".join(shown)


def _store(ready: ReadyServer) -> str:
    """The location of the cache, and whether it can be written."""
    if ready.info is None:
        return ready.store_folder or "off: the cache is in RAM until its model is unloaded"
    if ready.cache is None:
        return f"no cache: the layout {ready.info.layout} does not allow it"
    store = ready.cache.store
    if store is None:
        return "off: the cache is in RAM until the server ends"
    if store.mode != "writing":
        return (
            f"{ready.store_folder} CANNOT BE WRITTEN: the cache is in RAM until the server ends; "
            "see the log"
        )
    blocks = f"{store.blocks:,} {'block' if store.blocks == 1 else 'blocks'}"
    return f"{ready.store_folder} ({blocks} of this model)"


def _example(ready: ReadyServer) -> str:
    """A curl command that sends the server a first request."""
    key = ' -H "Authorization: Bearer $HOLDFAST_SERVER_API_KEY"' if ready.needs_key else ""
    path, text = "completions", '"prompt": "Once upon a time"'
    if ready.model.can_chat:
        path, text = "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    return (
        f"curl {ready.url}/v1/{path}{key} -H 'Content-Type: application/json' \\\n  -d "
        f'\'{{"model": "{ready.model.id}", {text}}}\''
    )


def lan_addresses(*, listens_on: str) -> tuple[str, ...]:
    """This machine's addresses as written in a URL, the most useful first.

    listens_on: 0.0.0.0 for IPv4, :: for both. Loopback and link-local addresses are left out.
    """
    families = {socket.AF_INET} if listens_on == "0.0.0.0" else {socket.AF_INET, socket.AF_INET6}
    running_interfaces = {name for name, state in psutil.net_if_stats().items() if state.isup}
    addresses = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if name not in running_interfaces or entry.family not in families:
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])  # without the zone
            if not (address.is_loopback or address.is_link_local):
                addresses.append(address)
    usual_address = _usual_address()
    addresses.sort(
        key=lambda address: (str(address) != usual_address, address.version, int(address))
    )
    hosts = (f"[{each}]" if each.version == 6 else str(each) for each in addresses)
    return tuple(dict.fromkeys(hosts))[:_MAX_ADDRESSES]


def _usual_address() -> str:
    """The address that this machine itself uses to reach others; empty if it cannot be found.

    Containers may give a machine a dozen further addresses.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_DOCUMENTATION_ADDRESS)  # sends nothing: datagrams have no handshake
        except OSError:
            return ""
        return str(probe.getsockname()[0])
