from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.store.block import BadBlock, BlockMissing, BlockUnreadable, fingerprint_id
from holdfast.store.store import BlockReader
from holdfast.store.write_ahead import Mailbox
from holdfast.wire.events import StoreFigures
from tests.fakes.stored_blocks import (
    FINGERPRINT,
    bytes_of,
    filled,
    make_block,
    make_chain,
    write_file,
)

CHAIN = make_chain(3)


def reader_of(path: Path) -> tuple[BlockReader, Mailbox, list[Path]]:
    bad: list[Path] = []
    mailbox = Mailbox(most_bytes=10**6, most_blocks=10)
    figures = StoreFigures(model=fingerprint_id(FINGERPRINT))
    return (
        BlockReader(
            filled(path, CHAIN),
            mailbox,
            figures=figures,
            on_failure=lambda path, _: bad.append(path),
        ),
        mailbox,
        bad,
    )


def test_blocks_are_returned_in_the_requested_order(tmp_path: Path) -> None:
    reader, _, bad = reader_of(tmp_path)
    futures = [reader.request_block(block.key) for block in CHAIN]
    order: list[int] = []
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    reader.end()
    reader.run()
    assert [bytes_of(future.result()) for future in futures] == CHAIN
    assert order == [0, 1, 2]
    assert bad == []
    assert reader._figures.read_bytes == sum(block.nbytes for block in CHAIN)


def test_a_block_waiting_to_be_written_is_read_from_memory(tmp_path: Path) -> None:
    reader, mailbox, _ = reader_of(tmp_path)
    block = make_block([9])
    mailbox.offer_block(block)
    future = reader.request_block(block.key)
    reader.end()
    reader.run()
    assert future.result() is block
    assert reader._figures.read_bytes == 0


def test_missing_and_damaged_blocks_are_distinguished(tmp_path: Path) -> None:
    reader, _, bad = reader_of(tmp_path)
    model = fingerprint_id(FINGERPRINT)
    path = tmp_path / "blocks" / model / f"{CHAIN[1].key.hex()}.block"
    path.write_bytes(b"x" * 500)
    foreign = make_block([50])
    write_file(path.with_name(f"{foreign.key.hex()}.block"), foreign, fingerprint="model two")
    missing, damaged, other = (
        reader.request_block(bytes(32)),
        reader.request_block(CHAIN[1].key),
        reader.request_block(foreign.key),
    )
    reader.end()
    reader.run()
    assert isinstance(missing.exception(), BlockMissing)
    assert isinstance(damaged.exception(), BadBlock)
    assert isinstance(other.exception(), BadBlock)
    assert bad[1:] == [path, path.with_name(f"{foreign.key.hex()}.block")]
    assert reader._figures.missing_blocks == 1


def test_a_cancelled_read_is_not_executed(tmp_path: Path) -> None:
    reader, _, _ = reader_of(tmp_path)
    future = reader.request_block(CHAIN[0].key)
    assert future.cancel()
    reader.end()
    reader.run()
    assert reader._figures.read_bytes == 0


def test_reads_after_the_end_get_an_answer(tmp_path: Path) -> None:
    reader, _, _ = reader_of(tmp_path)
    reader.end()
    early = reader.request_block(CHAIN[0].key)
    reader.run()
    with pytest.raises(BlockUnreadable, match="closed"):
        early.result(60)
    with pytest.raises(BlockUnreadable, match="closed"):
        reader.request_block(CHAIN[0].key).result(60)


def test_reads_continue_while_other_threads_write(tmp_path: Path) -> None:
    reader, _, _ = reader_of(tmp_path)
    thread = threading.Thread(target=reader.run)
    thread.start()
    assert all(
        bytes_of(reader.request_block(CHAIN[n % 3].key).result(60)) == CHAIN[n % 3]
        for n in range(30)
    )
    reader.end()
    thread.join(60)
    assert not thread.is_alive()
