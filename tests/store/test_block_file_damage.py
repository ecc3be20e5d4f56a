"""Whatever happens to a file, it is read correctly or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.store.block import (
    BadBlock,
    BlockKey,
    BlockMissing,
    fingerprint_id,
    read_block,
    read_header,
)
from tests.fakes.stored_blocks import FINGERPRINT, file_bytes, make_block

BLOCK = make_block(range(20), part_bytes=(100, 64, 3, 0, 130))
WHOLE = file_bytes(BLOCK)
OTHERS = [
    make_block(range(1, 21), part_bytes=(100, 64, 3, 0, 130)),
    make_block(range(20), fingerprint="another model", part_bytes=(100, 64, 3, 0, 130)),
    make_block([5], after=BLOCK, part_bytes=(300,)),
]


def refused(path: Path, data: bytes, key: BlockKey = BLOCK.key) -> bool:
    path.write_bytes(data)
    try:
        read_block(path, key, model=fingerprint_id(FINGERPRINT))
    except BadBlock:
        return True
    return False


def test_a_flipped_bit_in_any_byte_is_detected(tmp_path: Path) -> None:
    missed = []
    for position in range(len(WHOLE)):
        data = bytearray(WHOLE)
        data[position] ^= 1 << position % 8
        if not refused(tmp_path / "block", bytes(data)):
            missed.append(position)
    assert missed == []


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    assert [
        length for length in range(len(WHOLE)) if not refused(tmp_path / "block", WHOLE[:length])
    ] == []


@given(
    damage=st.one_of(
        st.builds(
            lambda at, new: WHOLE[:at] + new + WHOLE[at + len(new) :],
            st.integers(0, len(WHOLE)),
            st.binary(min_size=1),
        ),
        st.builds(
            lambda at, new: WHOLE[:at] + new + WHOLE[at:],
            st.integers(0, len(WHOLE)),
            st.binary(min_size=1),
        ),
        st.builds(
            lambda at, size: WHOLE[:at] + WHOLE[at + size :],
            st.integers(0, len(WHOLE)),
            st.integers(1, 200),
        ),
        st.builds(
            lambda at, size: WHOLE[:at] + bytes(size) + WHOLE[at + size :],
            st.integers(0, len(WHOLE)),
            st.integers(1, 99),
        ),
        st.builds(
            lambda other, at: WHOLE[:at] + file_bytes(other)[at:],
            st.sampled_from(OTHERS),
            st.integers(0, len(WHOLE)),
        ),
        st.binary(max_size=400),
    )
)
@settings(max_examples=300)
def test_damage_of_any_kind_is_refused(
    damage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert damage == WHOLE or refused(tmp_path_factory.getbasetemp() / "damaged", damage)


@pytest.mark.parametrize("other", OTHERS)
def test_a_sound_file_under_another_name_is_refused(tmp_path: Path, other: object) -> None:
    assert refused(tmp_path / "block", file_bytes(other))  # type: ignore[arg-type]


def test_the_whole_key_is_checked_not_only_the_checksum_seed(tmp_path: Path) -> None:
    assert refused(tmp_path / "block", WHOLE, BLOCK.key[:31] + bytes([BLOCK.key[31] ^ 1]))


@given(at=st.integers(0, len(WHOLE) - 1), new=st.integers(0, 255))
def test_a_damaged_header_is_read_correctly_or_refused(
    at: int, new: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged header"
    path.write_bytes(WHOLE[:at] + bytes([new]) + WHOLE[at + 1 :])
    try:
        block, _ = read_header(path, BLOCK.key)
    except (BadBlock, BlockMissing):
        return
    assert block == BLOCK.block
