"""Makes files and index agree. The files are the truth."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from holdfast.store.block import BadBlock, BlockMissing
from holdfast.store.block_file import read_block, read_header
from holdfast.store.folder import BLOCK_SUFFIX, BlockFile, StoreFolder, sync_folder
from holdfast.store.index import BlockIndex, IndexRow, row_of
from holdfast.store.keys import KEY_BYTES, BlockKey, fingerprint_id


@dataclass(slots=True, kw_only=True)
class Differences:
    """What was put right, and the files that turned out to be damaged: these are still where they were.

    removed: what is gone. A row that was made anew from its file counts as added, for its block is still there.
    """

    added: int = 0
    removed: list[BlockKey] = field(default_factory=list)
    damaged: list[tuple[BlockFile, BadBlock]] = field(default_factory=list)


def reconcile(index: BlockIndex, folder: StoreFolder) -> Differences:
    """Add what only the folder has, forget what only the index has. Reads the headers of unknown files only.

    Raises OSError, sqlite3.Error.
    """
    known = index.places()
    sound: set[BlockKey] = set()
    fresh: list[IndexRow] = []
    differences = Differences()
    for found in folder.block_files():
        if known.get(found.key) == (found.model, found.file_bytes):
            sound.add(found.key)
            continue
        try:
            fresh.append(row_of_file(found))
        except BlockMissing:
            continue
        except BadBlock as bad:
            differences.damaged.append((found, bad))
    wrong = [key for key in known if key not in sound]
    made_anew = {row.entry.key for row in fresh}
    differences.removed = [key for key in wrong if key not in made_anew]
    differences.added = len(fresh)
    if wrong:
        index.remove_rows(wrong)
    if fresh:
        index.add(fresh)
    index.recount()
    return differences


def row_of_file(found: BlockFile) -> IndexRow:
    """The row of a block, from its file's header. Raises BlockMissing, BadBlock."""
    stored = read_header(found.path, found.key)
    if fingerprint_id(stored.fingerprint) != found.model:
        raise BadBlock(found.key, "lies in another model's folder")
    return row_of(
        stored.block,
        fingerprint=stored.fingerprint,
        created=stored.created,
        file_bytes=stored.file_bytes,
        last_used=found.modified,  # recency is lost with the index; the time of writing is the next best
    )


def salvage(folder: StoreFolder) -> int:
    """Finish the files that dead writers had written but not named yet, delete the incomplete ones. Returns how many were saved.

    The caller holds the folder's lock. Raises OSError.
    """
    saved = 0
    touched = set()
    with folder.abandoned() as paths:
        for path in paths:
            name = path.name.partition(".")[0]
            try:
                stored = read_block(path, bytes.fromhex(name) if len(name) == 2 * KEY_BYTES else b"")
            except (BadBlock, BlockMissing, ValueError):
                path.unlink(missing_ok=True)
                continue
            target = folder.make_model_folder(stored.fingerprint)
            os.replace(path, target / (name + BLOCK_SUFFIX))
            touched.add(target)
            saved += 1
        for target in touched:
            sync_folder(target)
    return saved
