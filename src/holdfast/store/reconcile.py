"""Makes files and index agree. The files are the truth."""

from __future__ import annotations

import os
from typing import TypeAlias

from holdfast.store.block import KEY_BYTES, BadBlock, BlockKey, BlockMissing, Entry
from holdfast.store.block_file import BlockHeader, read_block, read_header
from holdfast.store.folder import BLOCK_SUFFIX, BlockFile, StoreFolder, fingerprint_id, sync_folder
from holdfast.store.index import BlockIndex

Gone: TypeAlias = dict[BlockKey, tuple[BlockFile, BadBlock] | None]


def reconcile(index: BlockIndex, folder: StoreFolder) -> Gone:
    """Add what only the folder has, take out what only the index has.

    Reads the headers of unknown files only.

    Returns the blocks that are gone, each with its file if that is damaged and still there. A row
    that was made anew from its file is not gone. Raises OSError, sqlite3.Error.
    """
    unseen = index.places()
    wrong: list[BlockKey] = []
    fresh: dict[BlockKey, Entry] = {}
    fingerprints: dict[str, str] = {}
    damaged: Gone = {}
    for found in folder.block_files():
        place = unseen.pop(found.key, None)
        if place == (found.model, found.file_bytes):
            continue
        if place is not None:
            wrong.append(found.key)
        try:
            header = _header_of(found)
        except BlockMissing:
            continue
        except BadBlock as bad:
            damaged[found.key] = found, bad
            continue
        # Recency is lost with the index; the time of writing is the next best.
        fresh[found.key] = Entry(
            block=header.block,
            model=found.model,
            file_bytes=found.file_bytes,
            last_used=found.modified,
        )
        fingerprints[found.model] = header.fingerprint
    wrong += unseen
    if wrong:
        index.remove_rows(wrong)
    if fresh:
        index.add(fresh.values(), fingerprints=fingerprints)
    index.recount()
    return dict.fromkeys(key for key in wrong if key not in fresh) | damaged


def _header_of(found: BlockFile) -> BlockHeader:
    header = read_header(found.path, found.key)
    if fingerprint_id(header.fingerprint) != found.model:
        raise BadBlock(found.key, "belongs to another model")
    return header


def salvage(folder: StoreFolder) -> int:
    """Finish the files that dead writers had written but not named yet, delete the incomplete ones.

    Returns how many were saved.

    The caller holds the folder's lock. Raises OSError.
    """
    saved = 0
    touched = set()
    with folder.abandoned() as paths:
        for path in paths:
            name = path.name.partition(".")[0]
            try:
                key = bytes.fromhex(name) if len(name) == 2 * KEY_BYTES else b""
                fingerprint = read_header(path, key).fingerprint
                read_block(path, key, model=fingerprint_id(fingerprint))
            except (BadBlock, BlockMissing, ValueError):
                path.unlink(missing_ok=True)
                continue
            target = folder.make_model_folder(fingerprint)
            os.replace(path, target / (name + BLOCK_SUFFIX))
            touched.add(target)
            saved += 1
        for target in touched:
            sync_folder(target)
    return saved
