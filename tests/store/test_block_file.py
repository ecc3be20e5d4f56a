from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.block import BadBlock, Block, BlockMissing
from holdfast.store.block_file import ALIGNMENT, check_block, encode_block, read_block, read_header, write_buffers
from holdfast.store.keys import child_key, root_key
from tests.store.chains import FINGERPRINT, bytes_of, file_bytes, make_block, write_file


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    token_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=300)))
    parent_tokens = draw(st.integers(0, 300))
    start = draw(st.integers(parent_tokens, 10**6)) if parent_tokens else 0
    kind = draw(st.sampled_from(["kv", "state"]))
    parent = root_key(draw(st.text(max_size=3)))
    key = child_key(parent, parent_tokens, token_ids, kind)
    parts = tuple(draw(st.lists(st.binary(max_size=300), max_size=80)))
    return Block(
        key=key, parent_key=parent, parent_tokens=parent_tokens, kind=kind, start=start, token_ids=token_ids,
        meta=draw(st.binary(max_size=200)), parts=parts,
    )  # fmt: skip


@given(block=blocks(), fingerprint=st.text(max_size=40))
def test_what_was_written_is_read(block: Block, fingerprint: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "block"
    write_file(path, block, fingerprint=fingerprint)
    stored = read_block(path, block.key)
    assert bytes_of(stored.block) == block
    assert (stored.fingerprint, stored.created, stored.file_bytes) == (fingerprint, 12.5, path.stat().st_size)
    head = read_header(path, block.key)
    assert head.block == replace(block, parts=())
    assert head.file_bytes == stored.file_bytes


def test_parts_are_aligned_read_only_views_of_one_buffer(tmp_path: Path) -> None:
    block = make_block(range(10), part_bytes=(1, 63, 64, 65, 0, 7))
    write_file(tmp_path / "block", block)
    parts = read_block(tmp_path / "block", block.key).block.parts
    views = [part for part in parts if isinstance(part, memoryview)]
    assert len(views) == 6
    assert all(view.readonly for view in views)
    assert len({id(view.obj) for view in views}) == 1
    whole = (tmp_path / "block").read_bytes()
    assert all(whole.index(bytes(view)) % ALIGNMENT == 0 for view in views if view.nbytes > 7)


def test_writing_copies_no_part() -> None:
    part = memoryview(bytearray(1000))
    buffers = encode_block(replace(make_block([1]), parts=(part,)), fingerprint="", created=0.0).buffers
    assert any(isinstance(buffer, memoryview) and buffer.obj is part.obj for buffer in buffers)


def test_parts_of_any_shape_are_written_as_their_bytes(tmp_path: Path) -> None:
    words = memoryview(bytearray(range(64))).cast("I", (4, 4))
    block = replace(make_block([1]), parts=(words,))
    write_file(tmp_path / "block", block)
    assert bytes(read_block(tmp_path / "block", block.key).block.parts[0]) == bytes(range(64))


def test_many_parts_take_several_writes(tmp_path: Path) -> None:
    block = make_block([1], part_bytes=tuple(n % 150 for n in range(3000)))
    write_file(tmp_path / "block", block)
    assert bytes_of(read_block(tmp_path / "block", block.key).block) == block


def test_a_write_that_takes_only_a_part_goes_on() -> None:
    block = make_block([1], part_bytes=(300_000, 5, 70_000))  # more than a pipe takes at once
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        write_buffers(write_end, encode_block(block, fingerprint=FINGERPRINT, created=12.5).buffers)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == file_bytes(block)
    os.waitpid(child, 0)


def test_a_missing_file_is_missing_not_bad(tmp_path: Path) -> None:
    with pytest.raises(BlockMissing):
        read_block(tmp_path / "nothing", make_block([1]).key)


def test_links_folders_and_pipes_are_not_read(tmp_path: Path) -> None:
    block = make_block([1])
    write_file(tmp_path / "block", block)
    (tmp_path / "link").symlink_to(tmp_path / "block")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BlockMissing):
        read_block(tmp_path / "link", block.key)
    for name in ("folder", "pipe"):
        with pytest.raises(BadBlock, match="plain file"):
            read_block(tmp_path / name, block.key)


@pytest.mark.parametrize("read", [read_block, read_header])
def test_another_format_is_refused_by_its_number(tmp_path: Path, read: object) -> None:
    block = make_block([1])
    data = bytearray(file_bytes(block))
    data[8] = 2
    (tmp_path / "block").write_bytes(data)
    with pytest.raises(BadBlock, match="format 2"):
        read(tmp_path / "block", block.key)  # type: ignore[operator]


def test_a_header_that_claims_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    block = make_block([1])
    data = bytearray(file_bytes(block))
    data[16:24] = (1 << 40).to_bytes(8, "little")
    (tmp_path / "block").write_bytes(data)
    with pytest.raises(BadBlock, match="bytes long"):
        read_block(tmp_path / "block", block.key)


def test_blocks_that_could_not_be_written_are_refused_beforehand() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        check_block(replace(make_block([1]), parts=(memoryview(b"abcdef")[::2],)))
    with pytest.raises(ValueError, match="too much"):
        check_block(replace(make_block([1]), meta=bytes(5 << 20)))
    with pytest.raises(OverflowError):
        check_block(replace(make_block([1]), token_ids=(-1,)))
