"""Fetches images by URL, only from public addresses.

A client must not be able to make the server reach machines that only the server can reach. So the
name in a URL is resolved once, all of its addresses are checked, and the connection is made to a
checked address, not to the name. Then the address of the other end is checked again. A redirect is
a new URL and is checked in the same way. Proxies from the environment are not used.

A fetch ends at its deadline, even if the host answers slowly or not at all, because its socket is
shut down then. Looking up a name cannot be interrupted: it runs on other threads, and the fetch
stops waiting for it.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import psutil

from holdfast.errors import InvalidRequest

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
AddressTest: TypeAlias = Callable[[_Address], bool]
_MOST_REDIRECTS: Final = 3
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_LOOKUPS_AT_ONCE: Final = 16
_LONGEST_URL: Final = 8192
_READ_BYTES: Final = 1 << 16
_PORTS: Final = {"http": 80, "https": 443}
# Networks that `ipaddress` considers public in some versions of Python: protocol assignments with
# Teredo, relays, documentation (RFC 9637), and 6to4, which embeds IPv4 addresses.
_SPECIAL_NETWORKS: Final = [
    ipaddress.ip_network(network)
    for network in "192.0.0.0/24 192.88.99.0/24 2001::/23 2001:db8::/32 3fff::/20 2002::/16".split()
]
# The only public IPv6 block so far. Outside it, besides private networks, are forms of IPv4
# addresses: ::a.b.c.d, ::ffff:0:a.b.c.d, and 64:ff9b:1::/48 (NAT64 of a local network).
_PUBLIC_IPV6: Final = ipaddress.ip_network("2000::/3")
_UNQUOTED: Final = "/?%:=&~#+!$,;'@()*[]"  # characters of URLs that are sent unchanged
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_HEADERS: Final = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "holdfast"}


class DaemonThreads(Executor):
    """A thread pool that a process does not wait for when it ends, even while a thread is busy."""

    def __init__(self, max_threads: int, *, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._threads = 0
        self._is_shut_down = False
        self._lock = threading.Lock()

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the threads are shut down")
            self._tasks.put((future, partial(fn, *args, **kwargs)))
            if self._threads < self._max_threads:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel what has not begun. Does not wait for the rest."""
        assert cancel_futures, "what has not begun is always cancelled"
        assert not wait, "these threads are not waited for"
        with self._lock:
            self._is_shut_down = True
            with contextlib.suppress(queue.Empty):
                while task := self._tasks.get_nowait():
                    task[0].cancel()
            for _ in range(self._threads):
                self._tasks.put(None)

    def _run(self) -> None:
        """Carry out tasks until None comes. Runs on each of the threads."""
        while task := self._tasks.get():
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, work  # they may contain an image


_LOOKUPS: Final = DaemonThreads(_LOOKUPS_AT_ONCE, name="look up")


def is_public(address: _Address) -> bool:
    """Whether an address is public: reachable from the whole internet, and not this machine's own.

    An IPv4-mapped or NAT64 address is judged by its IPv4 address. All other IPv6 addresses that
    embed an IPv4 address are refused, because no public service needs them.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.scope_id is not None or address not in _PUBLIC_IPV6:
            return False
    if any(address in network for network in _SPECIAL_NETWORKS):
        return False
    return address.is_global and not address.is_multicast and address not in _own_addresses()


def _own_addresses() -> set[_Address]:
    """The addresses of this machine's network interfaces, some of which may be public."""
    return {
        ipaddress.ip_address(each.address.partition("%")[0])
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }


def fetch_image(
    url: str, *, field: str, max_bytes: int, seconds: float, is_allowed: AddressTest = is_public
) -> bytes:
    """Fetch an image. Blocks for at most about `seconds`.

    Raises InvalidRequest, which names the field.

    is_allowed: whether an address may be contacted.
    """
    deadline = time.monotonic() + seconds
    try:
        for _ in range(_MOST_REDIRECTS + 1):
            url_parts = _checked_url(url)
            with _response(url_parts, is_allowed=is_allowed, deadline=deadline) as response:
                location = response.getheader("Location")
                if response.status in _REDIRECTS and location:
                    url = urljoin(url, location)
                    continue
                if response.status != http.client.OK:
                    raise _FetchRefused(f"its server answered with status {response.status}")
                return _read_body(response, max_bytes=max_bytes, deadline=deadline)
        raise _FetchRefused(f"it has more than {_MOST_REDIRECTS} redirects")
    except _FetchRefused as error:
        reason = str(error)
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = type(error).__name__
    if time.monotonic() >= deadline:  # then the socket was closed, which has many consequences
        reason = f"it took longer than {seconds:g} s"
    raise InvalidRequest(f"the image cannot be fetched: {reason}", field=field)


