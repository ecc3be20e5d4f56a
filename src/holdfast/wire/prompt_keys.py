"""Keys of the beginnings of prompts, by which the front tells a worker what it has sent before.

Leaf module.

A prompt has one every `STEP_TOKENS` tokens, a hash of all tokens up to there and of the tenant.
Both ends compute them and remember as many, the longest unused are forgotten first.
"""

from __future__ import annotations

import hashlib

from holdfast.wire.token_ids import TOKEN_ID_BYTES, TokenIds

# So many may be sent again. From 2,048 bytes on hashlib lets go of the interpreter's lock, for
# which the event loop might have to wait each time. The keys of 100,000 tokens take 0.6 ms.
STEP_TOKENS = 500
MOST_STEPS = 16_384  # of all prompts: 33 MB of token ids in the worker
_STEP_BYTES = STEP_TOKENS * TOKEN_ID_BYTES
# blake2b's `person`: the two kinds of keys can never meet
_ROOT, _STEP = b"holdfast tenant", b"holdfast prompt"


def tenant_key(tenant: str) -> bytes:
    """What the keys of all prompts of one tenant begin from."""
    return hashlib.blake2b(tenant.encode(), digest_size=32, person=_ROOT).digest()


def steps_behind(key: bytes, token_ids: TokenIds) -> list[tuple[bytes, bytes]]:
    """Key and packed ids of each full step of `token_ids`, which follow the beginning of that key."""
    steps: list[tuple[bytes, bytes]] = []
    for start in range(0, len(token_ids.packed) - _STEP_BYTES + 1, _STEP_BYTES):
        packed = token_ids.packed[start : start + _STEP_BYTES]
        digest = hashlib.blake2b(key, digest_size=32, person=_STEP)
        digest.update(packed)
        key = digest.digest()
        steps.append((key, packed))
    return steps
