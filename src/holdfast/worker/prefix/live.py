"""Chains whose state is live: of sequences that run, and of those that have ended and are parked.

Knows no MLX.

What a live chain holds needs no payload in RAM. A parked one is taken over by who goes on from it,
or leaves when there is need for its memory: the one that was used longest ago first, those that
somebody is to begin from last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.store.block import BlockKey
from holdfast.wire.requests import RequestId
from holdfast.wire.token_ids import common_tokens
from holdfast.worker.prefix.piece import Cursor

if TYPE_CHECKING:
    from holdfast.worker.kv.live import BaseUse, LiveState


@dataclass(slots=True, eq=False, kw_only=True)
class LiveClaim:
    """That a sequence is to begin from the first tokens of a live chain.

    needs_end: with all layers as they are at its end, or can be rewound from there; one alone can
        have that.
    use: as it is to be when it is found, and as it was when the engine was given it.
    """

    chain: LiveChain
    tokens: int
    needs_end: bool = False
    use: BaseUse = "copied"

    @property
    def is_lost(self) -> bool:
        """Whether the chain is live no more, or not to be trusted: it has to be looked up again."""
        return self.chain.state is None or self.chain.is_stale

    @property
    def held_tokens(self) -> int:
        """Tokens for which no memory has to be reserved."""
        return 0 if self.use == "copied" else self.tokens


@dataclass(slots=True, eq=False, kw_only=True)
class LiveChain:
    """A sequence whose state is live.

    Of a running one, the first `sound_tokens` are known to have come out right.

    keys: the blocks of which it holds every token. held_tokens: of what it began from, that nobody
    reserves memory for.
    """

    request_id: RequestId  # of who runs on it, or did last
    tenant: str
    session_id: str = ""  # the session that its last request was of, if any
    chain: bytes | bytearray  # packed
    prompt_tokens: int = 0  # of its last request
    cursor: Cursor
    state: LiveState | None = None  # None: it is not open yet
    keys: set[BlockKey] = field(default_factory=set)
    held_tokens: int = 0
    is_parked: bool = False
    is_stale: bool = False  # something that it holds was forgotten: nobody is to begin from it
    used: int = 0
    claims: list[LiveClaim] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many of its tokens another sequence may begin from."""
        if self.state is None or self.is_stale:
            return 0
        return self.state.tokens if self.is_parked else min(self.state.tokens, self.cursor.position)


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes of live states that no running sequence has reserved, what several share once; those
    that go with parked ones.
    """

    total_bytes: int = 0
    parked_bytes: int = 0
    parked: int = 0  # states


class LiveChains:
    """All live chains of one model."""

    def __init__(self) -> None:
        self._chains: list[LiveChain] = []
        self._uses = 0

    def __iter__(self) -> Iterator[LiveChain]:
        return iter(self._chains)

    @property
    def parked(self) -> list[LiveChain]:
        """Those that have ended, the first to leave first."""
        parked = [chain for chain in self._chains if chain.is_parked]
        return sorted(
            parked, key=lambda chain: (not chain.is_stale, bool(chain.claims), chain.used)
        )

    def add(self, chain: LiveChain) -> None:
        """One begins."""
        self._chains.append(chain)
        self.touch(chain)

    def touch(self, chain: LiveChain) -> None:
        """It was used."""
        self._uses += 1
        chain.used = self._uses

    def remove(self, chain: LiveChain) -> None:
        """One is live no more."""
        self._chains.remove(chain)

    def longest(self, packed: bytes, *, tenant: str) -> tuple[LiveChain | None, int]:
        """Which of them begins with most of these tokens, and how many; of equals a parked one with
        the fewest others.
        """
        best, most = None, (0, False, 0)
        for chain in self._chains:
            if chain.tenant == tenant and (own := chain.tokens):
                shared = min(own, common_tokens(chain.chain, packed))
                rank = (shared, chain.is_parked, shared - own)
                if shared and (best is None or rank > most):
                    best, most = chain, rank
        return best, most[0]
