"""Room and order in a store's folder: evict, remove, quarantine. I/O thread, or a command that has the folder for itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from holdfast.store.block import BadBlock, BlockMissing
from holdfast.store.block_file import read_block
from holdfast.store.budget import SLACK_PARTS, Eviction, Holding, StoreLimits, allowed_bytes, choose_victims, reachable_keys
from holdfast.store.folder import StoreFolder
from holdfast.store.index_keeper import IndexKeeper
from holdfast.store.keys import BlockKey, fingerprint_id
from holdfast.store.quarantine import bound_quarantine, quarantine
from holdfast.store.reconcile import reconcile, row_of_file
from holdfast.store.records import record_files

_LOG = logging.getLogger(__name__)


class StoreMaintenance:
    """Changes what is stored, apart from adding to it. Everything raises OSError."""

    def __init__(self, folder: StoreFolder, keeper: IndexKeeper, limits: StoreLimits, clock: Callable[[], float]) -> None:
        self._folder, self._keeper, self._limits, self._clock = folder, keeper, limits, clock

    def allowed_bytes(self) -> int:
        """How many bytes the store may hold at the moment."""
        stored = self._keeper.use(lambda index: index.totals()).file_bytes
        return allowed_bytes(self._limits, volume=self._folder.space(), stored_bytes=stored)

    def shortage_bytes(self, wanted_bytes: int) -> int:
        """How many bytes would have to go before so many more may be written."""
        stored = self._keeper.use(lambda index: index.totals()).file_bytes
        allowed = allowed_bytes(self._limits, volume=self._folder.space(), stored_bytes=stored)
        return max(0, stored + wanted_bytes - allowed)

    def make_room(self, wanted_bytes: int, *, in_use: Collection[BlockKey]) -> Eviction:
        """Evict until `wanted_bytes` more fit; a little beyond, so that it is not done for every block."""
        shortage = self.shortage_bytes(wanted_bytes)
        allowed = self.allowed_bytes()
        if not shortage or wanted_bytes > allowed:
            return Eviction()
        return self.evict(shortage + allowed // SLACK_PARTS, in_use=in_use)

    def evict(self, excess_bytes: int, *, in_use: Collection[BlockKey] = ()) -> Eviction:
        """Remove the least recently used blocks that free so many bytes together."""
        with self._folder.exclusive():
            victims = self._victims(excess_bytes, in_use)
            if any(self._has_another_size(holding) for holding in victims.values()):
                self._keeper.differences.append(self._keeper.use(lambda index: reconcile(index, self._folder)))
                victims = self._victims(excess_bytes, in_use)
            self._unlink(tuple(victims), victims)
        return Eviction(keys=tuple(victims), freed_bytes=sum(holding.file_bytes for holding in victims.values()))

    def _victims(self, excess_bytes: int, in_use: Collection[BlockKey]) -> dict[BlockKey, Holding]:
        """Who has to go, in this order."""
        holdings = {holding.key: holding for holding in self._keeper.use(lambda index: index.holdings(self._clock()))}
        eviction = choose_victims(tuple(holdings.values()), excess_bytes=excess_bytes, in_use=in_use)
        return {key: holdings[key] for key in eviction.keys}

    def _has_another_size(self, holding: Holding) -> bool:
        """Whether a row does not say how large its file is: a wrong size would make too many go, or too few."""
        try:
            size = self._folder.block_path(holding.key, model=holding.model).lstat().st_size
        except FileNotFoundError:  # somebody else has just removed it
            return False
        return size != holding.file_bytes

    def remove_unreachable(self) -> Eviction:
        """Remove the blocks whose parents are gone, unless they are pinned."""
        with self._folder.exclusive():
            holdings = self._keeper.use(lambda index: index.holdings(self._clock()))
            holdings.sort(key=lambda holding: holding.start)
            reachable = reachable_keys((holding.key, holding.parent_key, holding.start) for holding in holdings)
            lost = {holding.key: holding for holding in holdings if holding.key not in reachable and not holding.pinned}
            self._unlink(tuple(lost), lost)
        return Eviction(keys=tuple(lost), freed_bytes=sum(holding.file_bytes for holding in lost.values()))

    def _unlink(self, keys: tuple[BlockKey, ...], holdings: dict[BlockKey, Holding]) -> None:
        done = []
        try:
            for key in keys:  # files first: a row without a file is a miss, a file without a row would be found again
                self._folder.block_path(key, model=holdings[key].model).unlink(missing_ok=True)
                done.append(key)
        finally:
            if done:
                self._keeper.use(lambda index: index.remove(done))

    def remove(self, keys: Iterable[BlockKey], *, fingerprint: str) -> None:
        """Delete blocks of one model."""
        model = fingerprint_id(fingerprint)
        gone = list(keys)
        for key in gone:
            self._folder.block_path(key, model=model).unlink(missing_ok=True)
        self._keeper.use(lambda index: index.remove(gone))

    def forget_models(self, is_outdated: Callable[[str], bool]) -> None:
        """Delete what is kept of models whose fingerprints are outdated, sessions too; one line in the log if there was any."""
        fingerprints = self._keeper.use(lambda index: index.fingerprints())
        models = [model for model, fingerprint in fingerprints.items() if is_outdated(fingerprint)]
        if not models:
            return
        with self._folder.exclusive():
            files = [found for model in models for found in self._folder.block_files(model=model)]
            for found in files:
                found.path.unlink(missing_ok=True)
            for path in (path for model in models for path in record_files(self._folder.path / "sessions" / model)):
                path.unlink(missing_ok=True)
            self._keeper.use(lambda index: index.remove([found.key for found in files]))
            self._keeper.use(lambda index: index.forget_models(models))
        if files:
            _LOG.warning(
                "the store begins anew: %d blocks (%.1f MB) under an earlier, weaker kind of fingerprint are deleted: %s",
                len(files), sum(found.file_bytes for found in files) / 1e6, self._folder.path,
            )  # fmt: skip

    def condemn(self, path: Path, bad: BadBlock) -> bool:
        """Put a damaged file into quarantine, unless it has been replaced by a good one since. True when it was bad."""
        try:
            stored = read_block(path, bad.key)
            if fingerprint_id(stored.fingerprint) != path.parent.name:
                raise BadBlock(bad.key, "lies in another model's folder")
        except BlockMissing:
            return False
        except BadBlock as still_bad:
            _LOG.warning("a damaged block was found and set aside: %s", still_bad)
            quarantine(path, still_bad, folder=self._folder.quarantine_folder)
            self._bound_quarantine()
            self._keeper.use(lambda index: index.remove_rows([bad.key]))
            return True
        return False

    def _bound_quarantine(self) -> None:
        bound_quarantine(
            self._folder.quarantine_folder,
            most_bytes=self._limits.quarantine_bytes,
            most_files=self._limits.quarantine_files,
        )

    def settle_differences(self) -> tuple[int, list[BlockKey]]:
        """Quarantine what the last openings of the index found damaged. Returns how many files, and all keys that are gone."""
        damaged, gone = 0, []
        while self._keeper.differences:
            differences = self._keeper.differences.pop()
            gone += differences.removed
            for found, bad in differences.damaged:
                damaged += 1
                gone.append(found.key)
                quarantine(found.path, bad, folder=self._folder.quarantine_folder)
        if damaged:
            were = "file was" if damaged == 1 else "files were"
            _LOG.warning("%d damaged %s found in the store and set aside", damaged, were)
            self._bound_quarantine()
        return damaged, gone

    def heal_rows(self, keys: Iterable[BlockKey], *, fingerprint: str) -> None:
        """Make damaged rows of the index anew from the files' headers."""
        wanted = set(keys)
        rows = []
        for found in self._folder.block_files(model=fingerprint_id(fingerprint)):
            if found.key in wanted:
                try:
                    rows.append(row_of_file(found))
                except BlockMissing:
                    continue
                except BadBlock as bad:
                    self.condemn(found.path, bad)
        self._keeper.use(lambda index: index.remove_rows(wanted))
        self._keeper.use(lambda index: index.add(rows))
        self._keeper.use(lambda index: index.recount())  # a damaged size was subtracted
