"""A real server with a certificate: what is printed, who gets in, and a renewal while an answer is
written.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.certificates import CertificateFiles
from tests.fakes.command_line import holdfast, only_line
from tests.fakes.server_process import ServerProcess, until


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def server(files: CertificateFiles) -> Iterator[ServerProcess]:
    server = ServerProcess(
        "--name", "demo", "--tls-cert", str(files.certificate), "--tls-key", str(files.key)
    )
    server.wait_ready()
    yield server
    assert server.stop() == 0, server.log()


def listed(server: ServerProcess, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return holdfast("sessions", "ls", "--url", server.url, cwd=cwd, variables=variables)


def test_its_url_is_printed_as_https_and_commands_work_where_the_certificate_is_trusted(
    server: ServerProcess, files: CertificateFiles, tmp_path: Path
) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    until(lambda: f"curl {server.url}/v1/chat/completions" in server.output(), "the example")
    unknown = listed(server, tmp_path)
    assert unknown.returncode != 0
    assert "SSL_CERT_FILE=cert.pem" in only_line(unknown.stderr)
    by_authority = listed(server, tmp_path, SSL_CERT_FILE=str(files.trusted))
    by_settings = listed(
        server,
        tmp_path,
        HOLDFAST_SERVER_TLS_CERT=str(files.certificate),
        HOLDFAST_SERVER_TLS_KEY=str(files.key),
    )
    assert (by_authority.returncode, by_settings.returncode) == (0, 0), (
        by_authority.stderr + by_settings.stderr
    )
    said = holdfast(
        "chat",
        "--url",
        server.url,
        cwd=tmp_path,
        stdin="Hello\n",
        variables={"SSL_CERT_FILE": str(files.trusted)},
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()


def test_a_renewal_cuts_no_answer(server: ServerProcess, files: CertificateFiles) -> None:
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
def test_what_cannot_be_served_ends_the_start_in_one_line(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    ended = holdfast("serve", *options, cwd=tmp_path)
    assert ended.returncode == 2
    assert said in only_line(ended.stderr)
