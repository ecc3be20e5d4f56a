"""What Holdfast adds to OpenAI's requests: whose memory it is, and whether the answer is to explain itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from holdfast.http.answers import AnswerPlan

TENANT_HEADER = "x-holdfast-tenant"
EXPLAIN_HEADER = "x-holdfast-explain"
_YES = frozenset({"1", "true", "yes", "on"})


class HoldfastOptions(BaseModel):
    """Options that only Holdfast has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    explain: bool | None = Field(None, description="Tell in the answer what of the prompt was remembered, and why not more.")


def extended(plan: AnswerPlan, headers: Mapping[str, str], *, api_key: str, cache_salt: str) -> AnswerPlan:
    """The plan with what the request's headers and its `cache_salt` say. `api_key`: the one it was let in with."""
    tenant = tenant_of(api_key=api_key, name=headers.get(TENANT_HEADER, ""), cache_salt=cache_salt)
    return replace(
        plan,
        requests=tuple(msgspec.structs.replace(request, tenant=tenant) for request in plan.requests),
        explains=plan.explains or headers.get(EXPLAIN_HEADER, "").strip().lower() in _YES,
    )


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
