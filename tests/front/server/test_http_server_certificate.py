from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from holdfast.config import ServerSettings
from holdfast.errors import ConfigError
from holdfast.front.server.http_server import ServerCertificate
from tests.fakes.certificates import CertificateFiles
from tests.fakes.http_clients import CHAT, chat_body, served
from tests.fakes.scripted_gateway import ScriptedGateway

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return CertificateFiles(tmp_path)


def settings_of(files: CertificateFiles) -> ServerSettings:
    return ServerSettings(
        port=0, shutdown_seconds=0, tls_cert=str(files.certificate), tls_key=str(files.key)
    )


def certificate_of(files: CertificateFiles) -> ServerCertificate:
    return ServerCertificate(certificate=str(files.certificate), key=str(files.key))


@asynccontextmanager
async def serving(
    files: CertificateFiles, certificate: ServerCertificate | None = None
) -> AsyncIterator[str]:
    settings = settings_of(files)
    async with served(
        ScriptedGateway(), settings=settings, certificate=certificate or certificate_of(files)
    ) as url:
        yield url


async def connected(
    url: str, files: CertificateFiles
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A connection and the certificate it received."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(url.rpartition(":")[2]), ssl=files.trust()
    )
    return reader, writer, writer.get_extra_info("ssl_object").getpeercert(binary_form=True)


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a connection still works."""
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length")
    )
    await reader.readexactly(length)
    return head.startswith(b"HTTP/1.1 ")


async def test_requests_over_https_are_answered_and_streamed(files: CertificateFiles) -> None:
    async with (
        serving(files) as url,
        httpx.AsyncClient(base_url=url, verify=files.trust(), timeout=60) as client,
    ):
        assert url.startswith("https://127.0.0.1:")
        whole = await client.post(CHAT, json=chat_body())
        streamed = await client.post(CHAT, json=chat_body(stream=True))
        page = await client.get("/")
    assert whole.json()["choices"][0]["message"]["content"] == "Hello"
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert f"curl {url}/v1" in page.text


async def test_untrusting_and_plain_http_clients_get_nothing(files: CertificateFiles) -> None:
    async with serving(files) as url:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await _get(url)
        with pytest.raises(httpx.HTTPError):
            await _get(url.replace("https", "http"))


async def _get(url: str) -> httpx.Response:
    async with httpx.AsyncClient(verify=ssl.create_default_context(), timeout=60) as client:
        return await client.get(url)


async def test_a_renewed_certificate_applies_to_new_connections(files: CertificateFiles) -> None:
    certificate = certificate_of(files)
    async with serving(files, certificate) as url:
        reader, writer, old = await connected(url, files)
        new = files.renew()
        assert (await connected(url, files))[2] == old
        certificate.reload()
        assert (await connected(url, files))[2] == new != old
        assert await answers(reader, writer)


@pytest.mark.parametrize("broken", ["cert", "key", "missing"])
async def test_broken_files_change_nothing_and_log_one_line(
    files: CertificateFiles, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = certificate_of(files)
    async with serving(files, certificate) as url:
        old = (await connected(url, files))[2]
        if broken == "missing":
            files.key.unlink()
        else:
            (files.certificate if broken == "cert" else files.key).write_text(
                "-----BEGIN NONSENSE-----\n"
            )
        with caplog.at_level(logging.INFO, "holdfast.front.server.http_server"):
            certificate.reload()
        assert (await connected(url, files))[2] == old
        (record,) = caplog.records
        assert "the certificate is not reloaded" in record.getMessage()
        new = files.renew()
        certificate.reload()
        assert (await connected(url, files))[2] == new


def _of_another(files: CertificateFiles) -> None:
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(files.key)


def _locked(files: CertificateFiles) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    form = serialization.PrivateFormat.TraditionalOpenSSL
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(b"secret")
        )
    )


def _folder(files: CertificateFiles) -> None:
    files.certificate.unlink()
    files.certificate.mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda files: files.certificate.unlink(),
            "server.tls_cert: .*cert.pem: No such file or directory",
        ),
        (lambda files: files.key.unlink(), "server.tls_key: .*key.pem: No such file or directory"),
        (_folder, "server.tls_cert: .*Is a directory"),
        (_of_another, "the key does not match the certificate"),
        (_locked, "needs a password"),
        (lambda files: files.key.write_text("hello"), "not a certificate and a key in PEM format"),
        (
            lambda files: files.certificate.write_bytes(b"\0\1"),
            "not a certificate and a key in PEM format",
        ),
    ],
)
def test_unusable_files_are_named_in_one_line(
    files: CertificateFiles, spoil: object, said: str
) -> None:
    assert callable(spoil)
    spoil(files)
    with pytest.raises(ConfigError, match=said) as refused:
        certificate_of(files)
    assert "\n" not in str(refused.value)
