from __future__ import annotations

from holdfast.prefix.evicted import Evicted, EvictionCause, EvictionHistory
from holdfast.prefix.keys import pack_tokens
from holdfast.prefix.tree import Piece, Place, Standing


def lose(
    losses: EvictionHistory,
    key: bytes,
    parent: bytes,
    parent_tokens: int,
    tokens: list[int],
    cause: EvictionCause = EvictionCause.EVICTED,
) -> None:
    losses.block_lost(key, Standing(Place(parent, parent_tokens, 0), pack_tokens(tokens), len(tokens)), cause=cause)


def test_lost_blocks_are_followed_as_far_as_the_tokens_are_the_same() -> None:
    losses = EvictionHistory()
    lose(losses, b"a", b"root", 0, [1, 2, 3], EvictionCause.UNREADABLE)
    lose(losses, b"b", b"a", 2, [9, 9])
    lose(losses, b"c", b"a", 3, [4])
    root = Place(b"root", 0, 0)
    losses.block_lost(
        b"d", Standing(Place(b"root", 0, 0), pack_tokens([7, 7]), 5), cause=EvictionCause.EVICTED
    )  # 3 more are elsewhere
    lose(losses, b"e", b"d", 4, [8])
    assert losses.behind(root, pack_tokens([7, 8])) == Evicted(0, 2, EvictionCause.EVICTED)
    assert losses.behind(root, pack_tokens([1, 2, 3, 4, 5])) == Evicted(0, 4, EvictionCause.UNREADABLE)
    assert losses.behind(root, pack_tokens([1, 2, 9, 9])) == Evicted(0, 4, EvictionCause.UNREADABLE)
    assert losses.behind(root, pack_tokens([1, 2, 8])) == Evicted(0, 2, EvictionCause.UNREADABLE)
    assert losses.behind(root, pack_tokens([2])) is None
    assert losses.behind(root, b"") is None


def test_only_the_last_losses_are_remembered() -> None:
    losses = EvictionHistory(limit=2)
    for index in range(3):
        lose(losses, b"%d" % index, b"root", 0, [index])
        losses.state_lost(Place(b"a", index + 1, index + 1), cause=EvictionCause.EVICTED)
    root = Place(b"root", 0, 0)
    assert [losses.behind(root, pack_tokens([index])) is None for index in range(3)] == [True, False, False]
    piece = Piece(b"a", 0, 8)
    assert losses.last_state([piece], begin=0, end=8) == Evicted(0, 3, EvictionCause.EVICTED)
    assert losses.last_state([piece], begin=0, end=1) is None


def test_the_last_lost_state_within_the_match_is_named() -> None:
    losses = EvictionHistory()
    for key, tokens in ((b"a", 2), (b"a", 4), (b"b", 3), (b"other", 1)):
        losses.state_lost(Place(key, tokens, 0), cause=EvictionCause.FORGOTTEN)
    pieces = [Piece(b"a", 0, 4), Piece(b"b", 4, 3, offset=1)]
    assert losses.last_state(pieces, begin=1, end=9) == Evicted(1, 5, EvictionCause.FORGOTTEN)
    assert losses.last_state(pieces, begin=1, end=5) == Evicted(1, 3, EvictionCause.FORGOTTEN)
    assert losses.last_state(pieces, begin=1, end=3) == Evicted(1, 1, EvictionCause.FORGOTTEN)
    assert losses.last_state(pieces, begin=6, end=9) is None
