"""A session's file: it can be read as written, and damaged or invalid files are refused early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.store.block import Block, StoredBlock
from holdfast.worker.prefix.chain import Branch, ChainBlock, ChainState, pack_tokens
from holdfast.worker.sessions.registry import MOST_BRANCHES
from holdfast.worker.sessions.session_file import (
    _TRAILER,
    MAGIC,
    Manifest,
    SessionFile,
    write_session,
)
from tests.fakes.chains import named

ROOT, A, B, S = named("root"), named("a"), named("b"), named("s")


def kv(key: bytes, parent: bytes, start: int, tokens: list[int], *parts: bytes) -> StoredBlock:
    block = Block(
        key=key,
        parent_key=parent,
        parent_tokens=start,
        kind="kv",
        start=start,
        packed_tokens=pack_tokens(tokens),
    )
    return StoredBlock(block=block, parts=parts or (b"abcde", b"", b"fg"))


def blocks() -> list[StoredBlock]:
    """Two blocks, the second of which overlaps the first, and a state after both."""
    state = Block(key=S, parent_key=B, parent_tokens=3, kind="state", start=5, packed_tokens=b"")
    return [
        kv(A, ROOT, 0, [1, 2, 3]),
        kv(B, A, 2, [3, 4, 5]),
        StoredBlock(block=state, parts=(b"xyz",)),
    ]


PARTS = (ChainBlock(A, 3, 3), ChainBlock(B, 3, 5))


def manifest(**changes: Any) -> Manifest:
    whole = Manifest(
        fingerprint="f",
        session_id="s",
        created_at=1.0,
        metadata={"k": "v"},
        ttl_seconds=None,
        requests=2,
        branches=(Branch(blocks=PARTS, states=(ChainState(S, 5),)),),
    )
    return msgspec.structs.replace(whole, **changes)


def opened(path: Path, *, most_tokens: int = 100) -> SessionFile:
    return SessionFile(path, most_tokens=most_tokens)


def read_whole(path: Path, *, most_tokens: int = 100) -> None:
    file = opened(path, most_tokens=most_tokens)
    try:
        file.checked_chains(lambda block: None)
    finally:
        file.close()


def refusal(path: Path, *, most_tokens: int = 100) -> str:
    """The reason why a file is refused on opening or reading."""
    with pytest.raises(SessionRefused) as refused:
        read_whole(path, most_tokens=most_tokens)
    assert refused.value.failure is SessionFailure.BAD_FILE
    return str(refused.value)


def test_written_sessions_can_be_read(tmp_path: Path) -> None:
    write_session(tmp_path / "f", manifest(), blocks())
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    file = opened(tmp_path / "f")
    assert msgspec.structs.replace(file.manifest, blocks=()) == manifest()
    for index in (1, 0, 2, 1):
        expected = blocks()[index]
        found = file.block(expected.key)
        assert found.block == expected.block
        assert [bytes(part) for part in found.parts] == list(expected.parts)
    checked: list[bytes] = []
    chains = file.checked_chains(lambda block: checked.append(block.key))
    assert chains == [pack_tokens([1, 2, 3, 4, 5])]
    assert checked == [A, B, S]
    file.close()


def test_branches_may_share_blocks_or_use_parts(tmp_path: Path) -> None:
    branches = (Branch(blocks=PARTS), Branch(blocks=(ChainBlock(A, 2, 2),)))
    write_session(tmp_path / "f", manifest(branches=branches), blocks())
    file = opened(tmp_path / "f")
    assert file.checked_chains(lambda block: None) == [
        pack_tokens([1, 2, 3, 4, 5]),
        pack_tokens([1, 2]),
    ]
    file.close()
    assert "5 tokens, but the model's context has only 4" in refusal(tmp_path / "f", most_tokens=4)


def test_a_partially_written_file_is_deleted(tmp_path: Path) -> None:
    def broken() -> Any:
        yield blocks()[0]
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_session(tmp_path / "f", manifest(), broken())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changes", [
    {"session_id": ""},
    {"session_id": "a/b"},
    {"session_id": "x" * 300},
    {"metadata": {str(number): "" for number in range(17)}},
    {"metadata": {"k": "v" * 600}},
    {"ttl_seconds": -1.0},
    {"ttl_seconds": float("nan")},
    {"ttl_seconds": float("inf")},
    {"branches": (Branch(),) * (MOST_BRANCHES + 1)},
    {"branches": (Branch(blocks=(ChainBlock(A, 4, 4),)),)},  # longer than the block
    {"branches": (Branch(blocks=(ChainBlock(A, 3, 3), ChainBlock(A, 3, 6))),)},  # twice
    {"branches": (Branch(blocks=(ChainBlock(A, 3, 4),)),)},  # elsewhere
    {"branches": (Branch(blocks=(ChainBlock(A, -3, 3),)),)},
    {"branches": (Branch(blocks=(ChainBlock(A, 1, 1), ChainBlock(B, 3, 5))),)},  # a gap
    {"branches": (Branch(blocks=(ChainBlock(S, 0, 5),)),)},  # not a block
    {"branches": (Branch(blocks=(ChainBlock(ROOT, 3, 3),)),)},  # not there
    {"branches": (Branch(blocks=PARTS, states=(ChainState(S, 4),)),)},
    {"branches": (Branch(blocks=PARTS[:1], states=(ChainState(S, 5),)),)},
    {"branches": (Branch(blocks=PARTS, states=(ChainState(B, 5),)),)},
    {"branches": (Branch(blocks=PARTS, states=(ChainState(ROOT, 5),)),)},
    {"branches": (Branch(blocks=PARTS, states=(ChainState(S, 5),) * 4),)},
])  # fmt: skip
def test_a_manifest_that_is_invalid_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write_session(tmp_path / "f", manifest(**changes), blocks())
    assert refusal(tmp_path / "f") != ""


def test_overlapping_blocks_must_have_equal_tokens(tmp_path: Path) -> None:
    first, _, state = blocks()
    write_session(tmp_path / "f", manifest(), [first, kv(B, A, 2, [9, 4, 5]), state])
    assert "follows other tokens" in refusal(tmp_path / "f")


def with_manifest(path: Path, encoded: bytes, *, claimed_bytes: int | None = None) -> Path:
    """A file without blocks, with any manifest and the right checksum."""
    size = len(encoded) if claimed_bytes is None else claimed_bytes
    path.write_bytes(encoded + _TRAILER.pack(xxhash.xxh3_128_digest(encoded), size, MAGIC))
    return path


def test_an_unreadable_manifest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    encoded = msgspec.msgpack.encode(manifest(session_id="session", branches=()))
    opened(with_manifest(path, encoded)).close()
    no_text = encoded.replace(b"session\xaa", b"\xff\xfe\xff\xfe\xff\xfe\xff\xaa")
    for bad in (
        no_text.replace(b"\xa7session", b"\xa7\xff\xfe\xff\xfe\xff\xfe\xff"),
        b"\xc1",
        b"\x91" * 100_000,
    ):
        assert "cannot be read" in refusal(with_manifest(path, bad))
    assert "too long" in refusal(with_manifest(path, encoded, claimed_bytes=1 << 40))
    assert "the checksum of its manifest does not match" in refusal(
        with_manifest(path, encoded, claimed_bytes=7)
    )
    for sizes in (((A, 5),), ((A, -5), (B, 5)), ((A, 0), (A, 0))):
        other = manifest(branches=(), blocks=sizes)
        assert "manifest" in refusal(with_manifest(path, msgspec.msgpack.encode(other)))
    for content in (b"", b"x", b"x" * 200):
        path.write_bytes(content)
        assert "not an exported session" in refusal(path)


def test_an_oversized_manifest_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    claimed = 1 << 40
    with path.open("wb") as file:
        file.truncate(claimed)
        file.seek(claimed)
        file.write(_TRAILER.pack(bytes(16), claimed, MAGIC))
    assert "its manifest is too long" in refusal(path)


def test_a_file_of_the_first_format_is_refused_by_format(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"HOLDFAST-SESSION-1" + bytes(500))
    assert "exported by an earlier version of Holdfast" in refusal(tmp_path / "f")


@given(cut=st.integers(0, 200), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_damage_is_detected(
    cut: int, at: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damage") / "f"
    write_session(path, manifest(), blocks())
    whole = path.read_bytes()
    at %= len(whole)
    flipped = whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]
    for damaged in (flipped, whole[: len(whole) - 1 - cut % len(whole)]):
        path.write_bytes(damaged)
        assert refusal(path) != ""
