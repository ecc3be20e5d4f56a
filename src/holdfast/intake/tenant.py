"""Whose memory a request uses."""

from __future__ import annotations

import hashlib


def tenant_of(*, api_key: str, name: str, cache_salt: str) -> str:
    """One name for key, tenant and salt together, from which none of them can be told; empty when all are."""
    parts = (api_key, name, cache_salt)
    if not any(parts):
        return ""
    digest = hashlib.blake2b(digest_size=16, person=b"holdfast tenant")
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)  # "a" and "bc" are not "ab" and "c"
    return digest.hexdigest()
