"""Why `holdfast serve` cannot have its port: mostly because a server of the same kind runs there
already.
"""

from __future__ import annotations

from typing import Any

from holdfast.cli.server_client import ServerClient, ServerFailed
from holdfast.errors import AddressInUse

_ASK_SECONDS = 2.0
_WAY_OUT = "or take another port: -p {other} (-p 0: a free one)"


def who_has_the_port(taken: AddressInUse) -> str:
    """One line: who listens there, and what can be done. Asks the one who listens."""
    way_out = _WAY_OUT.format(other=taken.port + 1 if taken.port < 65535 else taken.port - 1)
    models = _models_served(taken.url)
    if models is None:
        return f"port {taken.port} on {taken.host} is taken by another program; stop it, {way_out}"
    served = ", ".join(models) or "nothing yet"
    return (
        f"port {taken.port} on {taken.host} is taken by Holdfast itself: it serves {served} at "
        f"{taken.url} "
        f"already (talk with it: holdfast chat --url {taken.url}). Stop that one (holdfast stop "
        f"{taken.port}), {way_out}"
    )


def _models_served(url: str) -> list[str] | None:
    """The ids of the models that a Holdfast at this address serves; None when it is something else."""
    try:
        with ServerClient(url=url, use_proxies=False) as client:
            health = client.call("GET", "/health", timeout=_ASK_SECONDS)
    except ServerFailed:
        return None
    models: Any = health.get("models")
    if "version" not in health or not isinstance(models, list):
        return None
    return [str(model["id"]) for model in models if isinstance(model, dict) and "id" in model]
