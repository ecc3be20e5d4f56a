"""Messages about what the prefix cache of a worker contains: the question and the answer, a bounded
summary of the prefix tree.
"""

from __future__ import annotations

import uuid

import msgspec


def _new_call_id() -> str:
    return uuid.uuid4().hex


class CacheMapQuestion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks a worker for a summary of its prefix cache.

    tenant: whose trees to show. sees_all: whether to show those of all tenants instead.
    """

    tenant: str
    sees_all: bool = False
    call_id: str = msgspec.field(default_factory=_new_call_id)


class CacheTree(msgspec.Struct, frozen=True, kw_only=True, rename={"form": "kv_bits"}):
    """The cached prompts of one tenant in one form of keys and values.

    is_own: whether the tree belongs to the tenant that asks. kv_bits: the form; null if the tree is
    of a tenant without recent sessions. hidden_parts: prompts that begin here and are not listed,
    and hidden_tokens the tokens in them.
    """

    is_own: bool
    form: str | None
    adapter: str
    tokens: int
    hidden_parts: int = 0
    hidden_tokens: int = 0


class CachePart(msgspec.Struct, frozen=True, kw_only=True):
    """Cached tokens between two places where prompts begin to differ.

    tree, parent: indices into `trees` and `parts`; the parent of a part that begins at token 0 is
        null.
    start: the position of its first token.
    live_tokens, ram_tokens, disk_tokens: where its tokens are: in live state, in blocks in RAM, or
        only on disk. They add up to `tokens`. saved_tokens: how many of them are on disk, too.
    below_tokens: tokens in all parts that follow.
    running: requests under way that began with it.
    sessions: the sessions that contain it, the last used first, at most six; session_count: all.
    hidden_parts, hidden_tokens: what follows directly and is not listed.
    """

    tree: int
    parent: int | None
    start: int
    tokens: int
    blocks: int
    bytes: int
    live_tokens: int
    ram_tokens: int
    disk_tokens: int
    saved_tokens: int
    below_tokens: int
    running: int = 0
    sessions: tuple[str, ...] = ()
    session_count: int = 0
    hidden_parts: int = 0
    hidden_tokens: int = 0


class CacheMap(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A summary of a prefix cache: its largest parts, each after its parent.

    hidden_trees: how many trees are not listed. is_complete: false if the cache has too many blocks
    to visit all.
    """

    call_id: str
    trees: tuple[CacheTree, ...] = ()
    hidden_trees: int = 0
    parts: tuple[CachePart, ...] = ()
    blocks: int = 0
    is_complete: bool = True
