from __future__ import annotations

import ipaddress

import pytest

from holdfast.front.run.running_servers import lan_addresses


@pytest.mark.parametrize("listens_on", ["0.0.0.0", "::"])
def test_lan_addresses_are_reachable_and_valid_in_a_url(listens_on: str) -> None:
    found = lan_addresses(listens_on=listens_on)
    assert len(found) == len(set(found))
    for text in found:
        address = ipaddress.ip_address(text.strip("[]"))
        assert not (address.is_loopback or address.is_link_local or address.is_unspecified)
        assert (address.version == 6) == text.startswith("[")
        assert listens_on == "::" or address.version == 4