class _FetchRefused(Exception):
    """The reason why an image is not fetched."""


def _checked_url(url: str) -> SplitResult:
    """The parts of a URL. Raises _FetchRefused unless it is a short http or https URL without a
    user.
    """
    if len(url) > _LONGEST_URL:
        raise _FetchRefused(f"a URL may have at most {_LONGEST_URL:,} characters")
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise _FetchRefused("only http and https URLs are allowed")
    if parts.username is not None or parts.password is not None:
        raise _FetchRefused("a URL must not contain a user name")
    return parts


@contextlib.contextmanager
def _response(
    parts: SplitResult, *, is_allowed: AddressTest, deadline: float
) -> Iterator[http.client.HTTPResponse]:
    """Send the request, and yield the response, whose socket is closed at the deadline."""
    host = str(parts.hostname)
    port = parts.port or _PORTS[parts.scheme]
    connection = http.client.HTTPConnection(host, port)
    connection.default_port = _PORTS[parts.scheme]  # which the Host header leaves out
    sock = _connected(host, port, is_allowed=is_allowed, deadline=deadline)
    with _SocketDeadline(deadline) as socket_closer, contextlib.closing(connection):
        connection.sock = socket_closer.watch_socket(sock)
        if parts.scheme == "https":
            # this moves the connection to another socket, so the handshake must wait for `watch_socket`
            tls_socket = ssl.create_default_context().wrap_socket(
                sock, server_hostname=host, do_handshake_on_connect=False
            )
            connection.sock = socket_closer.watch_socket(tls_socket)
            tls_socket.do_handshake()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        path = quote(path, safe=_UNQUOTED)
        connection.request("GET", path, headers=_HEADERS)
        with connection.getresponse() as response:
            yield response


class _SocketDeadline:
    """Closes a socket, and shuts it down at a deadline so that blocked reads and writes return."""

    def __init__(self, deadline: float) -> None:
        self._sock: socket.socket | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._shut_down)
        self._timer.daemon = True

    def __enter__(self) -> _SocketDeadline:
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            if self._sock is not None:
                self._sock.close()

    def watch_socket(self, sock: socket.socket) -> socket.socket:
        """Close or shut down this socket from now on, in place of an earlier one. Raises
        TimeoutError if the deadline has passed.
        """
        with self._lock:
            self._sock = sock
            if self._is_over:
                raise TimeoutError
        return sock

    def _shut_down(self) -> None:
        """Shut the socket down, so that a thread that is blocked in it continues with an error."""
        with self._lock:
            self._is_over = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    # not SSLSocket's method, which changes what the reading thread is using
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)


def _connected(host: str, port: int, *, is_allowed: AddressTest, deadline: float) -> socket.socket:
    """Connect to an address of a host, after all of its addresses were checked."""
    lookup = _LOOKUPS.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        addresses = lookup.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        lookup.cancel()
        raise
    except (OSError, UnicodeError) as error:
        raise _FetchRefused("its host has no address") from error
    for *_, target in addresses:
        if not is_allowed(ipaddress.ip_address(target[0])):
            raise _FetchRefused("its host has a private address")
    last_error: OSError | None = None
    for family, socket_type, protocol, _, target in addresses:
        sock = socket.socket(family, socket_type, protocol)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(target)
            if not is_allowed(ipaddress.ip_address(sock.getpeername()[0])):
                raise _FetchRefused("its host has a private address")
            return sock
        except OSError as error:
            sock.close()
            last_error = error
        except _FetchRefused:
            sock.close()
            raise
    raise last_error or _FetchRefused("its host has no address")


def _read_body(response: http.client.HTTPResponse, *, max_bytes: int, deadline: float) -> bytes:
    """The body of the response. Raises _FetchRefused if it is too large or incomplete, and
    TimeoutError.
    """
    too_large = f"it has more than {max_bytes:,} bytes"
    if (response.length or 0) > max_bytes:
        raise _FetchRefused(too_large)
    pieces = []
    received_bytes = 0
    while piece := response.read(_READ_BYTES):
        pieces.append(piece)
        received_bytes += len(piece)
        if received_bytes > max_bytes:
            raise _FetchRefused(too_large)
        if time.monotonic() >= deadline:
            raise TimeoutError
    if response.length:
        raise _FetchRefused("its server closed the connection too early")
    return b"".join(pieces)
