"""The cached prefix that one request can start from: blocks, a state, and a claim on a live chain.
No MLX.

A live chain is a sequence whose KV is in the layers' own buffers: it runs, or it has ended and is
parked. Blocks that a live chain holds need no copy in RAM. A state is a checkpoint of window and
recurrent layers. Tokens are *packed* as little-endian uint32.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.lru_cache import LruCache
from holdfast.store.block import BlockKey, StoredBlock
from holdfast.wire.events import CacheOutcome, CacheReport, Divergence
from holdfast.wire.requests import TOKEN_BYTES, RequestId, common_tokens
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.prefix.chain import ChainBlock, ChainState, Cursor, Node, Root
from holdfast.worker.prefix.tree import PrefixMatch, PrefixTree

if TYPE_CHECKING:
    from holdfast.worker.kv.live import BaseUse, LiveState, Snapshot

# number of lost blocks that are remembered, and of lost states: at most 2 MiB of tokens
REMEMBERED = 2048


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why the rest of a prompt cannot come from the cache; COMPLETE if there is none."""

    outcome: CacheOutcome
    unused_tokens: int = 0  # further tokens that are or were stored but cannot be used
    # where the stored chains differ from the prompt, even if that is after the reusable tokens
    divergence: Divergence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusePlan:
    """The stored prefix to start a sequence from. Valid until the index changes, or as long as the
    plan's keys are held.
    """

    cursor: Cursor  # after the reused tokens
    blocks: tuple[ChainBlock, ...] = ()  # beginning at token 0
    state: ChainState | None = None  # to resume from, at the end of the last block
    shortfall: Shortfall
    to_read: tuple[BlockKey, ...] = ()  # keys that must first be read from disk
    keys: tuple[BlockKey, ...] = field(init=False)  # all keys that the plan needs, parents first

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", _keys_of(self.blocks, self.state))

    @property
    def tokens(self) -> int:
        """The number of tokens that need no prefill."""
        return self.blocks[-1].end if self.blocks else 0


