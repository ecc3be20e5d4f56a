"""The page for browsers: its HTML shell at the address of each view, and the files that it loads.

The shell is the same for everybody and contains no data, so it needs no key. Its scripts read
everything from the HTTP API, with the key that the user enters.

Files are not read, and no template engine is imported, before the first browser comes.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from holdfast import __version__
from holdfast.front.server.dialect import Operation, operation
from holdfast.front.server.problem import RequestRefused
from holdfast.front.server.services import Services

FILES = Path(__file__).parent / "files"
# name of a view → its path; the navigation lists them in this order
VIEWS = {
    "Chat": "/",
    "Now": "/page/now",
    "Performance": "/page/performance",
    "Memory": "/page/memory",
    "Models": "/page/models",
    "Connect": "/page/connect",
    "Logs": "/page/logs",
}
_SHELL = "shell.html.jinja"
_FILES_PATH = "/page/files/"
SECURITY_HEADERS = {
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
# Images of messages are shown from data URLs, which call no host.
# Trusted Types: markup from a string is accepted only from Lit's templates and from DOMPurify.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types lit-html dompurify"
)
_PAGE_HEADERS = {
    **SECURITY_HEADERS,
    "content-security-policy": _POLICY,
    "vary": "accept, user-agent",
}
_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".json": "application/json",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, in its sent form."""

    media_type: str
    etag: str
    content: bytes
    compressed: bytes  # with gzip


def shell_response() -> Response:
    """The HTML shell."""
    return Response(_shell(), media_type="text/html", headers=_PAGE_HEADERS)


@cache
def _shell() -> str:
    """The HTML of the shell, rendered from its template once."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FILES), autoescape=True, trim_blocks=True
    )
    return environment.get_template(_SHELL).render(views=VIEWS, version=__version__)


@cache
def page_files() -> dict[str, PageFile]:
    """The files that browsers may load, by their paths below /page/files/."""
    return {
        path.relative_to(FILES).as_posix(): _page_file(path)
        for path in FILES.rglob("*")
        if path.suffix in _TYPES
    }


def _page_file(path: Path) -> PageFile:
    """Read a file, and compress it once for all browsers."""
    content = path.read_bytes()
    return PageFile(
        media_type=_TYPES[path.suffix],
        etag=f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        content=content,
        compressed=gzip.compress(content, mtime=0),
    )


def _view_operation(path: str) -> Operation:
    """The operation that shows the HTML shell at the path of a view."""

    @operation("GET", path, needs_key=False)
    async def show_view(request: Request, services: Services) -> Response:
        """Show a view of the page for browsers."""
        if not services.server.page:
            raise _unknown_page_error()
        return shell_response()

    return show_view


@operation("GET", "/page", needs_key=False)
async def redirect_to_chat(request: Request, services: Services) -> Response:
    """Lead a browser to the first view."""
    if not services.server.page:
        raise _unknown_page_error()
    return RedirectResponse(VIEWS["Chat"], headers=SECURITY_HEADERS)


@operation("GET", _FILES_PATH + "{path:path}", needs_key=False)
async def page_file(request: Request, services: Services) -> Response:
    """Send a file that the page loads."""
    file = page_files().get(request.path_params["path"]) if services.server.page else None
    if file is None:
        raise _unknown_page_error()
    headers = {
        **SECURITY_HEADERS,
        "cache-control": "no-cache",  # browsers ask again each time, since an upgrade changes files
        "etag": file.etag,
        "vary": "accept-encoding",
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(file.compressed, media_type=file.media_type, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


def _unknown_page_error() -> RequestRefused:
    return RequestRefused("there is no such page", status=404, code="unknown_path")


OPERATIONS = (
    *(_view_operation(path) for path in VIEWS.values() if path != "/"),
    redirect_to_chat,
    page_file,
)
