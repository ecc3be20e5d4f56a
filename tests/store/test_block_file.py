from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.store.block import (
    ALIGNMENT,
    BadBlock,
    Block,
    BlockMissing,
    StoredBlock,
    child_key,
    encode_block,
    fingerprint_id,
    read_block,
    read_header,
    root_key,
    write_buffers,
)
from holdfast.worker.prefix.chain import (
    pack_tokens,
)
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, file_bytes, make_block, write_file


def read(path: Path, block: StoredBlock) -> StoredBlock:
    return read_block(path, block.key, model=fingerprint_id(FINGERPRINT))


@st.composite
def blocks(draw: st.DrawFn) -> StoredBlock:
    token_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=300)))
    parent_tokens = draw(st.integers(0, 300))
    start = draw(st.integers(parent_tokens, 10**6)) if parent_tokens else 0
    kind = draw(st.sampled_from(["kv", "state"]))
    parent = root_key(draw(st.text(max_size=3)))
    key = child_key(parent, parent_tokens, pack_tokens(token_ids), kind)
    parts = tuple(draw(st.lists(st.binary(max_size=300), max_size=80)))
    block = Block(
        key=key,
        parent_key=parent,
        parent_tokens=parent_tokens,
        kind=kind,
        start=start,
        packed_tokens=pack_tokens(token_ids),
    )
    form = draw(st.sampled_from(["native", "8", "4"]))
    return StoredBlock(block=block, parts=parts, form=form)


@given(block=blocks(), fingerprint=st.text(max_size=40))
def test_a_written_block_is_read_back(
    block: StoredBlock, fingerprint: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "block"
    write_file(path, block, fingerprint=fingerprint)
    assert bytes_of(read_block(path, block.key, model=fingerprint_id(fingerprint))) == block
    assert read_header(path, block.key) == (block.block, fingerprint)


def test_parts_are_aligned_read_only_views_of_one_buffer(tmp_path: Path) -> None:
    block = make_block(range(10), part_bytes=(1, 63, 64, 65, 0, 7))
    write_file(tmp_path / "block", block)
    parts = read(tmp_path / "block", block).parts
    views = [part for part in parts if isinstance(part, memoryview)]
    assert len(views) == 6
    assert all(view.readonly for view in views)
    assert len({id(view.obj) for view in views}) == 1
    whole = (tmp_path / "block").read_bytes()
    assert all(whole.index(bytes(view)) % ALIGNMENT == 0 for view in views if view.nbytes > 7)


def test_writing_copies_no_part() -> None:
    part = memoryview(bytearray(1000))
    buffers = encode_block(replace(make_block([1]), parts=(part,)), fingerprint="")
    assert any(isinstance(buffer, memoryview) and buffer.obj is part.obj for buffer in buffers)


def test_parts_of_any_shape_are_written_as_their_bytes(tmp_path: Path) -> None:
    words = memoryview(bytearray(range(64))).cast("I", (4, 4))
    block = replace(make_block([1]), parts=(words,))
    write_file(tmp_path / "block", block)
    assert bytes(read(tmp_path / "block", block).parts[0]) == bytes(range(64))


def test_many_parts_take_several_writes(tmp_path: Path) -> None:
    block = make_block([1], part_bytes=tuple(n % 150 for n in range(3000)))
    write_file(tmp_path / "block", block)
    assert bytes_of(read(tmp_path / "block", block)) == block


def test_a_partial_write_is_continued() -> None:
    block = make_block([1], part_bytes=(300_000, 5, 70_000))  # more than a pipe's capacity
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        write_buffers(write_end, encode_block(block, fingerprint=FINGERPRINT))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == file_bytes(block)
    os.waitpid(child, 0)


def test_a_missing_file_is_missing_not_bad(tmp_path: Path) -> None:
    with pytest.raises(BlockMissing):
        read(tmp_path / "nothing", make_block([1]))


def test_links_folders_and_pipes_are_not_read(tmp_path: Path) -> None:
    block = make_block([1])
    write_file(tmp_path / "block", block)
    (tmp_path / "link").symlink_to(tmp_path / "block")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadBlock, match="plain file"):
        read(tmp_path / "link", block)
    for name in ("folder", "pipe"):
        with pytest.raises(BadBlock, match="plain file"):
            read(tmp_path / name, block)


def test_another_format_is_refused_by_its_number(tmp_path: Path) -> None:
    block = make_block([1])
    data = bytearray(file_bytes(block))
    data[8] = 3
    (tmp_path / "block").write_bytes(data)
    with pytest.raises(BadBlock, match="format 3"):
        read(tmp_path / "block", block)
    with pytest.raises(BadBlock, match="format 3"):
        read_header(tmp_path / "block", block.key)


def test_further_header_fields_of_a_later_version_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block([1])
    encode = msgspec.msgpack.encode
    with monkeypatch.context() as patch:
        patch.setattr(msgspec.msgpack, "encode", lambda fields: encode((*fields, "a new field")))
        write_file(tmp_path / "block", block)
    assert b"a new field" in (tmp_path / "block").read_bytes()
    assert bytes_of(read(tmp_path / "block", block)) == block
    assert read_header(tmp_path / "block", block.key) == (block.block, FINGERPRINT)


def test_the_block_of_another_model_is_refused(tmp_path: Path) -> None:
    block = make_block([1])
    write_file(tmp_path / "block", block, fingerprint="model two")
    with pytest.raises(BadBlock, match="another model"):
        read(tmp_path / "block", block)


def test_a_header_that_claims_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    block = make_block([1])
    data = bytearray(file_bytes(block))
    data[16:24] = (1 << 40).to_bytes(8, "little")
    (tmp_path / "block").write_bytes(data)
    with pytest.raises(BadBlock, match="bytes long"):
        read(tmp_path / "block", block)