class EvictionHistory:
    """Remembers which blocks and states were lost most recently, and where they were in their
    chains, to explain cache misses. Older losses are forgotten.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        # (key of the parent, tokens of the parent before the block, first own token)
        # -> key, offset, own tokens, cause
        self._blocks: LruCache[
            tuple[BlockKey, int, bytes], tuple[BlockKey, int, bytes, CacheOutcome]
        ] = LruCache(limit)
        # (key of the block, tokens of the block before the state) -> cause
        self._states: LruCache[tuple[BlockKey, int], CacheOutcome] = LruCache(limit)

    def record_block(self, node: Node, *, cause: CacheOutcome) -> None:
        """Record that a block is lost."""
        assert node.parent is not None, "a root is not lost"
        place = (
            node.parent.key,
            node.parent.offset + node.parent_cut,
            node.packed[:TOKEN_BYTES],
        )
        self._blocks.put(place, (node.key, node.offset, node.packed, cause))

    def record_state(self, node: Node, *, cause: CacheOutcome) -> None:
        """Record that a state is lost."""
        assert node.parent is not None, "a root is not lost"
        self._states.put((node.parent.key, node.parent.offset + node.parent_cut), cause)

    def lost_after(self, place: Cursor, packed: bytes) -> Shortfall | None:
        """Return how many of the tokens `packed` were once stored after `place`, and why they were
        lost; None if unknown.
        """
        end = 0  # bytes of `packed` that were stored
        cause = None
        parent_key = place.parent_key
        parent_tokens = place.parent_tokens
        while end < len(packed):
            lost = self._blocks.get((parent_key, parent_tokens, packed[end : end + TOKEN_BYTES]))
            if lost is None:
                break
            parent_key, offset, own_tokens, block_cause = lost
            cause = cause or block_cause
            matching = common_tokens(own_tokens, packed[end : end + len(own_tokens)])
            end += matching * TOKEN_BYTES
            parent_tokens = offset + matching
        return None if cause is None else Shortfall(cause, end // TOKEN_BYTES)

    def last_state(self, blocks: Iterable[ChainBlock], *, begin: int, end: int) -> Shortfall | None:
        """The lost state with the highest position in (begin, end] along `blocks`; None if none is
        known.
        """
        by_key = {block.key: block for block in blocks}
        last: Shortfall | None = None
        last_position = begin
        for (key, tokens), cause in self._states.items():
            block = by_key.get(key)
            if block is None or tokens > block.tokens:
                continue
            position = block.start + tokens
            if last_position < position <= end:
                last = Shortfall(cause, position - begin)
                last_position = position
        return last


class Planner:
    """Finds in the tree what a sequence can start from, and explains with the eviction history why
    it is not more.
    """

    def __init__(
        self,
        tree: PrefixTree,
        history: EvictionHistory,
        *,
        is_in_memory: Callable[[BlockKey], bool],
        missing: Collection[BlockKey] = (),
    ) -> None:
        """missing: keys in the tree that no tier has; reuse ends before them."""
        self._tree = tree
        self._history = history
        self._is_in_memory = is_in_memory
        self._missing = missing

    def plan(
        self,
        packed: bytes,
        *,
        root: Root,
        resumable_anywhere: bool,
        limit: int,
    ) -> ReusePlan:
        """Find the longest stored prefix, of at most `limit` tokens, that can be resumed from.

        The plan counts as a use only once `PrefixIndex.accept` gets it. resumable_anywhere: whether
        all layers keep every token, so that no saved state is needed. If the sequences hold keys and
        values quantized, so do stored blocks that end at a multiple of BLOCK_TOKENS, and no sequence
        can continue within such a block.
        """
        limit = max(0, min(limit, len(packed) // TOKEN_BYTES))
        whole_match = self._tree.match(packed, root=root)
        match = self._before_missing(whole_match)
        stored_tokens = min(match.tokens, limit)
        state: ChainState | None = None

        def last_resumable(position: int) -> int:
            """The last position at which a sequence can continue, at most `position`."""
            return position if root.form == "native" else self._before_quantized(match, position)

        tokens = last_resumable(stored_tokens)
        if not resumable_anywhere:
            usable_states = (
                each
                for each in reversed(match.states)
                if each.position <= stored_tokens and last_resumable(each.position) == each.position
            )
            state = next(usable_states, None)
            tokens = state.position if state else 0
        blocks = _first_blocks(match.blocks, tokens)
        keys = _keys_of(blocks, state)
        return ReusePlan(
            cursor=match.end.back_at(tokens),
            blocks=blocks,
            state=state,
            shortfall=self._shortfall(
                match,
                packed,
                tokens=tokens,
                stored_tokens=stored_tokens,
                limit=limit,
                cut_off_tokens=min(whole_match.tokens, limit) - stored_tokens,
            ),
            to_read=tuple([key for key in keys if not self._is_in_memory(key)]),
        )

    def _before_missing(self, match: PrefixMatch) -> PrefixMatch:
        """The part of a match before its first missing block."""
        if not self._missing:
            return match
        count = next(
            (index for index, block in enumerate(match.blocks) if block.key in self._missing),
            len(match.blocks),
        )
        if count == len(match.blocks):
            return match
        end = match.blocks[count - 1].end if count else 0
        return PrefixMatch(
            blocks=match.blocks[:count],
            states=tuple(state for state in match.states if state.position <= end),
            divergence=None,
            end=match.end.back_at(end),
        )

    def _before_quantized(self, match: PrefixMatch, position: int) -> int:
        """The last position, at most `position`, at which a sequence can continue: the block around
        it is stored unquantized up to there, or begins there.
        """
        last = position // BLOCK_TOKENS * BLOCK_TOKENS
        for block in match.blocks:
            if last < block.end and block.end - block.tokens < position and last < position:
                start, tokens = self._tree.run_of(block.key)
                if (start + tokens) % BLOCK_TOKENS == 0:
                    break
                last = min(block.end, position)
        return last

    def _shortfall(
        self,
        match: PrefixMatch,
        packed: bytes,
        *,
        tokens: int,
        stored_tokens: int,
        limit: int,
        cut_off_tokens: int,
    ) -> Shortfall:
        """Explain why only `tokens` tokens can be reused, although `stored_tokens` tokens are stored
        and `limit` tokens are wanted. cut_off_tokens: further tokens of the prompt that are in the
        tree, but after a missing block.
        """
        if tokens < stored_tokens:
            lost = self._history.last_state(match.blocks, begin=tokens, end=stored_tokens)
            lost = lost or Shortfall(CacheOutcome.NO_BOUNDARY, stored_tokens - tokens)
            return replace(lost, divergence=match.divergence)
        if tokens == limit:
            return Shortfall(CacheOutcome.COMPLETE)
        missing = packed[stored_tokens * TOKEN_BYTES : limit * TOKEN_BYTES]
        lost = self._history.lost_after(match.end, missing)
        if cut_off_tokens:
            lost = lost or Shortfall(CacheOutcome.EVICTED)
            return replace(lost, unused_tokens=max(lost.unused_tokens, cut_off_tokens))
        if lost is not None:
            return lost
        if match.divergence is not None:
            return Shortfall(CacheOutcome.DIVERGED, divergence=match.divergence)
        if self._tree.has_root(match.end.root.key):
            return Shortfall(CacheOutcome.NEW_TOKENS)
        return Shortfall(CacheOutcome.NOTHING_STORED)


def _keys_of(blocks: Iterable[ChainBlock], state: ChainState | None) -> tuple[BlockKey, ...]:
    """The keys of blocks and of a state after them."""
    keys = [block.key for block in blocks]
    if state is not None:
        keys.append(state.key)
    return tuple(keys)


def _first_blocks(blocks: tuple[ChainBlock, ...], tokens: int) -> tuple[ChainBlock, ...]:
    """The part of a chain within its first `tokens` tokens."""
    count = len(blocks)
    while count and (blocks[count - 2].end if count > 1 else 0) >= tokens:
        count -= 1
    if count == 0 or blocks[count - 1].end <= tokens:
        return blocks[:count]
    last = blocks[count - 1]
    excess_tokens = last.end - tokens
    return (*blocks[: count - 1], ChainBlock(last.key, last.tokens - excess_tokens, tokens))


@dataclass(slots=True, eq=False, kw_only=True)
class LiveClaim:
    """A claim to start a sequence from the first tokens of a live chain.

    needs_end_state: whether the sequence needs the state of all layers at the end of the chain,
        possibly rewound. Such a claim is exclusive.
    use: the planned use, and once the engine has the state, the actual use: the state is "moved" to
        the sequence, its buffers are "shared", or the tokens are "copied".
    """

    chain: LiveChain
    tokens: int  # how many of the first tokens
    needs_end_state: bool = False
    use: BaseUse = "copied"

    @property
    def is_lost(self) -> bool:
        """Whether the chain is no longer live or no longer trusted, so that a new lookup is
        needed.
        """
        return self.chain.state is None or self.chain.is_stale

    @property
    def held_tokens(self) -> int:
        """The number of claimed tokens that need no memory reservation, because they are not
        copied.
        """
        return 0 if self.use == "copied" else self.tokens


@dataclass(slots=True, eq=False, kw_only=True)
class LiveChain:
    """A sequence whose state is live: it runs, or it is parked.

    keys: the blocks whose tokens are all in the live state.
    held_tokens: how many of the first tokens are in frozen or shared buffers, for which no running
        sequence has reserved memory.
    """

    request_id: RequestId  # of the request that runs on this state, or was the last to run
    session_id: str = ""  # of that request, if it has one
    chain: bytes | bytearray  # packed
    prompt_tokens: int = 0  # of that request
    cursor: Cursor
    state: LiveState | None = None  # None until the sequence is open
    keys: set[BlockKey] = field(default_factory=set)
    held_tokens: int = 0
    is_parked: bool = False  # no request runs on it
    is_stale: bool = False  # a part was forgotten: no sequence may start from it
    used: int = 0  # a counter at the last use: larger is later
    claims: list[LiveClaim] = field(default_factory=list)  # of sequences that will start from it

    @property
    def root(self) -> Root:
        """The root of the chain."""
        return self.cursor.root

    @property
    def tokens(self) -> int:
        """The number of tokens that another sequence may start from. For a running sequence, these
        are only the stored tokens.
        """
        if self.state is None or self.is_stale:
            return 0
        return self.state.tokens if self.is_parked else min(self.state.tokens, self.cursor.position)


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Memory that live states take in addition to the reservations of running sequences.

    A buffer that several states share counts once.
    """

    total_bytes: int = 0
    parked_bytes: int = 0  # the part that becomes free if all parked states are freed
    parked: int = 0  # number of parked states


