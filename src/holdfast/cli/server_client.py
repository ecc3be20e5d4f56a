"""The HTTP client of all commands that talk to a running server."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from holdfast.errors import HoldfastError
from holdfast.files import atomic_write

CONNECT_SECONDS = 10.0


class ServerFailed(HoldfastError):
    """The server cannot be reached, refused a request or ended an answer with an error."""


class ServerClient:
    """A client of one server. Blocks, except `lines`. A context manager."""

    def __init__(
        self,
        *,
        url: str,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        certificate: str = "",
        is_local: bool = False,
    ) -> None:
        """headers, query: sent with every request.
        certificate: a file with a certificate to trust in addition to the system's.
        is_local: the server is the user's own on this machine: no proxy is asked, and its
            certificate may be for any name.

        Raises ServerFailed if the URL is invalid or the certificate cannot be read.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self.is_holdfast = False  # known once `model_ids` was called
        sent = dict(headers or {})
        if api_key:
            sent["Authorization"] = f"Bearer {api_key}"
        verify: ssl.SSLContext | bool = True
        if self.url.startswith("https:"):
            verify = _tls_context(certificate, any_name=is_local)
        try:
            self._options = dict[str, Any](
                base_url=self.url,
                headers=sent,
                params=query,
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
                trust_env=not (is_local or is_loopback(self.url)),
                verify=verify,
            )
            self._http = httpx.Client(**self._options)
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerFailed(f"{url} is not a valid URL: {error}") from None

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def models(self, *, seconds: float = CONNECT_SECONDS) -> list[dict[str, Any]]:
        """What /v1/models lists. Raises ServerFailed, also when it takes longer."""
        models = self.call("GET", "/v1/models", timeout=seconds).get("data", [])
        self.is_holdfast = all(model.get("owned_by") == "holdfast" for model in models)
        return list(models)

    def model_ids(self, *, seconds: float = CONNECT_SECONDS) -> tuple[str, ...]:
        """The ids of the models that the server serves. Raises ServerFailed."""
        return tuple(str(model["id"]) for model in self.models(seconds=seconds))

    def health(self, *, seconds: float = CONNECT_SECONDS) -> dict[str, Any]:
        """The answer of /health. Raises ServerFailed."""
        return self.call("GET", "/health", timeout=seconds)

    def call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Send a request and return its JSON. request: arguments of httpx. Raises ServerFailed."""
        try:
            response = self._http.request(method, path, **request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        content = json_object(response.text)
        # /health has an error status, and content, until a model is ready
        if response.is_error and not (path == "/health" and content):
            raise self._refused(response.status_code, response.text)
        return content

    @contextlib.asynccontextmanager
    async def lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a streamed answer. Raises ServerFailed."""
        try:
            async with (
                httpx.AsyncClient(**self._options) as http,
                http.stream("POST", path, json=body) as response,
            ):
                if response.is_error:
                    raise ServerFailed(
                        error_text((await response.aread()).decode(errors="replace"))
                    )
                yield response.aiter_lines()
        except httpx.HTTPError as error:
            raise ServerFailed(
                f"the connection to {self.url} broke: {str(error) or type(error).__name__}"
            ) from None

    def download(self, path: str, target: Path, **request: Any) -> int:
        """Write an answer to a file, whole or not at all; returns its size in bytes.

        Raises ServerFailed and OSError.
        """
        try:
            with self._http.stream("GET", path, **request) as response:
                if response.is_error:
                    raise self._refused(
                        response.status_code, response.read().decode(errors="replace")
                    )
                with atomic_write(target) as file:
                    for piece in response.iter_bytes():
                        file.write(piece)
                return target.stat().st_size
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> ServerFailed:
        reason = str(error).rstrip(".") or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            return ServerFailed(
                f"{self.url} shows a certificate that is not trusted: {reason}. If it is the "
                "server's own certificate, name its file: SSL_CERT_FILE=cert.pem holdfast …"
            )
        if isinstance(error, httpx.RemoteProtocolError) and self.url.startswith("http:"):
            reason += f". Does it speak TLS? Then its URL is https:{self.url.removeprefix('http:')}"
        return ServerFailed(f"no answer from {self.url}: {reason}")

    def _refused(self, status: int, text: str) -> ServerFailed:
        if status == HTTPStatus.NOT_FOUND and _error_message(text):
            return ServerFailed(_error_message(text))  # the message names what is missing
        return ServerFailed(f"{self.url} answers {status}: {error_text(text)}")


def is_loopback(url: str) -> bool:
    """Whether the URL names this machine."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _tls_context(certificate: str, *, any_name: bool) -> ssl.SSLContext:
    """Trust the system's authorities, those of SSL_CERT_FILE, and this certificate."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    context.check_hostname = not any_name
    # trusts a certificate itself, without the authority that signed it
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
    """The JSON object in a text; empty if it contains none."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def error_text(text: str) -> str:
    """The message of an error response."""
    return _error_message(text) or text.strip()[:300] or "an empty answer"


def _error_message(text: str) -> str:
    """The message in an error's JSON body; empty if there is none."""
    error = json_object(text).get("error")
    return str(error.get("message") or "") if isinstance(error, dict) else ""
