from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.server.guard import host_name, is_loopback, is_wildcard, normal_name

ports = st.integers(0, 65535).map(lambda port: f":{port}") | st.just("")
labels = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,20}[A-Za-z0-9_])?", fullmatch=True)
names = st.lists(labels, min_size=1, max_size=4).map(".".join)


@given(name=names, dot=st.sampled_from(["", "."]), port=ports)
def test_host_names_ignore_case_port_and_trailing_dot(name: str, dot: str, port: str) -> None:
    assert host_name(f"{name}{dot}{port}") == normal_name(name)


@given(address=st.ip_addresses(), port=ports)
def test_addresses_are_normalized(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: str
) -> None:
    written = f"[{address.exploded.upper()}]" if address.version == 6 else str(address)
    assert host_name(f"{written}{port}") == str(address)


@given(text=st.text(max_size=40) | st.text(alphabet="localhost.127[]:@%/\\ 089f", max_size=24))
def test_a_parsed_host_is_exactly_a_name_and_a_port(text: str) -> None:
    name = host_name(text)
    if name is not None:
        bracketed = f"[{name}]" if ":" in name else name
        rest = text[text.index("]") + 1 :] if ":" in name else text.lower()[len(name) :]
        assert rest.lstrip(".").lstrip(":").isdecimal() or rest in ("", ".")
        assert host_name(bracketed) == name


@given(
    good=st.sampled_from(["localhost", "127.0.0.1", "[::1]"]),
    port=ports,
    bad=st.sampled_from(
        [
            "@evil.com",
            ":80@evil.com",
            " ",
            "\t",
            "/",
            "?",
            "#",
            "\\",
            ",evil.com",
            ":",
            ":x",
            ":-1",
            "%00",
            "\n",
        ]
    ),
    in_front=st.booleans(),
)
def test_a_malformed_host_is_not_trimmed(good: str, port: str, bad: str, in_front: bool) -> None:
    assert host_name(bad + good + port if in_front else good + port + bad) is None


LONG_NAME = ".".join(["a" * 60] * 5)
BAD_NAMES = [
    "",
    ".",
    "..",
    "a..b",
    "a" * 64,
    LONG_NAME,
    "ⅼocalhost",
    "user@localhost",
    "user:pw@localhost",
]
BAD_PORTS = [
    "localhost:80@evil.com",
    "localhost:",
    "localhost:99999",
    "localhost:8o",
    "localhost:８０",
    "localhost.:80.",
]
BAD_BRACKETS = [
    "::1",
    "[::1",
    "::1]",
    "[::1]x",
    "[[::1]]",
    "[fe80::1%eth0]",
    "[1.2.3.4]",
    "[localhost]",
]


@pytest.mark.parametrize("header", [*BAD_NAMES, *BAD_PORTS, *BAD_BRACKETS])
def test_a_malformed_header_is_rejected(header: str) -> None:
    assert host_name(header) is None


@pytest.mark.parametrize(
    ("host", "wildcard", "loopback"),
    [("", True, False), ("0.0.0.0", True, False), ("::", True, False)],
)
def test_wildcards_are_recognized(host: str, wildcard: bool, loopback: bool) -> None:
    assert (is_wildcard(host), is_loopback(host)) == (wildcard, loopback)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]"])
def test_loopback_is_recognized(host: str) -> None:
    assert is_loopback(host)
    assert not is_wildcard(host)
