"""The portable file: what is written comes back, and what is damaged or made up is refused before
it costs anything.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.worker.sessions.portable import (
    MAGIC,
    Frame,
    FrameHead,
    Header,
    Part,
    PortableBranch,
    SessionFile,
    write_session,
)
from holdfast.worker.sessions.record import MOST_BRANCHES


def header(**changes: Any) -> Header:
    whole = Header(
        fingerprint="f", session_id="s", created_at=1.0, metadata={"k": "v"}, ttl_seconds=None, requests=2, frames=2,
        branches=(PortableBranch((Part(0, 3, 3),), ((1, 3),)),),
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def frames() -> list[Frame]:
    block = FrameHead(kind="kv", offset=0, packed_tokens=bytes(12), meta=b"m", part_bytes=(5, 0, 2))
    state = FrameHead(kind="state", offset=0, packed_tokens=b"", meta=b"s", part_bytes=(3,))
    return [Frame(block, (b"abcde", b"", b"fg")), Frame(state, (b"xyz",))]


def raw(*pieces: bytes) -> bytes:
    """A file of these pieces, with a right checksum."""
    content = MAGIC + b"".join(pieces)
    return content + xxhash.xxh3_128_digest(content)


def sized(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(SessionRefused) as refused:
        SessionFile(path)
    assert refused.value.failure is SessionFailure.BAD_FILE
    return str(refused.value)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    write_session(tmp_path / "f", header(), frames())
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600
    file = SessionFile(tmp_path / "f")
    assert file.header == header()
    for number in (1, 0, 1):
        found = file.frame(number)
        assert found.head == frames()[number].head
        assert [bytes(part) for part in found.parts] == list(frames()[number].parts)
    file.close()


def test_blocks_that_branches_share_have_one_place(tmp_path: Path) -> None:
    three = [*frames(), frames()[0], frames()[0]]
    first, second = (
        PortableBranch((Part(0, 3, 3), Part(2, 3, 6)), ((1, 3),)),
        PortableBranch((Part(0, 3, 3), Part(3, 3, 6)), ()),
    )
    write_session(tmp_path / "f", header(frames=4, branches=(first, second)), three)
    SessionFile(tmp_path / "f", most_tokens=6).close()
    with pytest.raises(SessionRefused, match="6 tokens, the model takes 5"):
        SessionFile(tmp_path / "f", most_tokens=5)
    for other in (((2, 3), (0, 6)), ((2, 3), (3, 6)), ((0, 2), (2, 5)), ((0, 3), (3, 6), (2, 9))):
        ends = (0, *(end for _, end in other))
        parts = tuple(
            Part(frame, end - before, end)
            for (frame, end), before in zip(other, ends, strict=False)
        )
        write_session(
            tmp_path / "f",
            header(frames=4, branches=(first, second, PortableBranch(parts, ()))),
            three,
        )
        with pytest.raises(SessionRefused, match="named twice"):
            SessionFile(tmp_path / "f")


def test_a_file_that_fails_half_way_does_not_stay(tmp_path: Path) -> None:
    def broken() -> Any:
        yield frames()[0]
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_session(tmp_path / "f", header(), broken())
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
    {"frames": 3},
    {"branches": (PortableBranch((), ()),) * (MOST_BRANCHES + 1)},
    {"branches": (PortableBranch((Part(0, 4, 4),), ()),)},
    {"branches": (PortableBranch((Part(0, 3, 3), Part(0, 3, 5)), ()),)},
    {"branches": (PortableBranch((Part(1, 3, 3),), ()),)},
    {"branches": (PortableBranch((Part(7, 3, 3),), ()),)},
    {"branches": (PortableBranch((Part(-1, 3, 3),), ()),)},
    {"branches": (PortableBranch((Part(0, 3, 3),), ((1, 4),)),)},
    {"branches": (PortableBranch((Part(0, 3, 3),), ((0, 3),)),)},
    {"branches": (PortableBranch((Part(0, 3, 3), Part(0, 3, 6)), ((1, 3),)),)},
    {"branches": (PortableBranch((Part(0, 3, 3),), ((1, 3), (1, 3))),)},
    {"branches": (PortableBranch((Part(0, 3, 3),), ((1, 3),)), PortableBranch((Part(0, 3, 3),), ((1, 2),)))},
    {"branches": (PortableBranch((Part(0, 3, 3),), ()),)},
    {"branches": ()},
    {"frames": -1, "branches": ()},
    {"frames": 1 << 62},
])  # fmt: skip
def test_a_header_that_makes_no_sense_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    write_session(tmp_path / "f", header(**changes), frames())
    with pytest.raises(SessionRefused):
        SessionFile(tmp_path / "f")


@pytest.mark.parametrize("head", [
    FrameHead(kind="kv", offset=0, packed_tokens=bytes(13), meta=b"", part_bytes=(5,)),
    FrameHead(kind="kv", offset=0, packed_tokens=bytes(4 * 257), meta=b"", part_bytes=(5,)),
    FrameHead(kind="kv", offset=0, packed_tokens=bytes(12), meta=b"", part_bytes=(-1, 6)),
    FrameHead(kind="kv", offset=0, packed_tokens=bytes(12), meta=b"", part_bytes=(1 << 40,)),
    FrameHead(kind="kv", offset=0, packed_tokens=bytes(12), meta=bytes(2 << 20), part_bytes=(5,)),
])  # fmt: skip
def test_a_block_that_makes_no_sense_is_refused(head: FrameHead, tmp_path: Path) -> None:
    write_session(tmp_path / "f", header(frames=1, branches=()), [Frame(head, (b"abcde",))])
    with pytest.raises(SessionRefused):
        SessionFile(tmp_path / "f")


def test_heads_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    encoded = msgspec.msgpack.encode(header(session_id="session", frames=0, branches=()))
    content = raw(sized(encoded))
    path.write_bytes(content)
    SessionFile(path).close()
    assert "cannot be read" in refusal(
        path, raw(sized(encoded.replace(b"session", b"\xff\xfe\xff\xfe\xff\xfe\xff")))
    )
    assert "cannot be read" in refusal(path, raw(sized(b"\xc1")))
    assert "cannot be read" in refusal(path, raw(sized(b"\x91" * 100_000)))
    assert "too long" in refusal(path, raw(struct.pack("<Q", 1 << 40)))
    assert "too early" in refusal(path, raw(struct.pack("<Q", 1000)))
    assert "not a session's" in refusal(path, b"x" * 30 + xxhash.xxh3_128_digest(b"x" * 30))


@given(cut=st.integers(0, 200), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_any_damage_is_seen(
    cut: int, at: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damage") / "f"
    write_session(path, header(), frames())
    whole = path.read_bytes()
    at %= len(whole)
    flipped = whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]
    for damaged in (flipped, whole[: len(whole) - 1 - cut % len(whole)]):
        refusal(path, damaged)
