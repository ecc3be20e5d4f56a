"""Under which addresses other machines reach this one."""

from __future__ import annotations

import ipaddress
import socket

import psutil

_MOST = 4
_ELSEWHERE = ("192.0.2.1", 9)  # an address for documentation


def lan_addresses(*, listens_on: str) -> tuple[str, ...]:
    """Addresses of this machine's interfaces that are up, as they stand in a URL, those of the same
    kind as the wildcard.

    listens_on: 0.0.0.0 for IPv4; :: takes both. Addresses that are good for this machine alone are
    left out.
    """
    families = {socket.AF_INET} if listens_on == "0.0.0.0" else {socket.AF_INET, socket.AF_INET6}
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        each.address
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for each in entries
        if each.family in families
    ]
    reachable = [
        address
        for address in map(_parsed, found)
        if not (address.is_loopback or address.is_link_local)
    ]
    usual = _usual_address()
    reachable.sort(key=lambda address: (str(address) != usual, address.version, int(address)))
    return tuple(
        dict.fromkeys(f"[{each}]" if each.version == 6 else str(each) for each in reachable)
    )[:_MOST]


def _usual_address() -> str:
    """The address from which this machine would speak to others; machines with containers have a
    dozen beside it.
    """
    # datagrams: connecting sends nothing
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(_ELSEWHERE)
        except OSError:
            return ""  # no way out
        return str(asking.getsockname()[0])


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])  # a zone follows it on some systems
