"""`/`: the page for browsers, a line for Ollama's clients, and a description in plain text for all
other clients.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex

from starlette.requests import Request
from starlette.responses import Response

from holdfast import __version__
from holdfast.front.page.shell import SECURITY_HEADERS, shell_response
from holdfast.front.server.access import caller_of
from holdfast.front.server.dialect import DialectTable, operation
from holdfast.front.server.guard import address_of
from holdfast.front.server.openapi import response_shape
from holdfast.front.server.services import Services, served_models

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 3rem auto; max-width: 50rem; padding: 0 1rem; }
pre { font: .9rem/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
""".strip()
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    **SECURITY_HEADERS,
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "vary": "accept, user-agent",
}
_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Holdfast</title><style>{_STYLE}</style></head><body><pre>%s</pre></body></html>
"""
_DOCUMENTS = "The documentation is in docs/ of the repository; start with README.md."
_HIDDEN = "shown only to clients that send an API key"
_OLLAMA = "Ollama is running"  # what Ollama's clients expect at this path


@operation("HEAD", "/", response_shape({"text/plain": str}), needs_key=False)
async def head_of_front_page(request: Request, services: Services) -> Response:
    """Confirm that a server runs here. Ollama's clients check in this way."""
    return Response(media_type="text/plain", headers=_HEADERS)


@operation("GET", "/", response_shape({"text/html": str, "text/plain": str}), needs_key=False)
async def front_page(request: Request, services: Services) -> Response:
    """Show the page to browsers, and a description of the server in plain text to other clients.

    Requires no key, but the description lists models only to clients that send one.
    """
    if _is_from_ollama_client(request):
        return Response(_OLLAMA, media_type="text/plain", headers=_HEADERS)
    takes_html = "text/html" in request.headers.get("accept", "")
    if takes_html and services.server.page:
        return shell_response()
    address = address_of(request.scope)
    table: DialectTable = request.app.state.dialects
    parts = (
        f"Holdfast {__version__} at {address}",
        "",
        "models",
        *_model_lines(request, services),
        "",
        "paths",
        *(f"  {each.path:22}{each.summary}" for each in table.operations if each.summary),
        "",
        "try",
        _example_command(address, needs_key=services.needs_key),
        "",
        _DOCUMENTS,
        "",
    )
    text = "\n".join(parts)
    if takes_html:
        return Response(_PAGE % html.escape(text), media_type="text/html", headers=_HEADERS)
    return Response(text, media_type="text/plain", headers=_HEADERS)


def _model_lines(request: Request, services: Services) -> list[str]:
    """A line for each model with its state and context; models are hidden from clients without a
    key.
    """
    if not caller_of(request).is_let_in:
        return [f"  {_HIDDEN}"]
    lines = []
    for model in served_models(services):
        tokens = model.context_tokens
        context = "" if tokens is None else f", {tokens:,} tokens of context"
        lines.append(f"  {model.id}: {model.state}{context}")
    return lines or ["  none"]


def _is_from_ollama_client(request: Request) -> bool:
    """Whether an Ollama client sent the request.

    Ollama clients are programs with "ollama" in their User-Agent and scripts in browsers. Neither
    accepts HTML.
    """
    agent, accepts = (request.headers.get(name, "").lower() for name in ("user-agent", "accept"))
    return "text/html" not in accepts and ("ollama" in agent or "mozilla" in agent)


def _example_command(address: str, *, needs_key: bool) -> str:
    """A command to try. If a key is needed, it is taken from an environment variable."""
    body = {"messages": [{"role": "user", "content": "Hello!"}]}
    key = ' -H "Authorization: Bearer $HOLDFAST_SERVER_API_KEY"' if needs_key else ""
    url = shlex.quote(f"{address}/v1/chat/completions")
    return (
        f"curl {url}{key} -H 'Content-Type: application/json' \\\n  -d "
        f"{shlex.quote(json.dumps(body))}"
    )


OPERATIONS = (head_of_front_page, front_page)
