"""Fetching images by URL: from public addresses only, in bounded time and size."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import trustme

from holdfast.errors import InvalidRequest
from holdfast.front.images import fetch
from holdfast.front.images.fetch import DaemonThreads, fetch_image, is_public
from tests.fakes.images import png

LOOPBACK = ipaddress.ip_address("127.0.0.1")


def spellings(address: str) -> dict[str, ipaddress.IPv6Address]:
    """The IPv6 addresses that embed an IPv4 address, by transition mechanism."""
    inner = int(ipaddress.IPv4Address(address))
    local = int(ipaddress.IPv6Address("64:ff9b:1::"))
    numbers = {
        "compatible": inner,
        "mapped": 0xFFFF << 32 | inner,
        "translated": 0xFFFF << 48 | inner,
        "NAT64": 0x64FF9B << 96 | inner,
        "local NAT64, 96 bits": local | inner,
        # RFC 6052: bits 64 to 71 are zero
        "local NAT64, 48 bits": local | inner >> 16 << 64 | (inner & 0xFFFF) << 40,
        "local NAT64, 64 bits": local | inner << 24,
        "6to4": 0x2002 << 112 | inner << 80,
        "6to4, as the host": 0x2002 << 112 | 0x08080808 << 80 | inner,
        "Teredo server": 0x20010000 << 96 | inner << 64 | (0x08080808 ^ 0xFFFFFFFF),
        "Teredo client": 0x20010000 << 96 | 0x08080808 << 64 | (inner ^ 0xFFFFFFFF),
        "ISATAP": 0xFE80 << 112 | 0x5EFE << 32 | inner,
    }
    return {name: ipaddress.IPv6Address(number) for name, number in numbers.items()}


INNER = [
    *("0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1"),
    *("192.0.0.8", "192.168.1.1", "198.18.0.1", "203.0.113.7", "224.0.0.1", "255.255.255.255"),
]


@pytest.mark.parametrize("spelling", spellings("10.0.0.1"))
@pytest.mark.parametrize("inner", INNER)
def test_no_spelling_of_a_private_ipv4_address_is_public(inner: str, spelling: str) -> None:
    assert not is_public(spellings(inner)[spelling])


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",  # metadata of clouds
        "100.64.0.1",  # carrier-grade NAT
        "192.0.0.192",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.7",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::127.0.0.1",
        "64:ff9b::10.0.0.1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2001:0:4136:e378:8000:63bf:80ff:fffe",
        "100::1",
        "3fff::1",
        "5f00::1",
        "4000::1",
        "fe80::5efe:8.8.8.8",
        "64:ff9b:1::8.8.8.8",
        "::8.8.8.8",
    ],
)
def test_an_address_that_is_not_public_is_never_contacted(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
)
def test_a_public_address_may_be_contacted(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


def test_this_machines_own_address_is_never_contacted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ipaddress.ip_address("93.184.215.14")
    monkeypatch.setattr(fetch, "_own_addresses", lambda: {own})
    assert not is_public(own)


def test_the_peer_of_a_connection_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if NAT had rewritten the address, or the name resolved differently the second time."""
    public = ipaddress.ip_address("93.184.215.14")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (str(public), port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        connect = socket.socket.connect
        monkeypatch.setattr(
            socket.socket, "connect", lambda sock, _: connect(sock, ("127.0.0.1", port))
        )
        assert "private address" in refused("http://rebinding.example/cat.png")


def refused(url: str, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        fetch_image(
            url,
            **{"field": "messages.0.content.1", "max_bytes": 10_000, "seconds": 20, **options},
        )
    assert error.value.field == "messages.0.content.1"
    return str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/cat.png",
        "http://127.1/cat.png",
        "http://2130706433/cat.png",
        "http://0x7f000001/cat.png",
        "http://0177.0.0.1/cat.png",
        "http://0/cat.png",
        "http://localhost/cat.png",
        "http://localhost:8321/health",
        "http://LOCALHOST./cat.png",
        "http://[::1]/cat.png",
        "http://[::ffff:127.0.0.1]/cat.png",
        "http://[fe80::1%25lo]/cat.png",
        "http://169.254.169.254/latest/meta-data/",
        "http://10.0.0.1/cat.png",
        "http://example.com@127.0.0.1/cat.png",
        "http://127.0.0.1#@example.com/",
        "http://127.0.0.1\\@example.com/",
        "https://127.0.0.1:443/cat.png",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "http:///cat.png",
        "http://",
        "http://[::1/cat.png",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1/\r\nHost: evil",
        "http://" + "a" * 300 + ".example/",
        "http://x/" + "a" * 10_000,
    ],
)
def test_no_url_leads_to_this_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(sock: socket.socket, address: Any) -> None:
        raise AssertionError(f"contacted {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert "cannot be fetched" in refused(url)


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
        for address in ("93.184.215.14", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert "private address" in refused("http://rebinding.example/cat.png")


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def served(answer: Answer, *, certificate: trustme.LeafCert | None = None) -> Iterator[str]:
    """A server on loopback. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                answer(self)

        def log_message(self, template: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(context)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{'http' if certificate is None else 'https'}://localhost:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sends(body: bytes, status: int = 200, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answer


def fetched(url: str, **options: Any) -> bytes:
    return fetch_image(
        url,
        **{
            "field": "f",
            "max_bytes": 10_000,
            "seconds": 20,
            "is_allowed": lambda _: True,
            **options,
        },
    )


def test_an_image_is_fetched() -> None:
    with served(sends(png())) as url:
        assert fetched(f"{url}/cat.png?size=1") == png()


def test_path_and_host_are_encoded_as_by_a_browser() -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        seen.append((request.path, request.headers["Host"]))
        sends(png())(request)

    with served(answer) as url:
        fetched(f"{url}/ein Käfer.png?größe=%20&a=b+c")
    host = url.removeprefix("http://")
    assert seen == [("/ein%20K%C3%A4fer.png?gr%C3%B6%C3%9Fe=%20&a=b+c", host)]


def test_an_image_is_fetched_over_tls_under_its_urls_name(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with served(sends(png()), certificate=authority.issue_cert("localhost")) as url:
        assert "SSLCertVerificationError" in refused(url, is_allowed=lambda _: True)
        monkeypatch.setattr(ssl, "create_default_context", lambda: context)
        assert fetched(url) == png()
        other = url.replace("localhost", "127.0.0.1")
        assert "SSLCertVerificationError" in refused(other, is_allowed=lambda _: True)


def test_a_redirect_is_followed_only_to_an_allowed_address() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/cat.png":
            sends(png())(request)
        elif request.path == "/away":
            sends(b"", 302, location="http://127.9.9.9/cat.png")(request)
        elif request.path == "/file":
            sends(b"", 302, location="file:///etc/passwd")(request)
        elif request.path == "/loop":
            sends(b"", 301, location="/loop")(request)
        else:
            sends(b"", 302, location="/cat.png")(request)

    with served(answer) as url:
        only_here = {
            "is_allowed": lambda address: address in (LOOPBACK, ipaddress.ip_address("::1"))
        }
        assert fetched(f"{url}/moved", **only_here) == png()
        assert "private address" in refused(f"{url}/away", **only_here)
        assert "only http and https" in refused(f"{url}/file", **only_here)
        assert "more than 3 redirects" in refused(f"{url}/loop", **only_here)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (sends(b"gone", 404), "status 404"),
        (sends(b"no", 500), "status 500"),
        (sends(b"", 302), "status 302"),
        (sends(b"x" * 10_001), "more than 10,000 bytes"),
        (sends(b"x" * 10, content_length="20", connection="close"), "too early"),
    ],
)
def test_an_answer_without_a_whole_image_is_refused(answer: Answer, reason: str) -> None:
    with served(answer) as url:
        assert reason in refused(url, is_allowed=lambda _: True)


def test_an_endless_answer_is_cut_at_the_limit() -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while True:
            request.wfile.write(b"x" * 1000)

    with served(endless) as url:
        assert "more than 10,000 bytes" in refused(url, is_allowed=lambda _: True)


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_slow_server_is_given_up_at_the_deadline(
    is_secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()

    def dripping(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-length", "500")
        request.end_headers()
        try:
            for _ in range(499):  # 10 s
                request.wfile.write(b"x")
                request.wfile.flush()
                stopped.wait(0.02)
        except OSError:
            stopped.set()
            raise

    authority = trustme.CA()
    context = ssl.create_default_context()
    authority.configure_trust(context)
    monkeypatch.setattr(ssl, "create_default_context", lambda: context)
    certificate = authority.issue_cert("localhost") if is_secure else None
    with served(dripping, certificate=certificate) as url:
        assert "longer than 0.3 s" in refused(url, seconds=0.3, is_allowed=lambda _: True)
        assert stopped.wait(20), "the connection outlived the deadline"


def test_a_stalled_tls_handshake_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}/"
        assert "longer than 0.2 s" in refused(url, seconds=0.2, is_allowed=lambda _: True)


def test_a_slow_dns_lookup_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def slow(*_: object, **__: object) -> list[Any]:
        may_end.wait(60)
        return []

    monkeypatch.setattr(fetch, "_LOOKUPS", DaemonThreads(2, name="test"))
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    for _ in range(3):  # the last one waits for a thread without success
        assert "longer than 0.1 s" in refused("http://slow.example/", seconds=0.1)
    assert not may_end.is_set()
    may_end.set()


def test_daemon_threads_return_results_and_cancel_waiting_calls() -> None:
    threads = DaemonThreads(1, name="test")
    assert threads.submit(int, "7").result(10) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        threads.submit(int, "x").result(10)
    has_begun, may_end = threading.Event(), threading.Event()

    def busy() -> bool:
        has_begun.set()
        return may_end.wait(60)

    running = threads.submit(busy)
    waiting = threads.submit(int)
    assert has_begun.wait(10)
    threads.shutdown()
    assert waiting.cancelled()
    may_end.set()
    assert running.result(10)
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(int)


def test_a_process_does_not_wait_for_a_busy_daemon_thread() -> None:
    program = """
import threading
from holdfast.front.images.fetch import DaemonThreads
begun = threading.Event()
DaemonThreads(1, name="test").submit(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