@dataclass(slots=True, eq=False)
class Lookup:
    """The cached prefix found for a sequence; its blocks stay pinned until `release`.

    chain: the sequence's tokens so far, packed.
    """

    chain: bytes
    root: Root
    plan: ReusePlan
    hold: ExitStack  # keeps the plan's blocks from being evicted
    asked_at: float  # when payloads were requested, in seconds of `time.perf_counter`
    # blocks that are being read from disk
    awaited: dict[BlockKey, Future[StoredBlock]] = field(default_factory=dict)
    fetched: dict[BlockKey, Snapshot] = field(default_factory=dict)  # payloads in memory
    fetched_at: float | None = None  # None until all payloads are in memory
    # limits reuse, because the block or state after these tokens could not be read
    limit_tokens: int | None = None
    in_blocks_only: bool = False  # whether live chains are excluded
    may_move: bool = True  # whether the sequence may take over a parked state
    base: LiveClaim | None = None  # the live state to start from; None: none

    @property
    def base_tokens(self) -> int:
        """The number of tokens that a live chain provides."""
        return 0 if self.base is None else self.base.tokens

    @property
    def cached_tokens(self) -> int:
        """The number of tokens that need no prefill; always less than the request's tokens."""
        return max(self.plan.tokens, self.base_tokens)

    @property
    def held_tokens(self) -> int:
        """The number of tokens that need no memory reservation, because live states hold them."""
        return 0 if self.base is None else self.base.held_tokens

    @property
    def has_lost_its_base(self) -> bool:
        """Whether the claimed live chain is lost, so that a new lookup is needed."""
        return self.base is not None and self.base.is_lost

    @property
    def missing_blocks(self) -> list[ChainBlock]:
        """The blocks of the plan that the claimed live chain does not have."""
        return [block for block in self.plan.blocks if block.end > self.base_tokens]

    @property
    def missing_state(self) -> ChainState | None:
        """The state to resume from; None if the plan has none, or if the claimed live chain has the
        state of all layers.
        """
        return None if self.base is not None and self.base.needs_end_state else self.plan.state

    @property
    def missing_keys(self) -> list[BlockKey]:
        """The keys of the missing blocks and of the missing state, parents before children."""
        keys = [block.key for block in self.missing_blocks]
        state = self.missing_state
        return keys if state is None else [*keys, state.key]

    def end_before(self, key: BlockKey) -> None:
        """End the plan before a block or state that cannot be read at the moment."""
        state = self.plan.state
        if state is not None and state.key == key:
            self.limit_tokens = state.position - 1
            return
        end = 0
        for block in self.plan.blocks:
            if block.key == key:
                break
            end = block.end
        self.limit_tokens = end

    def drop_base(self) -> None:
        """Give up the claim on a live chain."""
        if self.base is not None:
            self.base.chain.claims.remove(self.base)
            self.base = None

    @property
    def fetch_seconds(self) -> float:
        """The time until all payloads were in memory."""
        return 0.0 if self.fetched_at is None else self.fetched_at - self.asked_at

    def report(
        self, *, lookup_seconds: float, waited_seconds: float, restore_seconds: float
    ) -> CacheReport:
        """A report: how many tokens were cached, why not more, and how long the lookup took."""
        shortfall = self.plan.shortfall
        to_read = set(self.plan.to_read)
        disk_tokens = 0
        begin = self.base_tokens
        for block in self.missing_blocks:
            if block.key in to_read:
                disk_tokens += block.end - begin
            begin = block.end
        use = None if self.base is None else self.base.use
        # a live state may provide tokens that blocks do not
        from_live_tokens = self.cached_tokens - self.plan.tokens
        return CacheReport(
            outcome=shortfall.outcome,
            ram_tokens=self.cached_tokens - disk_tokens,
            moved_tokens=self.base_tokens if use == "moved" else 0,
            shared_tokens=self.base_tokens if use == "shared" else 0,
            disk_tokens=disk_tokens,
            unused_tokens=max(0, shortfall.unused_tokens - from_live_tokens),
            divergence=shortfall.divergence,
            waited_for_another=waited_seconds > 0,
            waited_seconds=waited_seconds,
            lookup_seconds=lookup_seconds,
            restore_seconds=restore_seconds,
        )

    def release(self) -> None:
        """Unpin the plan's blocks and give up the claim on a live chain. Fetched blocks stay in the
        index.
        """
        self.hold.close()
        self.fetched.clear()
        self.awaited.clear()
        self.drop_base()


