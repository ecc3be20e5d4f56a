"""Invariants of the store: its blocks and the records of sessions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from holdfast.store.block import (
    BlockKey,
    Entry,
    ReadFailed,
    StoredBlock,
    by_place,
    fingerprint_id,
    reachable_keys,
    read_block,
    read_header,
)
from holdfast.worker.kv.bits import BITS, KVBits
from tests.simulation.checks_part import Part
from tests.simulation.device import DIMENSION, Weights, rows_of

if TYPE_CHECKING:
    from tests.simulation.checks import Checks

RECORDED_SECONDS = 3.0  # until the store has recorded a use


class StoreChecks(Part):
    """Checks the store's guarantees."""

    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self.damaged: set[Path] = set()  # files that the scenario has damaged
        # file names of blocks that the store has reported durable and not given up since
        self._durable: set[str] = set()
        self._given_up: set[str] = set()  # files that the store may delete: evicted, or removed
        # by path of a session's record: the contents that a power cut may leave. First the durable
        # one, then those written since; None: no file
        self._records: dict[Path, list[bytes | None]] = {}
        self._unwanted: dict[str, float] = {}  # files that the store was told to delete, and when
        self._used_at: dict[BlockKey, float] = {}  # when a request last started from each block

    def stored(self, keys: Iterable[BlockKey]) -> None:
        """The store reports that these blocks are durable."""
        names = [key.hex() for key in keys]
        self._durable.update(names)
        self._given_up.difference_update(names)
        for name in names:  # it may have been given to the store again
            self._unwanted.pop(name, None)
        disk, store = self.simulation.disk, self.simulation.folder / "store"
        with disk.bypassed():
            files = [
                path
                for name in names
                for path in (
                    *store.glob(f"blocks/*/{name}.block"), *store.glob(f"incoming/*/{name}.part")
                )
            ]  # fmt: skip
            unsynced = [path.name for path in files if not disk.durability.is_synced(path)]
            for path in files:
                if path.suffix == ".block":
                    self._is_right(path)
        if unsynced:
            self._violation("durable blocks survive", f"{min(unsynced)} is not synced yet")

    def gave_up(self, keys: Iterable[BlockKey]) -> None:
        """The store evicts these blocks, or was told to remove them."""
        names = [key.hex() for key in keys]
        self._given_up.update(names)
        self._durable.difference_update(names)

    def unwanted(self, keys: Collection[BlockKey], *, to_retry: Collection[BlockKey]) -> None:
        """The store has deleted these blocks, or will as soon as it can. to_retry: those that it will
        try to delete again.
        """
        blocks = self.simulation.folder / "store" / "blocks"
        with self.simulation.disk.bypassed():
            left = [
                key.hex()
                for key in keys
                if key not in to_retry and any(blocks.glob(f"*/{key.hex()}.block"))
            ]
        if left:
            self._violation("nothing outlives its owner", f"{left[0]} is never deleted")
        names = [key.hex() for key in keys]
        self._unwanted.update(dict.fromkeys(names, self.world.now))
        self._durable.difference_update(names)  # including those that were stored just before

    def evicted(self, entries: list[Entry]) -> None:
        """The store evicts these blocks."""
        if pinned := [entry.block.key.hex() for entry in entries if entry.pinned]:
            self._violation("good blocks stay", f"{pinned[0]} is pinned, but is evicted")

    def used(self, keys: Iterable[BlockKey]) -> None:
        """Blocks are written, or a request starts from them."""
        self._used_at.update(dict.fromkeys(keys, self.world.now))

    def chose(
        self, entries: Sequence[Entry], victims: Sequence[Entry], *, in_use: Collection[BlockKey]
    ) -> None:
        """The store chooses which blocks it evicts: those that were used least recently, and no block
        without all that follow it.
        """
        chosen = {entry.block.key for entry in victims}
        orphans = [
            entry.block.key.hex()
            for entry in entries
            if entry.block.parent_key in chosen and entry.block.key not in chosen
        ]
        if orphans:
            self._violation("eviction order", f"{orphans[0]} loses the block before it")
        if self.checks.excuses.all:
            return  # a use may not have been recorded
        kept = set(in_use)
        recency = {each.block.key: self._used_at.get(each.block.key, 0.0) for each in entries}
        for entry in sorted(entries, key=by_place, reverse=True):  # children first
            key, parent = entry.block.key, entry.block.parent_key
            if entry.pinned or key in kept:
                kept |= {key, parent}
            recency[parent] = max(recency.get(parent, 0.0), recency[key])
        if kept & chosen:
            self._violation("eviction order", f"{min(kept & chosen).hex()} is in use")
        # the others are of no use, and are evicted first
        reachable = reachable_keys(sorted(entries, key=by_place))
        stay = [recency[e.block.key] for e in entries if e.block.key not in kept | chosen]
        newest = max((recency[key] for key in chosen & reachable), default=0.0)
        if stay and newest > min(stay) + RECORDED_SECONDS:
            self._violation(
                "eviction order",
                f"a block is evicted that was used at {newest}, but one stays from {min(stay)}",
            )

    def check_size(self) -> None:
        """The store is within its limit, and counts the blocks that are there."""
        options = self.simulation.options
        blocks = self.simulation.folder / "store" / "blocks"
        with self.simulation.disk.bypassed():
            sizes = [path.stat().st_size for path in blocks.glob("*/*.block")]
        if self.checks.excuses.disk_has_failed() or "failing" in options:
            return
        limit = options["store_bytes"]
        if limit is not None and sum(sizes) > limit:
            self._violation("bytes", f"the store has {sum(sizes)} of {limit} bytes")
        if len(options["models"]) > 1:
            return  # another worker may have written since this one has counted
        for worker in self.simulation.machine.workers.values():
            if worker.store is not None:
                figures = worker.store.statistics()
                counted = (figures.blocks, figures.stored_bytes)
                if counted != (len(sizes), sum(sizes)):
                    self._violation(
                        "bytes", f"{counted} blocks and bytes, not {len(sizes)} and {sum(sizes)}"
                    )

    def deleted(self, path: Path) -> None:
        """A block's file is about to be deleted or moved; a whole one must have been given up."""
        if path.stem in self._given_up or path.parent.parent.name != "blocks":
            return
        with self.simulation.disk.bypassed():
            is_whole = _is_whole(path)
        if is_whole:
            self._violation("good blocks stay", f"{path.name} is whole, but is deleted")

    def writes_record(self, path: Path, content: bytes | None) -> None:
        """A session's record is about to be replaced or removed."""
        self._records.setdefault(path, [None]).append(content)

    def wrote_record(self, path: Path) -> None:
        """The store reports that the record is durable."""
        self._records[path] = self._records[path][-1:]

    def check_durable(self) -> None:
        """All durable blocks and records exist."""
        with self.simulation.disk.bypassed():
            there = {path.stem for path in self._whole_files()}
            records = {path: _content(path) for path in self._records if path not in self.damaged}
        lost = self._durable - there - self._damaged_blocks()
        if lost:
            self._violation("durable blocks survive", f"{len(lost)} blocks are lost: {min(lost)}")
        for path, found in records.items():
            if found not in self._records[path]:
                self._violation("durable records survive", f"{path.name} is {found!r}")

    def after_power_cut(self) -> None:
        """Durable data has survived, and every file with its final name is whole. The surviving records
        count as durable from now on.
        """
        self.check_durable()
        self.check_blocks()
        with self.simulation.disk.bypassed():
            self._records = {path: [_content(path)] for path in self._records}

    def refused(self, keys: Iterable[BlockKey]) -> None:
        """A worker has refused these stored blocks. They must be damaged or gone, and the disk must have
        failed.
        """
        blocks = self.simulation.folder / "store" / "blocks"
        good = {key.hex() for key in keys} - self._damaged_blocks()
        with self.simulation.disk.bypassed():
            whole = [each for each in good if any(map(_is_whole, blocks.glob(f"*/{each}.block")))]
        if whole and not self.simulation.disk.may_lie:
            self._violation("good blocks stay", f"{min(whole)} is whole, but is given up")
        has_failed = self.damaged or self.checks.excuses.disk_has_failed()
        # a small store may evict a block between lookup and read
        has_failed = has_failed or self.simulation.options["store_bytes"] is not None
        if not has_failed and "failing" not in self.simulation.options:
            names = ", ".join(key.hex()[:12] for key in keys)
            self._violation("stored blocks can be used", f"these cannot, on a good disk: {names}")

    def left_by_the_dead(self) -> set[str]:
        """Blocks that dead processes have written, but not yet given their final names."""
        dead = {str(process.pid) for process in self.world.processes if process.is_dead}
        with self.simulation.disk.bypassed():
            return {
                path.stem
                for path in self._whole_files()
                if path.suffix == ".part" and path.parent.name.partition("-")[0] in dead
            }

    def salvaged(self, blocks: set[str]) -> None:
        """The store reports that it has salvaged the blocks of dead processes."""
        with self.simulation.disk.bypassed():
            there = {path.stem: path.suffix for path in self._whole_files()}
        lost = blocks - there.keys() - self._given_up - self._damaged_blocks()
        if lost:
            self._violation("a kill loses no written block", f"these are lost: {min(lost)}")
        # blocks that could not be read are salvaged at the next start
        named = {block for block in blocks if there.get(block) == ".block"}
        self._durable |= named - self._given_up

    def check_unwanted(self) -> None:
        """Files that the store was told to delete are gone, unless its process died first."""
        blocks = self.simulation.folder / "store" / "blocks"
        with self.simulation.disk.bypassed():
            there = {path.stem for path in blocks.glob("*/*.block")}
        last_death = max(self.simulation.machine.ended_at, default=-math.inf)
        for name, at in self._unwanted.items():
            if name in there and at > last_death:
                self._violation("nothing outlives its owner", f"{name} was deleted, but is there")

    def check_blocks(self) -> None:
        """Every block in the store is complete, with the right keys and values."""
        blocks = self.simulation.folder / "store" / "blocks"
        with self.simulation.disk.bypassed():
            for path in sorted(blocks.glob("*/*.block")):
                if not self._is_right(path) and path.stem not in self._damaged_blocks():
                    self._violation("stored blocks are right", f"{path.name} is damaged")

    def _is_right(self, path: Path) -> bool:
        model = path.parent.name
        try:
            stored = read_block(path, bytes.fromhex(path.stem), model=model)
        except ReadFailed:
            return False
        block = stored.block
        weights = self._weights_by_id().get(model, ())
        tokens = np.frombuffer(block.packed_tokens, "<u4").tolist()
        if not weights or not tokens:
            return True
        found = _rows_in(stored)
        for each in weights:
            seen = self.checks.links.seen(tokens, each)
            if np.array_equal(found, rows_of(seen, block.start, each)):
                return True
        self._violation("stored blocks are right", f"{path.name} holds other keys or values")
        return True

    def _weights_by_id(self) -> dict[str, Sequence[Weights]]:
        """All weights with which a block may have been computed, by the name of its folder."""
        return {
            fingerprint_id(fingerprint): weights
            for model in self.simulation.options["models"]
            for fingerprint, weights in self.simulation.machine.all_weights_of(model).items()
        }

    def _whole_files(self) -> Iterator[Path]:
        """The whole files of blocks, including those that get their final name only when the store
        is opened again.
        """
        store = self.simulation.folder / "store"
        for path in [*store.glob("blocks/*/*.block"), *store.glob("incoming/*/*.part")]:
            if _is_whole(path):
                yield path

    def _damaged_blocks(self) -> set[str]:
        return {path.stem for path in self.damaged}


def _rows_in(stored: StoredBlock) -> np.ndarray[Any, Any]:
    """The keys and values of a block: [2, tokens, DIMENSION]. Quantization moves none by a half."""
    if stored.form == "native":
        found = [np.frombuffer(part, np.float32) for part in stored.parts]
    else:
        found = []
        form = cast("KVBits", stored.form)
        for bits, at in zip(BITS[form], (0, 3), strict=True):
            codes, scales, biases = stored.parts[at : at + 3]
            each_bit = np.unpackbits(np.frombuffer(codes, np.uint8), bitorder="little")
            numbers = each_bit.reshape(-1, bits) @ (1 << np.arange(bits))
            scale, bias = (np.frombuffer(each, np.float16)[:, None] for each in (scales, biases))
            found.append(np.rint(numbers.reshape(-1, DIMENSION) * scale + bias))
    return np.stack([each.reshape(-1, DIMENSION) for each in found])


def _is_whole(path: Path) -> bool:
    """Whether a file holds a whole block."""
    key = bytes.fromhex(path.stem)
    try:
        _, fingerprint = read_header(path, key)
        read_block(path, key, model=fingerprint_id(fingerprint))
    except (ReadFailed, OSError):
        return False
    return True


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
