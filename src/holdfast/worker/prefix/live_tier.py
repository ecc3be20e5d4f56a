"""The live tier: states of running or parked sequences, from which other sequences start.

Device thread only. A sequence takes a state over (it is moved), shares its frozen buffers, or
copies it. When a state is dropped, the tokens that only this state has are copied into blocks.

A sequence that has ended is *parked*: its state is kept until its memory is needed. *Frozen* buffers
are never written to again, so several states can share them. To *rewind* a state is to drop its last
tokens; window and recurrent layers can do this only within narrow limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import mlx.core as mx

from holdfast.store.block import BlockKey
from holdfast.wire.requests import TOKEN_BYTES, common_tokens
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.kv.codec import PayloadFormat
from holdfast.worker.kv.live import (
    BaseUse,
    LiveBase,
    LiveState,
    Snapshot,
    all_bytes,
    frozen_bytes,
)
from holdfast.worker.prefix.chain import Root
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.lookup import HeldMemory, LiveChain, LiveClaim, Lookup

LEAST_SHARED_TOKENS = BLOCK_TOKENS  # a shorter prefix is copied
# when a parked state is moved, it may lose an eighth of the number of reused tokens, or one block
MOST_LOST_SHARE = 8
CUE_TOKENS = 16  # tokens at a prompt's end that the next turn may contain in another form


class LiveChains:
    """All live chains of one model.

    When memory is needed, the least recently used parked chain is dropped first, claimed ones last.
    """

    def __init__(self) -> None:
        self._chains: list[LiveChain] = []
        self._uses = 0

    def __iter__(self) -> Iterator[LiveChain]:
        return iter(self._chains)

    @property
    def parked(self) -> list[LiveChain]:
        """The parked chains, in the order in which they will be dropped."""
        parked = [chain for chain in self._chains if chain.is_parked]
        return sorted(
            parked, key=lambda chain: (not chain.is_stale, bool(chain.claims), chain.used)
        )

    def add(self, chain: LiveChain) -> None:
        """Add a new chain as the most recently used one."""
        self._chains.append(chain)
        self.touch(chain)

    def touch(self, chain: LiveChain) -> None:
        """Record that a chain was used."""
        self._uses += 1
        chain.used = self._uses

    def remove(self, chain: LiveChain) -> None:
        """Remove a chain that is no longer live."""
        self._chains.remove(chain)

    def longest(self, packed: bytes, *, root: Root) -> tuple[LiveChain | None, int]:
        """The chain that shares the longest prefix with these tokens, and the length of that
        prefix. Returns (None, 0) if no chain shares a token.

        If several chains share the same prefix, a parked chain is preferred, and then the chain
        with the fewest further tokens.
        """
        best = None
        best_rank = (0, False, 0)
        for chain in self._chains:
            if chain.root == root and (chain_tokens := chain.tokens):
                shared = min(chain_tokens, common_tokens(chain.chain, packed))
                rank = (shared, chain.is_parked, shared - chain_tokens)
                if shared and (best is None or rank > best_rank):
                    best = chain
                    best_rank = rank
        return best, best_rank[0]


class ParkedBytes:
    """The total size of all parked states. An array that several states share counts once.

    Updated incrementally, since thousands of states may be parked: a state is measured when it is
    parked, and again only if its frozen arrays have changed.
    """

    def __init__(self) -> None:
        # for each parked chain, the version of its frozen arrays, and the ids of all its arrays
        self._counted: dict[LiveChain, tuple[tuple[int, ...], Collection[int]]] = {}
        self._holders: Counter[int] = Counter()  # how many chains have an array, by its `id`
        self._nbytes: dict[int, int] = {}  # by the `id` of an array
        self._total = 0

    def update(self, parked: Sequence[LiveChain]) -> None:
        """Count the states of all parked chains."""
        changed: list[tuple[LiveChain, LiveState]] = []
        for chain in parked:
            if chain.state is not None:
                counted = self._counted.get(chain)
                if counted is None or counted[0] != chain.state.frozen_version:
                    changed.append((chain, chain.state))
        for chain, _ in changed:  # first, because the `id` of a freed array may be in use again
            self.forget(chain)
        for chain, state in changed:
            arrays = all_bytes((state,))
            self._counted[chain] = state.frozen_version, tuple(arrays)
            for key, nbytes in arrays.items():
                self._holders[key] += 1
                if key not in self._nbytes:
                    self._nbytes[key] = nbytes
                    self._total += nbytes

    def forget(self, chain: LiveChain) -> None:
        """Remove the arrays of a chain from the count. Does nothing if it is not counted."""
        _, arrays = self._counted.pop(chain, ((), ()))
        for key in arrays:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._total -= self._nbytes.pop(key)

    def total(self, others: Mapping[int, int]) -> int:
        """The bytes of all counted arrays and of `others`, which are given as by `frozen_bytes`."""
        return self._total + sum(
            nbytes for key, nbytes in others.items() if key not in self._nbytes
        )


class LiveTier:
    """The live states of one model. Decides which sequences may start from them, and how."""

    def __init__(
        self, index: PrefixIndex, *, payloads: PayloadFormat, most_parked_bytes: int | None
    ) -> None:
        """most_parked_bytes: 0: no state is parked; None: as many as fit."""
        self._index = index
        self._most_parked_bytes = most_parked_bytes
        self._model_form = payloads.model
        self._chains = LiveChains()
        self._held_memory: HeldMemory | None = HeldMemory()  # None: must be recomputed
        self._parked_bytes = ParkedBytes()  # memory of parked states

    def claim(self, lookup: Lookup) -> LiveClaim | None:
        """Claim the live chain that has the most of a lookup's tokens; None if there is none."""
        claim = self._possible_claim(
            lookup.chain,
            root=lookup.root,
            tokens_in_blocks=lookup.plan.tokens,
            may_move=lookup.may_move,
        )
        if claim is not None:
            claim.chain.claims.append(claim)
            claim.use = self._choose_use(claim, may_move=lookup.may_move)
        return claim

    def resumable_tokens(
        self, chain: bytes, *, root: Root, tokens_in_blocks: int, may_move: bool
    ) -> int:
        """The number of tokens of a chain that a sequence could take from a live state.
        tokens_in_blocks: the number that it could take from blocks.
        """
        claim = self._possible_claim(
            chain, root=root, tokens_in_blocks=tokens_in_blocks, may_move=may_move
        )
        return 0 if claim is None else claim.tokens

    def _possible_claim(
        self, packed: bytes, *, root: Root, tokens_in_blocks: int, may_move: bool
    ) -> LiveClaim | None:
        """What a sequence could take from the live state with the longest common prefix; or None.

        If some layers resume only at checkpoints, a live state has them only at its end. A sequence
        that takes the state over starts there. Any other sequence takes these layers from a stored
        checkpoint, and so no more tokens than blocks provide.
        """
        limit = len(packed) - TOKEN_BYTES  # the last token is always prefilled
        chain, tokens = self._chains.longest(packed[:limit], root=root)
        if chain is None or chain.state is None:
            return None
        moved_tokens = [claim.tokens for claim in chain.claims if claim.use == "moved"]
        tokens = min([tokens, *moved_tokens])  # a state that will be moved loses all later tokens
        state = chain.state
        stays_parked = chain.is_parked and not moved_tokens  # until this sequence starts
        # the state of a running sequence grows: only some prefixes stay usable then
        usable_prefix = state.resumable_prefix if stays_parked else state.lasting_prefix
        tokens = usable_prefix(tokens)
        needs_end_state = not self._model_form.resumes_anywhere
        if needs_end_state:
            may_take_over = may_move and chain.is_parked and not chain.claims
            if not (may_take_over and state.can_rewind(tokens)):
                needs_end_state = False
                # a model without KV layers has no blocks
                most_tokens = tokens_in_blocks if self._model_form.block else 0
                tokens = usable_prefix(min(tokens, most_tokens))
        if tokens == 0 or (needs_end_state and tokens < tokens_in_blocks):
            return None
        return LiveClaim(chain=chain, tokens=tokens, needs_end_state=needs_end_state)

    @property
    def chains(self) -> Iterable[LiveChain]:
        """All live chains, running and parked."""
        return self._chains

    def share_buffers(self, lookup: Lookup) -> None:
        """If a lookup found only blocks, and another sequence with the same tokens has become live
        since, let the lookup share that sequence's buffers.
        """
        planned_tokens = lookup.plan.tokens
        if lookup.base is not None or lookup.in_blocks_only or planned_tokens < LEAST_SHARED_TOKENS:
            return
        packed = lookup.chain[: planned_tokens * TOKEN_BYTES]
        chain, tokens = self._chains.longest(packed, root=lookup.root)
        if chain is None or chain.state is None or tokens < LEAST_SHARED_TOKENS:
            return
        tokens = chain.state.lasting_prefix(tokens)
        if chain.state.can_share and tokens:
            lookup.base = LiveClaim(chain=chain, tokens=tokens)
            chain.claims.append(lookup.base)

    def base(self, lookup: Lookup) -> LiveBase | None:
        """The live state that a lookup has claimed; None if it has claimed none. If the state is
        moved, no other sequence may use it from now on.
        """
        claim = lookup.base
        if claim is None:
            return None
        chain = claim.chain
        tokens = claim.tokens
        assert chain.state is not None, "a claimed live chain is gone"
        claim.use = self._choose_use(claim, may_move=lookup.may_move)
        if claim.use == "moved":
            later_keys = [key for key in chain.keys if sum(self._index.tree.run_of(key)) > tokens]
            self._release_blocks(chain, later_keys)
        self._chains.touch(chain)
        return LiveBase(state=chain.state, tokens=tokens, use=claim.use)

    def _choose_use(self, claim: LiveClaim, *, may_move: bool) -> BaseUse:
        """Decide how a claimed state is used. A parked state is moved if no other claim needs it
        and few of its tokens are lost.

        A request that diverges within the prompt is assumed to come from another agent: it does not
        take the state over if the prefix can be shared.
        """
        if claim.needs_end_state:
            return "moved"
        chain = claim.chain
        tokens = claim.tokens
        assert chain.state is not None, "a claimed live chain is gone"
        can_share = chain.state.can_share and tokens >= LEAST_SHARED_TOKENS
        if may_move and chain.is_parked:
            is_free = all(
                chain.state.lasting_prefix(other.tokens) == other.tokens <= tokens
                and other.use != "moved"
                for other in chain.claims
                if other is not claim
            )
            lost_tokens = chain.state.tokens - tokens
            is_little = lost_tokens <= max(BLOCK_TOKENS, tokens // MOST_LOST_SHARE)
            continues = tokens >= chain.prompt_tokens - CUE_TOKENS or not can_share
            if is_free and is_little and continues:
                return "moved"
        return "shared" if can_share else "copied"

    def begin(self, lookup: Lookup | None, live: LiveChain, state: LiveState) -> LiveChain:
        """Make the chain of a sequence live when the sequence is opened.

        live: the record of the new sequence. Returns it, or the record of the parked state that the
        sequence took over. lookup: the prefix that the
        sequence started from; None if it had none.
        """
        self._held_memory = None
        # Computed before the chain is added: if this raised later, nothing would remove the chain.
        keys = [] if lookup is None or not lookup.may_move else self._held_by_live(lookup)
        claim = None if lookup is None else lookup.base
        if claim is not None and claim.use == "moved":
            taken = claim.chain
            self._parked_bytes.forget(taken)
            taken.chain = live.chain
            taken.cursor = live.cursor
            taken.request_id = live.request_id
            taken.session_id = live.session_id
            taken.prompt_tokens = live.prompt_tokens
            taken.is_parked = False
            live = taken
        else:
            self._chains.add(live)
        live.state = state
        if lookup is not None:
            live.held_tokens = lookup.held_tokens
        self._index.begin_holding(live, keys)
        return live

    def _held_by_live(self, lookup: Lookup) -> list[BlockKey]:
        """The blocks that a live state, started from this lookup, will hold in the form in which
        they are stored.
        """
        root = lookup.root
        return [
            key
            for key in self._index.whole_blocks(lookup.plan.blocks)
            if root.form_at(sum(self._index.tree.run_of(key))) == root.form
        ]

    def park(self, live: LiveChain, chain: bytes) -> None:
        """Park the state of a sequence that has ended normally, if there is room.

        chain: the packed tokens of its prompt and answer.
        """
        assert live.state is not None, "a chain that is not live is parked"
        # tokens that were computed after the end of the answer
        excess_tokens = live.state.tokens - len(chain) // TOKEN_BYTES
        may_stay = not live.is_stale and self._most_parked_bytes != 0
        kept_tokens = live.state.tokens - excess_tokens
        if not may_stay or (excess_tokens > 0 and not live.state.can_rewind(kept_tokens)):
            self.end_chain(live)
            return
        live.state.rewind(max(0, excess_tokens))
        live.state.park()
        if not live.state.can_share:
            self._share_with_parked(live, chain)
        live.chain = chain
        live.is_parked = True
        live.held_tokens = 0
        self._chains.touch(live)
        self._held_memory = None
        if self._most_parked_bytes is not None:
            self.reclaim(self.held.parked_bytes - self._most_parked_bytes)

    def _share_with_parked(self, live: LiveChain, chain: bytes) -> None:
        """Let a newly parked state share buffers with the parked state that has the longest common
        prefix.

        For models whose states cannot be shared while they run, because a fused kernel needs a
        single buffer.
        """
        state = live.state
        assert state is not None, "a chain that is not live is parked"
        best_state = None
        most_tokens = LEAST_SHARED_TOKENS - 1
        for other in self._chains.parked:
            if other.root == live.root and other.state is not None and not other.is_stale:
                shared = common_tokens(other.chain, chain)
                tokens = min(shared, other.state.frozen_tokens, state.frozen_tokens)
                if tokens > most_tokens:
                    best_state = other.state
                    most_tokens = tokens
        if best_state is not None:
            state.share_prefix(best_state, most_tokens)

    def seclude(self, live: LiveChain) -> None:
        """Make the state of a running sequence, which is about to be quantized, unavailable to
        other sequences, now and after its end. Tokens that only this chain has are copied into
        blocks.
        """
        self._held_memory = None
        live.is_stale = True
        self._release_blocks(live, tuple(live.keys))

    def end_chain(self, live: LiveChain) -> None:
        """End a live chain. Tokens that only this chain has are copied into blocks; claims on the
        chain are lost.
        """
        self._held_memory = None
        try:
            self._release_blocks(live, tuple(live.keys))
        finally:
            self._chains.remove(live)
            self._parked_bytes.forget(live)
            live.state = None

    def forget_session(self, session_id: str, *, tenant: str) -> None:
        """Ensure that no sequence starts from a session's live states any more."""
        for live in self._chains:
            live.is_stale |= (live.session_id, live.root.tenant) == (session_id, tenant)

    def drop_stale(self) -> None:
        """End the parked chains that no sequence may start from."""
        for live in [live for live in self._chains if live.is_parked and live.is_stale]:
            self.end_chain(live)

    def reclaim(self, nbytes: int) -> None:
        """End parked chains until this many bytes are free."""
        remaining_bytes = self.held.total_bytes - nbytes
        for live in self._chains.parked:
            if self.held.total_bytes <= remaining_bytes:
                break
            self.end_chain(live)

    def limit_parked(self, nbytes: int | None) -> None:
        """Limit the bytes of parked states from now on; None: as many as fit."""
        self._most_parked_bytes = nbytes
        if nbytes is not None:
            self.reclaim(self.held.parked_bytes - nbytes)

    def newly_frozen(self) -> list[LiveChain]:
        """Running chains that have more frozen tokens than at the last call; these tokens now count
        as held.

        Tokens are frozen for another sequence that shares them, but also when a long tail grows.
        """
        changed: list[LiveChain] = []
        for live, state in self._running():
            if state.can_share and live.held_tokens != state.frozen_tokens:
                live.held_tokens = state.frozen_tokens
                self._held_memory = None
                changed.append(live)
        return changed

    def _running(self) -> list[tuple[LiveChain, LiveState]]:
        """The chains of running sequences, with their states."""
        return [
            (live, live.state)
            for live in self._chains
            if not live.is_parked and live.state is not None
        ]

    @property
    def held(self) -> HeldMemory:
        """The memory that live states take in addition to the reservations of running sequences."""
        if self._held_memory is None:
            parked = [live for live in self._chains if live.is_parked and live.state is not None]
            running = self._running()
            # of states that were taken over: nothing is reserved for these tokens
            moved_bytes = sum(
                live.held_tokens * state.bytes_per_token()
                for live, state in running
                if not state.can_share
            )
            frozen = frozen_bytes(state for _, state in running if state.can_share)
            self._parked_bytes.update(parked)
            running_bytes = sum(frozen.values()) + moved_bytes
            total_bytes = self._parked_bytes.total(frozen) + moved_bytes
            self._held_memory = HeldMemory(total_bytes, total_bytes - running_bytes, len(parked))
        return self._held_memory

    def copy_from_holder(self, key: BlockKey) -> Snapshot | None:
        """An evaluated copy of a block from a live chain; None if no chain has the block, or if its
        values are not finite.
        """
        chain = self._index.holder_of(key)
        return None if chain is None else self.copy_of(chain, key)

    def _release_blocks(self, live: LiveChain, keys: Sequence[BlockKey]) -> None:
        """Release blocks that a live chain holds. Blocks that only this chain has are copied to RAM
        first, unless the RAM limit for blocks is 0.
        """
        copies: dict[BlockKey, Snapshot | None] = {}
        may_keep = self._index.ram.budget_bytes > 0
        try:
            for key in self._index.held_alone(live, keys) if may_keep else ():
                copies[key] = self.copy_of(live, key)
        finally:
            self._index.end_holding(live, keys, copies=copies)

    def copy_of(self, chain: LiveChain, key: BlockKey) -> Snapshot | None:
        """An evaluated copy of a block from a live chain that has all its tokens; None if the chain
        is not live, or if the values are not finite.
        """
        start, tokens = self._index.tree.run_of(key)
        if chain.state is None:
            return None
        block = chain.state.copy_block(start=start, tokens=tokens).checked()
        mx.eval(block.outputs)
        return block if block.is_finite else None