class Trust(enum.Enum):
    """Which cached state a sequence may start from."""

    ALL = enum.auto()
    BLOCKS = enum.auto()
    NOTHING = enum.auto()


@dataclass(slots=True)
class CachedStart:
    """The cached state that a sequence starts from, and how far that is trusted.

    A sequence may fail because of cached state or for another reason, and only another attempt
    tells. Each failure costs one degree of trust, and what the sequence has computed is forgotten:

    - ALL, after a start from a live state: that state becomes stale, so that no sequence starts
      from it. The next attempt starts from BLOCKS only.
    - ALL or BLOCKS, after a start from blocks: those from the first damaged one on are forgotten;
      if none is damaged, they stay, but are suspects. The next attempt starts from NOTHING.
    - NOTHING, or after a start without cached state: the request fails; suspects stay.

    If an attempt from NOTHING succeeds, the suspects were to blame and are forgotten.
    """

    trust: Trust = Trust.ALL
    lookup: Lookup | None = None  # what was found, until the engine has it
    lookup_seconds: float = 0.0  # time that lookups took
    report: CacheReport | None = None  # the cache hit when the sequence was opened first
    cursor: Cursor | None = None  # how far the chain is known to be stored; None before the start
    # what it has started from; blocks stay until they are known to be right or were forgotten
    blocks: tuple[BlockKey, ...] = ()
    live: LiveChain | None = None  # the live state; None: it started without one

    @property
    def cached_tokens(self) -> int:
        """The tokens that need no prefill, as far as is known before the start."""
        return 0 if self.lookup is None else self.lookup.cached_tokens

    @property
    def may_blame_live(self) -> bool:
        """Whether the live state may be the cause of a failure."""
        return self.live is not None and self.trust is Trust.ALL

    @property
    def may_be_blamed(self) -> bool:
        """Whether the cached state may be the cause of a failure, so that the sequence may restart
        without it.
        """
        return self.may_blame_live or (bool(self.blocks) and self.trust is not Trust.NOTHING)

    @property
    def has_suspects(self) -> bool:
        """Whether a success tells that the blocks of an earlier attempt were to blame."""
        return self.trust is Trust.NOTHING and bool(self.blocks)

    def lose_trust(self) -> None:
        """Record that the sequence has failed."""
        self.trust = Trust.BLOCKS if self.may_blame_live else Trust.NOTHING

    def release(self) -> None:
        """Unpin the prefix that was found, because the sequence has started or never will."""
        if self.lookup is not None:
            self.lookup.release()
            self.lookup = None

    def begin(self) -> None:
        """Record that the sequence starts from the prefix that was found, if there is one."""
        self.live = None
        if self.lookup is not None:
            self.cursor = self.lookup.plan.cursor
            self.blocks = self.lookup.plan.keys
            if self.lookup.base is not None:
                self.live = self.lookup.base.chain
        elif self.trust is not Trust.NOTHING:  # otherwise they stay, as suspects
            self.blocks = ()
