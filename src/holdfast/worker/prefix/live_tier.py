"""The hot tier: states of sequences that run or are parked, for others to begin from.

Device thread only.

It moves, shares and copies them, and puts into blocks what only a state that leaves has.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from holdfast.store.block import BlockKey
from holdfast.wire.token_ids import TOKEN_BYTES, common_tokens
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.kv.codec import Payload, pack
from holdfast.worker.kv.form import Codec, ModelForm
from holdfast.worker.kv.live import BaseUse, LiveBase, LiveState, held_bytes
from holdfast.worker.kv.snapshot import KVBlock, all_finite, copy_block
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.live import HeldMemory, LiveChain, LiveChains, LiveClaim
from holdfast.worker.prefix.lookup import Lookup

LEAST_SHARED_TOKENS = BLOCK_TOKENS  # fewer are copied
# a parked state is moved to who needs all of it but one part in so many, or a block
MOST_LOST_SHARE = 8
CUE_TOKENS = 16  # at a prompt's end, which templates write otherwise once there is an answer


class LiveTier:
    """The live states of one model."""

    def __init__(
        self, index: PrefixIndex, *, form: ModelForm, codec: Codec, most_parked_bytes: int | None
    ) -> None:
        """most_parked_bytes: 0: none is parked, None: as many as fit."""
        self._index, self._form, self._codec = index, form, codec
        self._most_parked_bytes, self._token_bytes = (
            most_parked_bytes,
            sum(each.of(1).nbytes for each in form.block),
        )
        self._chains = LiveChains()
        self._held: HeldMemory | None = HeldMemory()  # None: something has changed

    def claim(self, lookup: Lookup) -> LiveClaim | None:
        """A claim on the live chain that has most of what a lookup wants; None when none has any of
        it.
        """
        limit = len(lookup.chain) - TOKEN_BYTES  # the last token is always read
        chain, tokens = self._chains.longest(lookup.chain[:limit], tenant=lookup.tenant)
        if chain is None or chain.state is None:
            return None
        taken = [claim.tokens for claim in chain.claims if claim.use == "moved"]
        tokens = min(tokens, *taken) if taken else tokens  # what is behind that will be gone
        needs_end = not self._form.resumes_anywhere
        if needs_end and not (
            lookup.may_move
            and chain.is_parked
            and not chain.claims
            and chain.state.can_rewind(tokens)
        ):
            needs_end, tokens = False, min(tokens, lookup.plan.tokens) if self._form.block else 0
        if tokens == 0 or (needs_end and tokens < lookup.plan.tokens):
            return None
        claim = LiveClaim(chain=chain, tokens=tokens, needs_end=needs_end)
        chain.claims.append(claim)
        claim.use = self._use_of(claim, may_move=lookup.may_move)
        return claim

    def join(self, lookup: Lookup) -> None:
        """Have a lookup that found blocks only share what is live by now: somebody has begun from
        the same ones meanwhile.
        """
        wanted = lookup.plan.tokens
        if lookup.base is not None or lookup.in_blocks_only or wanted < LEAST_SHARED_TOKENS:
            return
        chain, tokens = self._chains.longest(
            lookup.chain[: wanted * TOKEN_BYTES], tenant=lookup.tenant
        )
        if (
            chain is not None
            and chain.state is not None
            and chain.state.can_share
            and tokens >= LEAST_SHARED_TOKENS
        ):
            lookup.base = LiveClaim(chain=chain, tokens=tokens)
            chain.claims.append(lookup.base)

    def base(self, lookup: Lookup) -> LiveBase | None:
        """The live state that a lookup has claimed, for the engine.

        What is moved is the sequence's own from now on.
        """
        claim = lookup.base
        if claim is None:
            return None
        chain, tokens = claim.chain, claim.tokens
        assert chain.state is not None, "a live chain to begin from is gone"
        claim.use = self._use_of(claim, may_move=lookup.may_move)
        if claim.use == "moved":
            self._let_go(
                chain, [key for key in chain.keys if sum(self._index.run_of(key)) > tokens]
            )
        self._chains.touch(chain)
        return LiveBase(state=chain.state, tokens=tokens, use=claim.use)

    def _use_of(self, claim: LiveClaim, *, may_move: bool) -> BaseUse:
        """A parked state is moved if nobody else wants it and little of it is lost.

        Who parts from it within its prompt is another agent, to which it may lose nothing where the
        beginning can be shared.
        """
        chain, tokens = claim.chain, claim.tokens
        assert chain.state is not None, "a live chain to begin from is gone"
        is_free = all(
            other.tokens <= tokens and other.use != "moved"
            for other in chain.claims
            if other is not claim
        )
        lost = chain.state.tokens - tokens
        is_little = lost <= max(BLOCK_TOKENS, tokens // MOST_LOST_SHARE)
        can_share = chain.state.can_share and tokens >= LEAST_SHARED_TOKENS
        goes_on = tokens >= chain.prompt_tokens - CUE_TOKENS or not can_share
        if claim.needs_end or (may_move and chain.is_parked and is_free and is_little and goes_on):
            return "moved"
        return "shared" if can_share else "copied"

    def begin(self, lookup: Lookup | None, live: LiveChain, state: LiveState) -> LiveChain:
        """A sequence is open: its chain is live from now on.

        Returns it: `live`, or the one that it has taken over.

        lookup: what it began from, if anything.
        """
        self._held = None
        # Before it is counted: nobody could let go of a chain whose sequence does not know that it
        # is live.
        keys = (
            [] if lookup is None or not lookup.may_move else self._index.whole(lookup.plan.pieces)
        )
        claim = None if lookup is None else lookup.base
        if claim is not None and claim.use == "moved":
            taken = claim.chain
            taken.chain, taken.cursor, taken.is_parked = live.chain, live.cursor, False
            taken.request_id, taken.session_id, taken.prompt_tokens = (
                live.request_id,
                live.session_id,
                live.prompt_tokens,
            )
            live = taken
        else:
            self._chains.add(live)
        live.state = state
        if lookup is not None:
            live.held_tokens = lookup.held_tokens
        self._index.begin_holding(live, keys)
        return live

    def park(self, live: LiveChain, chain: bytes) -> None:
        """A sequence has ended in good order that knows `chain`, packed tokens: keep its state as
        it is, if there is room.
        """
        assert live.state is not None, "a chain is parked that is not live"
        behind = live.state.tokens - len(chain) // TOKEN_BYTES  # read behind its end
        may_stay = not live.is_stale and self._most_parked_bytes != 0
        if not may_stay or (behind > 0 and not live.state.can_rewind(live.state.tokens - behind)):
            self.leave(live)
            return
        live.state.rewind(max(0, behind))
        live.state.rest()
        if not live.state.can_share:
            self._share_with_parked(live.state, chain, tenant=live.tenant)
        live.chain, live.is_parked, live.held_tokens = chain, True, 0
        self._chains.touch(live)
        self._held = None
        if self._most_parked_bytes is not None:
            self.reclaim(self.held.parked_bytes - self._most_parked_bytes)

    def _share_with_parked(self, state: LiveState, chain: bytes, *, tenant: str) -> None:
        """Have a state that is about to be parked hold its beginning together with the parked one
        that has most of it.

        For states that share nothing while they run, since a fused kernel wants one buffer: each
        has a copy then.
        """
        best, most = None, LEAST_SHARED_TOKENS - 1
        for other in self._chains.parked:
            if other.tenant == tenant and other.state is not None and not other.is_stale:
                tokens = min(
                    common_tokens(other.chain, chain),
                    other.state.frozen_tokens,
                    state.frozen_tokens,
                )
                if tokens > most:
                    best, most = other.state, tokens
        if best is not None:
            state.share_beginning(best, most)

    def leave(self, live: LiveChain) -> None:
        """A chain is live no more: what only it has is put into blocks.

        Who was to begin from it has to look again.
        """
        self._held = None
        try:
            self._let_go(live, tuple(live.keys))
        finally:
            self._chains.remove(live)
            live.state = None

    def forget_session(self, session_id: str, *, tenant: str) -> None:
        """Nobody is to begin from a session's live states any more, wherever the tree has lost
        them.
        """
        for live in self._chains:
            live.is_stale |= (live.session_id, live.tenant) == (session_id, tenant)

    def drop_stale(self) -> None:
        """Let parked states leave from which nobody is to begin any more."""
        for live in [live for live in self._chains if live.is_parked and live.is_stale]:
            self.leave(live)

    def reclaim(self, nbytes: int) -> None:
        """Let parked states leave until so many bytes are free."""
        wanted = self.held.total_bytes - nbytes
        for live in self._chains.parked:
            if self.held.total_bytes <= wanted:
                break
            self.leave(live)

    def limit_parked(self, nbytes: int | None) -> None:
        """Let parked states take so many bytes from now on; None: as many as fit."""
        self._most_parked_bytes = nbytes
        if nbytes is not None:
            self.reclaim(self.held.parked_bytes - nbytes)

    def newly_frozen(self) -> list[LiveChain]:
        """Chains of running sequences that have frozen more since the last call, which counts as
        held from now on.

        They do so on their own account too, when a long tail has to grow.
        """
        running = [
            (live, live.state)
            for live in self._chains
            if not live.is_parked and live.state is not None
        ]
        frozen = [(live, state.frozen_tokens) for live, state in running if state.can_share]
        changed = [(live, tokens) for live, tokens in frozen if live.held_tokens != tokens]
        for live, tokens in changed:
            live.held_tokens, self._held = tokens, None
        return [live for live, _ in changed]

    @property
    def held(self) -> HeldMemory:
        """Memory of live states that no running sequence has reserved."""
        if self._held is None:
            parked = [
                live.state for live in self._chains if live.is_parked and live.state is not None
            ]
            running = [
                (live.state, live.held_tokens)
                for live in self._chains
                if not live.is_parked and live.state is not None
            ]
            frozen = [state for state, _ in running if state.can_share]
            whole = (
                sum(tokens for state, tokens in running if not state.can_share) * self._token_bytes
            )
            needed = held_bytes((), frozen) + whole
            total = held_bytes(parked, frozen) + whole
            self._held = HeldMemory(total, total - needed, len(parked))
        return self._held

    def copied(self, key: BlockKey) -> KVBlock | None:
        """A copy of a block that a live chain holds, evaluated; None when none does, or it holds
        values that are not finite.
        """
        chain = self._index.holder_of(key)
        return None if chain is None else self._copied(chain, key)

    def _let_go(self, live: LiveChain, keys: Sequence[BlockKey]) -> None:
        """A live chain holds these blocks no more; those that nobody else has come into RAM, as far
        as there is room.
        """
        copies: dict[BlockKey, Payload | None] = {}
        try:
            for key in self._index.held_alone(live, keys):
                copies[key] = self._copied(live, key)
        finally:
            self._index.end_holding(live, keys, copies=copies)

    def _copied(self, chain: LiveChain, key: BlockKey) -> KVBlock | None:
        start, tokens = self._index.run_of(key)
        if chain.state is None:
            return None
        block = pack(copy_block(chain.state.layers, start=start, tokens=tokens), self._codec)
        finite = all_finite(block.arrays)
        mx.eval(block.arrays, finite)
        return block if finite.item() else None
