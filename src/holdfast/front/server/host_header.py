"""The Host header, read strictly: what is not exactly a name or an address with an optional port is
nothing at all.
"""

from __future__ import annotations

import ipaddress
import re

_LONGEST_NAME = 253
_PORT = r"(?::([0-9]{1,5}))?"
_NAMED = re.compile(rf"((?:[A-Za-z0-9_-]{{1,63}}\.)*[A-Za-z0-9_-]{{1,63}})\.?{_PORT}")
_BRACKETED = re.compile(rf"\[([0-9A-Fa-f:.]{{2,45}})\]{_PORT}")
_LAST_PORT = 65535


def host_name(header: str) -> str | None:
    """The name or address that a Host header gives, as `normal_name` writes it; None when it is not
    well-formed.

    Nothing is cut off to make it fit: of `localhost:80@evil.com` a lenient reader would keep what
    it likes.
    """
    found = _NAMED.fullmatch(header) or _BRACKETED.fullmatch(header)
    if found is None or int(found[2] or 0) > _LAST_PORT or len(found[1]) > _LONGEST_NAME:
        return None
    if header.startswith("[") and not (":" in found[1] and is_address(found[1])):
        return None
    return normal_name(found[1])


def normal_name(name: str) -> str:
    """A name in the form in which names are compared: small letters, no brackets, no dot at the
    end, addresses in short form.
    """
    name = name.strip("[]").rstrip(".").lower()
    return str(ipaddress.ip_address(name)) if is_address(name) else name


def is_address(name: str) -> bool:
    """Whether it is an IP address, without brackets and without a zone."""
    return _address(name) is not None


def is_wildcard(name: str) -> bool:
    """Whether listening on it means listening on all addresses."""
    address = _address(name.strip("[]"))
    return name == "" or (address is not None and address.is_unspecified)


def is_loopback(name: str) -> bool:
    """Whether only this machine can reach what listens on it."""
    address = _address(normal_name(name))
    return normal_name(name) == "localhost" or (address is not None and address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return None if "%" in name else ipaddress.ip_address(name)
    except ValueError:
        return None
