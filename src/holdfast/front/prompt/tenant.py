"""Whose memory a request uses."""

from __future__ import annotations

import hashlib


def tenant_of(*, api_key: str, name: str, cache_salt: str) -> str:
    """One name for key, tenant and salt together, from which none of them can be told; empty when
    all are.

    api_key: the server's single one, which has no name: another one means another memory.
    """
    parts = (api_key, name, cache_salt)
    return _digest(parts, person=b"holdfast tenant") if any(parts) else ""


def tenant_of_key(key_name: str, *, name: str, cache_salt: str) -> str:
    """The same for a named key: whoever has a key of that name uses the same memory, today's or
    yesterday's.
    """
    return _digest((key_name, name, cache_salt), person=b"holdfast key")


def _digest(parts: tuple[str, ...], *, person: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16, person=person)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        # "a" and "bc" are not "ab" and "c"
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
