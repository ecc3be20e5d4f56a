from __future__ import annotations

from holdfast.wire.events import CacheOutcome
from holdfast.worker.prefix.evicted import EvictionHistory
from holdfast.worker.prefix.keys import pack_tokens
from holdfast.worker.prefix.piece import Cursor, Piece
from holdfast.worker.prefix.reuse import Shortfall
from holdfast.worker.prefix.tree import Standing


def record(
    history: EvictionHistory,
    key: bytes,
    parent: bytes,
    parent_tokens: int,
    tokens: list[int],
    cause: CacheOutcome = CacheOutcome.EVICTED,
) -> None:
    history.record_block(
        Standing(key, parent, parent_tokens, pack_tokens(tokens), len(tokens)), cause=cause
    )


def test_lost_blocks_are_followed_as_far_as_the_tokens_are_the_same() -> None:
    history = EvictionHistory()
    record(history, b"a", b"root", 0, [1, 2, 3], CacheOutcome.UNREADABLE)
    record(history, b"b", b"a", 2, [9, 9])
    record(history, b"c", b"a", 3, [4])
    root = Cursor(b"root")
    # 3 more are elsewhere
    history.record_block(
        Standing(b"d", b"root", 0, pack_tokens([7, 7]), 5), cause=CacheOutcome.EVICTED
    )
    record(history, b"e", b"d", 4, [8])
    assert history.behind(root, pack_tokens([7, 8])) == Shortfall(CacheOutcome.EVICTED, 2)
    assert history.behind(root, pack_tokens([1, 2, 3, 4, 5])) == Shortfall(
        CacheOutcome.UNREADABLE, 4
    )
    assert history.behind(root, pack_tokens([1, 2, 9, 9])) == Shortfall(CacheOutcome.UNREADABLE, 4)
    assert history.behind(root, pack_tokens([1, 2, 8])) == Shortfall(CacheOutcome.UNREADABLE, 2)
    assert history.behind(root, pack_tokens([2])) is None
    assert history.behind(root, b"") is None


def test_only_the_last_losses_are_remembered() -> None:
    history = EvictionHistory(limit=2)
    for index in range(3):
        record(history, b"%d" % index, b"root", 0, [index])
        history.record_checkpoint(
            Standing(b"", b"a", index + 1, b"", 0), cause=CacheOutcome.EVICTED
        )
    root = Cursor(b"root")
    assert [history.behind(root, pack_tokens([index])) is None for index in range(3)] == [
        True,
        False,
        False,
    ]
    piece = Piece(b"a", "kv", 0, 8)
    assert history.last_checkpoint([piece], begin=0, end=8) == Shortfall(CacheOutcome.EVICTED, 3)
    assert history.last_checkpoint([piece], begin=0, end=1) is None


def test_the_last_lost_checkpoint_within_the_match_is_named() -> None:
    history = EvictionHistory()
    for key, tokens in ((b"a", 2), (b"a", 4), (b"b", 3), (b"other", 1)):
        history.record_checkpoint(Standing(b"", key, tokens, b"", 0), cause=CacheOutcome.FORGOTTEN)
    pieces = [Piece(b"a", "kv", 0, 4), Piece(b"b", "kv", 4, 3, offset=1)]
    assert history.last_checkpoint(pieces, begin=1, end=9) == Shortfall(CacheOutcome.FORGOTTEN, 5)
    assert history.last_checkpoint(pieces, begin=1, end=5) == Shortfall(CacheOutcome.FORGOTTEN, 3)
    assert history.last_checkpoint(pieces, begin=1, end=3) == Shortfall(CacheOutcome.FORGOTTEN, 1)
    assert history.last_checkpoint(pieces, begin=6, end=9) is None
