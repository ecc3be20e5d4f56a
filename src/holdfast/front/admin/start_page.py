"""GET /: what this server is and how to ask it something, as a small page for browsers and as lines
for everybody else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex
from collections.abc import Sequence
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.fleet.residency import ModelStatus
from holdfast.front.server.access import caller_of
from holdfast.front.server.dialect import DialectTable, operation, text_answer
from holdfast.front.server.guard import host_name
from holdfast.front.server.services import Services

Rows: TypeAlias = Sequence[tuple[str, str]]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 44rem; margin: 3rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; } .quiet { opacity: .7; }
code, pre { font: .9rem/1.5 ui-monospace, monospace; } pre { background: var(--soft); padding: .8rem 1rem; border-radius: .5rem;
overflow-x: auto; } table { border-collapse: collapse; width: 100%; } td { padding: .35rem .8rem .35rem 0;
border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
""".strip()
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "vary": "accept, user-agent",
}
_DOCUMENTS = "The documentation is in docs/ of the repository; begin with README.md."
_HIDDEN = "shown to who sends the API key"
_OLLAMA = "Ollama is running"  # what Ollama's clients look for at this place


@operation("HEAD", "/", text_answer("text/plain"), needs_key=False)
async def head_of_front_page(request: Request, services: Services) -> Response:
    """Whether a server is there, as Ollama's clients ask."""
    return Response(media_type="text/plain", headers=_HEADERS)


@operation("GET", "/", text_answer("text/html", "text/plain"), needs_key=False)
async def front_page(request: Request, services: Services) -> Response:
    """What this server is: a page for browsers, lines for others.

    Needs no key, but tells of models only to who has it.
    """
    if _is_ollamas(request):
        return Response(_OLLAMA, media_type="text/plain", headers=_HEADERS)
    is_locked = not caller_of(request).is_let_in
    models = [] if is_locked else [(model.id, _state(model)) for model in services.statuses()]
    table: DialectTable = request.app.state.dialects
    paths = [
        (operation.path, operation.summary) for operation in table.operations if operation.summary
    ]
    example = _example(_address(request), needs_key=services.needs_key)
    wants_page = "text/html" in request.headers.get("accept", "")
    text = (_page if wants_page else _lines)(
        f"{services.version} at {_address(request)}",
        models=models,
        no_models=_HIDDEN if is_locked else "none",
        paths=paths,
        example=example,
    )
    return Response(text, media_type="text/html" if wants_page else "text/plain", headers=_HEADERS)


def _is_ollamas(request: Request) -> bool:
    """Whether a client of Ollama asks: by its name, or from within a page or an extension of a
    browser, which want no page.
    """
    agent, accepts = (request.headers.get(name, "").lower() for name in ("user-agent", "accept"))
    return "text/html" not in accepts and ("ollama" in agent or "mozilla" in agent)


def _example(address: str, *, needs_key: bool) -> str:
    """A command that works as it is, once the key is in the variable."""
    body = {"messages": [{"role": "user", "content": "Hello!"}]}
    key = ' -H "Authorization: Bearer $HOLDFAST_SERVER_API_KEY"' if needs_key else ""
    url = shlex.quote(f"{address}/v1/chat/completions")
    return (
        f"curl {url}{key} -H 'Content-Type: application/json' \\\n  -d "
        f"{shlex.quote(json.dumps(body))}"
    )


def _address(request: Request) -> str:
    """The address by which the client came, so that what is shown can be used where it is read."""
    host = request.headers.get("host", "")
    if host_name(host) is None:
        place, port = request.scope.get("server") or ("127.0.0.1", 80)
        host = f"[{place}]:{port}" if ":" in place else f"{place}:{port}"
    return f"{request.scope['scheme']}://{host}"


def _state(model: ModelStatus) -> str:
    context = (
        "" if model.context_tokens is None else f", {model.context_tokens:,} tokens of context"
    )
    return f"{model.state}{context}"


def _lines(place: str, *, models: Rows, no_models: str, paths: Rows, example: str) -> str:
    served = [f"  {model}: {state}" for model, state in models] or [f"  {no_models}"]
    listed = [f"  {path:22}{summary}" for path, summary in paths]
    parts = (
        f"Holdfast {place}",
        "",
        "models",
        *served,
        "",
        "paths",
        *listed,
        "",
        "try",
        example,
        "",
        _DOCUMENTS,
        "",
    )
    return "\n".join(parts)


def _page(place: str, *, models: Rows, no_models: str, paths: Rows, example: str) -> str:
    parts = (
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Holdfast</title><style>{_STYLE}</style></head><body>",
        f"<h1>Holdfast</h1><p class=quiet>version {html.escape(place)}</p>",
        "<h2>Models</h2>",
        _table(models) if models else f"<p class=quiet>{no_models}</p>",
        "<h2>Paths</h2>",
        _table(paths),
        f"<h2>Try</h2><pre>{html.escape(example)}</pre>",
        f"<p class=quiet>{_DOCUMENTS}</p>",
        "</body></html>",
    )
    return "\n".join(parts)


def _table(rows: Rows) -> str:
    shown = (
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(about)}</td></tr>"
        for name, about in rows
    )
    return f"<table>{''.join(shown)}</table>"
