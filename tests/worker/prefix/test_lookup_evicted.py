from __future__ import annotations

from holdfast.wire.events import CacheOutcome
from holdfast.worker.prefix.chain import ChainBlock, Cursor, Node, Root, pack_tokens
from holdfast.worker.prefix.lookup import EvictionHistory, Shortfall


def record(
    history: EvictionHistory,
    key: bytes,
    parent: bytes,
    parent_tokens: int,
    tokens: list[int],
    cause: CacheOutcome = CacheOutcome.EVICTED,
) -> None:
    history.record_block(
        Node(key, root(parent), parent_tokens, 0, 0, pack_tokens(tokens)), cause=cause
    )


def root(key: bytes) -> Node:
    return Node(key, None, 0, 0, 0, b"")


def state(block: bytes, tokens: int) -> Node:
    return Node(b"state", root(block), tokens, tokens, 0, b"")


def test_lost_blocks_are_followed_while_the_tokens_match() -> None:
    history = EvictionHistory()
    record(history, b"a", b"root", 0, [1, 2, 3], CacheOutcome.UNREADABLE)
    record(history, b"b", b"a", 2, [9, 9])
    record(history, b"c", b"a", 3, [4])
    place = Cursor(Root(b"root"))
    # 3 more are elsewhere
    d = Node(b"d", root(b"root"), 0, 0, 3, pack_tokens([7, 7]))
    history.record_block(d, cause=CacheOutcome.EVICTED)
    record(history, b"e", b"d", 4, [8])
    assert history.lost_after(place, pack_tokens([7, 8])) == Shortfall(CacheOutcome.EVICTED, 2)
    assert history.lost_after(place, pack_tokens([1, 2, 3, 4, 5])) == Shortfall(
        CacheOutcome.UNREADABLE, 4
    )
    assert history.lost_after(place, pack_tokens([1, 2, 9, 9])) == Shortfall(
        CacheOutcome.UNREADABLE, 4
    )
    assert history.lost_after(place, pack_tokens([1, 2, 8])) == Shortfall(
        CacheOutcome.UNREADABLE, 2
    )
    assert history.lost_after(place, pack_tokens([2])) is None
    assert history.lost_after(place, b"") is None


def test_only_recent_losses_are_remembered() -> None:
    history = EvictionHistory(limit=2)
    for index in range(3):
        record(history, b"%d" % index, b"root", 0, [index])
        history.record_state(state(b"a", index + 1), cause=CacheOutcome.EVICTED)
    place = Cursor(Root(b"root"))
    assert [history.lost_after(place, pack_tokens([index])) is None for index in range(3)] == [
        True,
        False,
        False,
    ]
    block = ChainBlock(b"a", 8, 8)
    assert history.last_state([block], begin=0, end=8) == Shortfall(CacheOutcome.EVICTED, 3)
    assert history.last_state([block], begin=0, end=1) is None


def test_the_last_lost_checkpoint_within_the_match_is_named() -> None:
    history = EvictionHistory()
    for key, tokens in ((b"a", 2), (b"a", 4), (b"b", 3), (b"other", 1)):
        history.record_state(state(key, tokens), cause=CacheOutcome.FORGOTTEN)
    blocks = [ChainBlock(b"a", 4, 4), ChainBlock(b"b", 4, 7)]
    assert history.last_state(blocks, begin=1, end=9) == Shortfall(CacheOutcome.FORGOTTEN, 5)
    assert history.last_state(blocks, begin=1, end=5) == Shortfall(CacheOutcome.FORGOTTEN, 3)
    assert history.last_state(blocks, begin=1, end=3) == Shortfall(CacheOutcome.FORGOTTEN, 1)
    assert history.last_state(blocks, begin=6, end=9) is None
