"""What requests and models have in common about KV: whose cache it is, and its precision."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.config import KVBitsChoice


class CacheScope(msgspec.Struct, frozen=True, kw_only=True):
    """Whose prefix cache a command uses: KV is shared only within a tenant and an adapter."""

    tenant: str
    # name of a LoRA adapter of the model; empty: the model itself. In the server, the lease sets it.
    adapter: str = ""

    @property
    def scope(self) -> dict[str, str]:
        """These fields, to compare them, or for another command."""
        return {"tenant": self.tenant, "adapter": self.adapter}


class CacheUse(CacheScope, frozen=True, kw_only=True):
    """How a request uses the prefix cache."""

    tenant: str = ""
    session_id: str = ""  # opened by the request if no session of the tenant with that id is open
    # bits of keys and values; empty: the model's setting. For "" and "auto", the worker decides.
    kv_bits: KVBitsChoice | Literal[""] = ""

    @property
    def cache_use(self) -> dict[str, Any]:
        """These fields, for another request."""
        return {name: getattr(self, name) for name in CacheUse.__struct_fields__}


class KVHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The precision in which sequences of a model hold keys and values.

    `bits` is the value of `kv_bits` for requests that do not set it, and `bytes_per_token` the
    memory that a token then takes (for `auto`: while memory does not run short). `forms` has the
    bytes per token for each value that a request can choose; `refused` has the reason for each
    value that the model does not support.
    """

    bits: str
    bytes_per_token: int
    forms: dict[str, int]
    refused: dict[str, str]

    def bits_of(self, request: CacheUse) -> str:
        """The precision of a request; `auto`: the worker decides."""
        return request.kv_bits or self.bits
