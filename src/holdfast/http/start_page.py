"""GET /: what this server is and how to ask it something, as a small page for browsers and as lines for everybody else."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from holdfast.http.api_key import opens
from holdfast.http.host_header import host_name
from holdfast.http.services import ServedModel, Services

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
    "vary": "accept",
}
_DOCUMENTS = "README.md, docs/http.md and docs/memory.md of the repository say more."
_HIDDEN = "shown to who sends the API key"
_PATHS = (
    ("/v1/chat/completions", "conversations, as OpenAI's"),
    ("/v1/completions", "raw text, as OpenAI's"),
    ("/v1/models", "what is served"),
    ("/v1/sessions", "what is kept, by name"),
    ("/health", "how the models are doing"),
    ("/metrics", "figures for Prometheus"),
    ("/openapi.json", "every field of every path"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What the page says."""

    version: str
    address: str
    models: tuple[ServedModel, ...]
    is_locked: bool  # a key is needed that the request has not brought
    needs_key: bool

    @property
    def example(self) -> str:
        """A command that works as it is, once the key is in the variable."""
        body = {"messages": [{"role": "user", "content": "Hello!"}]}
        key = ' -H "Authorization: Bearer $HOLDFAST_SERVER_API_KEY"' if self.needs_key else ""
        url = shlex.quote(f"{self.address}/v1/chat/completions")
        return f"curl {url}{key} -H 'Content-Type: application/json' \\\n  -d {shlex.quote(json.dumps(body))}"


def front_page(request: Request, services: Services) -> Response:
    """HTML for who asks for it, plain text for others."""
    key = services.server.api_key
    is_locked = not opens(dict(request.scope["headers"]), api_key=key)
    shown = _Shown(
        version=services.version,
        address=_address(request),
        models=() if is_locked else tuple(services.models.statuses()),
        is_locked=is_locked,
        needs_key=bool(key),
    )
    if "text/html" in request.headers.get("accept", ""):
        return Response(_page(shown), media_type="text/html", headers=_HEADERS)
    return Response(_lines(shown), media_type="text/plain", headers=_HEADERS)


def _address(request: Request) -> str:
    """The address by which the client came, so that what is shown can be used where it is read."""
    host = request.headers.get("host", "")
    if host_name(host) is None:
        place, port = request.scope.get("server") or ("127.0.0.1", 80)
        host = f"[{place}]:{port}" if ":" in place else f"{place}:{port}"
    return f"{request.scope['scheme']}://{host}"


def _state(model: ServedModel) -> str:
    context = "" if model.info is None else f", {model.info.context_tokens:,} tokens of context"
    return f"{model.state}{context}"


def _lines(shown: _Shown) -> str:
    models = [f"  {model.id}: {_state(model)}" for model in shown.models] or [f"  {_no_models(shown)}"]
    paths = [f"  {path:22}{what}" for path, what in _PATHS]
    head = [f"Holdfast {shown.version} at {shown.address}"]
    return "\n".join((*head, "", "models", *models, "", "paths", *paths, "", "try", shown.example, "", _DOCUMENTS, ""))


def _page(shown: _Shown) -> str:
    models = [(f"<code>{html.escape(model.id)}</code>", _state(model)) for model in shown.models]
    parts = (
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Holdfast</title><style>{_STYLE}</style></head><body>",
        f"<h1>Holdfast</h1><p class=quiet>version {html.escape(shown.version)} at {html.escape(shown.address)}</p>",
        "<h2>Models</h2>",
        _table(models) if models else f"<p class=quiet>{_no_models(shown)}</p>",
        "<h2>Paths</h2>",
        _table([(f"<code>{path}</code>", what) for path, what in _PATHS]),
        f"<h2>Try</h2><pre>{html.escape(shown.example)}</pre>",
        f"<p class=quiet>{_DOCUMENTS}</p>",
        "</body></html>",
    )
    return "\n".join(parts)


def _table(rows: list[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><td>{name}</td><td>{html.escape(what)}</td></tr>" for name, what in rows) + "</table>"


def _no_models(shown: _Shown) -> str:
    return _HIDDEN if shown.is_locked else "none"
