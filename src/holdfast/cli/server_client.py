"""Finds the running server for a command: the options that name a server, and an HTTP client."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import typer

from holdfast.cli.output import BAD_INPUT, complain, plain_errors
from holdfast.cli.settings import option, own_parameters, read_settings, with_parameters
from holdfast.errors import HoldfastError
from holdfast.files import atomic_write

if TYPE_CHECKING:
    from holdfast.front.run.running_servers import RunningServer

_CONNECT_SECONDS = 10.0
_PANEL = "Server"  # in the help
# address on which a server listens for all others → address at which it is reached
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
NO_SERVER = "no server of yours is running on this machine"

Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        rich_help_panel=_PANEL,
        help="URL of the server; default: as in your settings, or the only one running.",
    ),
]
ApiKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        rich_help_panel=_PANEL,
        help="API key; default: HOLDFAST_SERVER_API_KEY, or the key in your settings.",
    ),
]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="ID",
        rich_help_panel=_PANEL,
        help="Id of the model; default: the server's first one.",
    ),
]
Tenant: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        rich_help_panel=_PANEL,
        help="Value of the header X-Holdfast-Tenant.",
    ),
]
Salt: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cache-salt", rich_help_panel=_PANEL, help="cache_salt of the session's requests."
    ),
]
Server: TypeAlias = Annotated[
    int | None,
    typer.Argument(
        metavar="PID|PORT",
        show_default=False,
        help="Process id or port of the server; not needed if only one is running.",
    ),
]
SERVER_OPTIONS = {"url": Url, "api_key": ApiKey}
SESSION_OPTIONS = {**SERVER_OPTIONS, "model": Model, "tenant": Tenant, "cache_salt": Salt}


class ServerFailed(HoldfastError):
    """The server cannot be reached, refused a request, or ended an answer with an error."""


class KeyRefused(ServerFailed):
    """The server needs an API key, and none or a wrong one was given."""

    def __init__(self, url: str, *, has_key: bool) -> None:
        problem = (
            "does not accept this API key; pass the right one" if has_key else "needs an API key"
        )
        remedy = "with --api-key KEY, or in the variable HOLDFAST_SERVER_API_KEY"
        super().__init__(f"{url} {problem}{'' if has_key else ': pass it'} {remedy}")


class NotServed(ServerFailed):
    """The server does not serve the wanted model, or none at all."""


class NoSuchServer(HoldfastError):
    """There is no such server, or there is more than one."""


def server_command(
    command: Callable[..., None], *, options: Mapping[str, Any] = SESSION_OPTIONS
) -> Callable[..., None]:
    """Turn a function `(server, **own options)` into a command with options that name the server.

    All options except the URL and the key are sent with each request.

    The command prints an error as one line.
    """
    own_options = own_parameters(command)
    server_options = [option(name, annotation) for name, annotation in options.items()]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        from holdfast.front.server.context import TENANT_HEADER

        given_options = {
            name: value for name in options if (value := arguments.pop(name)) is not None
        }
        with plain_errors():
            url = given_options.pop("url", None)
            api_key = given_options.pop("api_key", None)
            headers = (
                {TENANT_HEADER: given_options.pop("tenant")} if "tenant" in given_options else {}
            )
            with client_of(url, api_key, headers=headers, query=given_options) as server:
                try:
                    command(server, **arguments)
                except BrokenPipeError:  # the reader has seen enough: Typer exits without a message
                    raise
                except OSError as error:
                    complain(str(error))
                    raise typer.Exit(BAD_INPUT) from None

    return with_parameters(run, [*own_options, *server_options])


def client_of(
    url: str | None,
    api_key: str | None,
    *,
    headers: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None,
) -> ServerClient:
    """Return a client of the server at `url`, or without `url` of the server in the settings.

    If the settings contain no port, this is the only server that the user runs, on any port.
    Raises NoSuchServer if there are several, and ServerFailed.
    """
    effective = read_settings()
    settings = effective.settings.server
    if api_key is None:
        api_key = settings.api_key
    if url:
        url = with_scheme(url)
    else:
        running = own_servers() if effective.origins["server.port"] == "default" else []
        candidates = [server for server in running if server.port == settings.port] or running
        if len(candidates) > 1:
            urls = ", ".join(server.url for server in candidates)
            raise NoSuchServer(f"several servers are running: {urls}; choose one with --url")
        if candidates:
            return client_of_own(candidates[0], api_key=api_key, headers=headers, query=query)
        host = _WILDCARDS.get(settings.host, settings.host)
        url = f"{settings.scheme}://{host}:{settings.port}"
    return ServerClient(
        url=url, api_key=api_key, headers=headers, query=query, certificate=settings.tls_cert
    )


def client_of_own(server: RunningServer, **options: Any) -> ServerClient:
    """Return a client of one of this user's servers on this machine.

    options: further arguments of ServerClient. Raises ServerFailed.
    """
    return ServerClient(url=server.url, certificate=server.certificate, pid=server.pid, **options)


def with_scheme(url: str) -> str:
    """Add the scheme to a URL if it is missing, as in mymachine:8321."""
    return url if "://" in url else f"http://{url}"


def own_servers() -> Sequence[RunningServer]:
    """Return the running servers of this user on this machine."""
    from holdfast.front.run.running_servers import running_servers

    return running_servers(os.environ)


def chosen_server(number: int | None) -> RunningServer:
    """Return the user's server with this process id or port; without a number, the only running
    server.

    Raises NoSuchServer.
    """
    running = own_servers()
    if not running:
        raise NoSuchServer(NO_SERVER)
    matching = [server for server in running if number in (None, server.pid, server.port)]
    if len(matching) == 1:
        return matching[0]
    running_text = ", ".join(f"{server.pid} at {server.url}" for server in running)
    if matching:
        raise NoSuchServer(
            f"several servers are running: {running_text}; choose one by process id or port"
        )
    raise NoSuchServer(
        f"no server of yours has the process id or port {number}; running servers: {running_text}"
    )


class ServerClient:
    """A client of one server, and a context manager. All methods block, except `lines`."""

    def __init__(
        self,
        *,
        url: str,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        certificate: str = "",
        pid: int | None = None,
    ) -> None:
        """headers, query: sent with every request.

        certificate: file with a certificate to trust in addition to the system's.

        pid: process id of the user's own server on this machine; its certificate may be for any
        name.

        Raises ServerFailed if the URL is invalid or the certificate cannot be read.
        """
        import httpx  # imported here, because it would slow down the start of every command

        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self.certificate = certificate
        self.pid = pid
        self.is_holdfast = False  # known after `models` was called
        all_headers = dict(headers or {})
        if api_key:
            all_headers["Authorization"] = f"Bearer {api_key}"
        verify: ssl.SSLContext | bool = True
        if self.url.startswith("https:"):
            verify = _tls_context(certificate, any_name=pid is not None)
        try:
            self._http_options = dict[str, Any](
                base_url=self.url,
                headers=all_headers,
                params=query,
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                trust_env=pid is None and not is_loopback(self.url),
                verify=verify,
            )
            self._http = httpx.Client(**self._http_options)
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerFailed(f"{url} is not a valid URL: {error}") from None

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def models(self, *, seconds: float = _CONNECT_SECONDS) -> list[dict[str, Any]]:
        """Return the list of /v1/models. Raises ServerFailed, also after a timeout."""
        models = self.call("GET", "/v1/models", timeout=seconds).get("data", [])
        self.is_holdfast = all(model.get("owned_by") == "holdfast" for model in models)
        return list(models)

    def model_ids(self, *, seconds: float = _CONNECT_SECONDS) -> tuple[str, ...]:
        """Return the ids of the models that the server serves. Raises ServerFailed."""
        return tuple(str(model["id"]) for model in self.models(seconds=seconds))

    def model(self, name: str = "") -> dict[str, Any]:
        """Return a model of /v1/models, by default the first one. Raises NotServed."""
        served = {str(model["id"]): model for model in self.models()}
        if name and name not in served:
            served_ids = ", ".join(served) or "nothing"
            raise NotServed(f"{self.url} does not serve {name}; it serves: {served_ids}")
        if not served:
            raise NotServed(f"{self.url} serves no model")
        return served[name or next(iter(served))]

    def health(self, *, seconds: float = _CONNECT_SECONDS) -> dict[str, Any]:
        """Return the content of /health. Raises ServerFailed."""
        return self.call("GET", "/health", timeout=seconds)

    def call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Send a request and return its JSON. request: further arguments of httpx. Raises ServerFailed."""
        with self._plain_failures():
            response = self._http.request(method, path, **request)
        content = json_object(response.text)
        # until a model is ready, /health has an error status and still content
        if response.is_error and not (path == "/health" and content):
            raise self._error_of_answer(response.status_code, response.text)
        return content

    @contextlib.asynccontextmanager
    async def lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
        """Yield the lines of a streamed answer. Raises ServerFailed."""
        import httpx

        try:
            async with (
                httpx.AsyncClient(**self._http_options) as http,
                http.stream("POST", path, json=body) as response,
            ):
                if response.is_error:
                    text = (await response.aread()).decode(errors="replace")
                    if response.status_code == HTTPStatus.UNAUTHORIZED:
                        raise self._error_of_answer(response.status_code, text)
                    raise ServerFailed(error_text(text))
                yield response.aiter_lines()
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerFailed(f"the connection to {self.url} broke: {reason}") from None

    def download(self, path: str, target: Path, **request: Any) -> int:
        """Write an answer to a file, completely or not at all. Returns its size in bytes.

        Raises ServerFailed and OSError.
        """
        with self._plain_failures(), self._http.stream("GET", path, **request) as response:
            if response.is_error:
                text = response.read().decode(errors="replace")
                raise self._error_of_answer(response.status_code, text)
            with atomic_write(target) as file:
                for chunk in response.iter_bytes():
                    file.write(chunk)
            return target.stat().st_size

    @contextlib.contextmanager
    def _plain_failures(self) -> Iterator[None]:
        """Turn errors of httpx into ServerFailed."""
        import httpx

        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                raise ServerFailed(
                    f"{self.url} presents a certificate that is not trusted: {reason}. If it is "
                    "the server's own certificate, name its file: SSL_CERT_FILE=cert.pem holdfast …"
                ) from None
            if isinstance(error, httpx.RemoteProtocolError) and self.url.startswith("http:"):
                https = self.url.replace("http:", "https:", 1)
                reason += f". Does it speak TLS? Then its URL is {https}"
            raise ServerFailed(f"no answer from {self.url}: {reason}") from None

    def _error_of_answer(self, status: int, text: str) -> ServerFailed:
        """The error for an answer with an error status."""
        if status == HTTPStatus.UNAUTHORIZED:
            return KeyRefused(self.url, has_key=bool(self.api_key))
        if status == HTTPStatus.NOT_FOUND and _error_message(text):
            return ServerFailed(_error_message(text))  # the server's message names what is missing
        return ServerFailed(f"{self.url} answers {status}: {error_text(text)}")


def is_loopback(url: str) -> bool:
    """Whether the URL is that of this machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _tls_context(certificate: str, *, any_name: bool) -> ssl.SSLContext:
    """Trust the system's authorities, those of SSL_CERT_FILE, and this certificate.

    any_name: whether a certificate may be for any host name.
    """
    import httpx

    context = httpx.create_ssl_context()
    context.load_default_certs()
    context.check_hostname = not any_name
    # trusts the certificate itself, even if the authority that signed it is unknown
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if certificate:
        try:
            context.load_verify_locations(certificate)
        except OSError as error:
            raise ServerFailed(
                f"server.tls_cert: {certificate}: {error.strerror or error}"
            ) from None
    return context


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text; {} if the text contains none."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def error_text(text: str) -> str:
    """Return the message of an error response."""
    return _error_message(text) or text.strip()[:300] or "an empty answer"


def _error_message(text: str) -> str:
    """Return the message in an error's JSON body; empty if there is none."""
    error = json_object(text).get("error")
    return str(error.get("message") or "") if isinstance(error, dict) else ""
