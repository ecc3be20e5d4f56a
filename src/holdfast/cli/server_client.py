"""A running server, as commands see it."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from holdfast.errors import HoldfastError
from holdfast.whole_file import whole_file

CONNECT_SECONDS = 10.0


class ServerFailed(HoldfastError):
    """The server cannot be reached, refused a request or ended an answer with an error."""


class ServerClient:
    """One server, spoken to over HTTP. Blocking; use as a context manager or call `close`."""

    def __init__(
        self,
        *,
        url: str,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        use_proxies: bool = True,
        certificate: str = "",
        any_name: bool = False,
    ) -> None:
        """headers, query: of every request. certificate: a file with one that is trusted beside
        those of the system.
        any_name: whatever name stands in it, for a server that is known to be on this machine.

        Raises ServerFailed for what is no URL, and a certificate that cannot be read.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        self.is_holdfast = False  # known once the models were asked for
        sent = {**(headers or {}), **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        trust = _trust(certificate, any_name=any_name) if self.url.startswith("https:") else True
        try:
            self._options = dict[str, Any](
                base_url=self.url,
                headers=sent,
                params=query,
                timeout=timeout,
                trust_env=use_proxies,
                verify=trust,
            )
            self._http = httpx.Client(**self._options)
        except (httpx.InvalidURL, ValueError) as error:
            raise ServerFailed(f"{url} is no URL: {error}") from None

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def model_ids(self, *, seconds: float = CONNECT_SECONDS) -> tuple[str, ...]:
        """The models that the server serves, if it says so in that time. Raises ServerFailed."""
        answer = self.call("GET", "/v1/models", timeout=seconds)
        self.is_holdfast = all(
            model.get("owned_by") == "holdfast" for model in answer.get("data", ())
        )
        return tuple(str(model["id"]) for model in answer.get("data", ()))

    def health(self) -> dict[str, Any]:
        """The server's account of itself. Raises ServerFailed."""
        return self.call("GET", "/health", timeout=CONNECT_SECONDS)

    def call(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """The JSON of one answer. `request`: as httpx takes it. Raises ServerFailed."""
        try:
            response = self._http.request(method, path, **request)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        content = json_object(response.text)
        # /health has an error status until a model is ready
        if response.is_error and not (path == "/health" and content):
            raise self._refused(response.status_code, response.text)
        return content

    @contextlib.asynccontextmanager
    async def lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of an answer that is streamed, as they come. Raises ServerFailed.

        On a loop, whose tasks can be cancelled: an exception of a signal's handler can leave an
        HTTP client's locks taken.
        """
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
        """Write an answer into a file; returns its bytes.

        What is not whole does not stay. Raises ServerFailed and OSError.
        """
        try:
            with self._http.stream("GET", path, **request) as response:
                if response.is_error:
                    raise self._refused(
                        response.status_code, response.read().decode(errors="replace")
                    )
                with whole_file(target) as file:
                    for piece in response.iter_bytes():
                        file.write(piece)
                return target.stat().st_size
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> ServerFailed:
        reason = str(error).rstrip(".") or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            way_out = (
                "If it is the server's own certificate, name its file: SSL_CERT_FILE=cert.pem "
                "holdfast …"
            )
            return ServerFailed(
                f"{self.url} shows a certificate that is not trusted: {reason}. {way_out}"
            )
        if isinstance(error, httpx.RemoteProtocolError) and self.url.startswith("http:"):
            reason += f". Does it speak TLS? Then its URL is https:{self.url.removeprefix('http:')}"
        return ServerFailed(f"no answer from {self.url}: {reason}")

    def _refused(self, status: int, text: str) -> ServerFailed:
        if status == HTTPStatus.NOT_FOUND and _error_message(text):
            return ServerFailed(_error_message(text))  # it names what is missing
        return ServerFailed(f"{self.url} answers {status}: {error_text(text)}")


def _trust(certificate: str, *, any_name: bool) -> ssl.SSLContext:
    """What is trusted: the system's authorities, those of SSL_CERT_FILE, and this very certificate."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    context.check_hostname = not any_name
    # so that a certificate can be trusted without who vouches for it
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
    """A JSON object; empty when the text is none."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def error_text(text: str) -> str:
    """What an error's body says to people."""
    return _error_message(text) or text.strip()[:300] or "an empty answer"


def _error_message(text: str) -> str:
    """The message in an error's JSON body; empty without one."""
    error = json_object(text).get("error")
    return str(error.get("message") or "") if isinstance(error, dict) else ""
