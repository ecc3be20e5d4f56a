"""A real server with a certificate: its output, its clients, and a renewal during an answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import Result

from tests.fakes.certificates import CertificateFiles
from tests.fakes.command_line import invoked, only_line
from tests.fakes.server_process import ServerProcess, running_server, until


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def server(files: CertificateFiles) -> Iterator[ServerProcess]:
    certificate = ("--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    with running_server("--name", "demo", *certificate) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(*arguments: str, variables: dict[str, str] | None = None, stdin: str = "") -> Result:
    return invoked(arguments, input=stdin, env=variables)


@pytest.mark.usefixtures("folder")
def test_https_urls_are_printed_and_trusted_certificates_accepted(
    server: ServerProcess, files: CertificateFiles
) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    until(lambda: f"curl {server.url}/v1/chat/completions" in server.output(), "the example")
    listing = ("sessions", "ls", "--url", server.url)
    unknown = run(*listing)
    assert unknown.exit_code != 0
    assert "SSL_CERT_FILE=cert.pem" in only_line(unknown.stderr)
    authority = {"SSL_CERT_FILE": str(files.trusted)}
    settings = {
        "HOLDFAST_SERVER_TLS_CERT": str(files.certificate),
        "HOLDFAST_SERVER_TLS_KEY": str(files.key),
    }
    for variables in (authority, settings):
        trusting = run(*listing, variables=variables)
        assert trusting.exit_code == 0, trusting.stderr
    said = run("chat", "--url", server.url, variables=authority, stdin="Hello\n")
    assert said.exit_code == 0, said.stderr
    assert said.stdout.strip()


def test_a_certificate_renewal_cuts_no_answer(
    server: ServerProcess, files: CertificateFiles
) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
    }
    with (
        httpx.Client(base_url=server.url, verify=files.trust(), timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        first = next(lines)
        files.renew()
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "the certificate is reloaded" in server.log(), "the renewal")
        rest = [line for line in lines if line]
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    assert httpx.get(f"{server.url}/health", verify=files.trust(), timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--tls-cert", "none.pem", "--tls-key", "none.pem"),
            "server.tls_cert: none.pem: No such file or directory",
        ),
        (
            ("--tls-cert", "none.pem"),
            "server.tls_cert (flag --tls-cert) needs server.tls_key (--tls-key) as well",
        ),
        (
            ("--tls-key", "none.pem"),
            "server.tls_key (flag --tls-key) needs server.tls_cert (--tls-cert) as well",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_bad_certificate_ends_the_start_in_one_line(options: tuple[str, ...], said: str) -> None:
    ended = run("serve", *options)
    assert ended.exit_code == 2
    assert said in only_line(ended.stderr)
